"""CGEE: when a verification is skipped, what it gives then, and what an audit changes: nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fakes import FakeAsker, FakeTask
from support.run_cli import in_process

from arbor import Solver, components
from arbor.errors import UsageError
from arbor.events import Event, Verified
from arbor.measure.replay import replay
from arbor.tasks.base import Problem, Task
from arbor.trace.read import read_trace
from arbor.tree import Node, NodeState, ThoughtTree
from arbor.verifiers.base import Asker, Exits, Gate, Inquires, Verdict
from arbor.verifiers.cgee import CGEE, DECIMALS
from arbor.verifiers.combined import Combined
from arbor.verifiers.exact import Exact
from arbor.verifiers.self_eval import CERTAIN, SelfEval
from arbor.verifiers.vote import Vote

pytestmark = pytest.mark.usefixtures("loaded_once")

PROBLEM = Problem("0", "fake", "fake")
DECISIVE = CGEE(confidence=0.8, gap=0.1)


def branches(*top1: float, texts: Sequence[str] | None = None, value: float | None = None) -> Any:
    """Closed children of one root with these confidences; the root may have a value."""
    tree = ThoughtTree([0])
    if value is not None:
        tree.root.value, tree.root.valued = value, True
    children = []
    for place, confidence in enumerate(top1):
        child = tree.fork(tree.root)
        tree.append(child, place)
        child.text = texts[place] if texts else f"v{place + 1}"
        child.top1, child.state = confidence, NodeState.CLOSED
        children.append(child)
    return children


@dataclass(frozen=True)
class Asks:
    """Values thoughts in one phase, by their digit; counts its calls."""

    calls: tuple[list[int], ...] = ([],)
    needs_model = True

    def verify(
        self, task: Task, problem: Problem, candidates: Sequence[Node], engine: Asker
    ) -> Verdict:
        self.calls[0].append(len(candidates))
        values = tuple(task.value(problem, node.thoughts) for node in candidates)
        return Verdict(values, len(candidates))


def silent() -> FakeAsker:
    return FakeAsker(lambda node, question: {" yes": 1.0, " no": 0.0})


def test_a_decisive_branch_skips_the_verification_and_branches_rank_by_confidence() -> None:
    engine = silent()

    verdict = DECISIVE.verify(FakeTask(), PROBLEM, branches(0.7, 0.9, 0.5), engine)

    assert verdict.values == (0.7, 0.9, 0.5)
    assert (verdict.asked, engine.calls) == (0, [])
    assert verdict.gate is not None and verdict.gate.skipped
    assert verdict.gate.confidences == (0.7, 0.9, 0.5)


@pytest.mark.parametrize(
    ("confidences", "why"),
    [((0.79, 0.3), "not confident"), ((0.9, 0.82), "a close competitor"), ((0.99,), "alone")],
)
def test_otherwise_the_verifier_is_asked(confidences: tuple[float, ...], why: str) -> None:
    candidates = branches(*confidences)

    verdict = DECISIVE.verify(FakeTask(), PROBLEM, candidates, silent())

    assert verdict.values == SelfEval().verify(FakeTask(), PROBLEM, candidates, silent()).values
    assert verdict.asked == len(candidates), why
    assert verdict.gate is not None and not verdict.gate.skipped


def test_thresholds_are_reached_by_equality() -> None:
    assert CGEE(confidence=0.9, gap=0.2).decide(branches(0.9, 0.72)).skipped
    assert not CGEE(confidence=0.9, gap=0.2001).decide(branches(0.9, 0.72)).skipped


def test_a_branch_does_not_compete_with_itself() -> None:
    gate = DECISIVE.decide(branches(0.9, 0.9, 0.5, texts=("a", "a", "b")))

    assert gate.skipped
    assert not DECISIVE.decide(branches(0.9, 0.9, texts=("a", "a"))).skipped


chances = st.integers(0, 100).map(lambda percent: percent / 100)


@given(st.lists(chances, min_size=2, max_size=6), chances, chances)
def test_the_rule_is_the_papers(top1: list[float], confidence: float, gap: float) -> None:
    second, first = sorted(round(p * 100) for p in top1)[-2:]  # per cent: no rounding

    skipped = CGEE(confidence=confidence, gap=gap).decide(branches(*top1)).skipped

    relative = round((first - second) / first, DECIMALS) if first else 0.0
    assert skipped == (first >= round(confidence * 100) and relative >= gap)


@given(st.lists(chances, min_size=2, max_size=6))
def test_the_released_rule_is_two_alternatives(top1: list[float]) -> None:
    second, first = sorted(round(p * 100) for p in top1)[-2:]

    skipped = CGEE(rule="release", confidence=1.0, gap=1.0).decide(branches(*top1)).skipped

    by_absolute = first >= 70 and first - second >= 6
    by_relative = first >= 63 and round((first - second) / first, DECIMALS) >= 0.08
    assert skipped == (by_absolute or by_relative)


@given(st.lists(chances, min_size=1, max_size=6), st.randoms())
def test_the_order_of_the_candidates_decides_nothing(top1: list[float], random: Any) -> None:
    children = branches(*top1)
    gate = DECISIVE.decide(children)
    shuffled = random.sample(children, len(children))

    again = DECISIVE.decide(shuffled)

    assert again.skipped == gate.skipped
    assert sorted(again.confidences) == sorted(gate.confidences)


def test_bits_that_depend_on_the_batch_decide_nothing() -> None:
    for wrong in (-1e-7, 0.0, 1e-7):
        assert DECISIVE.decide(branches(0.8 + wrong, 0.72 - wrong)).skipped
        assert DECISIVE.decide(branches(0.8 + wrong, 0.5)).confidences == (0.8, 0.5)


def test_a_skipped_verification_proves_nothing() -> None:
    verdict = CGEE(Exact(), 0.5, 0.1).verify(FakeTask(), PROBLEM, branches(1.0, 0.2), silent())

    assert verdict.values == (CERTAIN, 0.2)


def test_values_may_keep_the_scale_of_the_verifier() -> None:
    gate = CGEE(confidence=0.8, gap=0.1, values="inherited")

    values = gate.verify(FakeTask(), PROBLEM, branches(0.9, 0.45, value=0.4), silent()).values

    assert values == pytest.approx((0.4, 0.2))
    assert gate.verify(FakeTask(), PROBLEM, branches(0.9, 0.45), silent()).values == (0.9, 0.45)


def test_a_verifier_of_one_phase_is_asked_by_verify() -> None:
    gate = CGEE(Asks(([],)), 0.8, 0.1)
    close, clear = branches(0.9, 0.89), branches(0.9, 0.4)

    assert isinstance(gate, Inquires) and gate.inquire(FakeTask(), PROBLEM, close, silent()) is None
    asked = gate.inquire(FakeTask(), PROBLEM, clear, silent())
    assert asked is not None and not asked.nodes

    assert gate.verify(FakeTask(), PROBLEM, close, silent()).values == (1 / 9, 2 / 9)
    assert gate.verify(FakeTask(), PROBLEM, clear, silent()).values == (0.9, 0.4)
    assert isinstance(gate.verifier, Asks) and gate.verifier.calls == ([2],)


def test_an_audit_asks_all_the_same_and_changes_no_value() -> None:
    children = branches(0.9, 0.4)
    audited = CGEE(confidence=0.8, gap=0.1, audit=True)

    verdict = audited.verify(FakeTask(), PROBLEM, children, silent())

    plain = DECISIVE.verify(FakeTask(), PROBLEM, children, silent())
    full = SelfEval().verify(FakeTask(), PROBLEM, children, silent())
    assert verdict.values == plain.values
    assert verdict.asked == full.asked == 2
    assert verdict.gate is not None and verdict.gate.audited == full.values
    inquiry = audited.inquire(FakeTask(), PROBLEM, children, silent())
    assert inquiry is not None and inquiry.audits and len(inquiry.nodes) == 2


def test_questions_are_checked_and_bounded_as_the_verifiers_own() -> None:
    boundary = FakeTask().boundary
    alike = FakeAsker(lambda node, question: {}, pieces=".")

    task = FakeTask(verdicts={" no": 0.0, " not": 1.0})

    with pytest.raises(UsageError, match="verdict-ambiguous"):
        CGEE().check(task, PROBLEM, alike)
    CGEE(Exact()).check(task, PROBLEM, alike)
    assert CGEE().most_question_tokens(FakeTask(), PROBLEM, boundary, alike) is None
    bound = CGEE(Vote()).most_question_tokens(FakeTask(), PROBLEM, boundary, alike)
    assert bound == Vote().most_question_tokens(FakeTask(), PROBLEM, boundary, alike)
    assert not CGEE(Exact()).needs_model and CGEE().needs_model


@pytest.mark.parametrize("settings", [{"confidence": 1.5}, {"gap": -0.1}])
def test_thresholds_are_parts(settings: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="setting-range"):
        CGEE(**settings)


def test_the_verifier_within_goes_by_name() -> None:
    built = components.build("verifier", "cgee,verifier=exact,gap=0.25")

    assert built == CGEE(Exact(), gap=0.25)
    assert components.build("verifier", components.spec_of(built)) == built


# In a search

CONTROLLERS = ("tot,width=3", "beam,beam_size=2", "dpts,width=3,parallel=2,max_visited=8")


def search(controller: str, verifier: Any, **settings: Any) -> tuple[Any, list[Event]]:
    heard: list[Event] = []
    with Solver(
        task="game24",
        controller=controller,
        verifier=verifier,
        max_depth=4,
        listeners=[heard.append],
        deterministic=True,
        debug=True,
        **settings,
    ) as solver:
        return solver.solve("4 5 6 10"), heard


def shape(events: Sequence[Event]) -> list[tuple[Any, ...]]:
    return [
        (event.nodes, event.values, event.skipped)
        for event in events
        if isinstance(event, Verified)
    ]


@pytest.mark.parametrize("controller", CONTROLLERS)
def test_an_audit_changes_nothing_of_the_search(controller: str) -> None:
    gate = CGEE(confidence=0.3, gap=0.005)
    plain, events = search(controller, gate)
    audited, heard = search(controller, CGEE(confidence=0.3, gap=0.005, audit=True))

    assert any(skipped for *_, skipped in shape(events)), "or nothing is shown"
    assert shape(heard) == shape(events)
    assert audited.answer == plain.answer
    skipped = plain.metrics.skipped_verifications
    assert audited.metrics.audited_verifications == skipped > 0
    assert audited.metrics.disagreements <= skipped
    assert plain.metrics.asked < audited.metrics.asked


def test_a_gate_that_never_decides_is_the_verifier_itself() -> None:
    plain, events = search(CONTROLLERS[0], SelfEval())
    gated, heard = search(CONTROLLERS[0], CGEE(confidence=1.0, gap=1.0))

    assert shape(heard) == shape(events)
    assert gated.metrics.skipped_verifications == 0 < gated.metrics.verifications
    assert plain.metrics.verifications == 0
    assert "verifications" not in plain.metrics.to_dict()


def test_the_budget_changes_no_decision() -> None:
    gate = CGEE(confidence=0.3, gap=0.005)
    _, events = search(CONTROLLERS[0], gate)
    _, heard = search(CONTROLLERS[0], gate, budget="0.55")

    assert shape(heard) == shape(events)


def test_the_command_line_names_and_audits_it(capsys: pytest.CaptureFixture[str]) -> None:
    done = in_process(capsys)(
        "solve", "--verifier", "cgee", "--set", "verifier.confidence=0.3", "--set", "gap=0.005",
        "--set", "width=3", "--set", "audit=true", "--display", "plain", "4 5 6 10",
    )  # fmt: skip

    assert "verifications skipped" in done.err
    assert "decided otherwise" in done.err


def test_an_audit_needs_something_to_audit(capsys: pytest.CaptureFixture[str]) -> None:
    done = in_process(capsys)("solve", "--set", "audit=true", "4 5 6 10")

    assert (done.code, "no setting 'audit'" in done.err) == (2, True)


def test_a_verifier_with_a_model_of_its_own_is_refused() -> None:
    class Judge(SelfEval):
        def own_model(self, placement: object) -> None: ...

    for verifier in (Judge(), Combined(parts=(Exact(), Judge()))):
        with pytest.raises(UsageError, match="reward model"):
            CGEE(verifier=verifier)
    assert CGEE(verifier=Combined(parts=(Exact(), SelfEval()))).needs_model


@pytest.mark.parametrize("audit", [False, True])
@pytest.mark.parametrize("controller", [CONTROLLERS[0], CONTROLLERS[2]])
def test_a_replay_skips_what_the_run_skipped(controller: str, audit: bool, tmp_path: Path) -> None:
    gate = CGEE(confidence=0.3, gap=0.005, audit=audit)
    with Solver(controller=controller, verifier=gate, max_depth=4) as solver:
        path = tmp_path / "run.arbor.jsonl"
        run = solver.solve("4 5 6 10", trace=path).metrics
        again = replay(read_trace(path), solver.tokenizer, slots=4096, policy="lru")

    for name in ("nodes", "skipped_verifications", "asked", "rounds"):
        assert getattr(again, name) == getattr(run, name)
    assert run.skipped_verifications > 0


@pytest.mark.parametrize("audit", [False, True])
def test_the_gate_of_a_part_is_reported(audit: bool, tmp_path: Path) -> None:
    gate = CGEE(confidence=0.9, gap=0.01, audit=audit)
    both = Combined(parts=(Exact(), gate))
    with Solver(controller=CONTROLLERS[0], verifier=both, max_depth=4) as solver:
        path = tmp_path / "run.arbor.jsonl"
        run = solver.solve("4 5 6 10", trace=path).metrics
        again = replay(read_trace(path), solver.tokenizer, slots=4096, policy="lru")
    shown = [each for each in read_trace(path).events if isinstance(each, Verified)]

    assert 0 < run.skipped_verifications < run.verifications == len(shown)
    assert run.audited_verifications == audit * run.skipped_verifications
    for each in shown:
        if each.skipped:  # half of the values are exact ones
            exact = [2 * v - p for v, p in zip(each.values, each.confidences, strict=True)]
            assert all(value == pytest.approx(round(value)) for value in exact)
    for name in ("nodes", "verifications", "skipped_verifications", "asked"):
        assert getattr(again, name) == getattr(run, name)


def test_an_audit_of_a_part_compares_the_combined_values() -> None:
    rule = Combined(parts=(Exact(), SelfEval()), weights=(1, 3))
    plain = Verdict((1.0, 0.0), 0)

    gate = Gate(True, (0.6, 0.8), audited=(0.2, 0.4), audit_asked=2)
    found = rule.combined([plain, Verdict((0.6, 0.8), 2, gate=gate)])
    assert found.values == pytest.approx((0.7, 0.6))
    assert found.gate is not None and found.gate.audited == pytest.approx((0.4, 0.3))
    assert (found.gate.confidences, found.gate.audit_asked) == ((0.6, 0.8), 2)

    exits = Exits((1, 2), 6, (), audited=(0.2, 0.4))
    found = rule.combined([plain, Verdict((0.6, 0.8), 2, gate=Gate(False, ()), exits=exits)])
    assert found.exits is not None and found.exits.audited == pytest.approx((0.4, 0.3))
    assert found.exits.exit_layer == (1, 2)

    found = rule.combined([plain, Verdict((0.6, 0.8), 2, gate=Gate(True, (0.6, 0.8)))])
    assert found.gate is not None and not found.gate.audited, "there was no audit"


def test_a_configuration_repeats_the_gate(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = in_process(capsys)
    spec = "cgee,verifier=vote,gap=0.25,levels=both,threshold=0.2,patience=3"
    written = run("solve", "4 5 6 10", "--verifier", spec, "--print-config").out
    path = tmp_path / "run.toml"
    path.write_text(written)

    again = run("solve", "4 5 6 10", "--config", str(path), "--print-config").out

    assert again == written
    assert "patience = 3" in written and 'name = "vote"' in written
