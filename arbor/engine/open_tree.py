"""OpenTree: one search's tree in the engine, with the hooks of its run."""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from arbor.engine.retained import Account, Lengths, Retained
from arbor.events import KV, Detail, Event, Listener
from arbor.memory import KVMemory
from arbor.retention.future_reads import FutureReads
from arbor.tree import Node, NodeState, ThoughtTree, Tier

logger = logging.getLogger(__name__)


def ignore(event: Event) -> None:
    """Discard an event."""


@dataclass(frozen=True, slots=True)
class RunHooks:
    """The hooks of one run.

    Attributes:
        emit: listener for everything that happens.
        detail: how finely decoding is reported.
        outlook: probability that a later operation reads the path to a block, by node id.
        scores: by which figures the search chooses, by node id; of the others by their values.
        interrupted: asked after every decode step whether to give up the blocks in progress.
    """

    emit: Listener = ignore
    detail: Detail = "events"
    outlook: Callable[[], Mapping[int, float]] = dict
    scores: Callable[[], Mapping[int, float]] = dict
    interrupted: Callable[[], bool] = bool


@dataclass(slots=True)
class Steps:
    """Decode steps of one tree that were not reported yet.

    Attributes:
        steps, rows, read, unique, held: as in `Forwarded`.
        streamed: `Forwarded.streamed_bytes`.
        elapsed_s: of those whose time has been read.
        untimed_rows: rows whose time is still to be read.
    """

    steps: int = 0
    rows: int = 0
    read: int = 0
    unique: int = 0
    held: int = 0
    elapsed_s: float = 0.0
    untimed_rows: int = 0
    streamed: int = 0


class OpenTree:
    """One tree while its search runs, and what only its own search knows.

    Args:
        tree: holds only its root.
        slots: the budget of this search alone, in tokens; where it is a part of full retention,
            what it may come to.
        reads: future reads of a recorded run, for the clairvoyant policy.
        most: tokens that full retention of the search holds at most; None: unknown.
        least: tokens that a budget which is a part of full retention leaves it in any case.
        shares: whether siblings share what they begin alike with.

    Attributes:
        account: the budget that it keeps within, while it is open.
        run: the run in progress; after `finish` one that listens to nothing.
        turn: order in which the trees of the engine were opened.
        rank: its operations come after those of trees with a lower one; alike where searches share
            a part of full retention, so that the oldest operation comes first and all trees grow.
        failure: the first exception of a listener that has not been raised yet.
        operation: number of the operation in progress.
        read_early: ids of blocks that the next operation would read at their ends, and that were
            read during this one.
        upcoming: blocks at whose end each later wave of the operation begins, the next wave first.
        lengths: of its finished blocks.
        retained: what full retention of the search holds.
        steps: decode steps that were not reported yet.
        finished: the run has ended.
    """

    def __init__(
        self,
        tree: ThoughtTree,
        memory: KVMemory,
        slots: int,
        run: RunHooks,
        reads: FutureReads | None = None,
        most: int | None = None,
        *,
        least: int = 0,
        shares: bool = False,
    ) -> None:
        self.tree = tree
        self.slots = slots
        self.run = run
        self.reads = reads
        self.account: Account
        self.turn = self.rank = 0
        self.failure: Exception | None = None
        self.operation = 0
        self.read_early: set[int] = set()
        self.upcoming: list[list[Node]] = []
        self.lengths = Lengths()
        self.retained = Retained(memory.forest, self.lengths, shares=shares, most=most, least=least)
        self.retained.take([tree.root])
        self.steps = Steps()
        self.finished = False
        self._memory = memory
        # a heap of (-end, node id), from which pruned blocks are removed when they come up, and
        # the ends in it
        self._ends = [(-tree.root.end, tree.root.id)]
        self._reached = {tree.root.id: tree.root.end}

    # The run

    def emit(self, event: Event) -> None:
        """Report an event to the run's listener.

        An exception of the listener is kept until the operation in progress can be ended without
        harm to other trees; nothing more is reported until then.
        """
        if self.failure is None:
            try:
                self.run.emit(event)
            except Exception as error:
                self.failure = error

    def raise_failure(self) -> None:
        """Raise what a listener raised."""
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure

    def finish(self) -> None:
        """End of the run: its listener, outlook and interruption are let go; the tree stays
        usable."""
        self.run = RunHooks()
        self.finished = True

    @property
    def kv(self) -> KV:
        """Slots per tier now: those of the tree, and those of all trees if there are more."""
        memory = self._memory
        several = len(memory.forest.trees) > 1
        return KV(
            device=memory.used_by(self.tree),
            host=memory.lower.used_by(Tier.HOST, self.tree.number),
            compressed=memory.lower.used_by(Tier.COMPRESSED, self.tree.number),
            disk=memory.lower.used_by(Tier.DISK, self.tree.number),
            pool=memory.used if several else 0,
            shared=memory.shared_within(self.tree),
        )

    # What is known of the tree

    def reached(self, nodes: Iterable[Node]) -> None:
        """Record that these blocks were run through the model."""
        for node in nodes:
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
        self.read_early.clear()
