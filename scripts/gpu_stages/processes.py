"""Stages as processes: each part runs in one of its own, with a time limit; all of them run."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpu_stages.rows import SKIPPED, append, read

RESERVE = 0.85  # of its limit a part may begin checks in; the rest is for the one in progress


@dataclass(frozen=True)
class Part:
    """One process of a stage.

    Attributes:
        number: of the stage.
        stage: its name, which is also that of its module.
        part: distinguishes the processes of a stage.
        limit_s: seconds after which it is killed.
        cuda_only: it has nothing to do on a CPU.
    """

    number: int
    stage: str
    part: str
    limit_s: float
    cuda_only: bool = False


def run_all(
    commands: Sequence[tuple[Part, Sequence[str]]],
    out: Path,
    environment: dict[str, str],
    total_s: float,
) -> None:
    """Run the parts in order until the time is up; each ends with a row that says how.

    Args:
        commands: parts in order of value (the machine may be taken away at any time), each with the
            command of its process, which appends its own rows to `out`.
        out: the file of rows.
        environment: of the processes.
        total_s: seconds of all parts together.
    """
    end = time.monotonic() + total_s
    for part, command in commands:
        left_s = end - time.monotonic()
        if left_s > 0:
            limited = replace(part, limit_s=min(part.limit_s, round(left_s, 1)))
            run_part(limited, command, out, environment)
        else:
            row = {"stage": part.stage, "part": part.part, "name": "process"}
            append(out, row | {"status": SKIPPED, "reason": "out of time"})


def run_part(part: Part, command: Sequence[str], out: Path, environment: dict[str, str]) -> None:
    """Run one part until it ends or its time is up.

    The process leads a group of its own, so that what it started ends with it.
    """
    began = time.monotonic()
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True
    )
    try:
        code: int | None = process.wait(timeout=part.limit_s)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        _end(process)
    row: dict[str, Any] = {
        "stage": part.stage,
        "part": part.part,
        "name": "process",
        "ok": code == 0,
        "seconds": round(time.monotonic() - began, 1),
    }
    if code is None:
        row["reason"] = f"killed after {part.limit_s:g} s"
    elif code < 0:
        row["reason"] = f"died of {signal.Signals(-code).name}"
    elif code:
        row["reason"] = f"exit code {code}"
    append(out, row)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of a process and its group, which may outlive it."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def verdict(rows: Sequence[dict[str, Any]], require: str, checking: Sequence[str]) -> list[str]:
    """Why the run does not pass; empty if it does.

    Args:
        rows: of the run.
        require: the backend that must have been checked; ``none`` for any.
        checking: stages whose rows check a backend's results.
    """
    reasons = [
        f"{row['stage']} {row['part']}: {row['name']}: {row.get('reason', 'failed')}"
        for row in rows
        if row.get("ok") is False
    ]
    checked = any(
        row["stage"] in checking and row.get("backend") == require and row.get("ok") for row in rows
    )
    if require != "none" and not checked:
        reasons.append(f"no attention of {require} was checked")
    return reasons


def rows_since(out: Path, before: int) -> list[dict[str, Any]]:
    """The rows of a file after its first `before`."""
    return read(out)[before:]
