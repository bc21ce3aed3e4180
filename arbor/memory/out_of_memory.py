"""Memory that is free, and what to say when a device has no more."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

import torch

from arbor.errors import OutOfMemory, UsageError
from arbor.support.shortage import is_out_of_memory

PROC = Path("/proc")
GROUPS = Path("/sys/fs/cgroup")
# controller in /proc/self/cgroup and its folder, and its files: the limit and what is in use
_VERSIONS = (
    ("", "memory.max", "memory.current"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
)


def free_bytes(device: torch.device) -> int:
    """Free memory of a device, with what torch keeps there unused and gives back when it is needed;
    on a CPU what a program can have without swapping, within the limit of its container. 0 where
    the system does not report it (macOS, Windows)."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0]) + _kept_unused(device)
    known = [each for each in (_of_machine(), _of_group()) if each is not None]
    return min(known, default=0)


def _kept_unused(device: torch.device) -> int:
    """Bytes that torch has reserved in whole segments without a tensor."""
    found = torch.cuda.memory_stats(device)
    reserved, active, split = (
        found.get(f"{name}_bytes.all.current", 0)
        for name in ("reserved", "active", "inactive_split")
    )
    return max(0, int(reserved - active - split))


def _of_machine() -> int | None:
    for line in _lines(PROC / "meminfo"):
        name, _, amount = line.partition(":")
        if name == "MemAvailable":
            return int(amount.split()[0]) * 1024
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def _of_group() -> int | None:
    """What the program's control group has left; None without a limit."""
    left = []
    for line in _lines(PROC / "self" / "cgroup"):
        _, controllers, place = line.split(":", 2)
        for controller, limit, usage in _VERSIONS:
            if controller not in controllers.split(","):
                continue
            folder = GROUPS / controller
            # a container may see its own group as the root
            for group in (folder / place.lstrip("/"), folder):
                numbers = [_lines(group / name)[:1] for name in (limit, usage)]
                if all(each and each[0].isdecimal() for each in numbers):
                    left.append(max(0, int(numbers[0][0]) - int(numbers[1][0])))
                    break
    return min(left, default=None)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


UNITS = {"bytes": 0, "kib": 10, "mib": 20, "gib": 30, "tib": 40}
ASKED = re.compile(r"tried to allocate ([\d.]+) (bytes|[kmgt]ib)", re.IGNORECASE)
SPARE = 0.1  # of what is free or lacking: allocators round up and leave gaps


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


@contextlib.contextmanager
def lower_tier(wanted: int) -> Iterator[None]:
    """Around the allocation of what a tier below the device needs.

    Args:
        wanted: bytes.

    Raises:
        UsageError: the machine has less memory than that.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise UsageError(
            "host-memory",
            f"the host has no {size(wanted)} for KV that leaves the device.",
            "Lower host or disk.",
        ) from error


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
