"""Events of a run: frozen records, one union, one type of listener.

Events are records, never control flow. Trace, live view, metrics, callbacks and golden tests share
this vocabulary. `KV` is slots (tokens) per tier after the event; `elapsed_s` is wall time, for
people: no decision reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, get_args

from arbor.components import ONLY_IF_SET

MOST_INTEGER = 2**63 - 1  # in a trace; the least is one further from 0


@dataclass(frozen=True, slots=True)
class Integers:
    """Names of entries of a table that are integers; each may be missing, and others are free."""

    names: tuple[str, ...]


# limits that end a run, by the names of their settings
ReachedLimit = Literal["max_expansions", "max_tokens", "timeout", "first", "confidence"]

Counts = tuple[tuple[int, int], ...]  # (node id, tokens) pairs, ordered by node id


# budget_tokens, full_tokens, smallest_tokens, bytes_per_token; part where the budget is one of full
# retention; host_tokens and disk_tokens where there are such tiers, host_bits and host_token_bytes
# where the host's is packed, staging_tokens where attention reads it; kv_dtype where it is not the
# model's; numbers derived from them
Slots = Annotated[
    dict[str, Any],
    Integers(
        (
            *("budget_tokens", "full_tokens", "smallest_tokens", "bytes_per_token"),
            *("host_tokens", "disk_tokens", "host_bits", "host_token_bytes", "staging_tokens"),
        )
    ),
]


@dataclass(frozen=True, slots=True)
class KV:
    """Slots held after an event.

    Attributes:
        device: of this search on the device, temporary and shared ones included.
        host: tokens of this search in host memory.
        compressed: in host memory in few bits.
        disk: on disk; written only where there are any.
        pool: of all searches that share the budget; written only where there are several.
        shared: tokens that lie in the slots of siblings' equal tokens; written only where there are
            any.
    """

    device: int
    host: int = 0
    compressed: int = 0
    pool: int = field(default=0, metadata=ONLY_IF_SET)
    shared: int = field(default=0, metadata=ONLY_IF_SET)
    disk: int = field(default=0, metadata=ONLY_IF_SET)


@dataclass(frozen=True, slots=True)
class Header:
    """First event of a run: everything needed to repeat it.

    Attributes:
        task: its name.
        kv: slots of the budget, of full retention at most and of the smallest budget, bytes of KV
            per token; the part, where the budget is one.
    """

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
    device: dict[str, Any]  # name, torch, backend, threads
    config: dict[str, Any]  # controller, verifier, sampling, budget: resolved
    kv: Slots


@dataclass(frozen=True, slots=True)
class Opened:
    """A block was opened; `tokens` is the prompt's length at the root, 0 at every other block.

    Attributes:
        begin: an earlier sibling, and how many of its tokens come first; written only where a path
            branches inside a thought.
    """

    name: ClassVar[str] = "node"
    node: int
    parent: int | None
    index: int
    depth: int
    tokens: int
    text: str
    begin: tuple[int, int] | None = field(default=None, metadata=ONLY_IF_SET)


@dataclass(frozen=True, slots=True)
class Boundary:
    """A block closed (ArborKV's Boundary).

    Attributes:
        stop: text that ends a thought, end of the sequence, longest length, a limit of the run, or
            branches' confidence (event `stop`).
        given: tokens not sampled: a question, a proposed thought, or `begin`. Written only where
            there are any.
    """

    name: ClassVar[str] = "boundary"
    node: int
    ids: tuple[int, ...]
    text: str
    stop: Literal["step", "eos", "length", "limit", "gate"]
    logprob: float
    confidence: float
    top1: float
    given: int = field(default=0, metadata=ONLY_IF_SET)


@dataclass(frozen=True, slots=True)
class BranchesStopped:
    """One branch of an expansion was decisively more confident while they decoded, which ended
    branches early (RKSC's decode-time gate, `branch_stop`).

    Attributes:
        leaf: the block that the branches grow from.
        tokens: of each branch that had not ended, when they were compared.
        branches: all of them.
        confidences: the mean top-1 probability of each so far.
        stopped: those that end here.
    """

    name: ClassVar[str] = "stop"
    leaf: int
    tokens: int
    branches: tuple[int, ...]
    confidences: tuple[float, ...]
    stopped: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Selected:
    """The controller chose leaves to grow."""

    name: ClassVar[str] = "select"
    leaves: Counts  # (leaf, width)


@dataclass(frozen=True, slots=True)
class Transition:
    """The running leaves changed (ArborKV's Transition).

    Attributes:
        leaves: the leaves that run now.
        previous: the leaves that ran before.
        distance: edges from each leaf to the nearest previous one, summed.
    """

    name: ClassVar[str] = "transition"
    leaves: tuple[int, ...]
    previous: tuple[int, ...]
    distance: int


@dataclass(frozen=True, slots=True)
class Limited:
    """What a budget that is a part of full retention allows, as blocks begin to grow or have ended.

    Attributes:
        tokens: the most that could be held since the last such event, of all searches that share
            it.
        retained: the most that full retention of this search has held so far.
        expansion: the most that one expansion was, where it was more than the part. Written only
            where it was.
    """

    name: ClassVar[str] = "limit"
    tokens: int
    retained: int
    expansion: int = field(default=0, metadata=ONLY_IF_SET)


@dataclass(frozen=True, slots=True)
class Pressure:
    """More slots were needed than were free (ArborKV's Pressure)."""

    name: ClassVar[str] = "pressure"
    needed: int
    free: int
    limit: int


Cause = Literal["transition", "pressure", "close", "clock"]


@dataclass(frozen=True, slots=True)
class Allocated:
    """A retention policy divided the available room among blocks.

    Attributes:
        policy: its name.
        cause: the event that asked.
        room: slots the offered blocks may keep together.
        offered: number of blocks it could take from.
        nodes: (block, tokens before, tokens kept) of each block that lost some.
        signals: the columns of `retention.base.Blocks` that the allocator read, a value for each of
            `nodes`; null is never.
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
    """Tokens left the device.

    Attributes:
        nodes: how many, per block.
        stored: how many of them a lower tier took, per block; written only where there are any.
    """

    name: ClassVar[str] = "evict"
    cause: Cause
    nodes: Counts
    kv: KV
    stored: Counts = field(default=(), metadata=ONLY_IF_SET)


@dataclass(frozen=True, slots=True)
class Discarded:
    """KV in lower tiers was given up: for want of room, with its block, or computed again.

    Attributes:
        nodes: tokens per block.
        taken: how many of them siblings with equal tokens took, by their new block; written only
            where there are any.
    """

    name: ClassVar[str] = "discard"
    nodes: Counts
    kv: KV
    taken: Counts = field(default=(), metadata=ONLY_IF_SET)


@dataclass(frozen=True, slots=True)
class Rehydrated:
    """Missing tokens of a path came back.

    Attributes:
        nodes: tokens regained, per block.
        mode: computed again, or copied back from a lower tier.
        repeated: resident tokens that were computed again: the rest of a span, or written over a
            gap.
        shared: of `nodes`, tokens that took a sibling's KV of the same forward. Written only where
            there are any.
    """

    name: ClassVar[str] = "rehydrate"
    nodes: Counts
    mode: Literal["recompute", "fetch"]
    kv: KV
    repeated: int = 0
    shared: int = field(default=0, metadata=ONLY_IF_SET)


@dataclass(frozen=True, slots=True)
class Shared:
    """Missing tokens took the KV of equal ones: of another problem's prompt, a sibling, or a file.

    Attributes:
        nodes: how many, per block.
        source: where that KV was; written only where it was a file.
    """

    name: ClassVar[str] = "share"
    nodes: Counts
    kv: KV
    source: Literal["device", "file"] = field(default="device", metadata=ONLY_IF_SET)


@dataclass(frozen=True, slots=True)
class Merged:
    """Blocks that closed gave back the slots of their first tokens, which siblings hold too.

    Attributes:
        nodes: (block, sibling, tokens) of each; of several siblings the first.
    """

    name: ClassVar[str] = "merge"
    nodes: tuple[tuple[int, int, int], ...]
    kv: KV


@dataclass(frozen=True, slots=True)
class Compared:
    """A prompt was compared with an earlier one whose KV is on the device, before it was read
    (RKSC's ASKS, lossy).

    Where it is `shared`, the search reads the earlier prompt, and nothing that it writes is exact.

    Attributes:
        tokens: of the prompt.
        other_tokens: of the earlier one.
        common: tokens that both begin with.
        text: the prompt's own tokens that the earlier one does not have.
        ids: the earlier prompt's tokens in their place.
        similarity: of these and those, weighted by layer.
        threshold: the least similarity that is enough.
        layers: of the model that were run for it.
        rows: tokens that were run through them.
    """

    name: ClassVar[str] = "compare"
    tokens: int
    other_tokens: int
    common: int
    text: str
    ids: tuple[int, ...]
    similarity: float
    threshold: float
    shared: bool
    layers: int
    rows: int
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class Audited:
    """The problem was also searched from its own prompt, after a search from a similar one.

    Attributes:
        answer: of the search from its own prompt.
        same: whether the two answers are equal.
    """

    name: ClassVar[str] = "audit"
    answer: str | None
    same: bool
    elapsed_s: float


ForwardKind = Literal["prefill", "decode", "verify", "rehydrate"]


@dataclass(frozen=True, slots=True)
class Forwarded:
    """Forward passes of one kind ran.

    There is one event per prefill, rehydration and question. Decode steps between two of these
    share one event in detail ``events``, and have one each in ``steps`` and ``tokens``.

    Attributes:
        kind: purpose; a question's forward also recomputes what its paths miss.
        rows: rows run through the model.
        steps: forward passes.
        read_tokens: keys read if every row read its whole path by itself.
        unique_read_tokens: keys the cascade reads: each shared span once.
        kv: slots after the last of them.
        peak: most device slots at any instant of the run so far, with those of the staging buffer.
        held: device slots, summed over the steps; 0 in traces older than this field.
        streamed_bytes: KV that attention read in host memory; written only where there was any.
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
    streamed_bytes: int = field(default=0, metadata=ONLY_IF_SET)


@dataclass(frozen=True, slots=True)
class Sampled:
    """Tokens were sampled, one per decoding block; only in detail ``tokens``.

    Attributes:
        logprobs: log probability of each token.
        alternatives: the most probable ones in its place; written only where a
            request of a server asks for them.
        drawn: after temperature and cut-offs.
    """

    name: ClassVar[str] = "sample"
    nodes: tuple[int, ...]
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    alternatives: tuple[tuple[tuple[int, float], ...], ...] = field(
        default=(), metadata=ONLY_IF_SET
    )
    drawn: tuple[float, ...] = field(default=(), metadata=ONLY_IF_SET)


# Detail of decoding: many steps per `Forwarded`; one each; one each and its tokens (`Sampled`).
Detail = Literal["events", "steps", "tokens"]


@dataclass(frozen=True, slots=True)
class Verified:
    """Candidates were valued.

    Attributes:
        values: in the order of `nodes`.
        scores: of the last step of each alone, likewise; written only where values are of whole
            paths.
        confidences: of each candidate, from the generation; compared by a gate (CGEE level 1).
        skipped: the gate was decisive, and the values follow from the confidences.
        audited: values of the verification that was computed to be compared with these.
        exit_layer: of each candidate, the layer its question left after (CGEE level 2); -1 where
            there was none.
        layers: of the model.
        entropy: of each candidate, its question's uncertainty after each layer; null where it was
            not looked at.
    """

    name: ClassVar[str] = "verify"
    verifier: str
    nodes: tuple[int, ...]
    values: tuple[float, ...]
    asked: int
    elapsed_s: float
    scores: tuple[float, ...] = field(default=(), metadata=ONLY_IF_SET)
    confidences: tuple[float, ...] = field(default=(), metadata=ONLY_IF_SET)
    skipped: bool = field(default=False, metadata=ONLY_IF_SET)
    audited: tuple[float, ...] = field(default=(), metadata=ONLY_IF_SET)
    exit_layer: tuple[int, ...] = field(default=(), metadata=ONLY_IF_SET)
    layers: int = field(default=0, metadata=ONLY_IF_SET)
    entropy: tuple[tuple[float, ...], ...] = field(default=(), metadata=ONLY_IF_SET)

    @property
    def agrees(self) -> bool | None:
        """Whether the preferred candidate is also a best one by the audited values; None without
        an audit."""
        if not self.audited:
            return None
        return self.audited[preferred(self.values)] == max(self.audited)


@dataclass(frozen=True, slots=True)
class Scored:
    """The model of a verifier scored steps, in an engine of its own; comes before `verify`.

    Attributes:
        verifier: its name.
        steps: scores that were computed.
        path_tokens: tokens of their paths: what computing each from nothing would run.
        computed: tokens run through the model.
        recomputed: those of them whose KV had been evicted.
        peak: most slots that this search held in that engine so far.
    """

    name: ClassVar[str] = "score"
    verifier: str
    steps: int
    path_tokens: int
    computed: int
    recomputed: int
    peak: int
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class Pruned:
    """The search abandoned blocks."""

    name: ClassVar[str] = "prune"
    nodes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Terminal:
    """A path ended, with its answer.

    Attributes:
        guessed: the text does not mark its answer; the task took, for example, its last number.
            Written only where it is true.
        cut: a limit of paths ended it. Written only where it is true.
    """

    name: ClassVar[str] = "terminal"
    node: int
    answer: str | None
    guessed: bool = field(default=False, metadata=ONLY_IF_SET)
    cut: bool = field(default=False, metadata=ONLY_IF_SET)


@dataclass(frozen=True, slots=True)
class Answered:
    """The answer of the run.

    Attributes:
        node: the last block of its path; null without an answer.
        text: the answer.
        score: value of the answer's last block; null where it was not judged.
        correct: verdict of the task's grader; null where it cannot grade.
        guessed: as in `terminal`.
    """

    name: ClassVar[str] = "answer"
    node: int | None
    path: tuple[int, ...]
    text: str | None
    score: float | None
    correct: bool | None
    guessed: bool = field(default=False, metadata=ONLY_IF_SET)


@dataclass(frozen=True, slots=True)
class Ended:
    """Last event of a run, with the run's own counters (`Metrics`).

    Attributes:
        nodes: number of blocks, the root included.
        limit: the limit that ended the run, by the name of its setting.
    """

    name: ClassVar[str] = "end"
    status: Literal["solved", "exhausted", "cut", "limit", "timeout", "interrupted", "error"]
    nodes: int
    metrics: dict[str, float] = field(default_factory=dict)
    limit: ReachedLimit | None = field(default=None, metadata=ONLY_IF_SET)


Event = (
    Header
    | Opened
    | Boundary
    | BranchesStopped
    | Selected
    | Transition
    | Limited
    | Pressure
    | Allocated
    | Evicted
    | Discarded
    | Rehydrated
    | Shared
    | Merged
    | Compared
    | Audited
    | Forwarded
    | Sampled
    | Scored
    | Verified
    | Pruned
    | Terminal
    | Answered
    | Ended
)

Listener = Callable[[Event], None]


def preferred(values: Sequence[float]) -> int:
    """The place of the largest value, of equal ones the first."""
    return max(range(len(values)), key=lambda place: values[place])


EVENTS: tuple[type[Event], ...] = get_args(Event)
