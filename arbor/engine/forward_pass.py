"""ForwardPasses: the model's forwards, observed, committed and reported to the trees they serve."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
from arbor.engine.stopwatch import Stopwatch, nvtx_range
from arbor.errors import ArborError
from arbor.events import Forwarded, ForwardKind
from arbor.memory import KVMemory
from arbor.memory.last_tokens import LastTokens
from arbor.memory.out_of_memory import forward_too_large, is_out_of_memory
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
from arbor.model.sharing import SharedPrefix, Sharing, share
from arbor.tree import NO_SLOT, Certainty, NodeState, ThoughtTree


class DecodeBatch:
    """Lays out decode steps for rows as a whole: one array for each thing a step needs of every
    row.

    Args:
        memory: gives the slots.
        layers: of the model.
        levels: which shared spans are read once for all rows.

    Attributes:
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
        self._nodes = [row.node for row in rows]
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
        return len(self._nodes)

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
        last = LastTokens.of(self._nodes)
        before = last.spans.slot[last.at - 1]
        near = np.where((last.length > 1) & (before != NO_SLOT), before + 1, self._first_slots)
        slots = self._memory.append(
            last, near, exact=self._exact, rounded=self._rounded, depth=self._layers
        )
        count = len(slots)
        tails = zip(
            (last.begin + self._tail_from).tolist(),
            (last.begin + last.length).tolist(),
            strict=True,
        )
        held = last.spans.slot
        return SegmentTable(
            contexts=self._contexts,
            context_lengths=self._context_lengths,
            tails=[held[a:b] for a, b in tails],
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


class ForwardPasses:
    """Runs the model over the open trees.

    Args:
        state: of the open trees.
        runner: the model.
        observer: collects what the policy wants.
        levels: which shared spans are read once for all rows.
    """

    def __init__(
        self, state: ForestState, runner: ModelRunner, *, observer: Observer, levels: LevelRule
    ) -> None:
        self.runner = runner
        self._state = state
        self._memory = state.memory
        self.observer = observer
        self.levels = levels
        self._stopwatch = Stopwatch(runner.device)  # of the steps whose time was not read yet

    def run(self, parts: Sequence[Part], batch: DecodeBatch | None = None) -> Tensor:
        """One forward over segments, reported at once, and over the rows that decode if there are
        any, reported with the decode steps after it.

        Args:
            parts: at least one; a tree at most once.
            batch: the rows.

        Returns:
            logits [n, V] float32: of each row, then where the segments ask for them.
        """
        for part in parts:
            self.report_steps(self._state.trees[part.tree])
        self._read_times()
        segments = [segment for part in parts for segment in part.segments]
        before = self._streamed
        decoding = 0 if batch is None else len(batch)
        with self._stopwatch.running():
            tables = [SegmentTable.of(segments)] if segments else []
            if batch is not None:
                tables.insert(0, batch.table())
            table = joined(tables)
            shared = share(table.contexts, table.counts.tolist(), self.levels)
            plan = plan_table(table, shared)
            kind: ForwardKind = "decode" if decoding else parts[0].kind
            with (
                nvtx_range(kind),
                nvtx_range(parts[0].kind) if decoding else nullcontext(),
                self.explaining_out_of_memory(kind, plan.rows),
            ):
                logits = self._forward(plan, self._leave(parts, table, decoding))
        self._memory.commit()
        elapsed_s = self._stopwatch.take() / plan.rows  # of each row
        streamed = self._streamed - before
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
                held=self._held(opened),
                elapsed_s=elapsed_s * rows,
                streamed=streamed * rows // plan.rows,
            )
            self._report(opened, part.kind, once)
        return logits

    def timing(self) -> AbstractContextManager[None]:
        """Count the work within as part of the decode steps that are reported next."""
        return self._stopwatch.running()

    def step(self, batch: DecodeBatch) -> Tensor:
        """One decode step, reported together with those after it; logits [n, V] float32."""
        plan = batch.plan()
        before = self._streamed
        with nvtx_range("decode"), self.explaining_out_of_memory("decode", plan.rows):
            logits = self._forward(plan)
        self._memory.commit()
        self._count(plan, batch, self._streamed - before)
        return logits

    def report_steps(self, opened: OpenTree) -> None:
        """Report a tree's decode steps since its last forward of another kind."""
        if opened.steps.steps:
            self._read_times()
            steps, opened.steps = opened.steps, Steps()
            self._report(opened, "decode", steps)

    @property
    def _streamed(self) -> int:
        """Bytes of KV in host memory that attention has read so far."""
        staging = self._memory.staging
        return 0 if staging is None else staging.moved_bytes

    def _count(self, plan: ForwardPlan, batch: DecodeBatch, streamed: int) -> None:
        """Count one step for each tree that has rows in it.

        Args:
            plan: of the forward.
            batch: the rows.
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
            steps.held += self._held(opened)
            steps.streamed += streamed * rows // count

    @property
    def _staged(self) -> int:
        """Most tokens that the staging buffer ever held."""
        staging = self._memory.staging
        return 0 if staging is None else staging.peak

    def _held(self, opened: OpenTree) -> int:
        return self._memory.used_by(opened.tree)

    def _read_times(self) -> None:
        """Divide the time of the steps since the last call among their rows."""
        if any(opened.steps.untimed_rows for opened in self._state.trees.values()):
            self._share_time(self._stopwatch.take())

    def _share_time(self, elapsed_s: float) -> None:
        untimed = [each.steps for each in self._state.trees.values() if each.steps.untimed_rows]
        rows = sum(steps.untimed_rows for steps in untimed)
        for steps in untimed:
            steps.elapsed_s += elapsed_s * steps.untimed_rows / rows
            steps.untimed_rows = 0

    def _report(self, opened: OpenTree, kind: ForwardKind, what: Steps) -> None:
        opened.emit(
            Forwarded(
                kind=kind,
                rows=what.rows,
                steps=what.steps,
                read_tokens=what.read,
                unique_read_tokens=what.unique,
                kv=opened.kv,
                peak=self._memory.peak_of(opened.tree) + self._staged,
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

    def _forward(self, plan: ForwardPlan, leave: Leave | None = None) -> Tensor:
        pool = self._memory.pool
        if self._memory.debug:
            pieces = (piece for context in plan.table.contexts for piece in context)
            for piece in {id(each): each for each in pieces}.values():
                self._memory.check_reads(piece.slots, piece.positions)
        watched: dict[str, Any] = {} if leave is None else {"leave": leave}
        asked = self.observer.asked(plan)
        result = self.runner.forward(plan, pool, **asked, **watched)
        if asked:
            self.observer.take(plan, result)
        return result.logits

    @contextmanager
    def explaining_out_of_memory(self, kind: ForwardKind, rows: int = 0) -> Iterator[None]:
        """Turn an out-of-memory error within into one that names what holds the memory, and a
        budget that leaves room."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if isinstance(error, ArborError) or not is_out_of_memory(error):
                raise
            alive = [node for node in self._state.forest if node.state is not NodeState.PRUNED]
            raise forward_too_large(
                error,
                self.runner.device,
                f"{kind} of {rows:,} tokens" if rows else kind,
                weights=self.runner.weight_bytes,
                slots=self._memory.slots,
                bytes_per_token=self._memory.bytes_per_token,
                least=max(node.end for node in alive) + max(rows, 1),
            ) from error


def _any_of(several: Sequence[Leave]) -> Leave:
    """The rows that any of these lets leave."""
    if len(several) == 1:
        return several[0]

    def leave(layer: int, state: Tensor, rows: Tensor) -> Tensor | None:
        found = [each for ask in several if (each := ask(layer, state, rows)) is not None]
        return torch.stack(found).any(0) if found else None

    return leave
