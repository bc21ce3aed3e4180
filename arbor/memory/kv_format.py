"""Formats of KV in a pool: numbers of a floating-point dtype, or 8-bit codes with scales."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from arbor.kernels.int8 import stored_width
from arbor.kernels.native_int8 import store


class KVFormat(Protocol):
    """What a slot of a pool holds of a token, per KV head.

    Attributes:
        dtype: of the pool's tensors.
        blank: value of freed slots in debug mode, which reads as NaN.
    """

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def blank(self) -> float: ...

    def width(self, dim: int) -> int:
        """Numbers of `dtype` that a head of `dim` channels takes."""
        ...

    def store(self, pool: Tensor, slots: Tensor, x: Tensor) -> None:
        """Write K or V of one layer.

        Args:
            pool: [slots, H_kv, width].
            slots: int64 [T].
            x: [T, H_kv, D], as the model gives it.
        """
        ...


@dataclass(frozen=True, slots=True)
class PlainKV:
    """The model's own numbers.

    Attributes:
        dtype: of the model.
    """

    dtype: torch.dtype

    @property
    def blank(self) -> float:
        """NaN."""
        return torch.nan

    def width(self, dim: int) -> int:
        """See `KVFormat`."""
        return dim

    def store(self, pool: Tensor, slots: Tensor, x: Tensor) -> None:
        """See `KVFormat`."""
        pool.index_copy_(0, slots, x)


@dataclass(frozen=True, slots=True)
class Int8KV:
    """8-bit codes and the scales of groups of channels, see `arbor.kernels.int8`; lossy.

    A token is quantised once, when it is written. What moves between tiers or is read again are its
    codes and scales, which never change.
    """

    @property
    def dtype(self) -> torch.dtype:
        """int8, for scales too."""
        return torch.int8

    @property
    def blank(self) -> float:
        """All bits set: scales of NaN."""
        return -1

    def width(self, dim: int) -> int:
        """See `KVFormat`."""
        return stored_width(dim)

    def store(self, pool: Tensor, slots: Tensor, x: Tensor) -> None:
        """See `KVFormat`."""
        store(pool, slots, x)


def kv_format(dtype: torch.dtype) -> KVFormat:
    """The format of a pool whose tensors have this dtype."""
    return Int8KV() if dtype == torch.int8 else PlainKV(dtype)
