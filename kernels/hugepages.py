"""Large pages for memory that every step reads from end to end, where Linux offers them."""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
from collections.abc import Callable

HUGE = 1 << 21  # bytes of a large page on x86-64 and, with pages of 4 KiB, on arm64
# of Linux's <asm-generic/mman-common.h>; `mmap` does not name the second one
MADV_HUGEPAGE, MADV_COLLAPSE = 14, 25


def on_huge_pages(address: int, size: int, *, filled: bool) -> int:
    """Ask for large pages under some memory; its contents do not change.

    Weights and KV are streams of many megabytes, and with pages of 4 KiB a core spends part of the
    time on looking up addresses. Nothing depends on the answer: on other systems, on old kernels
    (`MADV_COLLAPSE` is of Linux 6.1), or where large pages are switched off, nothing happens.

    Args:
        address: of the first byte.
        size: bytes; the neighbours on the first and the last large page come along.
        filled: whether the memory has been written to, so that its pages exist and have to be
            joined.

    Returns:
        bytes that are on large pages now, or will be when they are first written to; 0 if none.

    Example:
        Memory smaller than a large page stays as it is:

        >>> import torch
        >>> weight = torch.ones(16, 16)
        >>> on_huge_pages(weight.data_ptr(), weight.nbytes, filled=True)
        0
    """
    madvise = _madvise()
    if madvise is None or size < HUGE:
        return 0
    first = address // mmap.PAGESIZE * mmap.PAGESIZE
    if madvise(first, -(-(address + size - first) // mmap.PAGESIZE) * mmap.PAGESIZE, MADV_HUGEPAGE):
        return 0
    if not filled:
        return size
    whole = range(address // HUGE * HUGE, address + size, HUGE)
    return sum(HUGE for page in whole if not madvise(page, HUGE, MADV_COLLAPSE))


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    """madvise(2): 0 for success."""
    if not sys.platform.startswith("linux"):
        return None
    call = ctypes.CDLL(None).madvise
    call.argtypes, call.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_int
    return call
