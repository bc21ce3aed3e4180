"""Packing: numbers as codes of 8 or 4 bits between a least and a largest one; lossy.

A group of numbers has a `low` and a `step`, both float16: ``low + step * code`` is the number.
`low` is rounded down and `step` up, so that no code saturates and a number changes by at most half
a step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class Scales:
    """The grid of each group of numbers.

    Attributes:
        low: float16, the least number.
        step: float16, likewise shaped, what a code is worth.
    """

    low: Tensor
    step: Tensor

    @classmethod
    def of(cls, x: Tensor, dim: int, bits: int) -> Self:
        """The grid that holds all numbers along a dimension, which is kept with size 1.

        Args:
            x: floating point.
            dim: numbers along it are a group.
            bits: of a code.

        Example:
            >>> scales = Scales.of(torch.tensor([[-1.0, 0.25, 2.0]]), 1, 2)
            >>> scales.low.item(), scales.step.item()
            (-1.0, 1.0)
        """
        x = x.float()
        low = _towards(x.amin(dim, keepdim=True), -math.inf)
        span = x.amax(dim, keepdim=True) - low.float()
        return cls(low, _towards(span / (2**bits - 1), math.inf))

    def encode(self, x: Tensor) -> Tensor:
        """Codes of numbers, uint8; `x` broadcasts with the scales."""
        step = torch.where(self.step == 0, 1.0, self.step.float())
        return ((x.float() - self.low.float()) / step).round_().to(torch.uint8)

    def decode(self, codes: Tensor) -> Tensor:
        """The numbers of codes, float32."""
        return codes.float().mul_(self.step.float()).add_(self.low.float())


def _towards(x: Tensor, end: float) -> Tensor:
    """float32 as float16, rounded towards an end."""
    half = x.to(torch.float16)
    wrong = half.float() < x if end > 0 else half.float() > x
    return torch.where(wrong, torch.nextafter(half, torch.full_like(half, end)), half)


def packed_width(numbers: int, bits: int) -> int:
    """Bytes of so many codes.

    Example:
        >>> packed_width(5, 8), packed_width(5, 4), packed_width(5, 2)
        (5, 3, 2)
    """
    return -(-numbers * bits // 8)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes next to each other in bytes, the first one lowest.

    Args:
        codes: uint8 [..., n], below 2 ** bits.
        bits: of a code.

    Returns:
        uint8 [..., packed_width(n, bits)].

    Example:
        >>> packed = pack(torch.tensor([1, 2, 15], dtype=torch.uint8), 4)
        >>> packed.tolist(), unpack(packed, 3, 4).tolist()
        ([33, 15], [1, 2, 15])
    """
    each = 8 // bits
    codes = F.pad(codes, (0, -codes.shape[-1] % each)).unflatten(-1, (-1, each))
    packed = codes[..., 0].clone()
    for place in range(1, each):
        packed |= codes[..., place] << (place * bits)
    return packed


def unpack(packed: Tensor, numbers: int, bits: int) -> Tensor:
    """The codes that `pack` was given, uint8 [..., numbers]."""
    each = 8 // bits
    most = 2**bits - 1
    parts = [(packed >> (place * bits)) & most for place in range(each)]
    return torch.stack(parts, dim=-1).flatten(-2)[..., :numbers]
