"""Jobs handed to many workers: each once, in order, whatever dies when; without Ray."""

from __future__ import annotations

import math
import os
import pickle
import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.run_cli import in_process

from arbor import Solver, Workers, errors
from arbor.errors import ArborError, BudgetInfeasible, ModelError, UsageError, WorkerError
from arbor.measure.outcomes import Job, Outcome
from arbor.measure.workers.cluster import (
    Broken,
    Delivered,
    Died,
    Finished,
    News,
    Ready,
    Refused,
)
from arbor.measure.workers.engine_process import EngineProcess
from arbor.measure.workers.hand_out import HandOut
from arbor.measure.workers.worker_place import WorkerPlace
from arbor.metrics import Metrics
from arbor.run.solution import Solution
from arbor.trace import Replay, read_trace

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
        if not chances:
            return []
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
        return [Finished(worker, [Delivered(Outcome(job, solution(str(job.problem)), NONE), None)])]

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


def test_a_few_jobs_are_dealt_in_equal_parts() -> None:
    hand_out = HandOut(range(6), workers=3, places=8, tries=3)

    assert [[ticket.job for ticket in hand_out.give(worker)] for worker in "abc"] == [
        *([0, 1], [2, 3], [4, 5]),
    ]


def test_jobs_are_read_only_as_far_ahead_as_there_are_places() -> None:
    read = []

    def endless() -> Iterator[int]:
        for number in range(10**6):
            read.append(number)
            yield number

    hand_out = HandOut(endless(), workers=2, places=3, tries=3)
    hand_out.give("a")

    assert len(read) <= 2 * 2 * 3


def test_no_more_workers_begin_than_there_are_problems() -> None:
    cluster = FakeCluster(size=8)

    with workers(cluster) as many:
        list(many.imap(problems(3)))

    assert cluster.begun == 3


def test_workers_live_from_one_loop_to_the_next() -> None:
    cluster = FakeCluster()

    with workers(cluster) as many:
        for _ in range(3):
            assert len(list(many.imap(problems(5)))) == 5

    assert cluster.begun == 2


def test_a_loop_that_is_left_gives_up_what_is_in_progress() -> None:
    cluster = FakeCluster(size=3)

    with workers(cluster) as many:
        first = next(many.imap(problems(20), ordered=False))
        again = list(many.imap(problems(4)))

    assert first.answer is not None
    assert [each.problem for each in again] == problems(4)


def test_two_loops_at_once_are_refused() -> None:
    with workers(FakeCluster()) as many:
        loop = many.imap(problems(20), ordered=False)
        next(loop)
        with pytest.raises(UsageError, match="workers-busy"):
            next(many.imap(problems(2)))


def test_stop_ends_the_loop() -> None:
    with workers(FakeCluster()) as many:
        found = []
        for each in many.imap(problems(50), ordered=False):
            found.append(each)
            if len(found) == 5:
                many.stop()

    assert 5 <= len(found) < 50


def test_an_error_is_raised_unless_it_is_asked_for() -> None:
    cluster = FakeCluster(poison=["problem 1"])

    with workers(cluster) as many, pytest.raises(WorkerError, match="3 workers died"):
        list(many.imap(problems(3)))


def test_what_the_first_worker_is_refused_is_raised() -> None:
    error = ModelError("model-missing", "no such model.")
    cluster = FakeCluster(refuses=Refused(0, error))

    with workers(cluster) as many, pytest.raises(ModelError) as raised:
        list(many.imap(problems(3)))

    assert raised.value is error


def test_a_bug_in_a_worker_is_raised_with_its_traceback() -> None:
    cluster = FakeCluster(refuses=Broken(0, "Traceback: a plank came loose"))

    with workers(cluster) as many, pytest.raises(RuntimeError, match="a plank came loose"):
        list(many.imap(problems(3)))


def test_workers_that_die_while_they_load_are_not_begun_for_ever() -> None:
    cluster = FakeCluster(stillborn=True)

    with workers(cluster) as many, pytest.raises(WorkerError) as raised:
        list(many.imap(problems(30)))

    assert raised.value.code == "worker-start"
    assert cluster.begun <= TRIES + 2


def test_the_number_in_progress_is_reported() -> None:
    counts: list[int] = []
    jobs = [Job(place, each, {}) for place, each in enumerate(problems(9))]

    with workers(FakeCluster(size=3), concurrency=2) as many:
        assert len(list(many.outcomes(jobs, counts.append))) == 9

    assert max(counts) == 6 and min(counts) >= 0


# Settings


@pytest.mark.parametrize(
    ("text", "number", "address"),
    [
        ("2", 2, None),
        (4, 4, None),
        ("ray", None, "ray"),
        ("ray://head:10001", None, "ray://head:10001"),
        ("8@ray://head:10001", 8, "ray://head:10001"),
        ("10.0.0.1:6379", None, "10.0.0.1:6379"),
        ("3@ray", 3, "ray"),
    ],
)
def test_workers_are_a_number_or_a_cluster(
    text: str | int, number: int | None, address: str | None
) -> None:
    place = WorkerPlace.parse(text)

    assert place == WorkerPlace(number, address)
    assert WorkerPlace.parse(str(place)) == place


@pytest.mark.parametrize("text", ["0", "-1", "two", "", "2@", "@ray", "ray://", "2@2", "1.5", True])
def test_other_forms_are_refused_with_one_that_works(text: Any) -> None:
    with pytest.raises(UsageError, match="--workers 2") as raised:
        WorkerPlace.parse(text)

    assert raised.value.code == "workers"


@pytest.mark.parametrize(
    ("config", "more", "says"),
    [
        ({"share": "similar", "mode": "lossy"}, {}, "share=exact"),
        ({}, {"device": "cuda:1"}, "--device cuda"),
        ({"controller": "bem"}, {}, "beam"),
        ({"listeners": [print]}, {}, "listeners"),
    ],
)
def test_settings_that_workers_cannot_have_are_refused(
    config: dict[str, Any], more: dict[str, Any], says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        Workers({**CONFIG, **config}, 2, cluster=FakeCluster(), **more)


def test_without_ray_the_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)

    with pytest.raises(UsageError, match=r"pip install 'arbor-search\[ray\]'") as raised:
        Workers(CONFIG, 2)

    assert raised.value.code == "ray-missing"


def test_the_command_without_ray_is_one_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.chdir(tmp_path)

    ran = in_process(capsys)("eval", "chains", "--limit", "2", "--workers", "2")

    assert ran.code == 2 and not Path("runs").exists()
    assert "arbor: error: [ray-missing]" in ran.err and "arbor-search[ray]" in ran.err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--workers", "none"], "--workers 2"),
        (["--workers", "2", "--set", "share=similar", "--mode", "lossy"], "share=exact"),
        (["--workers", "2", "--device", "cuda:0"], "--device cuda"),
        (["--device-map", "auto"], "--workers"),
    ],
)
def test_the_command_refuses_what_workers_cannot_have(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], says: str
) -> None:
    output = tmp_path / "out"

    ran = in_process(capsys)("eval", "chains", *arguments, "--output", str(output))

    assert ran.code == 2 and says in ran.err
    assert not output.exists()


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


# The process of a worker, in this one


def taken(process: EngineProcess, count: int) -> list[Delivered]:
    found: list[Delivered] = []
    while len(found) < count:
        more = process.take()
        assert not isinstance(more, str), more
        found += more
    return found


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


def test_a_process_says_why_it_cannot_load() -> None:
    missing = EngineProcess({**CONFIG, "model": "./no/such/model"}, {}, 1).load()
    other = EngineProcess(CONFIG, {}, 1, version="0.0.1").load()

    assert isinstance(missing, ModelError) and "process" in missing.data["worker"]
    assert isinstance(other, ModelError) and other.code == "worker-version"


def test_an_error_of_one_job_leaves_the_others_of_a_process() -> None:
    process = EngineProcess({**CONFIG, "max_depth": 2, "step_tokens": 12}, {}, 2)
    process.load()
    with Solver(**CONFIG) as solver:
        good = next(iter(solver.task.problems("test", 1)))

    process.give([Job(0, "not a problem of this task", {}), Job(1, good, {})], alone=False)
    results = {each.outcome.job.place: each.outcome.result for each in taken(process, 2)}

    assert isinstance(results[0], ArborError)
    assert isinstance(results[1], Solution) and results[1].error is None
