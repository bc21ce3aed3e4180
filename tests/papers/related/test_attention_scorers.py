"""TOVA and RaaS, against the whole history of attention, kept row by row."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from support.attention_history import History
from support.offers import SEEDS

from arbor.papers.related.received import RaaS
from arbor.retention.scorers import TOVA


@given(seed=SEEDS)
def test_tova_is_the_attention_of_the_last_forward_that_could_see_the_token(seed: int) -> None:
    history = History(seed)
    names, tokens = history.view()

    last = [np.mean(history.of(name)[-1]) if history.of(name) else 0.0 for name in names]

    assert TOVA().scores(tokens) == pytest.approx(last, abs=1e-6)


@given(seed=SEEDS)
def test_raas_is_the_time_since_a_token_was_last_activated(seed: int) -> None:
    history = History(seed)
    names, tokens = history.view()

    ages = []
    for name in names:
        since = 0
        for at, rows in enumerate(history.of(name)):
            since += len(rows)
            if not at or np.float32(sum(rows)) / len(rows) >= 0.2:
                since = 0
        ages.append(-since)
    assert RaaS().scores(tokens).tolist() == ages
