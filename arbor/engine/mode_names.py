"""Modes, and kinds of rehydration and sharing: their settings, read without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from arbor.errors import UsageError
from arbor.feature import hook_for
from arbor.support.setting import setting

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


@dataclass(frozen=True, kw_only=True)
class ModeSettings:
    """How exact a search is, and which first tokens use the same KV.

    Attributes:
        mode: ``lossless``: the result is full retention's at any budget; ``lossy``: tokens of
            running paths may leave too.
        rehydrate: ``selective``: missing tokens come back; ``span``: whole blocks do; ``off``:
            nothing does (only in lossy mode, where it is the default).
        share: in lossless mode ``exact``: equal first tokens of prompts and of siblings;
            ``prompts``: those of prompts; ``off``: none. In lossy mode ``similar``: a prompt is
            replaced by an earlier one whose hidden states are similar; ``audit``: likewise, and the
            problem is also searched from its own prompt (docs/tiers.md).
        share_threshold: the least similarity; by default the tau of RKSC.
    """

    HEADING = "KV budget"

    mode: Mode = setting(
        "lossless",
        "lossless: same answer at any budget; lossy: running paths lose tokens too.",
        recorded="always",
    )
    rehydrate: Rehydrate = setting(
        None,
        "Recompute missing tokens (selective), whole blocks (span), or nothing (off; lossy only).",
        recorded="always",
    )
    share: Share = setting(
        "exact",
        "Equal beginnings share KV: exact, prompts or off; lossy: similar prompts do too, or audit.",
        shown="set",
    )
    share_threshold: float = setting(
        SHARE_THRESHOLD,
        "Least similarity of prompts for share=similar.",
        shown="set",
        least=-1,
        most=1,
        needs="share=similar|audit",
    )

    def check_modes(self) -> None:
        """Refuses lossless search without rehydration, and similar prompts in a search that
        promises the exact result.

        Raises:
            UsageError: these settings contradict each other.
        """
        if self.mode == "lossless" and self.rehydrate == "off":
            raise UsageError(
                "rehydrate",
                "lossless needs what was evicted back.",
                "Take mode=lossy, or selective.",
            )
        if self.share in SIMILAR and (self.mode != "lossy" or self.rehydrate != "off"):
            raise UsageError(
                "share",
                f"share={self.share} has a search read another prompt than its own, for good.",
                "Take mode=lossy and no rehydration with it, or share=exact.",
            )
        if self.share in SIMILAR:
            hook_for("share", self.share)
