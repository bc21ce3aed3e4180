"""LastLogits: logits after blocks' last tokens, where their children begin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

MOST_BYTES = 256 << 20


class LastLogits(dict[int, Tensor]):
    """Row of a block -> [V] logits; beyond `MOST_BYTES` the oldest are dropped, and computed again
    from one token when they are needed."""

    def remember(self, blocks: Sequence[int], logits: Tensor) -> None:
        """Keep these rows ([n, V]) of these blocks, in any case.

        One call copies all rows, each into memory of its own: views of one gathered [n, V] would
        keep every row alive as long as any of them is.
        """
        for row in blocks:
            self.pop(row, None)  # to the end of the order
        # torch's stub says that unbind_copy returns nothing
        rows: Any = torch.unbind_copy(logits)  # type: ignore[func-returns-value]
        self.update(zip(blocks, rows, strict=True))
        if blocks:
            row_bytes = logits.shape[-1] * logits.element_size()
            most = max(len(blocks), MOST_BYTES // row_bytes)
            while len(self) > most:
                del self[next(iter(self))]
