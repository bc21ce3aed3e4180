"""DecodeBatch: the rows that decode together, as columns."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from arbor.engine.operation import Row
from arbor.memory import KVMemory
from arbor.memory.last_tokens import LastTokens
from arbor.model.level_rule import LevelRule
from arbor.model.plan import ForwardPlan, SegmentTable, plan_table
from arbor.model.sharing import SharedPrefix, Sharing
from arbor.tree import NO_SLOT, Certainty, ThoughtTree


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
