"""Free memory of a device, as the system reports it."""

from __future__ import annotations

import os
from pathlib import Path

import torch

PROC = Path("/proc")
GROUPS = Path("/sys/fs/cgroup")
# controller in /proc/self/cgroup and its folder, and its files: the limit and what is in use
_VERSIONS = (
    ("", "memory.max", "memory.current"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
)


def free_bytes(device: torch.device) -> int:
    """Free memory of a device; on a CPU what a program can have without swapping, within the limit
    of its container. 0 where the system does not report it (macOS, Windows)."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    known = [each for each in (_of_machine(), _of_group()) if each is not None]
    return min(known, default=0)


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
