"""LazyEviction's score, against the formula of the paper."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arbor.errors import UsageError
from arbor.papers.lazyeviction.lazy_eviction import COLD, LazyEviction
from arbor.retention.base import Tokens


def one(**columns: float) -> Tokens:
    """The view of a single token."""
    figures = {name: np.array([value]) for name, value in columns.items()}
    return Tokens.when_read({}, **figures)


@given(
    age=st.integers(0, 400),
    interval=st.integers(0, 400),
    window=st.integers(1, 300),
)
def test_lazy_eviction_is_the_formula_of_the_paper(age: int, interval: int, window: int) -> None:
    def sigma(x: float) -> float:
        return 1 / (1 + math.exp(-x)) if x > -700 else 0.0

    tokens = one(queries=500, activated=500 - age, recurrence=interval)
    h1 = 2 * sigma(-age / interval) if interval else float(age == 0)
    paper = 2 * sigma(-1 / (interval - 1)) if interval > 1 else 0.0
    fixed = 2 * sigma(-(interval - 1) / window) if interval else 0.0

    assert LazyEviction("off").scores(tokens)[0] == pytest.approx(h1)
    assert LazyEviction("paper").scores(tokens)[0] == pytest.approx(h1 + paper)
    assert LazyEviction("fixed", window).scores(tokens)[0] == pytest.approx(h1 + fixed)
    assert LazyEviction("fixed", window, "off").scores(tokens)[0] == pytest.approx(fixed)
    assert LazyEviction("paper", h1="off").scores(tokens)[0] == pytest.approx(paper)


def test_a_window_estimated_online_covers_four_fifths_of_the_intervals_seen() -> None:
    some, many = (
        Tokens.when_read(
            {},
            queries=np.full(count + 9, 500),
            activated=np.full(count + 9, 500),
            recurrence=np.append(np.zeros(9, int), np.arange(1, count + 1)),
        )
        for count in (COLD - 1, 100)
    )
    online = LazyEviction(window=7, online=True)

    assert online.scores(some) == pytest.approx(LazyEviction(window=7).scores(some))
    assert online.scores(many) == pytest.approx(LazyEviction(window=81).scores(many))


@pytest.mark.parametrize("wrong", [{"h1": "off", "h2": "off"}, {"online": True, "h2": "paper"}])
def test_parts_that_leave_no_score_or_use_no_window_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"h1|online"):
        LazyEviction(**wrong)
