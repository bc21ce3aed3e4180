"""A retention policy: how many tokens, which ones, what is protected; and the named ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from arbor.errors import UsageError
from arbor.registry import BUILTIN, build
from arbor.retention.allocators.belady import Belady
from arbor.retention.allocators.full import Full
from arbor.retention.allocators.kkt import KKT
from arbor.retention.allocators.lru import LRU
from arbor.retention.allocators.pooled import Pooled
from arbor.retention.allocators.ratio import Ratio
from arbor.retention.allocators.reentry import Reentry
from arbor.retention.allocators.uniform import Uniform
from arbor.retention.base import Allocator, Scorer
from arbor.retention.scorers.heavy_hitters import HeavyHitters
from arbor.retention.scorers.random_tokens import Chance
from arbor.retention.scorers.recency import Recency
from arbor.retention.scorers.tova import TOVA


@dataclass(frozen=True)
class Protect:
    """Tokens that stay in any case; counted within the budget, and equal for all policies that are compared.

    Where there is no room for all of them, they are given up in this order: `floor`, `tail`, `recent`, `sinks`.

    Attributes:
        sinks: first tokens of the path, which attention rests on (StreamingLLM).
        recent: last tokens before the end of each running leaf; lossy mode only.
        tail: last tokens of each block (ArborKV's L_tail).
        floor: least tokens of a block (ArborKV's K_min).
        threshold: attention from which a token counts as activated (RaaS's alpha).
    """

    sinks: int = 4
    recent: int = 8
    tail: int = 8
    floor: int = 4
    threshold: float = 1e-4

    def __post_init__(self) -> None:
        for name in ("sinks", "recent", "tail", "floor", "threshold"):
            if not getattr(self, name) >= 0:  # also refuses nan
                raise UsageError(
                    "setting-range", f"{name}={getattr(self, name)}: it must be 0 or more."
                )

    def easing(self) -> Iterator[Protect]:
        """This, then ever less, down to nothing: `floor` halved until it is 0, then `tail`, `recent` and `sinks`."""
        eased = self
        yield eased
        for name in ("floor", "tail", "recent", "sinks"):
            while left := getattr(eased, name):
                eased = replace(eased, **{name: left // 2})
                yield eased


WHOLE = Protect(
    tail=0, floor=0
)  # for policies that give blocks up whole, or rank all tokens together


@dataclass(frozen=True)
class Policy:
    """What decides about retention; a subclass with defaults is a named one.

    Attributes:
        name: what the command line calls it.
        allocator: how many tokens each block keeps.
        scorer: which tokens.
        protect: what stays whatever the two say.
        spares_paths: where running paths may lose tokens (lossy mode), they do only when nothing else is left to give up.
            So ArborKV, whose Path* is complete, and caches that lock what is in use; flat policies see no paths.
        needs_recording: a run needs the reads of a recorded run of the same search.
    """

    name: str
    allocator: Allocator
    scorer: Scorer = field(default_factory=Recency)
    protect: Protect = field(default_factory=Protect)
    spares_paths: bool = False
    needs_recording: bool = field(default=False, init=False)

    @property
    def observes(self) -> bool:
        """Whether attention has to be observed."""
        return self.scorer.observes

    @property
    def keeps_all(self) -> bool:
        """Whether nothing ever leaves."""
        return isinstance(self.allocator, Full)


@dataclass(frozen=True)
class FullRetention(Policy):
    """Keeps everything: the baseline, shared over the tree."""

    name: str = field(default="full", init=False)
    allocator: Allocator = field(default_factory=Full)
    scorer: Scorer = field(default_factory=Recency)
    protect: Protect = WHOLE


@dataclass(frozen=True)
class LRUPolicy(Policy):
    """Gives up the least recently used blocks: what a radix cache does."""

    name: str = field(default="lru", init=False)
    allocator: Allocator = field(default_factory=LRU)
    scorer: Scorer = field(default_factory=Recency)
    protect: Protect = WHOLE
    spares_paths: bool = True


@dataclass(frozen=True)
class ArborKV(Policy):
    """ArborKV as published: tree-aware ratios (TAE), heavy hitters within a block, tails and sinks protected."""

    name: str = field(default="arborkv", init=False)
    allocator: Allocator = field(default_factory=Ratio)
    scorer: Scorer = field(default_factory=HeavyHitters)
    spares_paths: bool = True


@dataclass(frozen=True)
class KKTPolicy(Policy):
    """ArborKV's optimisation view solved exactly, by water-filling; heavy hitters within a block."""

    name: str = field(default="kkt", init=False)
    allocator: Allocator = field(default_factory=KKT)
    scorer: Scorer = field(default_factory=HeavyHitters)
    spares_paths: bool = True


@dataclass(frozen=True)
class ReentryPolicy(Policy):
    """Keeps the blocks the search is most likely to read again: the optimum where nothing is lost."""

    name: str = field(default="reentry", init=False)
    allocator: Allocator = field(default_factory=Reentry)
    scorer: Scorer = field(default_factory=Recency)
    protect: Protect = WHOLE
    spares_paths: bool = True


@dataclass(frozen=True)
class UniformPolicy(Policy):
    """Keeps the same part of every block: the control that sees no tree."""

    name: str = field(default="uniform", init=False)
    allocator: Allocator = field(default_factory=Uniform)
    scorer: Scorer = field(default_factory=Recency)
    protect: Protect = WHOLE


@dataclass(frozen=True)
class BeladyPolicy(Policy):
    """Keeps what a recorded run reads next: the bound, up to the order of waves within an operation."""

    name: str = field(default="belady", init=False)
    allocator: Allocator = field(default_factory=Belady)
    scorer: Scorer = field(default_factory=Recency)
    protect: Protect = WHOLE
    spares_paths: bool = True
    needs_recording: bool = field(default=True, init=False)


@dataclass(frozen=True)
class StreamingLLM(Policy):
    """Keeps the tokens farthest down their paths, of the whole tree, and the sinks: a branch that was given up deep down
    outlives a shallow one that runs."""

    name: str = field(default="streaming", init=False)
    allocator: Allocator = field(default_factory=Pooled)
    scorer: Scorer = field(default_factory=Recency)
    protect: Protect = WHOLE


@dataclass(frozen=True)
class H2O(Policy):
    """Keeps the tokens of the whole tree that gathered the most attention."""

    name: str = field(default="h2o", init=False)
    allocator: Allocator = field(default_factory=Pooled)
    scorer: Scorer = field(default_factory=HeavyHitters)
    protect: Protect = WHOLE


@dataclass(frozen=True)
class TOVAPolicy(Policy):
    """Keeps the tokens of the whole tree that the last query looked at."""

    name: str = field(default="tova", init=False)
    allocator: Allocator = field(default_factory=Pooled)
    scorer: Scorer = field(default_factory=TOVA)
    protect: Protect = WHOLE


@dataclass(frozen=True)
class RandomTokens(Policy):
    """Keeps tokens of the whole tree by lot: the control every scorer has to beat."""

    name: str = field(default="random", init=False)
    allocator: Allocator = field(default_factory=Pooled)
    scorer: Scorer = field(default_factory=Chance)
    protect: Protect = WHOLE


POLICIES: Mapping[str, Policy] = {name: build("policy", name) for name in BUILTIN["policy"]}
