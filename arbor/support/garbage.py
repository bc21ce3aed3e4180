"""Memory that is no longer used: when Python looks for it, and how the system gets it back."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

LARGE = 100_000_000  # parameters; fewer that are left behind are not worth a search

_models: WeakKeyDictionary[object, int] = WeakKeyDictionary()  # each with its parameters


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


def look_for(model: object, parameters: int) -> None:
    """From now on `free_dropped` looks for this model, which lies in a cycle."""
    _models[model] = parameters


def free_dropped() -> None:
    """Frees the models that nothing refers to any more, where all that are left are large together.

    Without it a model that was dropped, whose parts refer to one another, has its weights until
    Python next searches the oldest objects. The search takes a third of a second.
    """
    if sum(_models.values()) >= LARGE:
        gc.collect()


def give_memory_back() -> None:
    """Returns to the system what was freed: glibc keeps most of it for the process.

    Loading a model leaves holes of half a gigabyte. Elsewhere than on Linux with glibc nothing
    happens.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
