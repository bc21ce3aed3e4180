"""When a recorded run reads each block: the knowledge of the clairvoyant policy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Self

import numpy as np
from numpy.typing import NDArray

from arbor.events import Event, Opened, Selected, Verified
from arbor.retention.base import NEVER


class FutureReads:
    """The operations of a run, in order, from 1, and the blocks each reads.

    Operations are expansions and verifications. A block is identified by its id: a run with another
    budget makes the same tree in the same order. Where expansions overlap, verifications come in
    another order at another budget, so operations are numbered by up to the number of expansions
    in progress differently.

    Args:
        reads: for each operation, the ids of all blocks on its paths; ids are integers of 64 bits.
    """

    def __init__(self, reads: Sequence[Iterable[int]]) -> None:
        pairs = [(node, operation) for operation, nodes in enumerate(reads, 1) for node in nodes]
        nodes, operations = np.array(pairs, np.int64).reshape(-1, 2).T
        # Ranks instead of ids: a key of rank and operation fits into 64 bits, whatever the ids.
        self._ids, ranks = np.unique(nodes, return_inverse=True)
        self._stride = len(reads) + 1
        self._keys = np.sort(ranks * self._stride + operations)

    @classmethod
    def of(cls, events: Iterable[Event]) -> Self:
        """The reads of a run, from its events.

        Each `Selected` is an operation, and each `Verified` that asked the model.
        """
        parent: dict[int, int | None] = {}
        reads: list[set[int]] = []
        for event in events:
            if isinstance(event, Opened):
                parent[event.node] = event.parent
            elif isinstance(event, Selected):
                reads.append(_paths((leaf for leaf, _ in event.leaves), parent))
            elif isinstance(event, Verified) and event.asked:
                reads.append(_paths(event.nodes, parent))
        return cls(reads)

    def after(
        self, operation: int | NDArray[np.int64], ids: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """The next operation after this one that reads each block; `NEVER` if none does.

        Args:
            operation: the operation in progress, one for all or int64 [M].
            ids: int64 [M], node ids.

        Returns:
            int64 [M].
        """
        if len(self._keys) == 0:
            return np.full(len(ids), NEVER)
        ranks = np.minimum(np.searchsorted(self._ids, ids), len(self._ids) - 1)
        operation = np.minimum(operation, self._stride - 1)
        at = np.searchsorted(self._keys, ranks * self._stride + operation, side="right")
        found = self._keys[np.minimum(at, len(self._keys) - 1)]
        known = (at < len(self._keys)) & (found // self._stride == ranks)
        return np.where(known & (self._ids[ranks] == ids), found % self._stride, NEVER)


def _paths(nodes: Iterable[int], parent: dict[int, int | None]) -> set[int]:
    """The ids of all blocks on the paths of some nodes."""
    found: set[int] = set()
    for node in nodes:
        at: int | None = node
        while at is not None and at not in found:
            found.add(at)
            at = parent.get(at)
    return found
