"""A retention policy: how many tokens, which ones, what is protected, and when it acts."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from arbor.components import NO_SETTING, ONLY_IF_SET
from arbor.errors import UsageError, check_settings
from arbor.retention.allocators.by_block import LRU, Belady, Ends, Full, Reentry, Uniform
from arbor.retention.allocators.per_tree import Among, divided
from arbor.retention.allocators.pooled import Pooled
from arbor.retention.base import (
    Allocator,
    CappedAllocator,
    Scorer,
    SegmentingAllocator,
    TokenAllocator,
)
from arbor.retention.head_budgets import Adaptive, HeadBudgets, HeadShares, Pyramid
from arbor.retention.scorers import HeavyHitters, RandomTokens, Recency, Window
from arbor.retention.token_kv import HeadKVScorer, KVScorer, Observation


@dataclass(frozen=True)
class Trigger:
    """Times at which the policy is asked while blocks decode.

    Where slots run out it is asked in any case. A policy that acts at a time (every W steps, as
    LazyEviction and R-KV do) frees a part of the budget at once instead of a few slots at each
    step.

    Attributes:
        every: decode steps between two looks at what is held.
        above: part of the budget, in (0, 1]; what is held beyond it leaves, as the policy says.
            1: nothing ever leaves early.
        spare: slots for each running path that are free after the policy has acted, so that it acts
            every so many tokens (W of LazyEviction, with its budget B - W so that B is never
            exceeded); at most half of what it may keep. 0: what is needed, and no more.
    """

    every: int = 1
    above: float = 1.0
    spare: int = field(default=0, metadata=ONLY_IF_SET)

    def __post_init__(self) -> None:
        check_settings(
            self,
            every=(self.every >= 1, "at least 1"),
            above=(0 < self.above <= 1, "above 0, at most 1"),
            spare=(self.spare >= 0, "0 or more"),
        )


Granularity = Literal["token", "head"]
Idle = Literal["scored", "newest"]
# of which layers attention and queries are read, and keys
Observed = Literal["one", "quarter", "all"]


@dataclass(frozen=True)
class Protect:
    """Tokens that stay in any case; within the budget, and equal for all policies compared.

    Where there is no room for all of them, they are given up in the order `floor`, `tail`,
    `prompt`, `recent`, `sinks`.

    Attributes:
        sinks: first tokens of the path, which attract attention (StreamingLLM).
        recent: last tokens before the end of each running leaf; lossy mode only.
        tail: last tokens of each block (ArborKV's L_tail); none by default.
        floor: least tokens of a block (ArborKV's K_min); none by default.
        threshold: alpha, the attention from which a token counts as read (RaaS); None: the one that
            ``arbor calibrate window`` found for the model, else 1e-4 (`arbor.retention.alpha`).
        prompt: all tokens of the prompt; lossy mode only.
    """

    sinks: int = 4
    recent: int = 8
    tail: int = 0
    floor: int = 0
    threshold: float | None = None
    prompt: bool = field(default=False, metadata=ONLY_IF_SET)

    def __post_init__(self) -> None:
        numbers = ("sinks", "recent", "tail", "floor", "threshold")
        given = {name: getattr(self, name) for name in numbers}
        check_settings(
            self, **{name: (n is None or n >= 0, "0 or more") for name, n in given.items()}
        )

    def easing(self) -> Iterator[Protect]:
        """This, then less and less, down to nothing.

        `floor` is halved until it is 0, then `tail`; the prompt follows, then `recent` and `sinks`.
        """
        eased = self
        yield eased
        for name in ("floor", "tail", "prompt", "recent", "sinks"):
            if name == "prompt":
                if self.prompt:
                    eased = replace(eased, prompt=False)
                    yield eased
                continue
            while left := getattr(eased, name):
                eased = replace(eased, **{name: left // 2})
                yield eased


@dataclass(frozen=True, repr=False)
class Policy:
    """A retention policy: an allocator, a scorer, and the tokens protected from both.

    Attributes:
        allocator: how many tokens each block keeps.
        scorer: which tokens.
        protect: tokens that stay in any case.
        spares_paths: in lossy mode, running paths lose tokens only when nothing else is left to
            evict. So in ArborKV, whose Path* is complete, and in caches that lock blocks in use;
            flat policies see no paths. What a policy destroys at its times lies anywhere.
        idle: with ``spares_paths``, what blocks off the running paths keep. ``scored``: what the
            allocator and the scorer say; ``newest``: the same part of each, its newest tokens, in
            every KV head, as `ends` has it, so that these two decide on running paths only.
        among: how the room is divided among searches that share a budget, see `PerTree` (in lossy
            mode each has its own, `ForestState.own_budgets`); ``together``: the allocator sees the
            blocks of all of them at once, and a capacity of its own is one of all of them.
        trigger: when it acts although room has not run out.
        granularity: which KV heads keep the same tokens. ``token``: all of a model's; ``head``:
            each KV head of each layer keeps tokens of its own; lossy mode only, and of models
            without windows.
        heads: with ``granularity=head``, how many tokens of a block each KV head keeps. ``equal``:
            as many as any other; ``adaptive``: the heads of a layer compete (AdaKV); ``pyramid``:
            those of lower layers more (PyramidKV).
        safeguard: with ``heads=adaptive``, the part of an equal share that every head keeps.
        beta: with ``heads=pyramid``, how steeply budgets fall; the last layer keeps 1/beta of the
            mean.
        observed: the layers whose attention, keys and queries are read. ``quarter``: the last of
            each four; ``one``: the last layer; ``all``: every layer, as ``granularity=head`` has it
            in any case. Figures of a token are means over these layers.
        summary: one sentence on it, for ``arbor list policies``.
        registered_as: its name in the registry, which sets it; empty without one.
    """

    kind: ClassVar[str] = "policy"

    allocator: Allocator
    scorer: Scorer = field(default_factory=Recency)
    protect: Protect = field(default_factory=Protect)
    spares_paths: bool = False
    idle: Idle = field(default="scored", metadata=ONLY_IF_SET)
    among: Among = "together"
    trigger: Trigger = field(default_factory=Trigger)
    granularity: Granularity = field(default="token", metadata=ONLY_IF_SET)
    heads: HeadShares = field(default="equal", metadata=ONLY_IF_SET)
    safeguard: float = field(default=0.2, metadata=ONLY_IF_SET)
    beta: float = field(default=20.0, metadata=ONLY_IF_SET)
    observed: Observed = field(default="quarter", metadata=ONLY_IF_SET)
    summary: str = field(default="", kw_only=True, compare=False, repr=False, metadata=NO_SETTING)
    registered_as: str = field(default="", kw_only=True, metadata=NO_SETTING)

    def __post_init__(self) -> None:
        check_settings(
            self,
            safeguard=(0 <= self.safeguard <= 1, "0 to 1"),
            beta=(1 <= self.beta <= 1e6, "1 or more"),
        )
        if self.observed != "quarter":
            self._check_observed()
        if self.idle == "newest" and (not self.spares_paths or self.destroys or self.capped):
            raise UsageError(
                "idle",
                "idle=newest: idle blocks lose their tokens before running paths do, and only when "
                "room runs out.",
                "Take spares_paths=true, and a policy without a capacity and times of its own.",
            )
        if self.heads != "equal" and not self.by_head:
            raise UsageError(
                "granularity",
                f"heads={self.heads}: all heads keep the same tokens with granularity=token.",
                "Take granularity=head, or heads=equal.",
            )
        if self.by_head:
            self._check_heads()
        if hasattr(self.allocator, "observation"):
            _ = self._wanted  # refuses parts that do not go together

    def _check_observed(self) -> None:
        """Refuse layers that nothing would be read of.

        Raises:
            UsageError: says why.
        """
        wanted = self._wanted
        if self.by_head and self.observed != "all":
            why = "granularity=head reads every layer."
        elif wanted.layers is not None:
            why = "the policy names its layers, with layers=" + ",".join(map(str, wanted.layers))
        elif not (self.observes or wanted.keys or wanted.anything):
            why = "the policy reads neither attention nor keys nor queries"
        else:
            return
        raise UsageError(
            "observed",
            f"observed={self.observed}: {why.rstrip('.')}.",
            "Leave observed out.",
        )

    def _check_heads(self) -> None:
        """Refuse parts that say nothing of single heads.

        Raises:
            UsageError: names the part, and others that do.
        """
        allocator, scorer = self.allocator, self.scorer
        wanted = getattr(scorer, "observation", Observation())
        segmenting = isinstance(allocator, SegmentingAllocator)
        by_score = segmenting or getattr(allocator, "by_score", False)
        if segmenting and (self.heads != "equal" or self.among != "together"):
            raise UsageError(
                "granularity",
                f"heads={self.heads}, among={self.among}: the allocator {type(allocator).__name__} "
                "divides the sequence, and KV heads keep equally many tokens of each segment.",
                "Take heads=equal,among=together.",
            )
        if isinstance(allocator, TokenAllocator) and not by_score:
            what = f"the allocator {type(allocator).__name__} chooses tokens by their places"
            hint = f"Take one that chooses by score, such as allocator=pooled, or {self.by_token}."
        elif isinstance(scorer, KVScorer) and not isinstance(scorer, HeadKVScorer):
            what = f"the scorer {type(scorer).__name__} gives all heads of a layer one score"
            hint = f"Derive it from HeadKVScorer, or take {self.by_token}."
        elif self.heads != "equal" and isinstance(scorer, KVScorer):
            raise UsageError(
                "granularity",
                f"heads={self.heads}: the scorer {type(scorer).__name__} compares the keys of a "
                "head, of which all heads have to hold equally many.",
                "Take a scorer of attention, such as that of h2o or snapkv, or heads=equal.",
            )
        elif wanted.heads is not None or wanted.layers is not None:
            what = f"the scorer {type(scorer).__name__} observes some heads or layers only"
            hint = f"Let it observe all, or take {self.by_token}."
        else:
            return
        raise UsageError("granularity", f"granularity=head: {what}.", hint)

    def __repr__(self) -> str:
        protect = self.protect
        kept = {"sinks": protect.sinks, "recent": protect.recent, "tail": protect.tail}
        kept["floor"] = protect.floor
        protects = ", ".join(f"{name}={count}" for name, count in kept.items())
        return f"Policy({self.name!r}, {self.allocator!r}, {self.scorer!r}, {protects})"

    @property
    def name(self) -> str:
        """Its name in the registry; without one, the class of its allocator."""
        return self.registered_as or type(self.allocator).__name__

    @property
    def by_head(self) -> bool:
        """Whether each KV head keeps tokens of its own."""
        return self.granularity == "head"

    @property
    def by_token(self) -> str:
        """The settings with which all heads keep the same tokens, for messages."""
        return "granularity=token" + (",heads=equal" if self.heads != "equal" else "")

    @property
    def head_budgets(self) -> HeadBudgets | None:
        """How many tokens each KV head keeps, where that differs; None: equally many."""
        if self.heads == "adaptive":
            return Adaptive(self.safeguard)
        return Pyramid(self.beta) if self.heads == "pyramid" else None

    @property
    def shared_allocator(self) -> Allocator:
        """The allocator, for the blocks of all searches of an engine."""
        if self.among == "together":
            return self.allocator
        return divided(self.allocator, self.among)

    @property
    def for_idle(self) -> tuple[Allocator, Scorer]:
        """What decides on blocks off the running paths with ``idle=newest``."""
        even = Uniform()
        return even if self.among == "together" else divided(even, self.among), Recency()

    @property
    def capped(self) -> CappedAllocator | None:
        """The same, where tokens leave although there is room; else None."""
        shared = self.shared_allocator
        if isinstance(self.allocator, CappedAllocator) and isinstance(shared, CappedAllocator):
            return shared
        return None

    @property
    def observes(self) -> bool:
        """Whether attention has to be observed."""
        return self.scorer.observes or bool(getattr(self.allocator, "observes", False))

    @property
    def observation(self) -> Observation:
        """What is collected for it while the model runs."""
        wanted = self._wanted
        every = {"one": sys.maxsize, "quarter": wanted.every, "all": 1}[self.observed]
        return replace(wanted, attention=self.observes, every=1 if self.by_head else every)

    @property
    def _wanted(self) -> Observation:
        """What its scorer and its allocator want."""
        wanted: Observation = getattr(self.scorer, "observation", Observation())
        return wanted.joined(getattr(self.allocator, "observation", Observation()))

    @property
    def keeps_all(self) -> bool:
        """Whether nothing is ever evicted."""
        return isinstance(self.allocator, Full)

    @property
    def destroys(self) -> bool:
        """Whether it destroys tokens, at a time of its own, for good."""
        return bool(getattr(self.allocator, "destroys", False))

    @property
    def packs(self) -> bool:
        """Whether it says which tokens lie in host memory in few bits."""
        return bool(getattr(self.allocator, "packed", 0))

    @property
    def reads_values(self) -> bool:
        """Whether its allocator goes by the values of blocks."""
        return bool(getattr(self.allocator, "reads_values", False))

    @property
    def reads_search_scores(self) -> bool:
        """Whether the figures by which a search chooses stand for the values of its blocks."""
        return getattr(self.allocator, "value", "verifier") == "controller"

    @property
    def needs_recording(self) -> bool:
        """Whether the allocator reads the future of a recorded run."""
        return bool(getattr(self.allocator, "needs_recording", False))


_NAMED = {
    "belady": Policy(
        Belady(),
        spares_paths=True,
        summary="Keeps what a recorded run reads next (Belady 1966): the bound, up to the order of waves "
        "within an operation.",
    ),
    "ends": Policy(
        Ends(),
        spares_paths=True,
        summary="Keeps running paths whole, and the newest tokens of every idle block.",
    ),
    "full": Policy(
        Full(),
        summary="Keeps everything: the baseline, shared over the tree.",
    ),
    "h2o": Policy(
        Pooled(),
        HeavyHitters(),
        summary="Keeps the tokens of the whole tree that received the most attention (H2O).",
    ),
    "lru": Policy(
        LRU(),
        spares_paths=True,
        summary="Evicts the least recently used blocks, as a radix cache does (SGLang).",
    ),
    "random": Policy(
        Pooled(),
        RandomTokens(),
        summary="Keeps random tokens of the whole tree: the control every scorer has to beat.",
    ),
    "reentry": Policy(
        Reentry(),
        spares_paths=True,
        summary="Keeps the blocks the search is most likely to read again: the optimum where nothing is "
        "lost.",
    ),
    "snapkv": Policy(
        Pooled(),
        Window(),
        summary="Keeps the tokens that the last queries attended to (SnapKV's observation window).",
    ),
    "streaming": Policy(
        Pooled(),
        summary="Keeps the sinks and the tokens of the whole tree farthest down their paths "
        "(StreamingLLM): a deep branch that was abandoned outlives a shallow one that runs.",
    ),
    "uniform": Policy(
        Uniform(),
        summary="Keeps the same part of every block: the control that sees no tree.",
    ),
}
POLICIES: Mapping[str, Policy] = {
    name: replace(policy, registered_as=name) for name, policy in _NAMED.items()
}
