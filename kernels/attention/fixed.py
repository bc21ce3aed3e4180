"""Attention whose buffers stay where they are, so that a CUDA graph can name them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from arbor.kernels.attention.base import AttentionShape, CascadeLayout, CascadeLevel

# Rows of a padded step. Decoding up to 256 rows mostly reads weights, so a third more rows
# costs little; more rows run without a graph.
ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
# Requests of a shared level. Few requests allow large query tiles, which read shared keys once for
# many rows; the workspace grows with the number.
REQUESTS = (4, 16, 64)
MOST_LEVELS = 6
# Keys of a last level beyond one per slot: rows that share a short span each list it themselves.
REPEATED_KEYS = 1 << 16


@dataclass(frozen=True, slots=True)
class Bucket:
    """The sizes that steps of one graph have in common.

    Attributes:
        rows: of the padded batch.
        levels: of full attention, the last one included.
        requests: of each shared level; at most `rows`; 0 where they do not count.
    """

    rows: int
    levels: int
    requests: int

    def __str__(self) -> str:
        return f"{self.rows} rows, {self.levels} levels, {self.requests} shared requests"


def bucket_of(
    layouts: Sequence[CascadeLayout],
    depths: Sequence[int] = range(1, MOST_LEVELS + 1),
    requests: Sequence[int] = REQUESTS,
) -> Bucket | None:
    """The smallest bucket of a step; None if none fits.

    Args:
        layouts: of the step, one per window.
        depths: numbers of levels that buckets have.
        requests: of a shared level that they have, each row one of its own on the last; empty:
            requests do not count.
    """
    rows = layouts[0].rows
    padded = next((size for size in ROWS if size >= rows), None)
    deepest = max(len(layout.levels) for layout in layouts)
    levels = next((depth for depth in depths if depth >= deepest), None)
    if padded is None or levels is None:
        return None
    shared = 0
    for layout in layouts:
        *others, last = layout.levels
        if requests and len(last.qo_indptr) - 1 != rows:
            return None
        shared = max([shared, *(len(level.qo_indptr) - 1 for level in others)])
    if shared == 0 or not requests:
        return Bucket(padded, levels, 0)
    needed = shared + (padded > rows)
    count = next((size for size in requests if size >= needed), None)
    return None if count is None else Bucket(padded, levels, min(count, padded))


def pad_shared(level: CascadeLevel, bucket: Bucket) -> CascadeLevel:
    """A shared level of a bucket's rows and requests.

    Rows added read nothing; requests added have neither rows nor keys.
    """
    rows, ends = level.qo_indptr.numpy(), level.kv_indptr.numpy()
    missing = bucket.requests + 1 - len(rows)
    return CascadeLevel(
        qo_indptr=_int32(np.concatenate((rows, np.full(missing, bucket.rows)))),
        kv_indptr=_int32(np.concatenate((ends, np.full(missing, ends[-1])))),
        kv_indices=level.kv_indices,
        causal=level.causal,
    )


def pad_last(level: CascadeLevel, bucket: Bucket, trash: int) -> CascadeLevel:
    """A last level of a bucket's rows; each row added is a request that reads the trash slot."""
    rows, ends = level.qo_indptr.numpy(), level.kv_indptr.numpy()
    missing = bucket.rows - int(rows[-1])
    added = np.arange(1, missing + 1)
    slots = np.concatenate((level.kv_indices.numpy(), np.full(missing, trash)))
    return CascadeLevel(
        qo_indptr=_int32(np.concatenate((rows, added + rows[-1]))),
        kv_indptr=_int32(np.concatenate((ends, added + ends[-1]))),
        kv_indices=_int32(slots) if missing else level.kv_indices,
        causal=level.causal,
    )


def _int32(numbers: np.ndarray[Any, Any]) -> Tensor:
    return torch.from_numpy(numbers.astype(np.int32, copy=False))


def key_capacity(shape: AttentionShape, slots: int, *, last: bool) -> int:
    """Keys that a level's buffer holds; a shared level names a slot at most once."""
    if not last:
        return slots
    windows = 0 if shape.window is None else ROWS[-1] * min(shape.window, slots)
    return max(slots + REPEATED_KEYS, windows)


class FixedAttention(Protocol):
    """Attention of one shape and one bucket; what it launches depends on neither rows nor keys."""

    @property
    def own_bytes(self) -> int:
        """Device memory of its own buffers."""
        ...

    def prepare(self, layout: CascadeLayout, trash: int) -> list[Tensor] | None:
        """Pad a step's layout.

        Args:
            layout: of the step; in the bucket.
            trash: the slot of no token.

        Returns:
            int32 lists on the CPU that `plan` needs on the device; None if the keys are more than
            the buffers hold.
        """
        ...

    def plan(self, lists: Sequence[Tensor]) -> None:
        """Fill the buffers for the layout prepared last.

        Args:
            lists: of `prepare`, on the device.
        """
        ...

    def run(
        self, q: Tensor, k_pool: Tensor, v_pool: Tensor, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """As `AttentionBackend.run`, for the padded rows; may be captured."""
        ...


@runtime_checkable
class FixedBackend(Protocol):
    """A backend that can keep its buffers where they are."""

    def bucket(self, layouts: Sequence[CascadeLayout]) -> Bucket | None:
        """The bucket of a step; None if it has none.

        Args:
            layouts: of the step, one per window.
        """
        ...

    def fixed(self, shape: AttentionShape, bucket: Bucket, slots: int) -> FixedAttention | None:
        """Attention with buffers of its own; None if it would take more memory than stated.

        Args:
            shape: of the layers.
            bucket: of the steps; a shape with a window uses the last level only.
            slots: of the pool, without the trash slot.
        """
        ...

    @property
    def fixed_bytes(self) -> int:
        """Device memory of all such buffers."""
        ...

    def release_fixed(self) -> None:
        """Give up the buffers that belong to no bucket alone; no fixed attention is used again, and
        each may be freed from then on."""
        ...
