"""Attention on CUDA whose rows do not depend on the batch, and which reads shared spans once.

Each row's list of keys, in the order of its path, is cut every `CHUNK_KEYS` keys from its
beginning. A chunk gives an output and a logsumexp per row, and a row's parts are merged in order:
where rows are cut and merged depends on their own paths alone. Neighbouring rows with the same
slots in a chunk are computed in one tile, which reads the slots once; within a tile no row's sums
involve another row, so sharing changes no bit.

FlashInfer is not used: it selects the size of its tiles by the mean number of rows per request, so
that a shared level's bits depend on the batch, and requests of one row read every shared span once
per row.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from arbor.kernels.attention.base import AttentionShape, CascadeLayout, apply_sinks
from arbor.kernels.attention.rowwise import RowwiseAttention, RowwisePlan
from arbor.kernels.invariant import plain

# Rows of one launch: bounds the memory of the parts.
LAUNCH_ROWS = 256
DTYPES = (torch.float32, torch.float16, torch.bfloat16)

Integers = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Launch:
    """The tiles of some consecutive rows.

    Attributes:
        first_row, end_row: of the batch.
        keys: int32 [rows, width], each row's slots; 0 after its last.
        lengths: int32 [rows], keys of each row.
        first_parts: int32 [rows + 1], the part of each row's first chunk; the others follow it.
        items: int32 [n, 3]: first row, rows, chunk. Every chunk of every row is in one item.
        parts: of all rows.
    """

    first_row: int
    end_row: int
    keys: Tensor
    lengths: Tensor
    first_parts: Tensor
    items: Tensor
    parts: int


@dataclass(slots=True)
class InvariantPlan:
    """The launches of one forward for one shape.

    Attributes:
        rowwise: the keys of each row.
        launches: on the queries' device, made at first use, when their dtype is known.
    """

    rowwise: RowwisePlan
    launches: dict[torch.dtype, tuple[Launch, ...]] = field(default_factory=dict)


class InvariantCascade:
    """The `AttentionBackend` of `deterministic` on CUDA: float32, float16 and bfloat16.

    Equal to `RowwiseAttention` up to rounding; every row needs at least one key.

    Example:
        Needs a GPU; `RowwiseAttention` has an example of these calls for any machine::

            backend = InvariantCascade()
            plan = backend.plan(layout, AttentionShape(32, 8, 128, 128, scaling=128**-0.5))
            out, lse = backend.run(plan, q, k_pool, v_pool)  # [T, 32, 128], [T, 32]
    """

    def __init__(self) -> None:
        self._rowwise = RowwiseAttention()

    def plan(self, layout: CascadeLayout, shape: AttentionShape) -> InvariantPlan:
        """Flatten a layout into one key list per row; see `AttentionBackend.plan`."""
        return InvariantPlan(self._rowwise.plan(layout, shape))

    def run(
        self,
        plan: InvariantPlan,
        q: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        sinks: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See `AttentionBackend.run`.

        Raises:
            ValueError: a dtype without kernels.
        """
        if q.dtype not in DTYPES:
            raise ValueError(f"the backend 'invariant' has no kernels for {q.dtype}")
        from arbor.kernels.invariant_triton import attend, attention_tile

        shape = plan.rowwise.shape
        tile = attention_tile(shape, q.dtype)
        if q.dtype not in plan.launches:
            most = tile["BLOCK_M"] // shape.group
            plan.launches[q.dtype] = launches(plan.rowwise, most, tile["CHUNK"], q.device)
        with plain(q.device):
            out = q.new_empty(q.shape[0], shape.num_qo_heads, shape.head_dim_vo)
            lse = q.new_empty(q.shape[0], shape.num_qo_heads, dtype=torch.float32)
            for launch in plan.launches[q.dtype]:
                rows = slice(launch.first_row, launch.end_row)
                attend(launch, q[rows], k_pool, v_pool, out[rows], lse[rows], tile)
        return apply_sinks(out, lse, sinks) if sinks is not None else (out, lse)

    def mass(
        self,
        plan: InvariantPlan,
        q: Tensor,
        k_pool: Tensor,
        lse: Tensor,
        heads: Tensor | None = None,
        *,
        by_head: bool = False,
    ) -> Tensor:
        """See `AttentionBackend.mass`; row by row in torch."""
        return self._rowwise.mass(plan.rowwise, q, k_pool, lse, heads, by_head=by_head)


def launches(
    plan: RowwisePlan, most_rows: int, chunk: int, device: torch.device
) -> tuple[Launch, ...]:
    """Cut rows into tiles.

    Args:
        plan: the keys of each row.
        most_rows: of a tile.
        chunk: keys of a part.
        device: of the result.
    """
    found = []
    for first in range(0, len(plan.keys), LAUNCH_ROWS):
        lists = [keys.numpy() for keys in plan.keys[first : first + LAUNCH_ROWS]]
        lengths = np.array([len(keys) for keys in lists], np.int32)
        chunks = -(-lengths // chunk)
        table = np.full((len(lists), int(chunks.max()) * chunk), -1, np.int32)
        for row, keys in enumerate(lists):
            table[row, : len(keys)] = keys
        items = tile_items(table, lengths, most_rows, chunk)
        parts = np.concatenate([[0], np.cumsum(chunks)]).astype(np.int32)

        def there(numbers: Integers) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(numbers)).to(device)

        found.append(
            Launch(
                first,
                first + len(lists),
                there(np.maximum(table, 0)),
                there(lengths),
                there(parts),
                there(items),
                int(parts[-1]),
            )
        )
    return tuple(found)


def tile_items(table: Integers, lengths: Integers, most_rows: int, chunk: int) -> Integers:
    """Runs of neighbouring rows whose slots in a chunk each begin with those of the row before.

    Args:
        table: [rows, chunks * chunk] slots, -1 after a row's last.
        lengths: [rows], keys of each row, at least 1.
        most_rows: of a run.
        chunk: keys of a chunk.

    Returns:
        [n, 3]: first row, rows, chunk.

    Example:
        Two rows share a chunk of two slots and have another each:

        >>> table = np.array([[5, 6, 7, -1], [5, 6, 8, -1]], np.int32)
        >>> tile_items(table, np.array([3, 3], np.int32), most_rows=4, chunk=2).tolist()
        [[0, 2, 0], [0, 1, 1], [1, 1, 1]]
    """
    parts = table.reshape(len(table), -1, chunk)
    held = np.clip(lengths[:, None] - chunk * np.arange(parts.shape[1]), 0, chunk)
    # a shorter list than that of the row before would end the run's common beginning
    goes_on = ((parts[1:] == parts[:-1]) | (parts[:-1] < 0)).all(-1) & (held[:-1] > 0)
    items = []
    for index in range(parts.shape[1]):
        row = 0
        while row < len(table):
            end = row + 1
            if held[row, index]:
                while end < len(table) and end - row < most_rows and goes_on[end - 1, index]:
                    end += 1
                items.append((row, end - row, index))
            row = end
    return np.array(items, np.int32)
