"""Writing 8-bit KV: by a native kernel, or by torch where there is none."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from arbor.kernels.int8 import encode
from arbor.kernels.native import LANES, NUMBERS, StoreJob, native_library

DTYPES = {getattr(torch, name): number for name, number in NUMBERS.items()}


def store(pool: Tensor, slots: Tensor, x: Tensor) -> None:
    """Quantise K or V of one layer into slots; the same bits as `encode`.

    Args:
        pool: int8 [slots, H_kv, stored_width(D)], contiguous in the last dimension.
        slots: int64 [T], on the pool's device.
        x: [T, H_kv, D], any floating-point dtype.
    """
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
