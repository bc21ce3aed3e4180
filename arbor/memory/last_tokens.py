"""LastTokens: the last tokens of blocks that grow together, as columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from arbor.tree import Node, Spans


@dataclass(frozen=True, slots=True)
class LastTokens:
    """The last token of each of n blocks.

    Valid until one of the blocks grows.

    Attributes:
        nodes: distinct blocks of one forest, each with a token at least.
        spans: residency of the forest's tokens.
        row: int64 [n], the blocks' rows.
        begin: int64 [n], where each block begins in `spans`.
        length: int64 [n], tokens of each block.
        token: int64 [n].
        position: int64 [n], on the path.
    """

    nodes: Sequence[Node]
    spans: Spans
    row: NDArray[np.int64]
    begin: NDArray[np.int64]
    length: NDArray[np.int64]
    token: NDArray[np.int64]
    position: NDArray[np.int64]

    @classmethod
    def of(cls, nodes: Sequence[Node]) -> LastTokens:
        """The columns of these blocks."""
        length = np.array([len(node.tokens) for node in nodes], np.int64)
        return cls(
            nodes=nodes,
            spans=nodes[0].span.spans,
            row=np.array([node.row for node in nodes], np.int64),
            begin=np.array([node.span.begin for node in nodes], np.int64),
            length=length,
            token=np.array([node.tokens[-1] for node in nodes], np.int64),
            position=np.array([node.start for node in nodes], np.int64) + (length - 1),
        )

    @property
    def at(self) -> NDArray[np.int64]:
        """Where each token is in `spans`, int64 [n]."""
        return self.begin + (self.length - 1)
