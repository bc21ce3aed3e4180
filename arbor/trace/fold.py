"""Replay: a run's state, folded event by event, with the inconsistencies of its trace."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from arbor.events import (
    KV,
    Allocated,
    Answered,
    Boundary,
    Discarded,
    Ended,
    Event,
    Evicted,
    Forwarded,
    Header,
    Limited,
    Merged,
    Opened,
    Pressure,
    Pruned,
    Rehydrated,
    Shared,
    Terminal,
    Transition,
    Verified,
)
from arbor.metrics import Metrics, MetricsFold
from arbor.trace.read import Trace
from arbor.trace.write import to_line, to_record, without_words
from arbor.tree import NodeState

MOST_PROBLEMS = 100  # a damaged trace fails everywhere; the first hundred suffice


@dataclass(slots=True)
class Block:
    """A thought block of a trace.

    Attributes:
        id, parent, index, depth: its place in the tree; `parent` is None for the root.
        tokens: its length, 0 while it is open.
        resident: number of its tokens on the device, 0 while it is open.
        moved: tokens that came back minus tokens that left while it was open, at most 0.
        stored: number of its tokens whose KV lower tiers hold.
        text: its text, empty while it is open.
        value: the last verifier's value, if `verified`.
        state: see `arbor.tree.NodeState`.
        answer: the answer of its path, if it is terminal.
    """

    id: int
    parent: int | None
    index: int
    depth: int
    tokens: int = 0
    resident: int = 0
    moved: int = 0
    stored: int = 0
    text: str = ""
    value: float = 0.0
    verified: bool = False
    state: NodeState = NodeState.OPEN
    answer: str | None = None
    children: list[int] = field(default_factory=list)


class Replay:
    """A listener that folds events into the state of a run, live or from a trace.

    Attributes:
        blocks: every block so far, by id.
        running: leaves decoding now.
        kv: slots per tier, from the last event with a `kv` field.
        series: (event number, `KV`) of each such event: the memory plot.
        answered: the answer; None before it.
        ended: the end; None before it.
        problems: inconsistencies found so far, one sentence each.
        events: number of events so far.
        peak: most device slots so far, with temporary ones and the staging buffer.
    """

    def __init__(self) -> None:
        self.header: Header | None = None
        self.blocks: dict[int, Block] = {}
        self.running: tuple[int, ...] = ()
        self.kv = KV(0)
        self.series: list[tuple[int, KV]] = []
        self.answered: Answered | None = None
        self.ended: Ended | None = None
        self.problems: list[str] = []
        self.events = 0
        self.peak = 0
        self._most = 0  # held at any instant since the last `Limited`
        self._allowed = 0  # the most that any `Limited` allowed
        self._held = 0  # tokens of closed blocks on the device
        self._stored = 0  # tokens in lower tiers
        self._open_blocks = 0
        self._prompt: Block | None = None  # the root, until all of it is computed
        self._uncomputed = 0  # its tokens that no forward pass has computed yet
        self._time = 0.0
        self._foreign = False  # the run may have counted events of unknown types
        self._fold = MetricsFold(clock=lambda: self._time)

    @classmethod
    def of(cls, trace: Trace) -> Self:
        """The state at the end of a trace, with the inconsistencies of the trace and its file."""
        replay = cls()
        for _ in replay.steps(trace):
            pass
        return replay

    def steps(self, trace: Trace) -> Iterator[Event]:
        """Feeds a trace and yields each event after folding it; file damage is noted last."""
        self._foreign = trace.unknown > 0
        for event, seconds in zip(trace.events, trace.times, strict=True):
            self.feed(event, seconds)
            yield event
        for gap in trace.gaps:
            self._wrong(f"line {gap.line:,}: event {gap.found:,} instead of {gap.expected:,}")
        for bad in trace.bad:
            self._wrong(str(bad))
        if trace.cut:
            self._wrong("the file is cut off")
        if self.header is None:
            self._wrong("the header is missing")
        if self.ended is None:
            self._wrong("the end is missing")

    def __call__(self, event: Event) -> None:
        """Folds an event without a time of its own."""
        self.feed(event, self._time)

    def feed(self, event: Event, seconds: float) -> None:
        """Folds an event that happened `seconds` after the first."""
        if math.isnan(seconds) or seconds < self._time:
            self._wrong(f"event {self.events:,}: time {seconds} after {self._time}")
        else:
            self._time = seconds
        if self.ended is not None:
            self._wrong(f"event {self.events:,}: '{event.name}' after the end")
        self._fold(event)
        if self._prompt is not None:
            self._prefill(event)
        elif isinstance(event, Shared):
            self._move(event.nodes, +1)
        self._take(event)
        if isinstance(event, Evicted | Discarded | Rehydrated | Shared | Merged):
            self._count(event.kv, borrowed=False)
            # what is discarded to make room is reported next
            self._count_stored(event.kv, fewer=not isinstance(event, Discarded))
        elif isinstance(event, Forwarded):
            self._count(event.kv, borrowed=event.kind == "verify")
            self._within_budget(event.peak)
            self.peak = max(self.peak, event.peak)
        self.events += 1

    def metrics(self) -> Metrics:
        """The counters so far; after the end, with the live run's wall time."""
        return self._fold.metrics()

    @property
    def open_blocks(self) -> int:
        """Number of blocks being decoded; their tokens are unknown until their boundaries."""
        return self._open_blocks

    def _take(self, event: Event) -> None:
        match event:
            case Header():
                if self.events:
                    self._wrong(f"event {self.events:,}: a second header")
                self.header = event
            case Opened():
                self._open(event)
            case Boundary():
                for block in self._find([event.node]):
                    if block.state is not NodeState.OPEN:
                        self._wrong(f"event {self.events:,}: block {block.id} closes twice")
                    if not 0 <= event.given <= len(event.ids):
                        self._wrong(
                            f"event {self.events:,}: {event.given:,} of the {len(event.ids):,} "
                            f"tokens of block {block.id} were given"
                        )
                    block.tokens = len(event.ids)
                    block.text = event.text
                    self._hold(block, block.tokens + block.moved)
                    block.moved = 0
                    self._become(block, NodeState.CLOSED)
                    self._within_length(block)
            case Transition():
                self.running = tuple(block.id for block in self._find(event.leaves))
            case Limited():
                self._allowed = max(self._allowed, event.tokens)
                # a peak may be older than the last such event, and is reported once
                for held, most in ((self._most, event.tokens), (self.peak, self._allowed)):
                    if held > most:
                        self._wrong(
                            f"event {self.events:,}: {held:,} tokens on the device, "
                            f"{most:,} were allowed at most"
                        )
                self._most = 0
            case Evicted():
                self._move(event.nodes, -1)
                self._store(event.stored, +1)
            case Discarded():
                self._store(event.taken, +1)
                self._store(event.nodes, -1)
            case Rehydrated():
                self._move(event.nodes, +1)
                if event.mode == "fetch":
                    self._store(event.nodes, -1)
            case Verified():
                if len(event.nodes) != len(event.values):
                    self._wrong(
                        f"event {self.events:,}: {len(event.values):,} values for "
                        f"{len(event.nodes):,} blocks"
                    )
                for block, value in zip(self._find(event.nodes), event.values, strict=False):
                    block.value, block.verified = value, True
            case Pruned():
                for block in self._find(event.nodes):
                    self._become(block, NodeState.PRUNED)
            case Terminal():
                for block in self._find([event.node]):
                    self._become(block, NodeState.TERMINAL)
                    block.answer = event.answer
            case Answered():
                self.answered = event
                self._find(event.path)
            case Ended():
                self.ended = event
                if event.nodes != len(self.blocks):
                    self._wrong(f"the end counts {event.nodes:,} blocks, not {len(self.blocks):,}")
                self._compare(event.metrics)
            case _:
                pass

    def _open(self, event: Opened) -> None:
        if event.node in self.blocks:
            self._wrong(f"event {self.events:,}: block {event.node} opens twice")
            return
        block = Block(event.node, event.parent, event.index, event.depth)
        self._open_blocks += 1
        if event.parent is None:
            block.tokens = event.tokens
            block.text = event.text
            self._prompt, self._uncomputed = block, block.tokens
            self._become(block, NodeState.CLOSED)
        for parent in self._find([] if event.parent is None else [event.parent]):
            parent.children.append(block.id)
            if block.depth != parent.depth + 1:
                self._wrong(f"event {self.events:,}: block {block.id} has depth {block.depth}")
        self.blocks[block.id] = block

    def _prefill(self, event: Event) -> None:
        """The prompt's next piece; a prompt longer than a lossy budget loses tokens between pieces.

        Any event of the search means that all of it is computed.
        """
        assert self._prompt is not None
        if isinstance(event, Forwarded) and event.kind == "prefill":
            piece = min(event.rows, self._uncomputed)
        elif isinstance(event, Shared):
            piece = min(sum(count for _, count in event.nodes), self._uncomputed)
        elif isinstance(event, Limited | Pressure | Allocated | Evicted):
            return
        else:
            piece = self._uncomputed
        self._hold(self._prompt, self._prompt.resident + piece)
        self._uncomputed -= piece
        if not self._uncomputed:
            self._prompt = None

    def _hold(self, block: Block, resident: int) -> None:
        self._held += resident - block.resident
        block.resident = resident

    def _become(self, block: Block, state: NodeState) -> None:
        self._open_blocks -= block.state is NodeState.OPEN
        block.state = state

    def _move(self, nodes: Iterable[tuple[int, int]], sign: int) -> None:
        counts = dict(nodes)
        for block in self._find(counts):
            if block.state is NodeState.OPEN:  # its length is unknown until its boundary
                block.moved += sign * counts[block.id]
                continue
            self._hold(block, block.resident + sign * counts[block.id])
            self._within_length(block)

    def _store(self, nodes: Iterable[tuple[int, int]], sign: int) -> None:
        """Tokens that lower tiers took or gave up."""
        counts = dict(nodes)
        for block in self._find(counts):
            held = block.stored + sign * counts[block.id]
            grows = block.state is NodeState.OPEN  # its length is unknown until its boundary
            if held < 0 or (not grows and held > block.tokens):
                self._wrong(
                    f"event {self.events:,}: lower tiers would hold {held} of the "
                    f"{block.tokens} tokens of block {block.id}"
                )
            self._stored += max(0, held) - block.stored
            block.stored = max(0, held)

    def _count_stored(self, kv: KV, fewer: bool) -> None:
        """Compares what lower tiers hold after an event with the sum of the events so far.

        Args:
            kv: the event's slots.
            fewer: whether they may hold fewer tokens.
        """
        held = kv.host + kv.compressed + kv.disk
        if held > self._stored or (held < self._stored and not fewer):
            self._wrong(
                f"event {self.events:,}: lower tiers hold {held:,} tokens, the events so far add "
                f"up to {self._stored:,}"
            )

    def _within_length(self, block: Block) -> None:
        if not 0 <= block.resident <= block.tokens:
            self._wrong(
                f"event {self.events:,}: block {block.id} would hold {block.resident} "
                f"of its {block.tokens} tokens"
            )

    def _count(self, kv: KV, borrowed: bool) -> None:
        """Compares an event's slots with the sum of the events so far.

        Args:
            kv: the event's slots.
            borrowed: whether a question may hold slots besides those of blocks; open blocks, whose
                tokens are not known yet, may in any case.
        """
        self.kv = kv
        self.series.append((self.events, kv))
        self.peak = max(self.peak, kv.device)
        self._within_budget(kv.device)
        self._most = max(self._most, kv.device)
        held = self._held - kv.shared
        if kv.device < held or (kv.device > held and not borrowed and not self.open_blocks):
            self._wrong(
                f"event {self.events:,}: the device holds {kv.device:,} tokens, "
                f"the events so far add up to {held:,}"
            )

    def _compare(self, reported: Mapping[str, Any]) -> None:
        """Compares the run's own counters with those of its events; seconds are exempt."""
        metrics = self._fold.metrics()
        folded = asdict(metrics) | metrics.to_dict()  # those that are left out at 0 too
        for name in [] if self._foreign else sorted(reported.keys() & folded.keys()):
            value = reported[name]
            if type(value) is int and value != folded[name]:
                self._wrong(f"the end counts {name} {value:,}, the events {folded[name]:,}")

    def _within_budget(self, tokens: int) -> None:
        kv = self.header.kv if self.header else {}
        if "part" in kv:  # what it allows is reported afterwards
            return
        budget = kv.get("pool_tokens", kv.get("budget_tokens"))
        if budget is not None and tokens > budget:
            self._wrong(
                f"event {self.events:,}: {tokens:,} tokens on the device, the budget is {budget:,}"
            )

    def _find(self, ids: Iterable[int]) -> list[Block]:
        found = []
        for node in ids:
            if node in self.blocks:
                found.append(self.blocks[node])
            else:
                self._wrong(f"event {self.events:,}: unknown block {node}")
        return found

    def _wrong(self, sentence: str) -> None:
        if len(self.problems) < MOST_PROBLEMS:
            self.problems.append(sentence)


def budget_of(trace: Trace) -> int | None:
    """Slots of a run's budget; of a part of full retention, the most it came to; None: unknown."""
    fold = MetricsFold()
    for event in trace.events:
        if isinstance(event, Header | Limited):
            fold(event)
    return fold.metrics().budget_tokens or None


def canonical(trace: Trace, words: bool = True) -> list[str]:
    """A trace as lines of JSON, without times, run id, version and machine.

    Fields whose names end in ``_s`` are times; floats keep five significant digits. Without
    `words`, what holds any is left out, as ``--trace-text none`` does.
    """
    records = map(to_record, trace.events)
    if not words:
        records = map(without_words, records)
    return [to_line(_steady(record)).decode() for record in records]


_PASSING = {"header": ("run", "created", "arbor", "device")}


def _steady(record: dict[str, Any]) -> dict[str, Any]:
    for name in _PASSING.get(record["e"], ()):
        record.pop(name, None)
    steady: dict[str, Any] = _without_times(record)
    return steady


def _without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_times(v) for k, v in value.items() if not k.endswith("_s")}
    if isinstance(value, list | tuple):
        return [_without_times(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.5g}")
    return value
