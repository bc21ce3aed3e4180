"""Whether an error is one of too little memory; imports no torch, for which there may be none."""

from __future__ import annotations

import errno

SIGNS = (
    "out of memory",
    "not enough memory",
    "can't allocate",
    "cannot allocate",
    "alloc_failed",  # cuBLAS
    "size calculation overflowed",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether something failed for want of memory: torch's own error on CUDA, on a CPU a plain
    `RuntimeError`, or Python's or the system's error."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in SIGNS):
        return True
    named = any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__)  # torch's
    return named or isinstance(error, MemoryError)
