"""ForwardPasses: the model's forwards, observed, committed and reported to the trees they serve."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from arbor.engine.forest_state import ForestState
from arbor.engine.hooks import Way
from arbor.engine.observer import Observer
from arbor.engine.open_tree import OpenTree, Steps
from arbor.engine.operation import Row
from arbor.errors import ArborError
from arbor.events import Forwarded, ForwardKind
from arbor.memory import KVMemory
from arbor.memory.out_of_memory import forward_too_large
from arbor.memory.slots import LastTokens
from arbor.model.layers import Leave
from arbor.model.level_rule import LevelRule
from arbor.model.plan import (
    ForwardPlan,
    Segment,
    SegmentTable,
    joined,
    plan_table,
)
from arbor.model.runner import ModelRunner
from arbor.model.sharing import SharedPrefix, Sharing
from arbor.support.shortage import is_out_of_memory
from arbor.tree import NO_SLOT, Certainty, NodeState, ThoughtTree


class Stopwatch:
    """Adds up stretches of work on a device.

    A CUDA call returns when its work is queued, so there a stretch lies between two events in the
    queue, which are read once the device has passed them. Elsewhere the work is done when the call
    returns, and the host's clock measures it.

    Args:
        device: where the work runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds = 0.0
        # events around stretches not read yet, in the order of the queue
        self._unread: deque[tuple[Any, Any]] = deque()

    def start(self) -> Any:
        """Begin a stretch; what to give `stop`."""
        return self._event() if self._device.type == "cuda" else time.perf_counter()

    def stop(self, began: Any) -> None:
        """Count what was done since; not to be called where it has failed."""
        if self._device.type == "cuda":
            self._unread.append((began, self._event()))
            while self._unread and self._unread[0][1].query():
                self._read()
        else:
            self._seconds += time.perf_counter() - began

    def take(self) -> float:
        """Seconds of all stretches since the last call; waits for the device to finish them."""
        if self._unread:
            self._unread[-1][1].synchronize()
        while self._unread:
            self._read()
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _event(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _read(self) -> None:
        begin, end = self._unread.popleft()
        self._seconds += begin.elapsed_time(end) / 1e3


NVTX_VARIABLE = "ARBOR_NVTX"


def nvtx_is_on() -> bool:
    """Whether the variable `NVTX_VARIABLE` is set and not 0, and torch sees a GPU."""
    return os.environ.get(NVTX_VARIABLE, "0") not in ("", "0") and torch.cuda.is_available()


def nvtx_range(name: str) -> AbstractContextManager[object]:
    """Within it, a profiler that reads NVTX (Nsight Systems) shows ``arbor.NAME``; phases nest.

    Args:
        name: ``prefill``, ``decode``, ``verify``, ``rehydrate``, ``fetch`` or ``policy``.
    """
    return torch.cuda.nvtx.range(f"arbor.{name}") if nvtx_is_on() else nullcontext()


class DecodeBatch:
    """Lays out decode steps for rows as a whole: one array for each thing a step needs of every
    row.

    Args:
        levels: which shared spans are read once for all rows.

    Attributes:
        rows: those that it holds.
        trees: of the rows, each once.
        tree: int64 [n], place of each row's tree in `trees`.
    """

    def __init__(self, memory: KVMemory, layers: int, levels: LevelRule) -> None:
        self._memory = memory
        self._layers = layers
        self._sharing = Sharing(levels)
        self.hold(())

    def hold(self, rows: Sequence[Row]) -> None:
        """Take these rows from now on.

        To be called after rows have joined or left, and after what one of them reads has changed.
        """
        self.rows = rows
        self._nodes = [row.node for row in rows]
        self._rows = np.array([node.row for node in self._nodes], np.int64)
        self._starts = np.array([node.start for node in self._nodes], np.int64)
        self._contexts = [row.context for row in rows]
        self._context_lengths = np.array([row.context_length for row in rows], np.int64)
        certainty = np.array([row.certainty for row in rows], np.int8)
        self._exact = certainty == Certainty.EXACT
        self._rounded = certainty == Certainty.ROUNDED
        self._tail_from = np.array([row.tail_from for row in rows], np.int64)
        self._first_slots = np.array([row.first_slot for row in rows], np.int64)
        self._shared: SharedPrefix | None = None
        places: dict[ThoughtTree, int] = {}
        self.tree = np.array([places.setdefault(row.node.tree, len(places)) for row in rows], int)
        self.trees = list(places)

    def __len__(self) -> int:
        return len(self.rows)

    def plan(self) -> ForwardPlan:
        """Plan the step that computes each row's last token, and nothing else."""
        table = self.table()
        if self._shared is None:
            self._shared = self._sharing.of(table.contexts, [1] * len(self))
        return plan_table(table, self._shared)

    def table(self) -> SegmentTable:
        """The segments that compute each row's last token.

        Each is given a slot, next to the one of the token before it if that is free.
        """
        last = LastTokens.of(self._nodes, self._rows, self._starts)
        held = last.spans.slot
        before = held[last.at - 1]
        near = np.where((last.length > 1) & (before != NO_SLOT), before + 1, self._first_slots)
        slots = self._memory.append(
            last, near, exact=self._exact, rounded=self._rounded, depth=self._layers
        )
        count = len(slots)
        begins, ends = last.begin + self._tail_from, last.at + 1
        return SegmentTable(
            contexts=self._contexts,
            context_lengths=self._context_lengths,
            tails=[held[a:b] for a, b in zip(begins.tolist(), ends.tolist(), strict=True)],
            tail_lengths=ends - begins,
            counts=np.ones(count, np.int64),
            ends=last.position + 1,
            ids=last.token,
            positions=last.position,
            write=slots,
            logit_rows=np.arange(count),
            again=np.zeros(count, np.bool_),
        )


@dataclass(slots=True)
class Part:
    """The segments of one tree in a forward, decode steps apart.

    Attributes:
        tree: whose.
        kind: their purpose.
        segments: the tokens to compute.
        ways: those of questions that may leave early, by their place in `segments`.
    """

    tree: ThoughtTree
    kind: ForwardKind
    segments: list[Segment]
    ways: dict[int, Way] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Begun:
    """A decode step that was given to the device.

    Attributes:
        plan: its rows.
        logits: [n, V] float32; a GPU may still be computing them.
        streamed: bytes of KV in host memory that it has read.
    """

    plan: ForwardPlan
    logits: Tensor
    streamed: int


class ForwardPasses:
    """Runs the model over the open trees.

    Args:
        levels: which shared spans are read once for all rows.
    """

    def __init__(
        self,
        state: ForestState,
        runner: ModelRunner,
        *,
        observer: Observer | None = None,
        levels: LevelRule,
    ) -> None:
        self.runner = runner
        self._state = state
        self._memory = state.memory
        self.observer = observer
        self.levels = levels
        self.stopwatch = Stopwatch(runner.device)  # of the steps whose time was not read yet
        self._range = nvtx_range if nvtx_is_on() else nullcontext

    @property
    def may_run_ahead(self) -> bool:
        """Whether a decode step may be given to the device before the host knows its tokens: the
        device works by itself, and nobody looks at the step."""
        return (
            self.runner.is_asynchronous
            and self.observer is None
            and self._memory.staging is None
            and not self._memory.debug
        )

    def run(self, parts: Sequence[Part], batch: DecodeBatch | None = None) -> Tensor:
        """One forward over segments, reported at once, and over the rows that decode if there are
        any, reported with the decode steps after it.

        Args:
            parts: at least one; a tree at most once.

        Returns:
            logits [n, V] float32: of each row, then where the segments ask for them.
        """
        for part in parts:
            self.report_steps(self._state.trees[part.tree])
        self._read_times()
        segments = [segment for part in parts for segment in part.segments]
        decoding = 0 if batch is None else len(batch)
        began = self.stopwatch.start()
        tables = [SegmentTable.of(segments)] if segments else []
        if batch is not None:
            tables.insert(0, batch.table())
        table = joined(tables)
        plan = plan_table(table, Sharing(self.levels).of(table.contexts, table.counts.tolist()))
        kind: ForwardKind = "decode" if decoding else parts[0].kind
        with self._range(kind), self._range(parts[0].kind) if decoding else nullcontext():
            logits, streamed = self._forward(plan, kind, self._leave(parts, table, decoding))
        self.stopwatch.stop(began)
        self._memory.commit()
        elapsed_s = self.stopwatch.take() / plan.rows  # of each row
        if batch is not None:
            self._count(plan, batch, streamed * decoding // plan.rows)
            self._share_time(elapsed_s * decoding)
        first = decoding
        for part in parts:
            mine = slice(first, first + len(part.segments))
            first += len(part.segments)
            rows = int(plan.table.counts[mine].sum())
            opened = self._state.trees[part.tree]
            once = Steps(
                steps=1,
                rows=rows,
                read=int(plan.reads[mine].sum()),
                unique=int(plan.unique_reads[mine].sum()),
                held=self._memory.used_by(opened.tree),
                elapsed_s=elapsed_s * rows,
                streamed=streamed * rows // plan.rows,
            )
            self._report(opened, part.kind, once)
        return logits

    def step(self, batch: DecodeBatch, begun: Begun | None = None) -> Tensor:
        """One decode step, reported together with those after it; logits [n, V] float32.

        Args:
            begun: the same step, if it was begun before.
        """
        if begun is None:
            begun = self.begin(batch)
        self._memory.commit()
        self._count(begun.plan, batch, begun.streamed)
        return begun.logits

    def begin(self, batch: DecodeBatch, ids: Tensor | None = None) -> Begun:
        """Run a decode step whose K/V count for nothing before `step` has counted it.

        Args:
            ids: int64 [n] on the device, each row's last token, where the host does not know it.
        """
        began = self.stopwatch.start()
        plan = batch.plan()
        plan.ids_there = ids
        with self._range("decode"):
            logits, streamed = self._forward(plan, "decode")
        self.stopwatch.stop(began)
        return Begun(plan, logits, streamed)

    def report_steps(self, opened: OpenTree) -> None:
        """Report a tree's decode steps since its last forward of another kind."""
        if opened.steps.steps:
            self._read_times()
            steps, opened.steps = opened.steps, Steps()
            self._report(opened, "decode", steps)

    def _count(self, plan: ForwardPlan, batch: DecodeBatch, streamed: int) -> None:
        """Count one step for each tree that has rows in it.

        Args:
            streamed: bytes it has read in host memory, which are divided among the rows.
        """
        count = len(batch)
        reads, unique = plan.reads[:count], plan.unique_reads[:count]
        whole = len(batch.trees) == 1
        for place, tree in enumerate(batch.trees):
            opened = self._state.trees[tree]
            mine: NDArray[np.int64] | slice = (
                slice(None) if whole else np.flatnonzero(batch.tree == place)
            )
            steps, rows = opened.steps, len(reads[mine])
            steps.steps += 1
            steps.rows += rows
            steps.untimed_rows += rows
            steps.read += int(reads[mine].sum())
            steps.unique += int(unique[mine].sum())
            steps.held += self._memory.used_by(tree)
            steps.streamed += streamed * rows // count

    def _read_times(self) -> None:
        """Divide the time of the steps since the last call among their rows."""
        if any(opened.steps.untimed_rows for opened in self._state.trees.values()):
            self._share_time(self.stopwatch.take())

    def _share_time(self, elapsed_s: float) -> None:
        untimed = [each.steps for each in self._state.trees.values() if each.steps.untimed_rows]
        rows = sum(steps.untimed_rows for steps in untimed)
        for steps in untimed:
            steps.elapsed_s += elapsed_s * steps.untimed_rows / rows
            steps.untimed_rows = 0

    def _report(self, opened: OpenTree, kind: ForwardKind, what: Steps) -> None:
        staging = self._memory.staging
        staged = 0 if staging is None else staging.peak
        opened.emit(
            Forwarded(
                kind=kind,
                rows=what.rows,
                steps=what.steps,
                read_tokens=what.read,
                unique_read_tokens=what.unique,
                kv=opened.kv,
                peak=self._memory.peak_of(opened.tree) + staged,
                elapsed_s=what.elapsed_s,
                held=what.held,
                streamed_bytes=what.streamed,
            )
        )

    def _leave(self, parts: Sequence[Part], table: SegmentTable, decoding: int) -> Leave | None:
        """What is asked between the layers of a forward which questions leave; None where none
        may."""
        of_kind: dict[type[Way], list[tuple[Way, int]]] = {}
        first = decoding
        for part in parts:
            for place, way in part.ways.items():
                of_kind.setdefault(type(way), []).append((way, first + place))
            first += len(part.segments)
        if not of_kind:
            return None
        ends = np.cumsum(table.counts)
        asked = []
        for kind, mine in of_kind.items():
            ways, places = zip(*mine, strict=True)
            at = list(places)
            asked.append(
                kind.watch(self.runner, ways, ends[at].tolist(), table.counts[at].tolist())
            )
        return _any_of(asked)

    def _forward(
        self, plan: ForwardPlan, kind: ForwardKind, leave: Leave | None = None
    ) -> tuple[Tensor, int]:
        """The logits, and how many bytes of KV in host memory attention has read."""
        pool, staging = self._memory.pool, self._memory.staging
        before = 0 if staging is None else staging.moved_bytes
        if self._memory.debug:
            pieces = (piece for context in plan.table.contexts for piece in context)
            for piece in {id(each): each for each in pieces}.values():
                self._memory.check_reads(piece.slots, piece.positions)
        watched: dict[str, Any] = {} if leave is None else {"leave": leave}
        asked = {} if self.observer is None else self.observer.asked(plan)
        try:
            result = self.runner.forward(plan, pool, **asked, **watched)
            if asked and self.observer is not None:
                self.observer.take(plan, result)
        except (RuntimeError, MemoryError) as error:
            if (known := self.explained(error, kind, plan.rows)) is error:
                raise
            raise known from error
        return result.logits, 0 if staging is None else staging.moved_bytes - before

    def explained(self, error: BaseException, kind: ForwardKind, rows: int = 0) -> BaseException:
        """An error; in place of one for want of memory, one that names what holds the memory, and
        a budget that leaves room.

        Args:
            error: raised by a step.
            kind: what it was doing.
            rows: tokens that were to be computed; 0: not known.
        """
        if isinstance(error, ArborError) or not is_out_of_memory(error):
            return error
        alive = [node for node in self._state.forest if node.state is not NodeState.PRUNED]
        return forward_too_large(
            error,
            self.runner.device,
            f"{kind} of {rows:,} tokens" if rows else kind,
            weights=self.runner.weight_bytes,
            slots=self._memory.slots,
            bytes_per_token=self._memory.bytes_per_token,
            least=max(node.end for node in alive) + max(rows, 1),
        )


def _any_of(several: Sequence[Leave]) -> Leave:
    """The rows that any of these lets leave."""
    if len(several) == 1:
        return several[0]

    def leave(layer: int, state: Tensor, rows: Tensor) -> Tensor | None:
        found = [each for ask in several if (each := ask(layer, state, rows)) is not None]
        return torch.stack(found).any(0) if found else None

    return leave
