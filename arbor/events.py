"""What can happen in a run: frozen records, one union, one kind of listener.

Events are records, never control flow. Trace, live view, metrics, callbacks and golden tests share this vocabulary.
`KV` is slots (tokens) per tier after the event; `elapsed_s` is wall time the thing took, for people: no decision reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

Counts = tuple[tuple[int, int], ...]  # (node id, tokens) pairs, ordered by node id


@dataclass(frozen=True, slots=True)
class KV:
    """Slots held after an event.

    Attributes:
        device: on the device, every allocated one, temporary ones included.
        host: in host memory; 0 as long as there is no such tier.
        compressed: in compressed form; 0 likewise.
    """

    device: int
    host: int = 0
    compressed: int = 0


@dataclass(frozen=True, slots=True)
class Header:
    """First event of a run: everything needed to repeat it."""

    name: ClassVar[str] = "header"
    schema: str
    run: str
    created: str
    arbor: str
    task: str
    problem: str
    seed: int
    expected: str | None
    model: dict[str, Any]  # id, architecture, dtype, layers, kv_bytes_per_token
    device: dict[str, Any]  # name, torch, backend
    config: dict[str, Any]  # controller, verifier, sampling, budget: resolved
    kv: dict[str, Any]  # budget_tokens, full_tokens, smallest_tokens, bytes_per_token


@dataclass(frozen=True, slots=True)
class Opened:
    """A block was opened; the root with its prompt's length in tokens, every other block with none."""

    name: ClassVar[str] = "node"
    node: int
    parent: int | None
    index: int
    depth: int
    tokens: int
    text: str


@dataclass(frozen=True, slots=True)
class Boundary:
    """A block closed (ArborKV's Boundary)."""

    name: ClassVar[str] = "boundary"
    node: int
    ids: tuple[int, ...]
    text: str
    stop: Literal["step", "eos", "length", "limit"]
    logprob: float
    confidence: float
    top1: float


@dataclass(frozen=True, slots=True)
class Selected:
    """The controller chose leaves to grow."""

    name: ClassVar[str] = "select"
    leaves: Counts  # (leaf, width)


@dataclass(frozen=True, slots=True)
class Transition:
    """The running leaves changed (ArborKV's Transition). `distance` is edges from the old ones, the minimum per leaf, summed."""

    name: ClassVar[str] = "transition"
    leaves: tuple[int, ...]
    previous: tuple[int, ...]
    distance: int


@dataclass(frozen=True, slots=True)
class Pressure:
    """More slots were needed than were free (ArborKV's Pressure)."""

    name: ClassVar[str] = "pressure"
    needed: int
    free: int
    limit: int


Cause = Literal["transition", "pressure", "close"]


@dataclass(frozen=True, slots=True)
class Allocated:
    """A retention policy shared out what room there was.

    Attributes:
        policy: its name.
        cause: the event that asked.
        room: slots the offered blocks may keep together.
        offered: how many blocks it could take from.
        nodes: (block, tokens it had, tokens it keeps) of each block that lost some.
        signals: what the allocator looked at, and so why: for each column of `retention.base.Blocks` but `length` that it
            read, the figure of each of `nodes`; null is never. `score` is MSVE's, from `value`, `confidence` and
            `attention`.
        elapsed_s: time of the decision and the eviction.
    """

    name: ClassVar[str] = "allocate"
    policy: str
    cause: Cause
    room: int
    offered: int
    nodes: tuple[tuple[int, int, int], ...]
    signals: dict[str, Any]
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class Evicted:
    """Tokens left the device. `nodes` holds how many each block lost."""

    name: ClassVar[str] = "evict"
    cause: Cause
    nodes: Counts
    kv: KV


@dataclass(frozen=True, slots=True)
class Rehydrated:
    """Missing tokens of a path came back.

    Attributes:
        nodes: how many each block regained.
        repeated: tokens that were on the device and were computed again all the same: the rest of a span, or tokens
            written over a gap.
    """

    name: ClassVar[str] = "rehydrate"
    nodes: Counts
    mode: Literal["recompute", "fetch"]
    kv: KV
    repeated: int = 0


ForwardKind = Literal["prefill", "decode", "verify", "rehydrate"]


@dataclass(frozen=True, slots=True)
class Forwarded:
    """Forward passes of one kind since the last such event (one per prefill, rehydration and question; for decoding,
    one for all steps between two of the others, or one per step in detail ``steps`` and ``tokens``).

    Attributes:
        kind: what for; a question's forward also recomputes what its paths miss.
        rows: rows run through the model.
        steps: forward passes.
        read_tokens: keys read if every row read its whole path by itself.
        unique_read_tokens: keys the cascade reads: each shared span once.
        kv: slots after the last of them.
        peak: most device slots allocated at any instant of the run so far.
        elapsed_s: seconds they took, choosing the next tokens included.
        held: device slots, summed over the steps; 0 in traces older than this figure.
    """

    name: ClassVar[str] = "forward"
    kind: ForwardKind
    rows: int
    steps: int
    read_tokens: int
    unique_read_tokens: int
    kv: KV
    peak: int
    elapsed_s: float
    held: int = 0


@dataclass(frozen=True, slots=True)
class Sampled:
    """A token was chosen for blocks that decode, which the next decoding step runs; only in detail ``tokens``."""

    name: ClassVar[str] = "sample"
    nodes: tuple[int, ...]
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]


# how much is told of decoding: many steps in one `Forwarded`; each step in one; and the tokens of each, in `Sampled`
Detail = Literal["events", "steps", "tokens"]


@dataclass(frozen=True, slots=True)
class Verified:
    """Candidates were valued. `values` belong to `nodes`, in order."""

    name: ClassVar[str] = "verify"
    verifier: str
    nodes: tuple[int, ...]
    values: tuple[float, ...]
    asked: int
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class Pruned:
    """The search gave blocks up."""

    name: ClassVar[str] = "prune"
    nodes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Terminal:
    """A path came to an end, with the answer it gives."""

    name: ClassVar[str] = "terminal"
    node: int
    answer: str | None


@dataclass(frozen=True, slots=True)
class Answered:
    """The answer of the whole run; `correct` by the task's grader where the task can grade it."""

    name: ClassVar[str] = "answer"
    node: int | None
    path: tuple[int, ...]
    text: str | None
    score: float
    correct: bool | None


@dataclass(frozen=True, slots=True)
class Ended:
    """Last event of a run, with the run's own counters (`Metrics`).

    Attributes:
        nodes: how many blocks there were, the root included.
    """

    name: ClassVar[str] = "end"
    status: Literal["solved", "exhausted", "limit", "timeout", "interrupted", "error"]
    nodes: int
    metrics: dict[str, Any] = field(default_factory=dict)


Event = (
    Header
    | Opened
    | Boundary
    | Selected
    | Transition
    | Pressure
    | Allocated
    | Evicted
    | Rehydrated
    | Forwarded
    | Sampled
    | Verified
    | Pruned
    | Terminal
    | Answered
    | Ended
)

Listener = Callable[[Event], None]

EVENTS: tuple[type[Event], ...] = (
    Header,
    Opened,
    Boundary,
    Selected,
    Transition,
    Pressure,
    Allocated,
    Evicted,
    Rehydrated,
    Forwarded,
    Sampled,
    Verified,
    Pruned,
    Terminal,
    Answered,
    Ended,
)
