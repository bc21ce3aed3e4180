"""Tokens win by lot: the control every scorer has to beat."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from arbor.retention.base import Floats, Tokens


@dataclass(frozen=True)
class Chance:
    """A token scores a uniform number in [0, 1) that depends on its key and the seed alone.

    The same token has the same score whenever it is asked and whatever lies around it, so a kept set only shrinks.
    SplitMix64 of the key, shifted by the seed's own.
    """

    seed: int = 0

    @property
    def observes(self) -> bool:
        return False

    def scores(self, tokens: Tokens) -> Floats:
        salt = _mixed(np.array([self.seed % (1 << 64)], np.uint64))
        return (_mixed(tokens.key ^ salt) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mixed(number: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's output function (Steele, Lea and Flood 2014), modulo 2^64."""
    number = number + np.uint64(0x9E3779B97F4A7C15)
    number = (number ^ (number >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    number = (number ^ (number >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return number ^ (number >> np.uint64(31))
