"""Similar prompts share KV in lossy mode: similarity by layers, the probe, substitution, audits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models import Words, build
from support.trees import GREEDY, Lab

import arbor
from arbor import Solver
from arbor.engine.similar_prompts import SimilarPrompts, differing
from arbor.engine.stop_rule import StopRule
from arbor.engine.token_source import Growth
from arbor.errors import UsageError
from arbor.events import Audited, Boundary, Compared, Event, Opened, Shared
from arbor.metrics import MetricsFold
from arbor.model.similarity import layer_weights
from arbor.run.callbacks import StopSearch
from arbor.run.session import Session
from arbor.tasks.base import BlockLimits
from arbor.trace import Replay, read_trace
from arbor.tree import ThoughtTree

pytestmark = pytest.mark.usefixtures("loaded_once")

HEAD = tuple(8 + (7 * i * i + 3 * i) % 80 for i in range(36))
FIRST = (*HEAD, 9, 3, 60, 61, 62)
SECOND = (*HEAD, 71, 9, 9, 61, 62)
POOL = 300
GROWTH = Growth(3, GREEDY, StopRule(Words(), BlockLimits((), 6, 8), ()))
PHRASINGS = (
    "Tom has 3 apples and buys 4 more apples. How many apples has he now?",
    "Tom has 3 apples, then buys 4 more apples. How many apples does he have now?",
)
SMALL: dict[str, Any] = {
    "task": "reasoning,shots=0",
    "controller": "chain",
    "max_depth": 2,
    "step_tokens": 12,
    "mode": "lossy",
    "policy": "streaming",
    "budget": "400tok",
}


# The formula


def by_numpy(branch: np.ndarray, root: np.ndarray, alpha: float) -> float:
    """Equation 2 of the paper, term by term."""
    layers = len(branch)
    weights = [np.exp(alpha * layer / layers) for layer in range(1, layers + 1)]
    total = 0.0
    for weight, one, other in zip(weights, branch, root, strict=True):
        cosine = one @ other / (np.linalg.norm(one) * np.linalg.norm(other))
        total += weight / sum(weights) * cosine
    return total


@settings(deadline=None)
@given(
    layers=st.integers(1, 12),
    width=st.integers(1, 20),
    alpha=st.sampled_from([0.0, 0.5, 1.5, 3.0]),
    seed=st.integers(0, 1000),
)
def test_similarity_is_the_formula(layers: int, width: int, alpha: float, seed: int) -> None:
    random = np.random.default_rng(seed)
    one, other = random.normal(size=(2, layers, width))
    found = arbor.similarity(torch.from_numpy(one), torch.from_numpy(other), alpha=alpha)

    assert found == pytest.approx(by_numpy(one, other, alpha), abs=1e-9)


def test_later_layers_count_more() -> None:
    weights = layer_weights(4)

    assert weights.tolist() == pytest.approx(
        (np.exp(1.5 * np.arange(1, 5) / 4) / np.exp(1.5 * np.arange(1, 5) / 4).sum()).tolist()
    )
    one, other = torch.eye(4)[:2].clone(), torch.eye(4)[:2].clone()
    other[1] = torch.eye(4)[3]
    early = arbor.similarity(one.flip(0), other.flip(0))
    assert arbor.similarity(one, one) == pytest.approx(1)
    assert arbor.similarity(one, -one) == pytest.approx(-1)
    assert arbor.similarity(one, other) < early < 1, "a difference in the last layer weighs more"


def test_states_without_a_direction_are_similar_to_nothing() -> None:
    assert arbor.similarity(torch.zeros(2, 3), torch.ones(2, 3)) == 0


@pytest.mark.parametrize("shapes", [((2, 3), (3, 3)), ((3,), (3,)), ((0, 3), (0, 3))])
def test_states_of_other_shapes_are_refused(shapes: Sequence[tuple[int, ...]]) -> None:
    with pytest.raises(UsageError, match="states of shape") as caught:
        arbor.similarity(*(torch.zeros(shape) for shape in shapes))
    assert caught.value.code == "similarity"


tokens = st.lists(st.integers(0, 2), min_size=1, max_size=8).map(np.array)


@given(one=tokens, other=tokens)
def test_prompts_differ_between_what_they_begin_and_end_with(
    one: np.ndarray, other: np.ndarray
) -> None:
    begin, end, other_end = differing(one, other)

    assert 0 <= begin <= end <= len(one) and begin <= other_end <= len(other)
    assert one[:begin].tolist() == other[:begin].tolist()
    assert one[end:].tolist() == other[other_end:].tolist()
    if begin < min(end, other_end):
        assert one[begin] != other[begin] and one[end - 1] != other[other_end - 1]


# The probe


def lab_of(**given: Any) -> Lab:
    return Lab(
        build("llama"),
        policy="streaming",
        mode="lossy",
        rehydrate="off",
        debug=True,
        **{"share": "similar", "threshold": -1.0} | given,
    )


def opened(lab: Lab, prompt: Sequence[int], *, read: bool = False, pool: int = POOL) -> ThoughtTree:
    tree = ThoughtTree(prompt)
    lab.open(tree, pool)
    if read:
        lab.extend(tree.root)
    return tree


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (FIRST, SECOND),
        (FIRST, (*HEAD, 61, 62)),
        ((*HEAD, 61, 62), SECOND),
        (HEAD, (77, *HEAD[1:])),
        (HEAD, (77, 78, *HEAD)),
    ],
    ids=["replaced", "left out", "put in", "at the start", "before the start"],
)
def test_the_probe_gives_the_similarity_of_honest_hidden_states(
    first: Sequence[int], second: Sequence[int]
) -> None:
    lab = lab_of()
    opened(lab, first, read=True)
    found = lab.compare(opened(lab, second))

    assert found is not None
    begin, end, other_end = differing(np.array(second), np.array(first))
    if begin in (end, other_end):
        end, other_end = (end, other_end) if begin else (end + 1, other_end + 1)
        begin = max(0, begin - 1)
    model = build("llama")
    means = []
    for prompt, last in ((second, end), (first, other_end)):
        with torch.inference_mode():
            states = model(torch.tensor([prompt]), output_hidden_states=True).hidden_states
        means.append(np.stack([s[0, begin:last].double().mean(0).numpy() for s in states[1:3]]))
    assert found.layers == 2
    assert found.rows == end + other_end - 2 * begin
    assert found.similarity == pytest.approx(by_numpy(means[0], means[1], 1.5), abs=1e-5)
    assert lab.memory.used == len(first), "the probe's slots were given back"


@pytest.mark.parametrize("threshold", [-1.0, 1.0])
def test_the_threshold_decides(threshold: float) -> None:
    lab = lab_of(threshold=threshold)
    opened(lab, FIRST, read=True)
    found = lab.compare(opened(lab, SECOND))

    assert found is not None
    assert found.shared == (threshold < 0)
    assert (found.begin, found.own_end, found.other_end) == (36, 39, 39)
    assert found.tokens == FIRST


def test_there_is_nothing_to_compare_with() -> None:
    lab = lab_of()
    assert lab.compare(opened(lab, FIRST)) is None, "no prompt is kept"
    lab.extend(lab.tree.root)
    assert lab.compare(opened(lab, FIRST)) is None, "the same prompt"
    lab.extend(lab.tree.root)
    other = tuple(reversed(FIRST)) * 3
    assert lab.compare(opened(lab, other, pool=POOL)) is not None
    lab = lab_of()
    opened(lab, FIRST, read=True, pool=len(FIRST) + 5)
    assert lab.compare(opened(lab, SECOND, pool=len(FIRST) + 5)) is None, "the probe has no room"
    lab = lab_of(share="exact")
    opened(lab, FIRST, read=True)
    assert lab.compare(opened(lab, SECOND)) is None


def test_a_prompt_of_which_a_part_has_left_is_not_read_instead() -> None:
    lab = lab_of()
    first = opened(lab, FIRST, read=True)
    lab.memory.evict(first.root, np.array([38]))

    assert lab.compare(opened(lab, SECOND)) is None


def test_of_several_prompts_the_one_with_the_most_tokens_in_common_is_compared() -> None:
    lab = lab_of()
    for prompt in (FIRST, (*HEAD, 71, 9, 60, 61, 62), tuple(range(10, 50))):
        opened(lab, prompt, read=True)
    found = lab.compare(opened(lab, SECOND))

    assert found is not None and found.tokens == (*HEAD, 71, 9, 60, 61, 62)


def test_kept_prompts_give_way_before_a_lossy_search_loses_a_token() -> None:
    lab = lab_of()
    pool = 2 * len(FIRST)
    opened(lab, FIRST, read=True, pool=pool)
    opened(lab, (*HEAD, 71, 9, 9), pool=pool)
    lab.events.clear()
    lab.extend(lab.tree.root)
    assert any(isinstance(event, Shared) for event in lab.events)
    growing = lab.begin_grow(
        [(lab.tree.root, 1)], Growth(3, GREEDY, StopRule(Words(), BlockLimits((), 60, 8), ()))
    )
    for _ in range(3):
        lab.step()
    lab.state.table.refresh()
    assert lab.state.table.resident[lab.tree.root.row] < len(HEAD), "shared with the kept one"
    while not growing.done:
        lab.step()
    (child,) = growing.result()

    assert len(child.tokens) == 60, "more than the pool, so the prompt has lost tokens too"
    assert lab.memory.used <= pool and not lab.memory.prefixes


# The search


def run(solver: Solver, problem: str, **options: Any) -> list[Event]:
    heard: list[Event] = []
    solver.listeners = [heard.append]
    solver.solve(problem, **options)
    return heard


def of(events: Sequence[Event], kind: type[Event]) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


def test_a_search_reads_the_similar_prompt_and_says_so(tmp_path: Path) -> None:
    trace = tmp_path / "run.arbor.jsonl"
    with Solver(share="similar", share_threshold=-1.0, debug=True, **SMALL) as solver:
        first = run(solver, PHRASINGS[0])
        second = run(solver, PHRASINGS[1], trace=trace)
        tree = solver.engine.tree
        exact = [bool(node.span.exact.any()) for node in tree.nodes[1:]]

    assert not of(first, Compared)
    (compared,) = of(second, Compared)
    assert compared.shared and compared.threshold == -1.0
    assert "then buys" in compared.text
    (root,) = (event for event in of(second, Opened) if event.parent is None)
    assert root.tokens == compared.other_tokens == len(tree.root.tokens)
    assert [event.nodes for event in of(second, Shared)] == [((0, root.tokens),)]
    texts = [[event.ids for event in of(events, Boundary)] for events in (first, second)]
    assert texts[0] == texts[1], "it is the earlier problem's search"
    assert tree.root.span.exact[: compared.common].all()
    assert not tree.root.span.exact[compared.common :].any() and not any(exact)
    assert Replay.of(read_trace(trace)).problems == []
    fold = MetricsFold()
    for event in second:
        fold(event)
    metrics = fold.metrics()
    assert metrics.tokens_substituted == compared.tokens - compared.common
    assert metrics.tokens_probed == compared.rows > 0
    assert metrics.probe_s == compared.elapsed_s > 0
    assert metrics.tokens_shared == root.tokens


def test_a_search_keeps_its_own_prompt_below_the_threshold() -> None:
    with Solver(share="off", **SMALL) as solver:
        alone = [run(solver, problem) for problem in PHRASINGS]
    with Solver(share="similar", share_threshold=1.0, debug=True, **SMALL) as solver:
        found = [run(solver, problem) for problem in PHRASINGS]

    (compared,) = of(found[1], Compared)
    assert not compared.shared
    for one, other in zip(alone, found, strict=True):
        assert [e.ids for e in of(one, Boundary)] == [e.ids for e in of(other, Boundary)]


def test_an_audit_searches_from_the_own_prompt_too() -> None:
    with Solver(share="off", **SMALL) as solver:
        honest = solver.solve(PHRASINGS[1])
        earlier = solver.solve(PHRASINGS[0])
    with Solver(share="audit", share_threshold=-1.0, debug=True, **SMALL) as solver:
        assert not of(run(solver, PHRASINGS[0]), Audited), "nothing was substituted"
        heard = run(solver, PHRASINGS[1])

    (audited,) = of(heard, Audited)
    assert audited.answer == honest.answer
    assert audited.same == (honest.answer == earlier.answer)
    fold = MetricsFold()
    for event in heard:
        fold(event)
    assert (fold.metrics().audits, fold.metrics().audits_differ) == (1, int(not audited.same))
    assert len(of(heard, Opened)) == len(of(heard, Boundary)) + 1, (
        "the audit's blocks are not reported"
    )


def test_a_search_that_is_stopped_is_not_audited() -> None:
    with Solver(share="audit", share_threshold=-1.0, **SMALL) as solver:
        solver.solve(PHRASINGS[0])
        heard: list[Event] = []

        def stop(event: Event) -> None:
            heard.append(event)
            if isinstance(event, Boundary):
                raise StopSearch

        solver.listeners = [stop]
        solver.solve(PHRASINGS[1])

    assert of(heard, Compared) and not of(heard, Audited)


def test_an_audit_that_does_not_end_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    steps, begun = Session.steps, []

    def stopped_second(session: Session, *given: Any) -> Any:
        begun.append(session)
        if len(begun) == 2:
            session.stop("timeout")
        return (yield from steps(session, *given))

    with Solver(share="audit", share_threshold=-1.0, **SMALL) as solver:
        run(solver, PHRASINGS[0])
        monkeypatch.setattr(Session, "steps", stopped_second)
        heard = run(solver, PHRASINGS[1])

    assert len(begun) == 2 and of(heard, Compared) and not of(heard, Audited)


@pytest.mark.parametrize(
    "given",
    [
        {"share": "similar"},
        {"share": "audit", "mode": "lossless"},
        {"share": "similar", "mode": "lossy", "rehydrate": "selective"},
        {"share_threshold": 1.5},
        {"share_threshold": float("nan")},
    ],
)
def test_settings_that_contradict_each_other_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        Solver(**given)
    assert caught.value.code == ("limit" if "share_threshold" in given else "share")
    assert caught.value.hint


def test_a_budget_that_depends_on_the_problem_is_refused() -> None:
    with (
        Solver(share="similar", **SMALL | {"budget": 0.5}) as solver,
        pytest.raises(UsageError, match="another for each") as caught,
    ):
        solver.solve(PHRASINGS[0])
    assert caught.value.code == "share"


def test_a_quarter_of_the_layers_is_probed() -> None:
    class Layers:
        layer_count = 24

    deep: Any = Layers()
    assert SimilarPrompts(deep)._layers == 6
    assert SimilarPrompts(deep, probed=1.0)._layers == 24
    assert SimilarPrompts(deep, probed=0.0)._layers == 2
    deep.layer_count = 1
    assert SimilarPrompts(deep)._layers == 1
