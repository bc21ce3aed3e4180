"""What to say when a device has no more memory."""

from __future__ import annotations

import re

import torch

from arbor.errors import OutOfMemory
from arbor.memory.free_memory import free_bytes

UNITS = {"bytes": 0, "kib": 10, "mib": 20, "gib": 30, "tib": 40}
ASKED = re.compile(r"tried to allocate ([\d.]+) (bytes|[kmgt]ib)", re.IGNORECASE)
SIGNS = (
    "out of memory",
    "not enough memory",
    "can't allocate",
    "cannot allocate",
    "alloc_failed",  # cuBLAS
    "size calculation overflowed",
)
SPARE = 0.1  # of what is free or lacking: allocators round up and leave gaps


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch failed for want of memory: its own error on CUDA, a plain `RuntimeError` on a
    CPU."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in SIGNS)


def asked_bytes(error: BaseException) -> int | None:
    """What the failed allocation asked for, as torch's message has it."""
    found = ASKED.search(str(error))
    return None if found is None else int(float(found[1]) * 2 ** UNITS[found[2].lower()])


def weights_too_large(device: torch.device, weights: int | None) -> OutOfMemory:
    """The weights alone do not fit; None where their size is not known yet."""
    free = free_bytes(device)
    take = "do not fit" if weights is None else f"take {size(weights)}"
    return OutOfMemory(
        "oom",
        f"{device}: the weights {take}, and {size(free)} are free.",
        "Try --dtype bfloat16, --device cpu, or a smaller model.",
        weights_bytes=weights,
        free_bytes=free,
    )


def kv_too_large(
    device: torch.device, slots: int, bytes_per_token: int, weights: int
) -> OutOfMemory:
    """The KV of a budget does not fit.

    Args:
        device: where.
        slots: of the budget.
        bytes_per_token: of KV.
        weights: bytes of the weights, which are there already; 0 = not known.
    """
    wanted, free = (slots + 1) * bytes_per_token, free_bytes(device)
    fits = int(free * (1 - SPARE)) // bytes_per_token
    held = f" next to weights of {size(weights)}" if weights else ""
    return OutOfMemory(
        "oom",
        f"{device}: the KV of {slots:,} tokens takes {size(wanted)}, and {size(free)} are free{held}.",
        f"About {fits:,} tokens fit: try --budget {fits}tok, or a smaller search."
        if fits
        else "Try a smaller --budget, or a smaller search.",
        wanted_bytes=wanted,
        free_bytes=free,
        weights_bytes=weights,
        fitting_tokens=fits,
    )


def forward_too_large(
    error: BaseException,
    device: torch.device,
    what: str,
    *,
    weights: int,
    slots: int,
    bytes_per_token: int,
    least: int,
) -> OutOfMemory:
    """A forward does not fit next to weights and KV.

    Args:
        error: torch's.
        device: where.
        what: what was computed, in words.
        weights: bytes of the weights.
        slots: of the budget.
        bytes_per_token: of KV.
        least: tokens below which no budget works.
    """
    wanted, free, kv = asked_bytes(error), free_bytes(device), (slots + 1) * bytes_per_token
    split = {"weights": weights, "KV": kv}
    if device.type == "cuda":  # the failed forward's tensors live as long as its error
        split["workspace"] = max(0, torch.cuda.memory_allocated(device) - weights - kv)
    held = ", ".join(f"{name} {size(count)}" for name, count in split.items())
    lacking = max(0, (wanted or 0) - free) or kv // 4  # free, but in pieces, or of unknown size
    fits = slots - int(lacking * (1 + SPARE)) // bytes_per_token - 1
    asked = "more memory" if wanted is None else size(wanted)
    hint = "Try a smaller --step-tokens or --max-depth, --device cpu, or a smaller model."
    if fits >= least:
        hint = f"Try --budget {fits}tok, or a smaller search."
    return OutOfMemory(
        "oom",
        f"{device}: wanted {asked} with {size(free)} free, in {what} ({held}).",
        hint,
        wanted_bytes=wanted,
        free_bytes=free,
        held_bytes=split,
        fitting_tokens=fits if fits >= least else None,
    )


def size(count: int) -> str:
    """``15.3 GiB``, ``512 MiB``, ``3 KiB``."""
    for unit, shift in (("GiB", 30), ("MiB", 20)):
        if count >= 1 << shift:
            return f"{count / (1 << shift):,.1f} {unit}"
    return f"{count / 1024:,.0f} KiB"
