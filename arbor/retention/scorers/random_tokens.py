"""Random tokens win: the control every scorer has to beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from arbor.retention.base import Floats, Tokens


@dataclass(frozen=True)
class RandomTokens:
    """A token scores a uniform number in [0, 1) that depends on its key and the seed alone.

    A token has the same score each time and among any others, so a kept set only shrinks.
    SplitMix64 of the key, combined with that of the seed.
    """

    observes: ClassVar[bool] = False

    seed: int = 0

    def scores(self, tokens: Tokens) -> Floats:
        salt = _mixed(np.array([self.seed % (1 << 64)], np.uint64))
        scores = (_mixed(tokens.key ^ salt) >> np.uint64(11)).astype(np.float64)
        return scores * 2.0**-53


def _mixed(number: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's output function (Steele, Lea and Flood 2014), modulo 2^64."""
    number = number + np.uint64(0x9E3779B97F4A7C15)
    number ^= number >> np.uint64(30)
    number *= np.uint64(0xBF58476D1CE4E5B9)
    number ^= number >> np.uint64(27)
    number *= np.uint64(0x94D049BB133111EB)
    number ^= number >> np.uint64(31)
    return number
