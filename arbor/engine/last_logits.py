"""Logits after blocks' last tokens: where their children begin."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

MOST_BYTES = 256 << 20


class LastLogits(dict[int, Tensor]):
    """Node id -> [V] float32, the oldest dropped beyond `MOST_BYTES` and then
    computed again from one token."""

    def remember(self, nodes: Sequence[int], logits: Tensor) -> None:
        """Keep these rows ([n, V]) of these blocks, in any case."""
        for row, node_id in enumerate(nodes):
            self[node_id] = logits[row].clone()
        if nodes:
            most = max(len(nodes), MOST_BYTES // (4 * logits.shape[-1]))
            while len(self) > most:
                del self[next(iter(self))]
