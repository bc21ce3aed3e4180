"""TextStream: the text of a block token by token, cut at a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from arbor.engine.text import LOOK_BACK, Decode, added


@dataclass(frozen=True, slots=True)
class TextToken:
    """One generated token.

    Attributes:
        text: what it adds to the text; empty for a part of a character and for special tokens.
        logprob: its log probability in the model's own distribution.
        offset: characters of the choice's text before it.
        alternatives: texts of the most probable tokens in its place, and their log probabilities;
            a special token has its name.
    """

    text: str
    logprob: float
    offset: int
    alternatives: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that is certain to be part of the choice, with the tokens that begin in it."""

    text: str
    tokens: tuple[TextToken, ...] = ()


class TextStream:
    """The text of a block token by token, without the stop string that ends it.

    Text that may turn out to be the beginning of a stop string is held back until that is known.

    Args:
        decode: the tokenizer's, special tokens skipped.
        before: the end of the prompt.
        stops: stop strings.
        named: the tokenizer's decoding with the names of special tokens; for alternatives.
    """

    def __init__(
        self,
        decode: Decode,
        before: Sequence[int],
        stops: Sequence[str],
        named: Decode | None = None,
    ) -> None:
        self._decode = decode
        self._named = named or decode
        self._before = list(before[-LOOK_BACK:])
        self._stops = stops
        self._held = ""
        self._tokens: list[TextToken] = []
        self._emitted = 0
        self._read = 0
        self.stopped = False

    def feed(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[float] = (),
        alternatives: Sequence[tuple[int, float]] = (),
    ) -> Piece:
        """Text that has become certain with further tokens.

        Args:
            tokens: any number of them.
            logprobs: of each; empty where tokens are not wanted.
            alternatives: the most probable tokens in place of the only one.
        """
        for place, token in enumerate(tokens):
            text = added(self._decode, self._before, [token])
            if logprobs:
                others = tuple(
                    (text if other == token else self._text_of(other), logprob)
                    for other, logprob in alternatives
                )
                self._tokens.append(TextToken(text, logprobs[place], self._read, others))
            self._before = [*self._before, token][-LOOK_BACK:]
            self._read += len(text)
            self._held += text
        if self.stopped:
            self._held = ""
            return Piece("")
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self._held = self._held[: min(found)]
            self.stopped = True
            return self.end()
        keep = max((_begun(self._held, stop) for stop in self._stops), default=0)
        sure = len(self._held) - keep
        text, self._held = self._held[:sure], self._held[sure:]
        return self._piece(text)

    def end(self, *, by_token: bool = False) -> Piece:
        """The text that was held back, and tokens without a text after it: the block has ended.

        Args:
            by_token: its last token ended it, and does not belong to the text.
        """
        text, self._held = self._held, ""
        piece = self._piece(text)
        if self.stopped:
            return piece
        left = self._tokens[:-1] if by_token else self._tokens
        self._tokens = []
        return Piece(text, (*piece.tokens, *left))

    def _text_of(self, token: int) -> str:
        return added(self._decode, self._before, [token]) or self._named([token])

    def _piece(self, text: str) -> Piece:
        self._emitted += len(text)
        ready = [token for token in self._tokens if token.offset < self._emitted]
        self._tokens = self._tokens[len(ready) :]
        return Piece(text, tuple(ready))


def _begun(text: str, stop: str) -> int:
    """Characters at the end of a text with which a stop string begins."""
    most = min(len(text), len(stop) - 1)
    return next((n for n in range(most, 0, -1) if text.endswith(stop[:n])), 0)
