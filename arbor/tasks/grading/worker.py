"""ScriptProcess: answers requests within limits of time and memory, and can be killed."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class ProcessLimits:
    """ProcessLimits of a worker.

    Attributes:
        answer_s: seconds of one answer; then the process is killed.
        start_s: seconds until the process is ready.
        memory_bytes: address space of the process, where the system has such a limit.
    """

    answer_s: float = 5.0
    start_s: float = 120.0
    memory_bytes: int = 2 << 30


@dataclass(frozen=True, slots=True)
class Reply:
    """The end of one request.

    Attributes:
        status: whether the worker answered, ran out of time, or ended without an answer.
        data: the answer.
    """

    status: Literal["answered", "timeout", "crashed"]
    data: Any = None


class ScriptProcess:
    """A process for one script, started at the first request and again after each that ends badly.

    The script reads a JSON line with its limits, prints a line when it is ready, then a line for
    each line it reads; the end of its input ends it. Requests of several threads take turns.

    Args:
        script: path of the script.
        limits: of the process.
    """

    def __init__(self, script: Path, limits: ProcessLimits) -> None:
        self._script = script
        self._limits = limits
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._owner = 0

    @property
    def process_id(self) -> int | None:
        """The process in use; None before the first request and after one that ended badly."""
        return None if self._process is None else self._process.pid

    def ask(self, request: Mapping[str, Any], seconds: float = math.inf) -> Reply:
        """The reply to one request; never raises for what the process does.

        Args:
            request: JSON-able.
            seconds: most for all of it, with the start of the process and the turns of others.
        """
        ends = time.monotonic() + seconds
        if not self._lock.acquire(timeout=min(seconds, threading.TIMEOUT_MAX)):
            return Reply("timeout")
        try:
            if self._process is None or self._owner != os.getpid():
                reply = self._start(min(self._limits.start_s, ends - time.monotonic()))
                if reply.status != "answered":
                    return reply
            left = max(0.0, ends - time.monotonic())
            return self._request(request, min(self._limits.answer_s, left))
        finally:
            self._lock.release()

    def close(self) -> None:
        """End the process; the next request starts another."""
        with self._lock:
            self._end()

    def _start(self, seconds: float) -> Reply:
        self._owner = os.getpid()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(self._script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                encoding="utf-8",
                start_new_session=True,  # Ctrl-C of the terminal is for the search
            )
        except OSError as error:
            self._process = None
            return Reply("crashed", error.strerror)
        limits = {"memory_bytes": self._limits.memory_bytes, "answer_s": self._limits.answer_s}
        return self._request(limits, max(0.0, seconds))

    def _request(self, request: Mapping[str, Any], seconds: float) -> Reply:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            if wait([process.stdout.fileno()], seconds):
                return Reply("answered", json.loads(process.stdout.readline()))
            reply = Reply("timeout")
        except (OSError, ValueError):  # its pipe is closed, or what it wrote is not a reply
            reply = Reply("crashed")
        except BaseException:  # Ctrl-C: an answer that comes later belongs to no request
            self._end()
            raise
        self._end()
        return reply

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None and self._owner == os.getpid():
            process.kill()
            process.communicate()
