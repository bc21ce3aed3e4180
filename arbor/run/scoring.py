"""Scoring: the log probabilities of given tokens, of one solver."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from arbor.errors import InputError, UsageError
from arbor.model.checkpoint import Checkpoint

if TYPE_CHECKING:
    from arbor.engine.engine import Engine
    from arbor.engine.likelihood import TokenScores
    from arbor.run.session import Status

SLOTS = 8192  # tokens of KV at a time, where a text does not need more


class Scoring:
    """The scoring of given tokens, checked, and then in progress.

    Args:
        checkpoint: the model.
        pairs: (tokens before, tokens to score), at least one of each.

    Raises:
        InputError: a text without tokens, or longer than the model's context.
        UsageError: ids that the model does not have.
    """

    def __init__(
        self, checkpoint: Checkpoint, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]
    ) -> None:
        from arbor.engine.likelihood import GivenTokens

        info = checkpoint.read().info
        self._given = [GivenTokens(tuple(before), tuple(tokens)) for before, tokens in pairs]
        self._stopped = False
        for each in self._given:
            if not each.before or not each.tokens:
                raise InputError(
                    "problem-empty", "a text to score has no tokens, or none before them.", ""
                )
            if len(each.read) > info.context:
                raise InputError(
                    "problem-too-long",
                    f"{len(each.read):,} tokens; the model's context is {info.context:,}.",
                    "Leave out the first ones.",
                    tokens=len(each.read),
                    context=info.context,
                )
            ids = (*each.before, *each.tokens)
            if min(ids) < 0 or max(ids) >= info.vocabulary:
                raise UsageError(
                    "token-answer",
                    f"token ids from {min(ids)} to {max(ids)}; the model has {info.vocabulary:,}.",
                )

    def stop(self, status: Status = "interrupted") -> None:
        """End after the batch in progress.

        Safe from a signal handler or another thread.
        """
        self._stopped = True

    def run(
        self, lend: Callable[[Scoring], AbstractContextManager[Engine]]
    ) -> list[TokenScores | None]:
        """The scores, in the order of the texts; None for those that `stop` left out.

        Args:
            lend: the engine, loaded, for as long as that takes.
        """
        from arbor.engine.likelihood import score_tokens

        found: dict[int, TokenScores] = {}
        with lend(self) as engine:
            for batch in score_tokens(engine.runner, self._given, SLOTS):
                found.update(batch)
                if self._stopped:
                    break
        return [found.get(place) for place in range(len(self._given))]
