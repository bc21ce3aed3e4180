"""Random tokens win: the control every scorer has to beat."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from arbor.retention.base import Floats, Tokens

_PIECE = 1 << 13  # tokens


@dataclass(frozen=True)
class RandomTokens:
    """A token scores a uniform number in [0, 1) that depends on its key and the seed alone.

    A token has the same score each time and among any others, so a kept set only shrinks.
    SplitMix64 of the key, combined with that of the seed.
    """

    seed: int = 0

    @property
    def observes(self) -> bool:
        return False

    def scores(self, tokens: Tokens) -> Floats:
        salt = _mixed(np.array([self.seed % (1 << 64)], np.uint64))
        scores = np.empty(len(tokens.key))
        # in pieces that fit a processor's cache
        for begin in range(0, len(scores), _PIECE):
            piece = slice(begin, begin + _PIECE)
            scores[piece] = _mixed(tokens.key[piece] ^ salt) >> np.uint64(11)
        scores *= 2.0**-53
        return scores


def _mixed(number: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's output function (Steele, Lea and Flood 2014), modulo 2^64."""
    number = number + np.uint64(0x9E3779B97F4A7C15)
    number ^= number >> np.uint64(30)
    number *= np.uint64(0xBF58476D1CE4E5B9)
    number ^= number >> np.uint64(27)
    number *= np.uint64(0x94D049BB133111EB)
    number ^= number >> np.uint64(31)
    return number
