"""Workers as actors of Ray on this machine: killed ones, killed drivers, poisoned problems."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="the extra `ray` is not installed")
from support.deadly import Deadly
from support.run_cli import REAL, environment, spawn

from arbor import Solver, Workers
from arbor.errors import UsageError
from arbor.run.solution import Solution
from arbor.trace import Replay, read_trace

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # of Ray's own
]

EVAL = ("eval", "game24", "--set", "beam=2", "--set", "width=3", "--concurrency", "1")
SECONDS = (
    *("wall_s", "prefill_s", "decode_s", "verify_s", "rehydrate_s", "policy_s", "cpu_s"),
    "tok_per_s",
)


def rows(folder: Path) -> dict[str, dict[str, Any]]:
    """Samples by id; each is there once."""
    try:
        lines = (folder / "samples.jsonl").read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return {}
    found = [json.loads(line) for line in lines]
    assert len({row["id"] for row in found}) == len(found), "a sample is there twice"
    return {row["id"]: row for row in found}


def without_seconds(row: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in row.items() if name not in SECONDS}
    kept["metrics"] = {k: v for k, v in row["metrics"].items() if k not in SECONDS}
    return kept


def descendants(root: int) -> dict[int, str]:
    """The living processes below one, with their command lines."""
    parents, names = {}, {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            status = (entry / "stat").read_text().rpartition(")")[2].split()
            names[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
        if status[0] != "Z":
            parents[int(entry.name)] = int(status[1])
    below = {root}
    while True:
        more = {each for each, parent in parents.items() if parent in below} - below
        if not more:
            return {each: names[each] for each in below - {root}}
        below |= more


def engines(root: int) -> list[int]:
    return sorted(pid for pid, name in descendants(root).items() if "EngineProcess" in name)


def until(condition: Any, seconds: float = 1200) -> Any:
    """The first true value of a condition."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.02)
    raise AssertionError("it did not happen")


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The samples of one process."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    with spawn(*EVAL, "--limit", "8", "--output", str(folder), code=REAL) as process:
        _, err = process.communicate(timeout=1200)
    assert process.returncode == 0, err
    return rows(folder)


@pytest.mark.parametrize(
    "together", [(), ("--tp", "2")], ids=["worker", "another process of its model"]
)
def test_a_killed_worker_costs_its_problem_in_progress_and_changes_no_result(
    together: tuple[str, ...], tmp_path: Path, expected: dict[str, dict[str, Any]]
) -> None:
    folder, temporary = tmp_path / "run", tmp_path / "temporary"
    temporary.mkdir()
    command = (*EVAL, "--limit", "8", "--workers", "2", *together, "--output", str(folder))
    places = environment(TMPDIR=str(temporary), RAY_TMPDIR=tempfile.gettempdir())
    with spawn(*command, "-v", "--json", code=REAL, env=places) as process:
        until(lambda: len(rows(folder)) >= 2)
        victim = worker = engines(process.pid)[0]
        if together:
            (victim,) = descendants(worker)
        os.kill(victim, signal.SIGKILL)
        out, err = process.communicate(timeout=1200)

    assert process.returncode == 0, err
    assert json.loads(out)["n"] == 8, "nothing of Ray's is on stdout"
    assert list(temporary.glob("arbor*")) == [], "no traces are left"
    assert f"process {worker} of".encode() in err and b"died" in err
    assert (f"process {victim}) was ended by signal SIGKILL".encode() in err) == bool(together)
    found = rows(folder)
    assert found.keys() == expected.keys()
    for name, row in found.items():
        if not together:  # sums over two processes have another order
            assert without_seconds(row) == without_seconds(expected[name])
        assert Replay.of(read_trace(folder / row["trace"])).problems == []


def test_after_a_killed_driver_finished_samples_are_there_and_stay(
    tmp_path: Path, expected: dict[str, dict[str, Any]]
) -> None:
    folder = tmp_path / "run"
    command = (*EVAL, "--limit", "8", "--workers", "2", "--output", str(folder))
    with spawn(*command, code=REAL) as process:
        until(lambda: len(rows(folder)) >= 3)
        below = descendants(process.pid)
        process.kill()
        process.communicate()
    kept = (folder / "samples.jsonl").read_bytes()
    kept = kept[: kept.rfind(b"\n") + 1]
    until(lambda: not [pid for pid in below if Path(f"/proc/{pid}/exe").exists()])

    with spawn(*command, code=REAL) as process:
        _, err = process.communicate(timeout=1200)

    assert process.returncode == 0, err
    assert (folder / "samples.jsonl").read_bytes().startswith(kept)
    found = rows(folder)
    assert found.keys() == expected.keys()
    for name, row in found.items():
        assert without_seconds(row) == without_seconds(expected[name])


def test_ctrl_c_keeps_what_is_finished_and_leaves_no_process(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = (*EVAL, "--limit", "40", "--workers", "2", "--output", str(folder))
    with spawn(*command, code=REAL) as process:
        until(lambda: len(rows(folder)) >= 1)
        below = descendants(process.pid)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=1200)

    assert process.returncode == 130, err
    assert b"--workers 2" in err and b"to resume" in err
    assert json.loads((folder / "results.json").read_text())["missing"] > 0
    until(lambda: not [pid for pid in below if Path(f"/proc/{pid}/exe").exists()])


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("127.0.0.1:1", "nothing listens at 127.0.0.1:1"),
        ("ray://127.0.0.1:1", "nothing listens at 127.0.0.1:1"),
        ("nosuch.invalid:6379", "the host 'nosuch.invalid' is unknown"),
    ],
)
def test_a_cluster_that_is_not_there_is_refused_within_seconds(address: str, why: str) -> None:
    began = time.monotonic()
    with Workers({"task": "game24"}, address) as workers, pytest.raises(UsageError) as raised:
        list(workers.imap(["4 5 6 10"]))

    assert raised.value.code == "ray-unreachable" and why in raised.value.message
    assert time.monotonic() - began < 60


def test_a_controller_named_by_its_file_searches_in_workers(tmp_path: Path) -> None:
    own = tmp_path / "version 1.2" / "own"
    own.mkdir(parents=True)
    (own / "aid.py").write_text("SAMPLES = 2\n")
    (own / "mine.py").write_text(
        "import aid\nfrom arbor.controllers.chain import Chain\n"
        "class Mine(Chain):\n"
        "    def max_blocks(self, max_depth):\n        return aid.SAMPLES * max_depth\n"
    )
    folder = tmp_path / "run"
    command = ("eval", "chains", "--limit", "1", "--workers", "1", "--output", str(folder))
    with spawn(*command, "--controller", str(own / "mine.py:Mine"), code=REAL) as process:
        _, err = process.communicate(timeout=1200)

    assert process.returncode == 0, err
    (row,) = rows(folder).values()
    assert Replay.of(read_trace(folder / row["trace"])).problems == []


@pytest.fixture
def path_of_tests(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    yield


@pytest.mark.usefixtures("path_of_tests")
@pytest.mark.parametrize("concurrency", [1, 4])
def test_a_problem_that_kills_every_worker_fails_alone(concurrency: int) -> None:
    problems = ["4 5 6 10", "1 2 3 4", "2 2 6 6", "3 3 8 8", "1 1 4 6", "5 5 5 9", "2 3 5 12"]
    task = Deadly(poison="3 3 8 8", spared=os.getpid())
    settings = {"task": task, "controller": "chain", "seed": 5, "record_bytes": 0}
    with Workers(settings, 2, concurrency=concurrency) as workers:
        found = list(workers.imap(problems, on_error="return"))
    with Solver(**settings) as solver:
        alone = list(solver.imap(problems))

    for problem, solution, other in zip(problems, found, alone, strict=True):
        if problem == "3 3 8 8":
            assert solution.error is not None
            assert (solution.error["code"], solution.error["data"]) == ("worker-died", {"tries": 3})
        else:
            assert plain(solution) == plain(other)


def plain(solution: Solution) -> tuple[Any, ...]:
    return (solution.problem, solution.answer, solution.text, solution.candidates, solution.path)
