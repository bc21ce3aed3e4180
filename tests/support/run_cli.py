"""Running the command line in tests: in this process, or in one of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from arbor.cli import main

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
CACHE = tempfile.TemporaryDirectory(prefix="arbor-cache-")

REAL = "import sys; from arbor.cli import main; sys.exit(main())"
FAKE = "import sys; from support import fake_solver; fake_solver.install_light(); from arbor.cli import main; sys.exit(main())"


class Ran:
    """A command's exit code and output."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def document(self) -> Any:
        return json.loads(self.out)


Arbor = Callable[..., Ran]


def in_process(capsys: pytest.CaptureFixture[str]) -> Arbor:
    """A function that runs ``arbor`` in this process."""

    def run(*arguments: str) -> Ran:
        code = main(arguments)
        said = capsys.readouterr()
        return Ran(code, said.out, said.err)

    return run


def environment(**more: str) -> dict[str, str]:
    """This process's environment without variables that change the command's behaviour."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("ARBOR_", "NO_COLOR"))}
    path = os.pathsep.join((str(TESTS), str(ROOT)))
    return kept | {"PYTHONPATH": path, "COLUMNS": "200", "ARBOR_CACHE": CACHE.name} | more


def spawn(*arguments: str, code: str = FAKE, **settings: Any) -> subprocess.Popen[bytes]:
    """``arbor`` in a process of its own, with the fake solver."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": environment()}
    return subprocess.Popen([sys.executable, "-c", code, *arguments], **(streams | settings))


def await_line(process: subprocess.Popen[bytes], words: bytes, seconds: float = 60) -> None:
    """Reads stderr up to a line with these words; fails where the process ends without one.

    A process that takes longer than `seconds` is killed.
    """
    assert process.stderr is not None
    deadline = threading.Timer(seconds, process.kill)
    deadline.start()
    try:
        lines = []
        while line := process.stderr.readline():
            lines.append(line)
            if words in line:
                return
    finally:
        deadline.cancel()
    raise AssertionError(f"{words!r} is not on stderr: {b''.join(lines).decode()}")


def run_and_record(command: Sequence[str], path: Path) -> None:
    """Run ``arbor`` in this process, stdout and stderr written to a file, and exit with its code.

    Args:
        command: arguments of ``arbor``.
        path: of the file; the descriptor of stderr too, which a signal's handler writes to.
    """
    with path.open("w", encoding="utf-8", buffering=1) as sys.stdout:
        sys.stderr = sys.stdout
        os.dup2(sys.stdout.fileno(), 2)
        code = main(list(command))
    os._exit(code)
