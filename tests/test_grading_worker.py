"""The worker of a grader: limits of time and memory, and the answer after one that ended badly."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from arbor.tasks.grading.mathematics import SCRIPT, Mathematics, worker
from arbor.tasks.grading.worker import ProcessLimits, ScriptProcess

ECHO = """
import json, os, sys, time
limits = json.loads(sys.stdin.readline())
print("{}", flush=True)
for line in sys.stdin:
    request = json.loads(line)
    if request.get("sleep"):
        time.sleep(600)
    if request.get("die"):
        os._exit(3)
    if request.get("garbage"):
        print("not JSON", flush=True)
        continue
    print(json.dumps({"said": request["say"], "process": os.getpid()}), flush=True)
"""


@pytest.fixture
def echo(tmp_path: Path) -> Iterator[ScriptProcess]:
    script = tmp_path / "echo.py"
    script.write_text(ECHO)
    found = ScriptProcess(script, ProcessLimits(answer_s=1.0))
    yield found
    found.close()


@pytest.mark.parametrize(
    ("request_", "status"), [("sleep", "timeout"), ("die", "crashed"), ("garbage", "crashed")]
)
def test_a_process_that_hangs_or_ends_is_replaced(
    echo: ScriptProcess, request_: str, status: str
) -> None:
    first = echo.ask({"say": "before"}).data["process"]

    assert echo.ask({request_: True}).status == status
    assert echo.process_id is None
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)
    after = echo.ask({"say": "after"})
    assert after.data["said"] == "after" and after.data["process"] != first


def test_an_endless_sum_is_a_timeout_and_the_next_answer_is_graded() -> None:
    pytest.importorskip("math_verify")
    impatient = Mathematics(seconds=1.0)

    grade = impatient.grade(r"\sum_{k=1}^{10000000} \frac{1}{k^2}", "x+1")

    assert (grade.correct, grade.method) == (False, "timeout")
    assert grade.reason.startswith("timeout: ")
    assert Mathematics(seconds=20).grade("1+x", "x+1").correct


@pytest.mark.parametrize(
    "tower", ["9^{9^{9^{9}}}", "x+2^{10^{10}}", "10000000!", "1.5^{10^{9}}", "e^{10^{9}}"]
)
def test_a_number_too_long_to_write_is_not_evaluated(tower: str) -> None:
    pytest.importorskip("math_verify")
    grader = Mathematics(seconds=20)

    grade = grader.grade(tower, "y+1")

    assert (grade.correct, grade.method) == (False, "too-large")
    assert not grader.equal(tower, "y+1", 20)


def test_a_process_that_is_killed_is_a_crash_and_the_next_answer_is_graded() -> None:
    pytest.importorskip("math_verify")
    grader = Mathematics(seconds=21)
    assert grader.grade("2y+1", "1+2y").correct
    process = worker(21).process_id
    assert process is not None
    os.kill(process, 9)

    grade = grader.grade("3y+1", "1+3y")

    assert (grade.correct, grade.method) == (False, "crashed")
    assert grade.reason.startswith("crashed: ")
    assert grader.grade("3y+1", "1+3y").correct  # what ended badly is not remembered


def test_memory_beyond_the_limit_ends_in_a_verdict() -> None:
    pytest.importorskip("math_verify")
    small = ScriptProcess(SCRIPT, ProcessLimits(answer_s=20, memory_bytes=512 << 20))

    reply = small.ask({"expected": "x+1", "answer": "2^{10^{10}}"})

    assert reply.data is None or reply.data.get("equal") is not True
    assert small.ask({"expected": "x+1", "answer": "1+x"}).data == {"equal": True, "library": True}
    small.close()
