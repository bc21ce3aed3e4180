"""Free memory, of the machine and of a container."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from arbor.memory import out_of_memory as free_memory
from arbor.memory.out_of_memory import free_bytes

CPU = torch.device("cpu")


def system(
    folder: Path, monkeypatch: pytest.MonkeyPatch, groups: str, files: dict[str, str]
) -> None:
    """A machine with 8 GiB available, and control groups."""
    (folder / "proc" / "self").mkdir(parents=True)
    (folder / "proc" / "meminfo").write_text("MemFree: 1 kB\nMemAvailable: 8388608 kB\n")
    (folder / "proc" / "self" / "cgroup").write_text(groups)
    for name, text in files.items():
        path = folder / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    monkeypatch.setattr(free_memory, "PROC", folder / "proc")
    monkeypatch.setattr(free_memory, "GROUPS", folder / "groups")


@pytest.mark.parametrize(
    ("groups", "files", "free"),
    [
        ("", {}, 2**33),
        ("0::/\n", {"memory.max": "max", "memory.current": "5"}, 2**33),
        ("0::/\n", {"memory.max": "3000", "memory.current": "1000"}, 2000),
        ("0::/job\n", {"job/memory.max": "3000", "job/memory.current": "5000"}, 0),
        ("0::/job\n", {"memory.max": "3000", "memory.current": "1000"}, 2000),
        (
            "9:cpu:/\n4:memory,x:/job\n0::/\n",
            {"memory/job/memory.limit_in_bytes": "70", "memory/job/memory.usage_in_bytes": "10"},
            60,
        ),
    ],
)
def test_free_memory_is_what_machine_and_container_leave(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    groups: str,
    files: dict[str, str],
    free: int,
) -> None:
    system(tmp_path, monkeypatch, groups, files)

    assert free_bytes(CPU) == free


def test_what_torch_keeps_of_a_gpu_without_a_tensor_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As after weights were joined: the parts that were freed stay with torch."""
    kept = {"reserved": 70, "active": 40, "allocated": 39, "inactive_split": 10}
    seen = {f"{name}_bytes.all.current": count for name, count in kept.items()}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 2000))
    for stats, free in ((seen, 1020), ({}, 1000)):
        monkeypatch.setattr(torch.cuda, "memory_stats", lambda device, stats=stats: stats)
        assert free_bytes(torch.device("cuda")) == free


def test_this_machine_has_some() -> None:
    assert free_bytes(CPU) > 2**20
