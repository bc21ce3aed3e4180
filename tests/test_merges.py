"""Merges of a vocabulary that lists none: those of transformers, in its order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import tokenization_utils_base

from arbor.model.gguf.conversion import derived_merges

TOKENS = st.lists(st.text("ab▁", min_size=1, max_size=6), min_size=1, max_size=40, unique=True)


@given(tokens=TOKENS, data=st.data())
def test_merges_are_those_of_transformers(tokens: list[str], data: st.DataObject) -> None:
    vocab = {token: number for number, token in enumerate(tokens)}
    numbers = st.integers(-3, 3) if data.draw(st.booleans()) else st.integers(-(1 << 20), 1 << 20)
    scores = {token: float(data.draw(numbers)) for token in data.draw(st.permutations(tokens))}

    wanted = tokenization_utils_base.generate_merges(vocab, scores)

    assert derived_merges(vocab, scores) == wanted
    assert derived_merges(vocab) == tokenization_utils_base.generate_merges(vocab)


def test_skipped_tokens_are_left_to_transformers() -> None:
    vocab = {"a": 0, "b": 1, "ab": 2, "ba": 3, "aba": 4}
    scores = {token: -float(number) for token, number in vocab.items()}

    assert derived_merges(vocab, scores, skip_tokens=["ab"]) == [("b", "a"), ("a", "ba")]


def test_distinct_scores_never_reach_the_slower_function(monkeypatch: pytest.MonkeyPatch) -> None:
    vocab = {"a": 0, "b": 1, "ab": 2}
    monkeypatch.setattr(tokenization_utils_base, "generate_merges", None)

    assert derived_merges(vocab, {"a": 0.0, "b": -1.0, "ab": -2.0}) == [("a", "b")]
