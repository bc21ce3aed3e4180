"""8-bit KV: a head's numbers as int8 codes, followed by the scales of its groups of channels.

A head of D channels is stored as ``stored_width(D)`` bytes: D codes, then a float16 scale for each
group of `GROUP` consecutive channels (the last group may be shorter), in the machine's byte order.
``code * scale`` is the number; in float32 the product is exact, because a code has 7 bits and a
scale 11.

Each group is quantised once, symmetrically, when its token is written: the scale is the largest
magnitude / 127, rounded up to float16, so that no code saturates and a number changes by at most
half a scale. A scale per channel over many tokens, which suits keys with large channels better
(KIVI, arXiv 2402.02750), does not suit a pool that is written token by token: a later token that
exceeds the scale would change the codes of earlier ones.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from arbor.kernels.native import LANES, NUMBERS, StoreJob, native_library
from arbor.kernels.triton_module import triton_module

GROUP = 32
MOST_CODE = 127
SCALE_BYTES = 2


def stored_width(dim: int) -> int:
    """Bytes of a head of `dim` channels.

    Example:
        >>> stored_width(64), stored_width(24)
        (68, 26)
    """
    return dim + SCALE_BYTES * groups_of(dim)


def groups_of(dim: int) -> int:
    """Groups, and scales, of a head of `dim` channels."""
    return -(-dim // GROUP)


def encode(x: Tensor) -> Tensor:
    """Numbers as 8-bit codes and scales.

    A group with a NaN, an infinity or a number above 8.3 million becomes NaN.

    Args:
        x: [..., D], any floating-point dtype.

    Returns:
        int8 [..., stored_width(D)].

    Example:
        >>> stored = encode(torch.tensor([0.0, 1.0, -2.0, 254.0]))
        >>> stored[:4]
        tensor([  0,   0,  -1, 127], dtype=torch.int8)
        >>> decode(stored, 4)
        tensor([  0.,   0.,  -2., 254.])
    """
    dim = x.shape[-1]
    groups = F.pad(x.float(), (0, groups_of(dim) * GROUP - dim)).unflatten(-1, (-1, GROUP))
    wanted = groups.abs().amax(-1) / MOST_CODE
    scales = wanted.to(torch.float16)
    # rounded down: the next float16 is the next whole number as bits
    scales = torch.where(
        scales < wanted, (scales.view(torch.int16) + 1).view(torch.float16), scales
    )
    divisors = torch.where(scales == 0, 1.0, scales.float())
    codes = (groups / divisors.unsqueeze(-1)).round_().nan_to_num_(0.0).to(torch.int8)
    return torch.cat([codes.flatten(-2)[..., :dim], scales.view(torch.int8)], dim=-1)


def decode(stored: Tensor, dim: int) -> Tensor:
    """The numbers of codes and scales, exactly.

    Args:
        stored: int8 [..., stored_width(dim)].
        dim: channels, D.

    Returns:
        float32 [..., dim].
    """
    codes = stored[..., :dim]
    # a copy: float16 begins at even bytes
    scales = stored[..., dim:].clone(memory_format=torch.contiguous_format)
    scales = scales.view(torch.float16).float()
    if dim % GROUP == 0:
        return (codes.unflatten(-1, (-1, GROUP)) * scales.unsqueeze(-1)).flatten(-2)
    return codes * scales.repeat_interleave(GROUP, dim=-1)[..., :dim]


def is_stored(pool: Tensor) -> bool:
    """Whether a pool holds 8-bit KV rather than numbers."""
    return pool.dtype == torch.int8


def read_slots(pool: Tensor, slots: Tensor, dim: int) -> Tensor:
    """K or V of some slots: a copy in the pool's dtype, or decoded to float32.

    Args:
        pool: [slots, H_kv, dim], or int8 [slots, H_kv, stored_width(dim)].
        slots: int64 [n], on the pool's device.
        dim: channels of a head.

    Returns:
        [n, H_kv, dim].
    """
    rows = pool.index_select(0, slots)
    return decode(rows, dim) if is_stored(pool) else rows


@functools.cache
def _on_cuda() -> Any:
    return triton_module("int8_triton", "8-bit KV")


DTYPES = {getattr(torch, name): number for name, number in NUMBERS.items()}


def store(pool: Tensor, slots: Tensor, x: Tensor) -> None:
    """Quantise K or V of one layer into slots; the same bits as `encode`.

    Args:
        pool: int8 [slots, H_kv, stored_width(D)], contiguous in the last dimension.
        slots: int64 [T], on the pool's device.
        x: [T, H_kv, D], any floating-point dtype.
    """
    if x.is_cuda and x.shape[2] % SCALE_BYTES == 0:
        module = _on_cuda()
        if module is not None:
            module.store(pool, slots, x)
            return
    library, number = native_library(), DTYPES.get(x.dtype)
    if library is None or number is None or not x.is_cpu or x.shape[2] % LANES:
        pool.index_copy_(0, slots, encode(x))
        return
    x = x if x.stride(2) == 1 else x.contiguous()
    slots = slots.contiguous()
    job = StoreJob(
        x.data_ptr(),
        pool.data_ptr(),
        slots.data_ptr(),
        x.stride(0),
        x.stride(1),
        pool.stride(0),
        pool.stride(1),
        *x.shape,
        number,
    )
    library.store(ctypes.addressof(job))
