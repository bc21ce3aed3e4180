"""Scorers and their statistics, against the whole history of attention, kept row by row."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from support.attention_history import History
from support.offers import SEEDS, offer
from support.policies import of_papers

from arbor.retention.base import Scorer, Tokens
from arbor.retention.scorers import HeavyHitters, RandomTokens, Recency, Window

SCORERS: tuple[Scorer, ...] = (
    Recency(),
    HeavyHitters(),
    HeavyHitters(normalise=True),
    RandomTokens(),
    RandomTokens(seed=3),
    Window(),
    *of_papers(
        "scorer",
        ("lazyeviction", {}),
        ("lazyeviction", {"h2": "paper"}),
        ("raas", {}),
        ("tova", {}),
    ),
)
every_scorer = pytest.mark.parametrize("scorer", SCORERS, ids=repr)


@given(seed=SEEDS)
def test_h2o_is_all_attention_ever_received(seed: int) -> None:
    history = History(seed)
    names, tokens = history.view()
    received = [sum(map(sum, history.of(name))) for name in names]
    looks = [sum(map(len, history.of(name))) for name in names]

    assert HeavyHitters().scores(tokens) == pytest.approx(received, abs=1e-6)
    assert tokens.queries.tolist() == looks
    mean = [total / max(1, count) for total, count in zip(received, looks, strict=True)]
    assert HeavyHitters(normalise=True).scores(tokens) == pytest.approx(mean, abs=1e-6)


@given(seed=SEEDS)
def test_a_token_is_activated_when_its_attention_reaches_the_threshold_again(seed: int) -> None:
    history = History(seed)
    names, tokens = history.view()

    found = zip(names, tokens.activated.tolist(), tokens.recurrence.tolist(), strict=True)
    for name, activated, recurrence in found:
        expected = looks = longest = 0
        for at, rows in enumerate(history.of(name)):
            looks += len(rows)
            if at and np.float32(sum(rows)) / len(rows) >= 0.2:
                longest = max(longest, looks - expected)
                expected = looks
            elif not at:  # written
                expected = looks
        assert (activated, recurrence) == (expected, longest)


# Scorers


@every_scorer
@given(seed=SEEDS)
def test_a_score_does_not_depend_on_what_else_is_resident(scorer: Scorer, seed: int) -> None:
    """Physical order and the history of eviction do not matter: a token's own figures alone."""
    tokens = offer(seed).tokens
    rng = np.random.default_rng(seed)
    some = rng.permutation(len(tokens.block))[: len(tokens.block) // 2]
    fewer = Tokens(**{f.name: getattr(tokens, f.name)[some] for f in dataclasses.fields(Tokens)})

    assert (scorer.scores(fewer) == scorer.scores(tokens)[some]).all()


@every_scorer
@given(seed=SEEDS)
def test_a_scorer_that_observes_nothing_reads_no_attention(scorer: Scorer, seed: int) -> None:
    tokens = offer(seed, 9, ties=False).tokens
    zero = np.zeros(len(tokens.block))
    blind = dataclasses.replace(
        tokens,
        mass=zero,
        latest=zero,
        queries=zero.astype(int),
        activated=zero.astype(int),
        recurrence=zero.astype(int),
        lately=zero,
    )

    same = (scorer.scores(blind) == scorer.scores(tokens)).all()

    assert same != scorer.observes


@given(seed=SEEDS)
def test_the_window_weighs_later_queries_more(seed: int) -> None:
    history = History(seed)
    names, tokens = history.view()

    wanted = []
    for name in names:
        total = 0.0
        for rows in history.of(name):
            total = total * (31 / 32) ** len(rows) + sum(rows)
        wanted.append(total)
    assert Window().scores(tokens) == pytest.approx(wanted, abs=1e-5)
