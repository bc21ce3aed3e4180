"""What a session gives the engine while it runs, and takes back at its end."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest

from arbor import Solver, TraceWriter
from arbor.events import Boundary, Event, Opened, Pruned, Selected, Verified
from arbor.run import session
from arbor.run.worker import Worker


class Outlooks:
    """Listens to a solver's runs, and asks at every event what the search will come back to.

    Attributes:
        round: ids of the blocks opened since leaves were last chosen.
        stack: what a depth-first search will grow, the next one last.
        asked: (event, outlook, `round` and `stack` at that time).
    """

    def __init__(self, solver: Solver) -> None:
        self.solver = solver
        self.asked: list[tuple[Event, dict[int, float], list[int], list[int]]] = []
        self.round: list[int] = []

    def __call__(self, event: Event) -> None:
        assert self.solver._run is not None
        session: Any = self.solver._run.session
        if isinstance(event, Selected):
            self.round = []
        elif isinstance(event, Opened):
            self.round.append(event.node)
        if session._search is None:
            return
        outlook = dict(session.engine.opened.run.outlook())
        stack = [node.id for node in session._search._stack]
        self.asked.append((event, outlook, list(self.round), stack))


@pytest.mark.parametrize("verifier", ["self", "exact"])
def test_the_outlook_is_what_waits_for_the_verifier_and_what_the_controller_may_grow(
    verifier: str,
) -> None:
    search = {"name": "tot", "strategy": "dfs", "width": 3, "max_per_state": 2, "max_visited": 6}
    # nothing is refuted, nor is the hand below solved with whole numbers
    search |= {"threshold": -1.0}
    with Solver(controller=search, verifier=verifier) as solver:
        heard = Outlooks(solver)
        solver.listeners = (heard,)
        solver.solve("1 5 5 5")

    decoding = [each for each in heard.asked if isinstance(each[0], Boundary)]
    judged = [each for each in heard.asked if isinstance(each[0], Pruned)]
    assert max(len(stack) for _, _, _, stack in decoding) > 2
    for _, outlook, children, stack in decoding:
        waiting = children if verifier == "self" else []
        later = {node: 0.5**place for place, node in enumerate(reversed(stack[:-1]), 1)}
        assert outlook == later | dict.fromkeys(waiting, 1.0)
    assert len(judged) >= 3
    for _, outlook, _, stack in judged:  # what has its verdict waits no more
        assert outlook.keys() == set(stack[:-1])
    assert any(isinstance(event, Verified) for event, *_ in heard.asked)


class Listening:
    """A listener of one run, with weak references to it, its writer and its session.

    Args:
        solver: runs it.
        fails: raise at the first block.
    """

    def __init__(self, solver: Solver, trace: Path, fails: bool) -> None:
        self.writer = TraceWriter(trace)
        self.references = [weakref.ref(self), weakref.ref(self.writer)]
        self._solver = weakref.ref(solver)
        self._fails = fails

    def __call__(self, event: Event) -> None:
        if isinstance(event, Boundary) and len(self.references) == 2:
            run = getattr(self._solver(), "_run", None)
            if isinstance(run, Worker):
                (run,) = run.running
            assert run is not None and run.session is not None
            self.references += [weakref.ref(run), weakref.ref(run.session)]
            if self._fails:
                raise ZeroDivisionError


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("streamed", [False, True])
def test_nothing_of_a_run_is_reachable_after_it_but_its_tree(
    fails: bool, streamed: bool, tmp_path: Path
) -> None:
    def run() -> list[weakref.ref[Any]]:
        listening = Listening(solver, tmp_path / "run.arbor.jsonl", fails)
        solver.listeners = (listening,)
        try:
            if streamed:
                list(solver.stream("4 5 6 10", trace=listening.writer))
            else:
                solver.solve("4 5 6 10", trace=listening.writer)
        except ZeroDivisionError:
            assert fails
        solver.listeners = ()
        return listening.references

    with Solver(controller="chain", verifier="exact") as solver:
        references = run()
        gc.collect()

        assert len(references) == 4
        assert [reference() for reference in references] == [None] * 4
        assert len(solver.engine.tree) > 1


@pytest.mark.parametrize(
    ("controller", "temperature", "warned"),
    [("best-of-n,samples=3", 0, True), ("best-of-n,samples=3", 1, False), ("chain", 0, False)],
)
def test_equal_thoughts_are_warned_of_once(
    controller: str, temperature: float, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    session._warn_of_equals.cache_clear()

    with Solver(controller=controller, sampling={"temperature": temperature}) as solver:
        for _ in range(2):
            solver.solve("4 5 6 10")

    found = [each for each in caplog.messages if "are equal" in each]
    assert len(found) == warned and all("'best-of-n'" in each for each in found)
