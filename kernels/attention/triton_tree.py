"""Attention over a tree on CUDA in two launches a layer: all items of the tree, and their merging.

FlashInfer's cascade launches a kernel, and often a merge, for every level; here one launch takes
all levels, each item in the tile that suits it. FastTree (MLSys 2025) and DeFT (ICLR 2025) group a
tree's keys and rows alike; differences: items are cut for an equal share of the keys, and a
captured graph may be given other trees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from arbor.kernels.attention.base import AttentionShape, CascadeLayout, apply_sinks
from arbor.kernels.attention.fixed import Bucket, key_capacity, pad_last, pad_shared
from arbor.kernels.attention.torch_cascade import TorchCascade
from arbor.kernels.attention.tree_work import COLUMNS, most_work, tree_work

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MOST_PART_BYTES = 256 << 20


@dataclass(slots=True)
class TreePlan:
    """The items of one forward for one shape.

    Attributes:
        shape: of the layers.
        layout: as given.
        lists: of the `TreeWork`, on the device of the last run.
        by_hand: the plan of `TorchCascade`, made when attention mass is asked for.
    """

    shape: AttentionShape
    layout: CascadeLayout
    lists: tuple[Tensor, ...]
    by_hand: Any = None


class TritonTree:
    """The `AttentionBackend` ``triton``: float32, float16 and bfloat16, heads of any size.

    Equal to `RowwiseAttention` up to rounding; every row needs at least one key.

    Example:
        Needs a GPU; `TorchCascade` has an example of these calls for any machine::

            backend = TritonTree()
            plan = backend.plan(layout, AttentionShape(32, 8, 128, 128, scaling=128**-0.5))
            out, lse = backend.run(plan, q, k_pool, v_pool)  # [T, 32, 128], [T, 32]
    """

    def __init__(self) -> None:
        self._torch = TorchCascade()

    def plan(self, layout: CascadeLayout, shape: AttentionShape) -> TreePlan:
        """See `AttentionBackend.plan`."""
        return TreePlan(shape, layout, tree_work(layout, shape).lists)

    def run(
        self,
        plan: TreePlan,
        q: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        sinks: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See `AttentionBackend.run`.

        Raises:
            ValueError: a dtype without kernels.
        """
        if plan.lists[0].device != q.device:
            plan.lists = tuple(each.to(q.device, non_blocking=True) for each in plan.lists)
        return _attend(plan.shape, plan.lists, q, k_pool, v_pool, sinks)

    def mass(
        self,
        plan: TreePlan,
        q: Tensor,
        k_pool: Tensor,
        lse: Tensor,
        heads: Tensor | None = None,
        *,
        by_head: bool = False,
    ) -> Tensor:
        """See `AttentionBackend.mass`; `TorchCascade`'s, which on CUDA is a Triton kernel too."""
        if plan.by_hand is None:
            plan.by_hand = self._torch.plan(plan.layout, plan.shape)
        return self._torch.mass(plan.by_hand, q, k_pool, lse, heads, by_head=by_head)

    def fixed(self, shape: AttentionShape, bucket: Bucket, slots: int) -> FixedTree | None:
        """See `FixedBackend.fixed`."""
        levels = bucket.levels if shape.window is None else 1
        items, parts = most_work(shape, bucket.rows, levels, bucket.requests)
        if 4 * parts * shape.num_qo_heads * (shape.head_dim_vo + 1) > MOST_PART_BYTES:
            return None
        keys = key_capacity(shape, slots, last=True)
        if levels > 1:
            keys += key_capacity(shape, slots, last=False)
        return FixedTree(shape, bucket, (items * COLUMNS, parts, bucket.rows + 1, keys))

    @property
    def fixed_bytes(self) -> int:
        """See `FixedBackend.fixed_bytes`: nothing is shared by buckets."""
        return 0

    def release_fixed(self) -> None:
        """See `FixedBackend.release_fixed`."""


class FixedTree:
    """`FixedAttention` by the same two launches, over buffers with room for any tree of a bucket.

    Partial results are tensors of the run, so that a graph keeps them in its own memory, which all
    layers share.

    Args:
        shape, bucket: see `FixedBackend.fixed`.
        sizes: numbers in each buffer: items, places, ends, slots.
    """

    def __init__(self, shape: AttentionShape, bucket: Bucket, sizes: Sequence[int]) -> None:
        self._shape = shape
        self._bucket = bucket
        self._sizes = tuple(sizes)
        self._buffers: tuple[Tensor, ...] = ()
        self.own_bytes = 4 * sum(sizes)

    def prepare(self, layout: CascadeLayout, trash: int) -> list[Tensor] | None:
        """See `FixedAttention.prepare`."""
        *shared, last = layout.levels
        levels = [pad_shared(level, self._bucket) for level in shared]
        padded = (*levels, pad_last(last, self._bucket, trash))
        lists = tree_work(CascadeLayout(self._bucket.rows, padded), self._shape).lists
        fits = all(len(each.view(-1)) <= n for each, n in zip(lists, self._sizes, strict=True))
        return [each.view(-1) for each in lists] if fits else None

    def plan(self, lists: Sequence[Tensor]) -> None:
        """See `FixedAttention.plan`."""
        if not self._buffers:
            with torch.inference_mode(False):  # written to in every mode
                self._buffers = tuple(
                    torch.zeros(n, dtype=torch.int32, device=lists[0].device) for n in self._sizes
                )
        for buffer, numbers in zip(self._buffers, lists, strict=True):
            buffer[: len(numbers)].copy_(numbers)
        self._buffers[0][len(lists[0]) :].zero_()  # items that are not used have no rows

    def run(
        self, q: Tensor, k_pool: Tensor, v_pool: Tensor, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """See `FixedAttention.run`."""
        items, *others = self._buffers
        lists = (items.view(-1, COLUMNS), *others)
        return _attend(self._shape, lists, q, k_pool, v_pool, sinks)


def _attend(
    shape: AttentionShape,
    lists: Sequence[Tensor],
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    if q.dtype not in DTYPES:
        raise ValueError(f"the backend 'triton' has no kernels for {q.dtype}")
    from arbor.kernels.attention.triton_tree_kernel import attend

    items, places, ends, slots = lists
    out, lse = attend(shape, items, places, ends, slots, q, k_pool, v_pool)
    return apply_sinks(out, lse, sinks) if sinks is not None else (out, lse)
