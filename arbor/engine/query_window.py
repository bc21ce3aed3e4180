"""QueryWindow: the last queries of the paths that run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def last_of_each(
    counts: NDArray[np.int64], new: NDArray[np.bool_], length: int
) -> NDArray[np.int64]:
    """The rows of a forward whose queries are kept: the last of each segment, int64.

    Args:
        counts: int64 [n], rows of each segment.
        new: bool [T], rows that count.
        length: of each segment at most.
    """
    ends = np.cumsum(counts)
    left = np.repeat(ends, counts) - np.arange(len(new))
    return np.flatnonzero(new & (left <= length))


class QueryWindow:
    """The last queries of each running path of a tree, in a ring that holds `length` forwards of
    all its rows.

    Args:
        length: queries of each path, >= 1.
        layers: whose queries.

    Attributes:
        row: int64 [c], of the block that a query's token belongs to; -1: empty.
        position: int64 [c], of that token on its path.
        age: int64 [c], increasing with the time of writing.
    """

    def __init__(self, length: int, layers: Sequence[int]) -> None:
        self.length = length
        self.layers = tuple(layers)
        self.row = np.empty(0, np.int64)
        self.position = np.empty(0, np.int64)
        self.age = np.empty(0, np.int64)
        self._queries: dict[int, Tensor] = {}
        self._next = 0
        self._written = 0

    def add(
        self,
        rows: NDArray[np.integer],
        positions: NDArray[np.integer],
        queries: Mapping[int, Tensor],
        paths: int,
    ) -> None:
        """Keep queries of a forward.

        Args:
            rows: int [m], of the blocks of their tokens.
            positions: int [m], of these tokens.
            queries: layer -> [m, H_q, D].
            paths: segments that they are of: the ring grows to hold `length` queries of each.
        """
        self._reserve(self.length * paths, queries)
        capacity = len(self.row)
        at = (self._next + np.arange(len(rows))) % capacity
        self.row[at], self.position[at] = rows, positions
        self.age[at] = self._written + np.arange(len(rows))
        index = torch.from_numpy(at)
        for layer, ring in self._queries.items():
            ring[index.to(ring.device)] = queries[layer]
        self._next = (self._next + len(rows)) % capacity
        self._written += len(rows)

    def queries(self, layer: int, at: NDArray[np.int64]) -> Tensor:
        """The queries of some places, [m, H_q, D] float32."""
        ring = self._queries[layer]
        return ring[torch.from_numpy(at).to(ring.device)].float()

    def _reserve(self, capacity: int, like: Mapping[int, Tensor]) -> None:
        if capacity <= len(self.row):
            return
        kept = np.argsort(self.age)[len(self.row) - np.count_nonzero(self.row >= 0) :]
        kept = kept[self.row[kept] >= 0]
        row, position, age = self.row[kept], self.position[kept], self.age[kept]
        self.row = np.full(capacity, -1, np.int64)
        self.position = np.zeros(capacity, np.int64)
        self.age = np.full(capacity, -1, np.int64)
        count = self._next = len(kept)
        self.row[:count], self.position[:count], self.age[:count] = row, position, age
        for layer in self.layers:
            ring = like[layer].new_zeros((capacity, *like[layer].shape[1:]))
            if count:
                old = self._queries[layer]
                ring[:count] = old[torch.from_numpy(kept).to(old.device)]
            self._queries[layer] = ring
