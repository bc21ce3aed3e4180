"""The process of a worker, in this one: it finds what a solver finds. Needs no Ray."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from arbor import Solver
from arbor.integrations.ray.ray_cluster import EngineProcess
from arbor.measure.cluster import Delivered
from arbor.measure.outcomes import Job
from arbor.run.solution import Solution
from arbor.trace import Replay, read_trace

CONFIG = {"task": "chains", "controller": "chain"}


def taken(process: EngineProcess, count: int) -> list[Delivered]:
    found: list[Delivered] = []
    while len(found) < count:
        more = process.take()
        assert not isinstance(more, str), more
        found += more
    return found


@pytest.mark.slow
@pytest.mark.parametrize("concurrency", [1, 3])
def test_a_process_finds_what_a_solver_finds(tmp_path: Path, concurrency: int) -> None:
    with Solver(**CONFIG, seed=3, max_depth=2, step_tokens=12) as solver:
        given = list(solver.task.problems("test", 5))
        alone = [solver.solve(each) for each in given]
        config = solver.config
    process = EngineProcess(config, {"record_bytes": 0}, concurrency)
    assert f"process {os.getpid()} of " in str(process.load())
    jobs = [
        Job(place, each, {}, tmp_path / "elsewhere" / f"{place}.arbor.jsonl.gz")
        for place, each in enumerate(given)
    ]

    process.give(jobs[:3], alone=False)
    found = taken(process, 1)
    process.give(jobs[3:], alone=False)
    found += taken(process, 5 - len(found))

    assert sorted(each.outcome.job.place for each in found) == [0, 1, 2, 3, 4]
    for each in found:
        outcome = each.outcome
        result = outcome.result
        assert isinstance(result, Solution)
        expected = alone[outcome.job.place]
        assert (result.answer, result.text, result.candidates, result.correct) == (
            *(expected.answer, expected.text, expected.candidates, expected.correct),
        )
        assert outcome.job == jobs[outcome.job.place], "the trace's place is the sender's"
        assert outcome.seconds["wall_s"] > 0 and not math.isnan(outcome.seconds["cpu_s"])
        assert each.trace is not None
        path = tmp_path / "trace.arbor.jsonl.gz"
        path.write_bytes(each.trace)
        assert Replay.of(read_trace(path)).problems == []
