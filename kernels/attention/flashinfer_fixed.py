"""FlashInfer's wrappers over fixed buffers: attention of a decode step that can be captured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from arbor.kernels.attention.base import AttentionShape, CascadeLayout, CascadeLevel
from arbor.kernels.attention.fixed import ROWS, Bucket, pad_last, pad_shared

# Keys of a last level beyond one per slot: rows that share a short span each list it themselves.
REPEATED_KEYS = 1 << 16
MOST_WORKSPACE_BYTES = 256 << 20


@dataclass(slots=True)
class IndexBuffer:
    """The key lists of one level of one shape, used by the wrappers of all buckets in turn.

    Attributes:
        slots: int32, on the device.
        owner: the wrapper whose lists it holds.
    """

    slots: Tensor
    owner: Any = None


class Planner(Protocol):
    """The part of `FlashInferCascade` that fixed attention uses."""

    def plan_level(
        self, planned: Any, level: CascadeLevel, shape: AttentionShape, indices: Tensor
    ) -> None:
        """Plan one wrapper for a level whose key list is on the device already."""
        ...

    def run(
        self, plan: Any, q: Tensor, k_pool: Tensor, v_pool: Tensor, sinks: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """As `AttentionBackend.run`."""
        ...


class FixedCascade:
    """`FixedAttention` by FlashInfer in its CUDA graph mode.

    In that mode a wrapper's number of requests and of rows is constant, it copies what is planned
    into the buffers it was given, and grid, query tile and places in its workspaces follow from
    these two numbers alone. Requests may have no rows and no keys.

    Args:
        planner: plans and runs.
        shape, bucket: see `FixedBackend.fixed`.
        wrappers: `PlannedWrapper`s, the last level first.
        buffers: of their key lists.
        plan: a `FlashInferPlan` of the wrappers.
        own_bytes: device memory of the wrappers.
    """

    def __init__(
        self,
        planner: Planner,
        shape: AttentionShape,
        bucket: Bucket,
        wrappers: Sequence[Any],
        buffers: Sequence[IndexBuffer],
        plan: Any,
        own_bytes: int,
    ) -> None:
        self._planner = planner
        self._shape = shape
        self._bucket = bucket
        self._wrappers = tuple(wrappers)
        self._buffers = tuple(buffers)
        self._plan = plan
        self._due: list[tuple[int, CascadeLevel, CascadeLevel]] = []
        self.own_bytes = own_bytes

    def prepare(self, layout: CascadeLayout, trash: int) -> list[Tensor] | None:
        """See `FixedAttention.prepare`; levels that are planned already need nothing."""
        assert len(layout.levels) == len(self._wrappers), "a layout of another bucket"
        self._due = []
        for index, level in enumerate(reversed(layout.levels)):
            planned, buffer = self._wrappers[index], self._buffers[index]
            if planned.level is level and buffer.owner is planned:
                continue
            if index == 0:
                padded = pad_last(level, self._bucket, trash)
            else:
                padded = pad_shared(level, self._bucket)
            if len(padded.kv_indices) > len(buffer.slots):
                return None
            self._due.append((index, level, padded))
        return [padded.kv_indices for _, _, padded in self._due]

    def plan(self, lists: Sequence[Tensor]) -> None:
        """See `FixedAttention.plan`."""
        for (index, level, padded), indices in zip(self._due, lists, strict=True):
            planned, buffer = self._wrappers[index], self._buffers[index]
            buffer.owner = None
            with torch.inference_mode(False):
                self._planner.plan_level(planned, padded, self._shape, indices)
            planned.level, buffer.owner = level, planned
        self._due = []

    def run(
        self, q: Tensor, k_pool: Tensor, v_pool: Tensor, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """See `FixedAttention.run`."""
        return self._planner.run(self._plan, q, k_pool, v_pool, sinks)


def key_capacity(shape: AttentionShape, slots: int, *, last: bool) -> int:
    """Keys that a level's buffer holds; a shared level names a slot at most once."""
    if not last:
        return slots
    windows = 0 if shape.window is None else ROWS[-1] * min(shape.window, slots)
    return max(slots + REPEATED_KEYS, windows)


@dataclass(frozen=True, slots=True)
class Launch:
    """What FlashInfer launches in its CUDA graph mode, for any plan of the same size.

    Attributes:
        tile: rows of a query tile (rows times the query heads of a group).
        pieces: query tiles times chunks of keys, padded.
        float_bytes: of the float workspace.
        int_bytes: of the integer workspace, at most.
    """

    tile: int
    pieces: int
    float_bytes: int
    int_bytes: int


def launch_of(shape: AttentionShape, rows: int, requests: int, multiprocessors: int) -> Launch:
    """The launch of a wrapper with fixed buffers.

    The tile is for the longest request that so many rows and requests allow; splitting is always
    on. (`PrefillSplitQOKVIndptr` and `PrefillPlanImpl` of FlashInfer 0.6.18.)

    Args:
        shape: of the layers.
        rows: of the batch.
        requests: at most `rows`.
        multiprocessors: of the device.
    """
    longest = (rows - requests + 1) * shape.group
    tile = 64 if longest > 16 else 16
    if longest > 64 and shape.head_dim_vo < 256:
        tile = 128
    tiles = -(-rows * shape.group // tile) + requests - 1
    pieces = max(2 * multiprocessors // shape.num_kv_heads, tiles)
    states = shape.num_qo_heads * pieces * tile
    return Launch(
        tile=tile,
        pieces=pieces,
        float_bytes=states * (shape.head_dim_vo + 1) * torch.float32.itemsize,
        int_bytes=13 * pieces + 4 * (requests + rows) + 256,
    )
