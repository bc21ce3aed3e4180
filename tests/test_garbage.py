"""Searches for garbage: what is made without one is old afterwards."""

from __future__ import annotations

import gc
import weakref
from typing import Any
from weakref import WeakKeyDictionary

import pytest

from arbor import Solver
from arbor.model import weights
from arbor.support import garbage
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


@pytest.mark.parametrize(("large", "stays"), [(0, False), (garbage.LARGE, True)])
def test_a_large_model_that_was_dropped_is_freed_before_the_next_is_read(
    large: int, stays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small one is not worth a search of all objects."""
    monkeypatch.setattr(garbage, "LARGE", large)
    monkeypatch.setattr(garbage, "_models", WeakKeyDictionary())
    right, alive = weights.load_model, []

    def watched(*given: Any, **named: Any) -> Any:
        alive.append(first() is not None)
        return right(*given, **named)

    with no_collection():
        solver = Solver(device="cpu")
        first = weakref.ref(solver.engine.runner.model)
        del solver
        monkeypatch.setattr(weights, "load_model", watched)
        Solver(device="cpu").load()

    assert alive == [stays]


@pytest.mark.parametrize("solved", [False, True])
def test_closing_frees_the_models_that_are_large_together(
    solved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(garbage, "LARGE", 2 * Solver(device="cpu").describe().parameters)
    monkeypatch.setattr(garbage, "_models", WeakKeyDictionary())
    models, alive = [], []

    with no_collection():
        for _ in range(4):
            with Solver(device="cpu", budget=0.5) as solver:
                if solved:
                    solver.solve("4 5 6 10", max_tokens=20)
                models.append(weakref.ref(solver.engine.runner.model))
            alive.append(sum(each() is not None for each in models))

    assert alive == [1, 0, 1, 0]
