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
