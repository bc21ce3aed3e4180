"""Decode steps that a device begins before the host knows their tokens."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from support.slow_cases import every
from torch import Tensor

from arbor import Solution, Solver
from arbor.engine import sampling, token_source
from arbor.engine.ahead import Ahead
from arbor.engine.forward_pass import ForwardPasses
from arbor.engine.sampling import Drawing, Draws
from arbor.errors import ModelError
from arbor.events import Ended, Event, Forwarded, Header
from arbor.model.checkpoint import Checkpoint
from arbor.model.runner import ModelRunner

PROBLEM = "4 5 6 10"
SEARCHES: dict[str, dict[str, Any]] = {
    "tot": {},
    "dpts at a quarter": {"controller": "dpts", "budget": 0.25},
    "mcts at the smallest budget": {"controller": "mcts", "budget": 0.01},
    "beam, a nucleus, plain draws": {
        "controller": "beam",
        "sampling": {"temperature": 1.3, "top_p": 0.7, "arithmetic": False},
    },
    "chain, greedy": {"controller": "chain", "sampling": {"temperature": 0.0}},
    "lossy": {"policy": "streaming", "budget": "100tok"},
    "a policy that acts by time": {"policy": "ends,above=0.8", "budget": "100tok"},
    "attention observed": {"policy": "h2o", "budget": "100tok"},
}
# no step runs ahead that somebody looks at, or before which something may have to leave
NEVER = ("attention observed", "mcts at the smallest budget", "a policy that acts by time")


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """A device that works by itself; what was done on it by the names of methods."""
    found: Counter[str] = Counter()

    def count(where: type, name: str) -> None:
        right = getattr(where, name)

        def counted(self: Any, *given: Any) -> Any:
            found[name] += not isinstance(self, Ahead) or name != "drop" or self.waiting
            return right(self, *given)

        monkeypatch.setattr(where, name, counted)

    for where, name in (
        *((Ahead, "begin"), (Ahead, "take"), (Ahead, "drop")),
        *((ForwardPasses, "step"), (Drawing, "result")),
    ):
        count(where, name)
    monkeypatch.setattr(ModelRunner, "is_asynchronous", True)
    monkeypatch.setattr(token_source, "first_draw", lambda: sampling.drawn)
    return found


def searched(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, late: bool, **settings: Any
) -> tuple[Any, list[Any]]:
    """The solution of a search and all its events, without times."""
    happened: list[Any] = []

    def note(event: Event) -> None:
        if isinstance(event, (Header, Ended)):
            return
        names = [name for name in event.__slots__ if not name.endswith("_s")]
        happened.append((type(event).__name__, [getattr(event, name) for name in names]))

    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "is_asynchronous", late)
        patch.setattr(token_source, "first_draw", lambda: sampling.drawn)
        solver = Solver(seed=3, max_expansions=8, listeners=[note], **settings)
        solver.checkpoint = checkpoint
        solution = solver.solve(PROBLEM, trace_level="tokens")
    return solution, happened


@pytest.mark.parametrize("name", every(3, SEARCHES))
def test_all_that_happens_is_what_happens_on_a_device_that_is_waited_for(
    name: str, checkpoint: Checkpoint, counts: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    solution, wanted = searched(checkpoint, monkeypatch, late=False, **SEARCHES[name])
    assert not counts["begin"]
    counts.clear()
    found, happened = searched(checkpoint, monkeypatch, late=True, **SEARCHES[name])
    assert happened == wanted
    assert found.answer == solution.answer
    if name in NEVER:
        assert not counts["begin"]
    else:
        assert counts["take"] > counts["step"] / 3, "many steps run ahead"
        assert counts["begin"] == counts["take"] + counts["drop"]
        assert counts["drop"] < counts["take"] / 8, "few run in vain"


def test_a_step_is_begun_before_the_host_learns_the_tokens_it_computes(
    checkpoint: Checkpoint, counts: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    begin, learn = ForwardPasses.begin, Drawing.result

    def began(self: ForwardPasses, batch: Any, ids: Tensor | None = None) -> Any:
        if ids is not None:
            order.append("begin")
            assert {row.node.tokens[-1] for row in batch.rows} == {0}
        return begin(self, batch, ids)

    def learned(self: Drawing) -> Draws:
        if order and order[-1] == "begin":
            order.append("learn")
        return learn(self)

    monkeypatch.setattr(ForwardPasses, "begin", began)
    monkeypatch.setattr(Drawing, "result", learned)
    searched(checkpoint, monkeypatch, late=True)
    assert order and order == ["begin", "learn"] * (len(order) // 2)


def test_rows_that_need_more_tokens_than_were_examined_are_drawn_as_ever(
    checkpoint: Checkpoint, counts: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "_first_width", lambda vocabulary, sampling: 20)
    settings = {"sampling": {"temperature": 1.5, "top_p": 0.999}}
    _, wanted = searched(checkpoint, monkeypatch, late=False, **settings)
    _, happened = searched(checkpoint, monkeypatch, late=True, **settings)
    assert happened == wanted
    assert counts["drop"] and counts["take"]


def broken(monkeypatch: pytest.MonkeyPatch, failure: BaseException, after: int) -> None:
    """Have the tokens of a later step not arrive."""
    right, calls = Drawing.result, Counter[str]()

    def result(self: Drawing) -> Draws:
        calls["all"] += 1
        if calls["all"] == after:
            raise failure
        return right(self)

    monkeypatch.setattr(Drawing, "result", result)


def checked(solver: Solver) -> None:
    """The engine's memory is in order, and no step waits."""
    memory = solver.engine.state.memory
    memory.check()
    assert not memory.pending


@pytest.mark.parametrize(
    ("failure", "after"), every(2, [(KeyboardInterrupt(), 9), (ModelError("logits", "NaN."), 2)])
)
def test_after_a_failure_in_between_the_next_search_is_as_ever(
    failure: BaseException,
    after: int,
    counts: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Solver(seed=3, budget=0.25, max_expansions=4) as solver:
        wanted = solver.solve(PROBLEM)
        with monkeypatch.context() as patch:
            broken(patch, failure, after)
            with pytest.raises(type(failure)):
                solver.solve(PROBLEM)
        if isinstance(failure, Exception):
            checked(solver)
        assert tree_of(solver.solve(PROBLEM)) == tree_of(wanted)
        checked(solver)


def tree_of(solution: Solution) -> list[Any]:
    return [(each.parent, each.text, each.state) for each in solution.replay().blocks.values()]


def test_a_search_that_is_stopped_while_a_step_waits_leaves_none(
    counts: Counter[str],
) -> None:
    with Solver(seed=3) as solver:
        for ahead in (False, True):
            stream = solver.stream(PROBLEM, trace_level="tokens")
            for event in stream:
                if isinstance(event, Forwarded) and (counts["begin"] > 3 or not ahead):
                    break
            stream.close()
        assert solver.solve(PROBLEM).finish_reason != "interrupted"
        checked(solver)


@pytest.mark.slow
def test_searches_that_come_and_go_find_what_they_find_alone(
    counts: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    problems = [PROBLEM, "1 2 3 4", "3 3 8 8", "2 3 5 12"]
    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "is_asynchronous", False)
        with Solver(seed=3, budget=0.5, max_expansions=4) as solver:
            wanted = [tree_of(solver.solve(problem)) for problem in problems]
    with Solver(seed=3, budget=0.5, max_expansions=4) as solver:
        found = [tree_of(each) for each in solver.solve_batch(problems, concurrency=3)]
    assert found == wanted
    assert counts["take"]
