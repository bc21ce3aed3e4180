"""Rehydration: makes running paths complete, in one forward over the tokens they miss."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from arbor.engine.forward_pass import ForwardPasses
from arbor.engine.mode import Rules
from arbor.engine.pieces import head, segments_of
from arbor.engine.residency import Residency
from arbor.engine.tree_state import TreeState
from arbor.events import Evicted, ForwardKind, Rehydrated
from arbor.model.plan import Segment
from arbor.tree import NO_SLOT, Node

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Placed:
    """Missing tokens of paths, with slots and ready to run.

    Attributes:
        segments: the tokens to run.
        wanted: ids of the blocks whose logits after the last token it gives, in order.
        written: blocks of which it writes tokens.
        again: whether some of these had been computed before.
    """

    segments: list[Segment]
    wanted: list[int]
    written: list[Node]
    again: bool


class Rehydration:
    """Completes paths of one tree.

    Args:
        state: of the tree.
        residency: frees room.
        forwards: compute the missing tokens.
        rules: of the mode.
    """

    def __init__(
        self,
        state: TreeState,
        residency: Residency,
        forwards: ForwardPasses,
        rules: Rules,
    ) -> None:
        self._state = state
        self._residency = residency
        self._memory = state.memory
        self._forwards = forwards
        self._logits = state.logits
        self._rules = rules
        self._layers = forwards.runner.layer_count
        # ids of the blocks whose tokens were reported to be back, and are not computed yet
        self._announced: list[int] = []

    def complete(
        self,
        leaves: Sequence[Node],
        *,
        reserve: int,
        want: Sequence[Node],
        running: Sequence[Node] = (),
    ) -> list[Tensor]:
        """Bring back what the leaves' paths miss, in one forward over the missing tokens only.

        Every run of consecutive missing tokens is one segment whose context ends where the run
        begins; all K/V are written before anything attends, so earlier runs are context of later
        ones.

        Args:
            leaves: whose paths.
            reserve: slots that must be free afterwards.
            want: those of them whose logits after the last token are needed.
            running: ends of other running paths, which stay.

        Returns:
            [V] float32 for each that was wanted.
        """
        path = self._state.tree.paths(leaves)
        root = path[0]
        for leaf in leaves:
            if self._rules.is_outdated(leaf):
                self._logits.pop(leaf.id, None)
        if pieces := self._rules.pieces(root, self._memory.slots - reserve - len(want)):
            self._prefill_in_pieces(root, pieces)
        known = {leaf.id: self._logits.get(leaf.id) for leaf in want}
        placed = self.place(leaves, want=want, reserve=reserve, running=running)
        if placed.segments:
            kind: ForwardKind = "rehydrate" if placed.again else "prefill"
            logits = self.compute(placed, kind)
            known.update(zip(placed.wanted, logits, strict=True))
            self._logits.remember(placed.wanted, logits)
        self._state.used(path)
        return [row for leaf in want if (row := known[leaf.id]) is not None]

    def compute(self, placed: Placed, kind: ForwardKind, behind: Sequence[Segment] = ()) -> Tensor:
        """Run placed tokens, in one forward.

        Args:
            placed: by `place`.
            kind: its purpose.
            behind: more segments of the same forward, which write no block.

        Returns:
            logits [n, V] float32 where the segments ask for them.
        """
        logits = self._forwards.run(kind, [*placed.segments, *behind], placed.written)
        self._announced = []
        return logits

    def undo(self) -> None:
        """After a failure: drop tokens that were placed and never computed, and report the eviction
        of those that were reported as rehydrated."""
        lost = self._memory.rollback()
        announced, self._announced = self._announced, []
        self._state.changed(self._state.tree)
        gone = sorted((node_id, lost[node_id]) for node_id in announced if lost.get(node_id))
        if gone:
            event = Evicted(cause="transition", nodes=tuple(gone), kv=self._state.kv)
            try:
                self._state.emit(event)
            except Exception:  # the failure that is being undone is the one that counts
                logger.warning("a listener failed at '%s'", event.name, exc_info=True)

    def place(
        self,
        leaves: Sequence[Node],
        *,
        want: Sequence[Node] = (),
        reserve: int,
        running: Sequence[Node] = (),
    ) -> Placed:
        """Give slots to the missing tokens of the leaves' paths; `compute` fills them.

        Args:
            leaves: ends of the running paths.
            want: leaves whose logits after the last token are needed.
            reserve: slots that must be free afterwards.
            running: ends of other running paths, which stay.
        """
        path = sorted(self._state.tree.paths(leaves), key=lambda node: node.key)
        wanted = {leaf.id for leaf in want if leaf.id not in self._logits}
        holes = self._rules.holes(path, leaves, reserve + len(wanted), self._residency)
        for leaf in want:
            # its last token runs again for its logits, and needs a slot while it does
            last = len(leaf.tokens) - 1
            if leaf.id in wanted and leaf.span.slot[last] == NO_SLOT:
                holes[leaf.id] = np.union1d(holes[leaf.id], [last])
        absent = {
            node.id: holes[node.id][node.span.slot[holes[node.id]] == NO_SLOT] for node in path
        }
        needed = sum(len(offsets) for offsets in absent.values()) + reserve
        self._residency.fit(needed, [*leaves, *running], "transition", paths_lose="never")
        again: list[tuple[int, int]] = []
        repeated = 0
        clean: dict[int, bool] = {}
        for node in path:
            here, hole = absent[node.id], holes[node.id]
            stale = np.setdiff1d(hole, here, assume_unique=True)
            above = node.parent is None or clean[node.parent.id]
            exact = above and self._state.sees_all(node) and _is_whole(node, hole)
            if len(stale):
                self._memory.rewrite(node, stale, exact=exact, depth=self._layers)
            if len(here):
                first = int(node.span.slot[here[0] - 1]) + 1 if here[0] else NO_SLOT
                self._memory.place(node, here, exact=exact, depth=self._layers, first=first)
            clean[node.id] = exact
            if len(hole) and node.id in self._state.computed:
                again.append((node.id, len(here)))
                repeated += len(stale)
        self._state.changed(path)
        if again:
            nodes, kv = tuple(sorted(again)), self._state.kv
            self._announced = [node_id for node_id, _ in nodes]
            self._state.emit(Rehydrated(nodes, mode="recompute", kv=kv, repeated=repeated))
        segments, order = segments_of(
            path,
            holes,
            wanted,
            self._memory.pool.trash,
            hidden=self._state.hidden,
            before=self._state.before_hiding,
            computed=self._state.computed,
        )
        written = [node for node in path if len(holes[node.id])]
        return Placed(segments, order, written, bool(again))

    def _prefill_in_pieces(self, root: Node, pieces: Sequence[range]) -> None:
        """A prompt longer than the budget (lossy mode): piece by piece, the policy evicting in
        between."""
        try:
            for piece in pieces:
                logits = self._prefill_piece(root, piece.start, piece.stop)
        except BaseException:  # a prompt counts as computed once all of it is
            self.undo()
            self._memory.release([root])
            self._state.changed([root])
            raise
        self._state.mark_computed([root])
        self._logits.remember([root.id], logits)

    def _prefill_piece(self, root: Node, begin: int, end: int) -> Tensor:
        """The tokens of a prompt from `begin` to `end`; logits [1, V] after the last one of all."""
        self._residency.fit(end - begin, [root], "transition")
        exact = bool(root.span.exact[:begin].all())
        offsets = np.arange(begin, end)
        context = tuple(head(root, begin))
        slots = self._memory.place(root, offsets, exact=exact, depth=self._layers)
        self._state.changed([root])
        segment = Segment(
            context=context,
            tokens=root.tokens[begin:end],
            positions=offsets,
            tail=slots,
            write=slots,
            logits=int(end == root.end),
        )
        return self._forwards.run("prefill", [segment], [])


def _is_whole(node: Node, hole: NDArray[np.int64]) -> bool:
    """Whether every token of a block is exact once these are computed."""
    exact = node.span.exact.copy()
    exact[hole] = True
    return bool(exact.all())
