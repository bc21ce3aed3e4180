"""Names of modes and of kinds of rehydration and sharing, for settings read without torch."""

from __future__ import annotations

from typing import Literal

Mode = Literal["lossless", "lossy"]
Rehydrate = Literal["selective", "span", "off"]
Share = Literal["exact", "prompts", "off", "similar", "audit"]
SHARE_THRESHOLD = 0.82  # least similarity of prompts; the tau of RKSC
SIMILAR = ("similar", "audit")  # lossy: a prompt may be replaced by a similar one


def default_policy(mode: str, rehydrate: str | None) -> str:
    """The policy of a run that names none: `ends` where what leaves is lost, else `reentry`."""
    return "ends" if mode == "lossy" and rehydrate in (None, "off") else "reentry"


def have_own_budgets(mode: Mode, share: Share, *, staged: bool) -> bool:
    """Whether each of several searches keeps within its own budget, so that none depends on what is
    searched next to it; else they share one.

    In lossless mode they share, since that changes no result; so they do in lossy mode where
    attention reads host memory (`staged`), or prompts stay for later problems.
    """
    return mode == "lossy" and not staged and share not in SIMILAR
