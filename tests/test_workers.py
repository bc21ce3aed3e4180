"""Jobs handed to many workers: each once, in order, whatever dies when; without Ray."""

from __future__ import annotations

import pickle
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arbor import Solver, Workers, errors
from arbor.errors import ArborError, BudgetInfeasible, UsageError, WorkerError
from arbor.measure.cluster import (
    Delivered,
    Died,
    Finished,
    News,
    Ready,
)
from arbor.measure.outcomes import Job, JobOutcome
from arbor.metrics import Metrics
from arbor.run.solution import Solution

CONFIG = {"task": "chains", "controller": "chain"}
TRIES = 3
NONE = {"cpu_s": 0.0, "wall_s": 0.0}


def solution(problem: str) -> Solution:
    return Solution(
        id=problem,
        task="chains",
        problem=problem,
        answer=problem[::-1],
        text="",
        score=1.0,
        correct=None,
        finish_reason="solved",
        path=(),
        steps=(),
        candidates=(),
        metrics=Metrics(),
        seed=0,
        config={},
    )


class FakeCluster:
    """Workers that solve by turning a problem round, and die when a die says so.

    Args:
        size: number of workers wanted.
        seed: of what happens when.
        risk: probability that a worker with jobs dies instead of finishing one.
        poison: problems that kill their worker.
        refuses: what the first worker to begin answers with.
        stillborn: whether workers die before they are ready.
    """

    def __init__(
        self,
        size: int = 2,
        seed: int = 0,
        risk: float = 0.0,
        poison: Sequence[str] = (),
        refuses: News | None = None,
        stillborn: bool = False,
    ) -> None:
        self.size, self.risk, self.poison = size, risk, set(poison)
        self.refuses, self.stillborn = refuses, stillborn
        self.random = random.Random(seed)
        self.loading: list[int] = []
        self.jobs: dict[int, list[Job]] = {}  # of workers that live
        self.lonely: set[int] = set()
        self.begun = 0
        self.most_at_once = 0
        self.given: Counter[int] = Counter()
        self.closed = False

    def open(self) -> int:
        return self.size

    def start(self) -> int:
        self.loading.append(self.begun)
        self.begun += 1
        return self.begun - 1

    def give(self, worker: int, jobs: Sequence[Job], alone: bool) -> None:
        here = self.jobs[worker]
        assert worker not in self.lonely or not here, "nothing joins a job that is tried again"
        assert not alone or (len(jobs) == 1 and not here)
        (self.lonely.add if alone else self.lonely.discard)(worker)
        here += jobs
        self.given.update(job.place for job in jobs)
        self.most_at_once = max(self.most_at_once, len(here))

    def news(self, seconds: float) -> list[News]:
        chances = [("load", each) for each in self.loading]
        chances += [("work", each) for each, jobs in self.jobs.items() if jobs]
        assert chances, "no worker begins or has a job, and yet the loop is not over"
        kind, worker = self.random.choice(chances)
        if kind == "load":
            self.loading.remove(worker)
            if self.refuses is not None:
                return [replace(self.refuses, worker=worker)]
            if self.stillborn:
                return [Died(worker, "killed")]
            self.jobs[worker] = []
            return [Ready(worker, f"process {worker}")]
        jobs = self.jobs[worker]
        deadly = any(job.problem in self.poison for job in jobs)
        if deadly or self.random.random() < self.risk:
            del self.jobs[worker]
            return [Died(worker, "killed")]
        job = jobs.pop(self.random.randrange(len(jobs)))
        return [
            Finished(worker, [Delivered(JobOutcome(job, solution(str(job.problem)), NONE), None)])
        ]

    def end(self, worker: int) -> None:
        self.jobs.pop(worker, None)
        if worker in self.loading:
            self.loading.remove(worker)

    def lack(self) -> str | None:
        return None

    def close(self) -> None:
        self.closed = True


@cache
def described() -> Solver:
    return Solver(**CONFIG)


def workers(cluster: FakeCluster, **more: Any) -> Workers:
    return Workers(described(), cluster.size, cluster=cluster, tries=TRIES, **more)


def problems(count: int) -> list[str]:
    return [f"problem {place}" for place in range(count)]


# Handing out


@settings(max_examples=150)
@given(
    size=st.integers(1, 4),
    concurrency=st.integers(1, 3),
    count=st.integers(0, 14),
    risk=st.sampled_from([0.0, 0.1, 0.4]),
    ordered=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_every_problem_is_answered_once_whatever_dies_when(
    size: int, concurrency: int, count: int, risk: float, ordered: bool, seed: int
) -> None:
    cluster = FakeCluster(size, seed, risk)
    given = problems(count)

    with workers(cluster, concurrency=concurrency) as many:
        found = list(many.imap(given, ordered=ordered, on_error="return"))

    assert cluster.closed
    assert sorted(each.problem for each in found) == sorted(given)
    if ordered:
        assert [each.problem for each in found] == given
    for each in found:
        tried = cluster.given[given.index(each.problem)]
        if each.error is None:
            assert each.answer == each.problem[::-1] and tried <= TRIES
        else:
            assert (each.error["code"], tried) == ("worker-died", TRIES)
    assert cluster.most_at_once <= concurrency


@settings(max_examples=150)
@given(
    size=st.integers(1, 4),
    concurrency=st.integers(1, 4),
    poison=st.sets(st.integers(0, 11), max_size=3),
    seed=st.integers(0, 2**32),
)
def test_problems_that_kill_their_worker_fail_and_harm_no_other(
    size: int, concurrency: int, poison: set[int], seed: int
) -> None:
    given = problems(12)
    cluster = FakeCluster(size, seed, poison=[given[place] for place in poison])

    with workers(cluster, concurrency=concurrency) as many:
        found = list(many.imap(given, on_error="return"))

    assert {place for place, each in enumerate(found) if each.error is not None} == poison
    assert all(cluster.given[place] == TRIES for place in poison)
    assert all(cluster.given[place] <= 2 for place in set(range(12)) - poison)


@pytest.mark.parametrize("given", [["deadly"], ["deadly", "a", "b"], ["a", "deadly", "b"]])
@pytest.mark.parametrize("size", [1, 2])
def test_a_second_loop_ends_though_the_workers_of_the_first_die_at_once(
    given: list[str], size: int
) -> None:
    cluster = FakeCluster(size, poison=["deadly"])
    with workers(cluster) as many:
        assert [each.error for each in many.imap(problems(size))] == [None] * size

        found = list(many.imap(given, on_error="return"))

    failed = [each.problem for each in found if each.error is not None]
    assert ([each.problem for each in found], failed) == (given, ["deadly"])


# Settings


def test_a_solver_and_its_settings_make_the_same_solver_elsewhere(tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "controller": "tot,width=3",
        "verifier": "self",
        "budget": 0.25,
        "seed": 7,
        "threads": 2,
        "keep_kv": tmp_path,
        "sampling": {"temperature": 0.5},
        "record_bytes": 0,
    }
    with Solver(**given) as here:
        config, unrecorded = pickle.loads(pickle.dumps((here.config, here.unrecorded)))
        with Solver.from_config(config, **unrecorded) as there:
            assert (there.config, there.unrecorded) == (here.config, here.unrecorded)


KINDS = [
    UsageError("flag", "--max-depth is 0.", "It is 1 or more.", depth=0),
    errors.UnknownName("controller", "bem", ["beam", "tot"]),
    BudgetInfeasible(988, 744, "one path"),
    errors.OutOfMemory("oom", "out of memory."),
    WorkerError("worker-died", "it died.", tries=3),
]


@pytest.mark.parametrize("error", KINDS, ids=lambda error: type(error).__name__)
def test_an_error_comes_from_another_process_as_it_was(error: ArborError) -> None:
    again = pickle.loads(pickle.dumps(error))

    assert type(again) is type(error) and str(again) == str(error)
    assert (again.to_dict(), vars(again)) == (error.to_dict(), vars(error))


def test_stop_before_the_first_is_asked_for_ends_them_all() -> None:
    cluster = FakeCluster()
    with workers(cluster) as many:
        stopped = many.imap(problems(3))
        many.stop()

        assert list(stopped) == [] and not cluster.begun
        assert len(list(many.imap(problems(3)))) == 3
