"""Searches for garbage: what is made without one is old afterwards."""

from __future__ import annotations

import gc
import weakref
from weakref import WeakSet

import pytest

from arbor.support import garbage
from arbor.support.garbage import free_dropped, look_for, no_collection


def is_in(generation: int, thing: object) -> bool:
    return any(each is thing for each in gc.get_objects(generation))


def test_what_was_made_without_a_search_is_old() -> None:
    with no_collection():
        made: list[object] = [[]]
        assert not gc.isenabled() and is_in(0, made)

    assert gc.isenabled()
    assert is_in(2, made)
    assert gc.get_freeze_count() == 0


def test_what_others_froze_stays_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 1)
    monkeypatch.setattr(gc, "unfreeze", lambda: pytest.fail("thawed"))

    with no_collection():
        pass

    assert gc.isenabled()


def test_inner_blocks_leave_it_to_the_outer_one() -> None:
    with no_collection():
        with no_collection():
            pass
        assert not gc.isenabled()


class Cycle:
    """What only a search for garbage frees."""

    def __init__(self) -> None:
        self.itself = self


def test_what_is_large_and_dropped_is_freed_and_else_nothing_is_searched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(garbage, "_large", WeakSet())
    with no_collection():
        small, large = Cycle(), Cycle()
        left = [weakref.ref(small), weakref.ref(large)]

        del small
        free_dropped()
        assert left[0]() is not None

        look_for(large)
        del large
        free_dropped()
        assert left[0]() is left[1]() is None
