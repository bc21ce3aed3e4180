"""MSVE's training data: what a path loses without one of its blocks."""

from __future__ import annotations

import itertools

import pytest

from arbor import Sampling, Solver
from arbor.errors import UsageError
from arbor.papers.arborkv.calibrate import collect


def test_a_greedy_path_needs_no_other_continuation(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"policy": "arborkv", "mode": "lossy", "sampling": {"temperature": 0.0}}
    with Solver(task="chains", controller="chain", **settings) as solver:
        problems = list(itertools.islice(solver.task.problems("test"), 1, 2))
        found = collect(solver, problems)
        monkeypatch.setattr(Solver, "sampling", Sampling(temperature=1.0))
        assert len(found) > 3 and any(each.drop for each in found)
        assert len({each.value for each in found}) > 1, "each block is valued by itself"
        assert collect(solver, problems) == found


def test_blocks_without_values_are_refused() -> None:
    with (
        Solver(task="chains", controller="chain", policy="arborkv") as solver,
        pytest.raises(UsageError, match="not valued"),
    ):
        collect(solver, itertools.islice(solver.task.problems("test"), 1, 2))
