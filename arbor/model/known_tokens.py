"""Token ids that a model knows: its tokenizer may have more of them than its weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from arbor.errors import InputError

MOST_NAMED = (1 << 31) - 1  # higher ids no tokenizer takes


def check_known(tokens: Sequence[int], vocabulary: int, what: str, tokenizer: Any) -> None:
    """Refuse token ids for which a model has no weights.

    Args:
        tokens: ids that a tokenizer or a user gave.
        vocabulary: number of ids that the model has; 0: not known.
        what: what they encode, for the message.
        tokenizer: of the model, which may name them.

    Raises:
        InputError: one is not among them.
    """
    if not vocabulary or not len(tokens) or 0 <= min(tokens) <= max(tokens) < vocabulary:
        return
    number = next(each for each in tokens if not 0 <= each < vocabulary)
    name = tokenizer.decode([number]) if 0 <= number <= MOST_NAMED else ""
    raise InputError(
        "problem-token",
        f"{what} has the token {number}{f' ({name:.40})' if name else ''}, which the model's weights "
        f"do not know: they have 0 to {vocabulary - 1}.",
        "Leave it out.",
        token=number,
    )
