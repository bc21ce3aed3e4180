"""A retention policy: how many tokens, which ones, what is protected; the named ones in one table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from arbor.errors import UsageError
from arbor.retention.base import Allocator, Scorer
from arbor.retention.belady import Belady
from arbor.retention.chance import Chance
from arbor.retention.full import Full
from arbor.retention.heavy import HeavyHitters
from arbor.retention.kkt import KKT
from arbor.retention.lru import LRU
from arbor.retention.pooled import Pooled
from arbor.retention.ratio import Ratio
from arbor.retention.recency import Recency
from arbor.retention.reentry import Reentry
from arbor.retention.tova import TOVA
from arbor.retention.uniform import Uniform


@dataclass(frozen=True)
class Protect:
    """Tokens that stay in any case; counted within the budget, and equal for all policies that are compared.

    Attributes:
        sinks: first tokens of the path, which attention rests on (StreamingLLM).
        recent: last tokens before the end of each running leaf; lossy mode only.
        tail: last tokens of each block (ArborKV's L_tail).
        floor: least tokens of a block (ArborKV's K_min).
        threshold: attention from which a token counts as activated (RaaS's alpha).
    """

    sinks: int = 4
    recent: int = 0
    tail: int = 8
    floor: int = 4
    threshold: float = 1e-4

    def __post_init__(self) -> None:
        for name in ("sinks", "recent", "tail", "floor", "threshold"):
            if getattr(self, name) < 0:
                raise UsageError(
                    "setting-range", f"{name}={getattr(self, name)}: it must be 0 or more."
                )


@dataclass(frozen=True)
class Policy:
    """What decides about retention.

    Attributes:
        name: what the command line calls it.
        allocator: how many tokens each block keeps.
        scorer: which tokens.
        protect: what stays whatever the two say.
    """

    name: str
    allocator: Allocator
    scorer: Scorer = field(default_factory=Recency)
    protect: Protect = field(default_factory=Protect)

    @property
    def observes(self) -> bool:
        """Whether attention has to be observed."""
        return self.scorer.observes


POLICIES: Mapping[str, Policy] = {
    policy.name: policy
    for policy in (
        Policy("full", Full()),
        Policy("lru", LRU()),
        Policy("arborkv", Ratio(), HeavyHitters()),
        Policy("kkt", KKT(), HeavyHitters()),
        Policy("reentry", Reentry()),
        Policy("uniform", Uniform()),
        Policy("belady", Belady()),
        Policy("streaming", Pooled(), Recency()),
        Policy("h2o", Pooled(), HeavyHitters()),
        Policy("tova", Pooled(), TOVA()),
        Policy("random", Pooled(), Chance()),
    )
}
