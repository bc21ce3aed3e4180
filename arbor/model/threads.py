"""CPU threads of torch: their default number for a model, and their number while a search runs."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from arbor.model.model_info import SMALL_MODEL, ModelInfo


def thread_count(given: int | None, model: ModelInfo, ranks: int = 1) -> int | None:
    """Threads for a model; None: as torch is set.

    Args:
        given: the setting; None: one for a model below `SMALL_MODEL`, unless ``OMP_NUM_THREADS``
            is set.
        model: its size.
        ranks: processes of this machine that hold it together, and share its cores.
    """
    if given is not None or "OMP_NUM_THREADS" in os.environ:
        return given
    if model.parameters < SMALL_MODEL:
        return 1
    return None if ranks == 1 else max(1, len(os.sched_getaffinity(0)) // ranks)


class _Process:
    """The searches of this process and the number of threads before the first of them.

    torch keeps a number for each thread of Python, and one for threads that have not computed yet;
    setting the first sets the second. A search in a new thread may therefore find the number of
    another search, which is neither its own nor the one to restore.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.searches = 0
        self.before = 0
        self.here = threading.local()  # `count` of the innermost search of each thread


_PROCESS = _Process()


@contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    """torch computes with `count` threads in this thread of Python; afterwards as before.

    Contexts may be nested, and be open in several threads at once. After the last one, threads that
    have not computed yet have the number again that they had before the first one.

    Args:
        count: threads; None: as many as before the first of the open contexts.
    """
    process = _PROCESS
    outer = getattr(process.here, "count", None)
    with process.lock:
        if process.searches == 0:
            process.before = torch.get_num_threads()
        chosen = process.before if count is None else count
        process.searches += 1
        torch.set_num_threads(chosen)
    process.here.count = chosen
    try:
        yield
    finally:
        process.here.count = outer
        with process.lock:
            process.searches -= 1
            torch.set_num_threads(process.before if outer is None else outer)


def keep_threads() -> None:
    """Fix this thread's number of torch threads, before a search in another thread sets its own.

    A thread that has not computed yet would take over the number of that search, and keep it.
    """
    torch.get_num_threads()
