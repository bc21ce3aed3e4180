"""CGEE: when a verification is skipped, what it gives then, and what an audit changes: nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.fakes import FakeAsker, FakeTask
from support.slow_cases import every

from arbor import Solver
from arbor.events import Event, Verified
from arbor.measure.replay import replay
from arbor.papers.rksc.cgee import CGEE
from arbor.tasks.base import Problem
from arbor.trace.read import read_trace
from arbor.tree import NodeState, ThoughtTree
from arbor.verifiers.self_eval import SelfEval

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


@pytest.mark.parametrize("controller", every(3, CONTROLLERS))
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
