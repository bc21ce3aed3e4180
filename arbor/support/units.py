"""Human-readable numbers."""

from __future__ import annotations


def human_bytes(count: float) -> str:
    """``1.2 MiB``: three significant digits at most, powers of 1024."""
    unit = "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if count < 1024:
            break
        count, unit = count / 1024, larger
    return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.3g} {unit}"


def counted(count: int, word: str) -> str:
    """A number and its word: ``1 block``, ``1,200 blocks``."""
    return f"{count:,} {word}" if count == 1 else f"{count:,} {word}s"


def duration_text(seconds: float) -> str:
    """Seconds for people: ``40 s``, ``12 min``, ``3.5 h``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
