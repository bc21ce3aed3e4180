"""Memory that is no longer used: when Python looks for it, and how the system gets it back."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakSet

_large: WeakSet[object] = WeakSet()


@contextmanager
def no_collection() -> Iterator[None]:
    """While it lasts, cycles of garbage are not searched for: what is made there is kept anyway.

    The search takes a tenth of the time of large imports. What was made counts as old afterwards;
    as new it would be searched three times, once for each generation.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            if not gc.get_freeze_count():  # else it would thaw what others froze
                gc.freeze()
                gc.unfreeze()
            gc.enable()


def look_for(large: object) -> None:
    """From now on `free_dropped` looks for this, which takes much memory and lies in a cycle."""
    _large.add(large)


def free_dropped() -> None:
    """Frees what `look_for` was told of and nothing refers to any more.

    Without it a model that was dropped, whose parts refer to one another, has its weights until
    Python next searches the oldest objects. The search takes a third of a second; where nothing
    large was made there is none.
    """
    if _large:
        gc.collect()


def give_memory_back() -> None:
    """Returns to the system what was freed: glibc keeps most of it for the process.

    Loading a model leaves holes of half a gigabyte. Elsewhere than on Linux with glibc nothing
    happens.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
