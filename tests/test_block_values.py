"""MSVE's training data: what a path loses without one of its blocks."""

from __future__ import annotations

import itertools

import pytest

from arbor import Sampling, Solver
from arbor.papers.arborkv.calibrate import collect


def test_a_greedy_path_needs_no_other_continuation(monkeypatch: pytest.MonkeyPatch) -> None:
    with Solver(task="chains", controller="chain", sampling={"temperature": 0.0}) as solver:
        problems = list(itertools.islice(solver.task.problems("test"), 1, 2))
        found = collect(solver, problems)
        monkeypatch.setattr(Solver, "sampling", Sampling(temperature=1.0))
        assert len(found) > 3 and any(each.drop for each in found)
        assert collect(solver, problems) == found
