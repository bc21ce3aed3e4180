"""StopRule: where a thought ends, on tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

from arbor.engine.text import BROKEN, LOOK_BACK, MOST_HELD, added
from arbor.tasks.base import BlockLimits

StopReason = Literal["step", "eos", "length", "limit", "gate"]


class StopRule:
    """Decides after each token whether it ends the block.

    Args:
        tokenizer: a Hugging Face tokenizer.
        boundary: the task's.
        eos: ids that end a sequence.
    """

    def __init__(self, tokenizer: Any, boundary: BlockLimits, eos: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._stops = boundary.stop
        self._span = max((len(stop) for stop in boundary.stop), default=0)
        self._eos = frozenset(eos)
        self._last_characters = frozenset(stop[-1:] for stop in boundary.stop)
        self._pieces: dict[tuple[int, ...], str] = {}
        self._goes_on: dict[tuple[int, int], bool] = {}
        self._ends = boundary.ends
        self.max_tokens = boundary.max_tokens
        self.path_tokens = boundary.path_tokens

    def within(self, boundary: BlockLimits) -> StopRule:
        """The rule of the same model with other limits."""
        return StopRule(self._tokenizer, boundary, self._eos)

    def is_eos(self, token: int) -> bool:
        """Whether the token ends a sequence."""
        return token in self._eos

    def longest(self, reasoned: int) -> int:
        """Tokens that a block may have, after so many of its path that follow the prompt; at
        least 1."""
        if self.path_tokens is None:
            return self.max_tokens
        return max(1, min(self.max_tokens, self.path_tokens - reasoned))

    def goes_on(self, tokens: list[int], reasoned: int = 0) -> bool:
        """Whether the block's last token surely does not end it, by a look at that token and the
        one before it only.

        It completes no stop if its text does not contain the last character of one. Stops that
        begin in the first token are left to `after`, since that one may have been given.

        Args:
            tokens: the block's, all but the first of which were looked at as they came.
            reasoned: tokens of the path before it that follow the prompt.
        """
        count = len(tokens)
        most = self.max_tokens if self.path_tokens is None else self.longest(reasoned)
        if count < 3 or count >= most:
            return False
        pair = (tokens[-2], tokens[-1])
        known = self._goes_on.get(pair)
        if known is None:
            known = self._goes_on[pair] = self._is_inside(*pair)
        return known

    def _is_inside(self, previous: int, token: int) -> bool:
        """Whether a token ends neither a sequence nor a stop, nor is part of a character."""
        if token in self._eos:
            return False
        text = self._piece((previous,), token) if self._stops else ""
        return BROKEN not in text and self._last_characters.isdisjoint(text)

    def after(
        self, tokens: list[int], before: Sequence[int] = (), reasoned: int = 0
    ) -> StopReason | None:
        """Why the block ends with its last token; None if it goes on. A stop may span several
        tokens.

        Args:
            before: the end of the path before it; no stop is looked for there.
            reasoned: tokens of the path before it that follow the prompt.
        """
        if tokens[-1] in self._eos:
            return "eos"
        if self._stops:
            text = self._end(tokens, before)
            if any(stop in text for stop in self._stops) and self._is_whole(tokens, before):
                return "step"
        return "length" if len(tokens) >= self.longest(reasoned) else None

    def _is_whole(self, tokens: list[int], before: Sequence[int]) -> bool:
        """Whether a thought that has come to a stop ends there."""
        if self._ends is None:
            return True
        return self._ends(added(self._decode, before, tokens), len(tokens))

    def _end(self, tokens: list[int], before: Sequence[int]) -> str:
        """The text of the block's end, long enough for any stop that the last token completes."""
        most = 4 * self._span + MOST_HELD  # a character has four bytes at most
        begin = max(0, len(tokens) - most)
        text, enough = "", 0
        for i in reversed(range(begin, len(tokens))):
            previous = tokens[i - 1 : i] if i else before[-1:]
            text = self._piece(previous, tokens[i]) + text
            enough = enough or self._span + len(text)
            if len(text) >= enough:
                break
        if BROKEN not in text:
            return text
        # bytes of characters, which decode only together
        earlier = [*before, *tokens[max(0, begin - LOOK_BACK) : begin]]
        return added(self._decode, earlier[-LOOK_BACK:], tokens[begin:])

    def _piece(self, previous: Sequence[int], token: int) -> str:
        """The token's text after the one before it, if there is one."""
        key = (*previous, token)
        text = self._pieces.get(key)
        if text is None:
            known = len(self._piece((), previous[0])) if previous else 0
            text = self._pieces[key] = self._decode(list(key))[known:]
        return text

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens)
        return text
