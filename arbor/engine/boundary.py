"""Where a thought ends, on tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from arbor.tasks.base import Boundary

Stop = Literal["step", "eos", "length", "limit"]


class StopRule:
    """Says after each token whether the block ends with it.

    Args:
        tokenizer: a Hugging Face tokenizer.
        boundary: the task's.
        eos: ids that end a sequence.
    """

    def __init__(self, tokenizer: Any, boundary: Boundary, eos: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._stops = boundary.stop
        self._span = max((len(stop) for stop in boundary.stop), default=0)
        self._eos = frozenset(eos)
        self._pieces: dict[int, str] = {}
        self.max_tokens = boundary.max_tokens

    def piece(self, token: int) -> str:
        """The token's text by itself."""
        text = self._pieces.get(token)
        if text is None:
            text = self._pieces[token] = self._tokenizer.decode([token])
        return text

    def is_eos(self, token: int) -> bool:
        """Whether the token ends a sequence."""
        return token in self._eos

    def after(self, tokens: list[int]) -> Stop | None:
        """Why the block ends with its last token; None if it goes on. A stop may span several tokens."""
        last = tokens[-1]
        if last in self._eos:
            return "eos"
        if self._stops:
            text = self.piece(last)
            for token in reversed(tokens[-self._span - 1 : -1]):
                if len(text) >= self._span + len(self.piece(last)):
                    break
                text = self.piece(token) + text
            if any(stop in text for stop in self._stops):
                return "step"
        return "length" if len(tokens) >= self.max_tokens else None
