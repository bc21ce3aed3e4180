"""Large pages: contents stay, and the system's own books say what it gave."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from arbor.kernels import hugepages
from arbor.kernels.hugepages import HUGE, on_huge_pages

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
offered = pytest.mark.skipif(
    not SETTING.exists() or "[never]" in SETTING.read_text(), reason="no large pages here"
)


def huge_bytes(address: int) -> int:
    """Bytes on large pages in the mapping that holds an address, by the kernel's account."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            first, last = (int(bound, 16) for bound in head.split("-"))
            inside = first <= address < last
        elif inside and head == "AnonHugePages:":
            return int(line.split()[1]) * 1024
    return 0


@offered
def test_filled_memory_moves_to_large_pages_and_keeps_its_contents() -> None:
    tensor = torch.arange(8 * HUGE // 8)
    before = tensor.clone()
    middle = tensor.data_ptr() + tensor.nbytes // 2
    gained = on_huge_pages(tensor.data_ptr(), tensor.nbytes, filled=True)
    assert torch.equal(tensor, before)
    assert gained <= tensor.nbytes + 2 * HUGE
    if gained:  # the machine may have no free large page, or be older than Linux 6.1
        assert huge_bytes(middle) >= gained - 2 * HUGE > 0


@pytest.mark.parametrize("offset", [0, 4096, HUGE - 64])
def test_every_large_page_that_holds_a_part_is_joined(
    monkeypatch: pytest.MonkeyPatch, offset: int
) -> None:
    asked: list[tuple[int, int, int]] = []
    monkeypatch.setattr(hugepages, "_madvise", lambda: lambda *call: asked.append(call) or 0)
    begin, size = 64 * HUGE + offset, 3 * HUGE
    gained = on_huge_pages(begin, size, filled=True)
    (first, length, advice), *joined = asked
    assert advice == hugepages.MADV_HUGEPAGE and first % 4096 == 0 == length % 4096
    assert first <= begin and begin + size <= first + length
    assert all(part[1:] == (HUGE, hugepages.MADV_COLLAPSE) for part in joined)
    covered = {page for page, *_ in joined}
    assert covered == {byte // HUGE * HUGE for byte in range(begin, begin + size, 64)}
    assert gained == len(joined) * HUGE
