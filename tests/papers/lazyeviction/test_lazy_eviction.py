"""LazyEviction's score, against the formula of the paper."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arbor.papers.lazyeviction.lazy_eviction import LazyEviction
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
