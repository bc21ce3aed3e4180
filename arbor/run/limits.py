"""Seeds and limits of a run, checked: a number that means something else is refused with the one that works."""

from __future__ import annotations

import math
import operator
from typing import Any

from arbor.errors import UsageError


def seed_of(seed: Any) -> int:
    """A seed.

    Raises:
        UsageError: not a whole number, or below 0.
    """
    taken = _whole(seed)
    if taken is None or taken < 0:
        raise UsageError("seed", f"seed is {seed!r}.", "It is a whole number, 0 or more.")
    return taken


def limit_of(name: str, limit: Any) -> int | None:
    """A limit on how many there may be; None is none.

    Raises:
        UsageError: not a whole number, or below 1.
    """
    if limit is None:
        return None
    taken = _whole(limit)
    if taken is None or taken < 1:
        raise UsageError("limit", f"{name} is {limit!r}.", "It is a whole number, 1 or more.")
    return taken


def timeout_of(seconds: Any) -> float | None:
    """A limit on wall time; None is none.

    Raises:
        UsageError: no number, or below 0.
    """
    if seconds is None:
        return None
    try:
        taken = math.nan if isinstance(seconds, str | bool) else float(seconds)
    except (TypeError, ValueError, OverflowError):
        taken = math.nan
    if not taken >= 0:
        raise UsageError("limit", f"timeout is {seconds!r}.", "It is 0 seconds or more.")
    return taken


def _whole(value: Any) -> int | None:
    """A whole number as one; None for anything else."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None
