"""Commands in forks of one process that has imported arbor, torch and transformers already.

Starting Python with torch and loading a first model takes seconds of CPU; a fork of a process that
has done so takes none. For tests whose subject is what a command does. Tests of start-up, of what
is imported and of signals start processes of their own (`support.run_cli.spawn`).

The warm process serves a Unix socket: each connection names a command, its folder, its environment
and its streams, and receives its exit code. `program` writes an executable for shells; `run` is
`subprocess.run`.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import runpy
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from arbor import registry

CLIENT = Path(__file__).with_name("warm_client.py")
TESTS = Path(__file__).parents[1]


def command(*arguments: str) -> list[str]:
    """The words of ``python ARGUMENT...`` in a fork of the warm process."""
    return [sys.executable, "-S", "-E", str(CLIENT), address(), *arguments]


def run(*arguments: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    """``python ARGUMENT...`` in a fork of the warm process; its output as text.

    Args:
        arguments: ``-m MODULE``, ``-c CODE`` or a file, then the command's own.
        settings: of `subprocess.run`.
    """
    given = {"capture_output": True, "text": True} | settings
    return subprocess.run(command(*arguments), **given)


def program(path: Path, *arguments: str) -> None:
    """Write an executable that runs ``python ARGUMENT...`` and its own arguments in a fork."""
    words = shlex.join(command(*arguments))
    path.write_text(f'#!/bin/sh\nexec {words} "$@"\n', encoding="utf-8")
    path.chmod(0o755)


@cache
def address() -> str:
    """The socket of this process's warm process, which is started once and ends with this one."""
    folder = tempfile.TemporaryDirectory(prefix="arbor-warm-")
    path = str(Path(folder.name) / "socket")
    variables = {
        name: value for name, value in os.environ.items() if not name.startswith("ARBOR_")
    } | {"PYTHONPATH": os.pathsep.join((str(TESTS), str(TESTS.parent)))}
    variables |= {"ARBOR_CACHE": folder.name, "TOKENIZERS_PARALLELISM": "false"}
    process = subprocess.Popen(
        [sys.executable, "-m", "support.warm_process", path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=variables,
        cwd=folder.name,
    )
    assert process.stdin is not None and process.stdout is not None
    assert process.stdout.readline() == b"ready\n", "the warm process did not start"

    def end() -> None:
        process.communicate()  # its stdin ends, and so does it
        folder.cleanup()

    atexit.register(end)
    return path


def warm_up() -> None:
    """Import what a search imports, by a search."""
    import torch

    from arbor import Solver

    torch.set_num_threads(1)  # a thread does not survive a fork
    with Solver(max_expansions=1, verifier="exact", threads=1) as solver:
        solver.solve("4 5 6 10")
    with Solver(max_expansions=1, verifier="self", threads=1) as solver:
        solver.solve("4 5 6 10")


def serve(path: str) -> list[str]:
    """Answer until stdin ends; in a fork: return the arguments of the command it is to run."""
    awake, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    asking: dict[int, socket.socket] = {}  # the connection of each fork
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen(64)
        print("ready", flush=True)
        while True:
            clients = {each.fileno(): pid for pid, each in asking.items()}
            ready, _, _ = select.select([0, awake, listener, *clients], [], [])
            if 0 in ready:
                for pid in asking:
                    os.kill(pid, signal.SIGKILL)
                os._exit(0)
            if awake in ready:
                os.read(awake, 4096)
                _answer(asking)
            for gone in clients.keys() & set(ready):  # a client sends nothing more: it has ended
                if (pid := clients[gone]) in asking:
                    os.kill(pid, signal.SIGKILL)
            if listener in ready:
                connection, _ = listener.accept()
                asked, streams = _request(connection)
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    for each in (awake, wake, connection.fileno()):
                        os.close(each)
                    connection.detach()
                    for each in asking.values():
                        each.close()
                    break
                asking[pid] = connection
                for each in streams:
                    os.close(each)
    return _become(asked, streams)


def _answer(asking: dict[int, socket.socket]) -> None:
    """Send the exit codes of the forks that have ended."""
    while asking:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        code = str(os.waitstatus_to_exitcode(status))
        with asking.pop(pid) as connection, contextlib.suppress(OSError):  # its client has ended
            connection.sendall(code.encode())


def _request(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    length, streams, _, _ = socket.recv_fds(connection, 8, 3)
    size, text = int.from_bytes(length, "big"), b""
    while len(text) < size:
        text += connection.recv(size - len(text))
    return json.loads(text), list(streams)


def _become(asked: dict[str, Any], streams: Sequence[int]) -> list[str]:
    """Take a command's folder, environment and streams; its arguments."""
    for target, stream in enumerate(streams):
        os.dup2(stream, target)
        os.close(stream)
    os.environ.clear()
    os.environ.update(asked["variables"])
    os.chdir(asked["folder"])
    registry._installed.cache_clear()  # plug-ins on the command's own path
    sys.path[:0] = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    # as Python makes them when it starts: buffered where they are files
    for name, stream, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        text = open(stream, mode, encoding="utf-8", closefd=False)  # noqa: SIM115
        text.reconfigure(line_buffering=name == "stderr")
        setattr(sys, name, text)
        setattr(sys, f"__{name}__", text)
    arguments: list[str] = asked["arguments"]
    return arguments


def perform(arguments: list[str]) -> None:
    """What ``python ARGUMENT...`` does."""
    first, *rest = arguments
    if first == "-m":
        name, *sys.argv[1:] = rest
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    elif first == "-c":
        code, *sys.argv[1:] = rest
        sys.argv[0] = "-c"
        sys.path.insert(0, "")
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv[:] = arguments
        sys.path.insert(0, str(Path(first).resolve().parent))
        runpy.run_path(first, run_name="__main__")


def leave(arguments: list[str]) -> NoReturn:
    """Perform a command and end as a program does, but for taking the interpreter apart.

    That would copy most of the memory that the fork shares.
    """
    code: Any = 0
    try:
        perform(arguments)
    except SystemExit as left:
        code = left.code
        if code is None or isinstance(code, int):
            code = code or 0
        else:
            print(code, file=sys.stderr)
            code = 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        code = 120  # as Python does
    os._exit(code & 0xFF)


if __name__ == "__main__":
    warm_up()
    gc.collect()
    gc.freeze()  # a collection in a fork would copy what it looks at
    leave(serve(sys.argv[1]))
