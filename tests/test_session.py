"""What a session gives the engine while it runs, and takes back at its end."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
from support.slow_cases import every

from arbor import Solver, TraceWriter
from arbor.events import Boundary, Event
from arbor.run.worker import SearchWorker


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
            if isinstance(run, SearchWorker):
                (run,) = run.running
            assert run is not None and run.session is not None
            self.references += [weakref.ref(run), weakref.ref(run.session)]
            if self._fails:
                raise ZeroDivisionError


@pytest.mark.parametrize("fails", every(2, [False, True]))
@pytest.mark.parametrize("streamed", every(2, [True, False]))
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
