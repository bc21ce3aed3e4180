"""Searches for garbage: what is made without one is old afterwards."""

from __future__ import annotations

import gc

import pytest

from arbor.support.garbage import no_collection


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
