"""TreeState: the engine's knowledge of the open tree, read and reported to by its parts."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from arbor.engine.last_logits import LastLogits
from arbor.engine.pieces import contexts_of
from arbor.events import KV, Detail, Event, Listener
from arbor.memory import KVMemory
from arbor.model.sharing import Context
from arbor.retention.block_table import BlockTable
from arbor.retention.future_reads import FutureReads
from arbor.retention.policy import Protect
from arbor.retention.token_statistics import TokenStatistics
from arbor.tree import Node, NodeState, ThoughtTree


def ignore(event: Event) -> None:
    """Discard an event."""


@dataclass(frozen=True, slots=True)
class RunHooks:
    """The hooks of one run.

    Attributes:
        emit: listener for everything that happens.
        detail: how finely decoding is reported.
        outlook: probability that a later operation reads the path to a block, by node id.
        interrupted: asked after every decode step whether to give up the blocks in progress.
    """

    emit: Listener = ignore
    detail: Detail = "events"
    outlook: Callable[[], Mapping[int, float]] = dict
    interrupted: Callable[[], bool] = bool


class TreeState:
    """The state of one opened tree, shared by the parts of the engine.

    Args:
        tree: holds only its root.
        memory: attached to the tree.
        protect: the policy's; says which tokens the figures of blocks count.
        run: the hooks of the run.
        reads: future reads of a recorded run, for the clairvoyant policy.

    Attributes:
        run: the run in progress; after `finish` one that listens to nothing.
        logits: after blocks' last tokens, where they are known.
        table: figures of blocks that policies read.
        statistics: attention that tokens received.
        computed: ids of the blocks computed at least once; their missing tokens count as
            rehydrated, not prefilled.
        hidden: ids of the blocks that nothing attends to.
        before_hiding: ids of the blocks computed before these were hidden; empty while nothing is.
        operation: number of the operation in progress.
        upcoming: blocks at whose end each later wave of the operation begins, the next wave first.
    """

    def __init__(
        self,
        tree: ThoughtTree,
        memory: KVMemory,
        protect: Protect,
        run: RunHooks,
        reads: FutureReads | None = None,
    ) -> None:
        self.tree = tree
        self.memory = memory
        self.run = run
        self.reads = reads
        self.logits = LastLogits()
        self.table = BlockTable(protect.tail)
        self.table.touch(tree.root)
        self.statistics = TokenStatistics(threshold=protect.threshold)
        self.computed: set[int] = set()
        self.hidden: frozenset[int] = frozenset()
        self.before_hiding: frozenset[int] = frozenset()
        self.operation = 0
        self.upcoming: list[list[Node]] = []
        self._clock = 0
        # a heap of (-end, node id), from which pruned blocks are removed when they come up, and
        # the ends in it
        self._ends = [(-tree.root.end, tree.root.id)]
        self._reached = {tree.root.id: tree.root.end}

    # The run

    def emit(self, event: Event) -> None:
        """Report an event to the run's listener."""
        self.run.emit(event)

    def finish(self) -> None:
        """End of the run: its listener, outlook and interruption are let go; the tree stays
        usable."""
        self.run = RunHooks()

    @property
    def kv(self) -> KV:
        """Slots per tier now."""
        return KV(device=self.memory.used)

    # What the parts report

    def changed(self, nodes: Iterable[Node]) -> None:
        """Record that these blocks grew, closed, were valued, or gained or lost tokens."""
        for node in nodes:
            self.table.touch(node)

    def used(self, path: Sequence[Node]) -> None:
        """Record that a forward read these blocks."""
        self._clock += 1
        self.changed(path)
        self.table.use(path, self._clock)

    def mark_computed(self, nodes: Iterable[Node]) -> None:
        """Record that the tokens of these blocks were run through the model."""
        for node in nodes:
            self.computed.add(node.id)
            if node.end > self._reached.get(node.id, 0):
                self._reached[node.id] = node.end
                heapq.heappush(self._ends, (-node.end, node.id))

    @property
    def longest(self) -> int:
        """Tokens of the longest path the search has not given up."""
        while self._ends[0][1] and self.tree[self._ends[0][1]].state is NodeState.PRUNED:
            heapq.heappop(self._ends)
        return -self._ends[0][0]

    def begin_operation(self) -> None:
        """Count one more operation."""
        self.operation += 1

    def expect(self, waves: Sequence[Sequence[Node]]) -> None:
        """Replace `upcoming`."""
        self.upcoming = [list(wave) for wave in waves]

    def observe(
        self, slots: NDArray[np.int64], mass: NDArray[np.float32], queries: NDArray[np.int64]
    ) -> None:
        """Attention of one forward.

        Args:
            slots: int64 [S], distinct.
            mass: float32 [S], attention each received, summed over rows (each row: mean over layers
                and heads).
            queries: int64 [S], rows that could see it.
        """
        owner = self.memory.table.owner[slots]
        mine = owner >= 0
        owner = owner[mine]
        position = self.memory.table.position[slots[mine]]
        for node_id in np.unique(owner):
            node = self.tree[int(node_id)]
            self.statistics.open(node.id, node.start, len(node.tokens))
        self.statistics.observe(owner, position, mass[mine], queries[mine])

    # What forwards read

    def contexts(self, nodes: Sequence[Node]) -> list[Context]:
        """The context of a token after each of these blocks."""
        return contexts_of(nodes, self.hidden)

    def missing(self, node: Node) -> NDArray[np.int64]:
        """Offsets of the tokens that are not as full retention would hold them, increasing."""
        held = node.span.exact if self.sees_all(node) else node.span.resident
        return np.flatnonzero(~held)

    def sees_all(self, node: Node) -> bool:
        """Whether a block's tokens attend to every block above it."""
        if not self.hidden or node.id in self.before_hiding:
            return True
        return not any(above.id in self.hidden for above in node.path[:-1])

    def are_exact_after(self, nodes: Sequence[Node]) -> list[bool]:
        """Whether a token after each of these blocks is exact: every token before it is, and it
        attends to all of them."""
        known: dict[int, bool] = {}
        for each in self.tree.paths(nodes):
            above = each.parent is None or known[each.parent.id]
            own = above and each.id not in self.hidden
            known[each.id] = own and bool(each.span.exact.all())
        return [known[node.id] for node in nodes]

    @contextmanager
    def hiding(self, nodes: Sequence[Node]) -> Iterator[None]:
        """Within, nothing attends to these blocks: neither what is computed for the first time, nor
        logits."""
        known = dict(self.logits)
        self.logits.clear()
        self.hidden = frozenset(node.id for node in nodes)
        self.before_hiding = frozenset(self.computed)
        try:
            yield
        finally:
            self.hidden = self.before_hiding = frozenset()
            self.logits.clear()
            self.logits.update(known)
