"""When a recorded run reads each block: the knowledge of the clairvoyant policy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Self

import numpy as np
from numpy.typing import NDArray

from arbor.events import Event, Opened, Selected, Verified
from arbor.retention.base import NEVER

_STRIDE = 1 << 32


class FutureReads:
    """The operations of a run, in order, from 1, and the blocks each reads.

    Operations are expansions and verifications. A block is identified by its id: a run with another
    budget makes the same tree in the same order.

    Args:
        reads: for each operation, the ids of all blocks on its paths.
    """

    def __init__(self, reads: Sequence[Iterable[int]]) -> None:
        keys = [
            node * _STRIDE + operation for operation, nodes in enumerate(reads, 1) for node in nodes
        ]
        self._keys = np.array(sorted(keys), np.int64)

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

    def after(self, operation: int, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """The next operation after this one that reads each block; `NEVER` if none does.

        Args:
            operation: the operation in progress.
            ids: int64 [M], node ids.

        Returns:
            int64 [M].
        """
        if len(self._keys) == 0:
            return np.full(len(ids), NEVER)
        at = np.searchsorted(self._keys, ids * _STRIDE + operation, side="right")
        found = self._keys[np.minimum(at, len(self._keys) - 1)]
        known = (at < len(self._keys)) & (found // _STRIDE == ids)
        return np.where(known, found % _STRIDE, NEVER)


def _paths(nodes: Iterable[int], parent: dict[int, int | None]) -> set[int]:
    """The ids of all blocks on the paths of some nodes."""
    found: set[int] = set()
    for node in nodes:
        at: int | None = node
        while at is not None and at not in found:
            found.add(at)
            at = parent.get(at)
    return found
