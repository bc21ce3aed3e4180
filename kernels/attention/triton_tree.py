"""Attention over a tree on CUDA in two launches a layer: all items of the tree, and their merging.

FlashInfer's cascade launches a kernel, and often a merge, for every level; here one launch takes
all levels, each item in the tile that suits it. FastTree (MLSys 2025) and DeFT (ICLR 2025) group a
tree's keys and rows alike; differences: items are cut for an equal share of the keys, a captured
graph may be given other trees, and tokens that rows append to one need no new items.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from arbor.kernels.attention.base import AttentionShape, CascadeLayout, apply_sinks
from arbor.kernels.attention.fixed import Bucket, bucket_of, key_capacity, pad_last
from arbor.kernels.attention.torch_cascade import MassByTorch
from arbor.kernels.attention.tree_work import COLUMNS, ROOM, appends, most_work, tree_work
from arbor.kernels.attention.trial import BackendUnusable, computes_a_tiny_attention, reason_of

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MOST_PART_BYTES = 256 << 20
DEPTHS = (1, 4, 16)  # levels of a step by a graph; more than there are cost next to nothing
# Key reads that a shared span must save to be a level of its own: its partial result is written
# and read, which takes about as long as reading 8 keys for each row.
SAVED_READS = 128


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


class TritonTree(MassByTorch):
    """The `AttentionBackend` ``triton``: float32, float16 and bfloat16, heads of any size.

    Equal to `RowwiseAttention` up to rounding; every row needs at least one key. Numbers of 8-bit
    KV are rounded to the dtype of the queries.

    Example:
        Needs a GPU; `TorchCascade` has an example of these calls for any machine::

            backend = TritonTree()
            plan = backend.plan(layout, AttentionShape(32, 8, 128, 128, scaling=128**-0.5))
            out, lse = backend.run(plan, q, k_pool, v_pool)  # [T, 32, 128], [T, 32]
    """

    least_saved_reads, most_shared_levels = SAVED_READS, DEPTHS[-1] - 1

    def probe(
        self,
        shapes: Iterable[AttentionShape],
        dtype: torch.dtype,
        device: torch.device,
        *,
        int8_kv: bool = False,
    ) -> None:
        """Compile and try the kernels of these shapes, over KV in their dtype.

        Args:
            shapes: of the layers.
            dtype: of queries, keys and values.
            device: that computes.
            int8_kv: over 8-bit KV as well, and its writing.

        Raises:
            BackendUnusable: one cannot be compiled or run here, or computes something else.
        """
        kinds = (False, True) if int8_kv else (False,)
        for shape, stored in product(dict.fromkeys(shapes), kinds):
            what = f"heads of {shape.head_dim_qk} in {str(dtype).removeprefix('torch.')}"
            if stored:
                what += " over 8-bit KV"
            try:
                right = computes_a_tiny_attention(self, shape, dtype, device, int8_kv=stored)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # compilers and CUDA fail in many ways
                raise BackendUnusable(
                    f"Triton has no usable kernel for {what}: "
                    f"{type(error).__name__}: {reason_of(error)}",
                    name="triton",
                ) from error
            if not right:
                raise BackendUnusable(f"Triton computes {what} wrongly.", name="triton")

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

    def bucket(self, layouts: Sequence[CascadeLayout]) -> Bucket | None:
        """See `FixedBackend.bucket`; steps with several tokens of a path have one too."""
        return bucket_of(layouts, DEPTHS, ())

    def fixed(self, shape: AttentionShape, bucket: Bucket, slots: int) -> FixedTree | None:
        """See `FixedBackend.fixed`."""
        levels = bucket.levels if shape.window is None else 1
        items, parts = most_work(shape, bucket.rows, levels)
        if 4 * parts * shape.num_qo_heads * (shape.head_dim_vo + 1) > MOST_PART_BYTES:
            return None
        keys = key_capacity(shape, slots, last=True) + ROOM * bucket.rows
        if levels > 1:
            keys += key_capacity(shape, slots, last=False)
        return FixedTree(shape, bucket, (items * COLUMNS, parts, bucket.rows + 1, keys, 1))

    @property
    def fixed_bytes(self) -> int:
        """See `FixedBackend.fixed_bytes`: nothing is shared by buckets."""
        return 0

    def release_fixed(self) -> None:
        """See `FixedBackend.release_fixed`."""


@dataclass(frozen=True, slots=True)
class _Held:
    """The tree whose work is in the buffers of a bucket.

    Attributes:
        layout: of the last step.
        next: see `TreeWork.next`.
        grown: keys that each row's own list was given since it was planned.
    """

    layout: CascadeLayout
    next: Tensor
    grown: int


class FixedTree:
    """`FixedAttention` by the same two launches, over buffers with room for any tree of a bucket.

    Items are planned once for a tree: a step that only appends a token to each row sends the slots
    of these. A window moves, so that layers with one are planned at every step.

    Partial results are tensors of the run, so that a graph keeps them in its own memory, which all
    layers share.

    Args:
        shape, bucket: see `FixedBackend.fixed`.
        sizes: numbers in each buffer: items, places, ends, slots, 1.
    """

    def __init__(self, shape: AttentionShape, bucket: Bucket, sizes: Sequence[int]) -> None:
        self._shape = shape
        self._bucket = bucket
        self._sizes = tuple(sizes)
        self._buffers: tuple[Tensor, ...] = ()
        self._held: _Held | None = None
        self._due: _Held | None = None
        self.own_bytes = 4 * sum(sizes)

    def prepare(self, layout: CascadeLayout, trash: int) -> list[Tensor] | None:
        """See `FixedAttention.prepare`; a token more of each row needs their slots alone."""
        held, self._due = self._held, None
        if held is not None and held.grown < ROOM and appends(held.layout, layout):
            self._due = due = replace(held, layout=layout, grown=held.grown + 1)
            own = layout.levels[-1]
            added = own.kv_indices[own.kv_indptr[1:].long() - 1]
            grown = torch.tensor([due.grown], dtype=torch.int32)
            return [added, held.next + held.grown, grown]
        *shared, last = layout.levels
        padded = (*shared, pad_last(last, self._bucket, trash))
        decodes = len(last.qo_indptr) - 1 == layout.rows
        growing = layout.rows if decodes and self._shape.window is None else 0
        work = tree_work(CascadeLayout(self._bucket.rows, padded), self._shape, growing)
        lists = [each.view(-1) for each in work.lists]
        if any(len(each) > n for each, n in zip(lists, self._sizes, strict=True)):
            return None
        self._due = _Held(layout, work.next, 0) if growing else None
        return lists

    def plan(self, lists: Sequence[Tensor]) -> None:
        """See `FixedAttention.plan`."""
        if not self._buffers:
            with torch.inference_mode(False):  # written to in every mode
                self._buffers = tuple(
                    torch.zeros(n, dtype=torch.int32, device=lists[0].device) for n in self._sizes
                )
        self._held = None  # a plan that fails leaves the buffers undefined
        if len(lists) < len(self._buffers):
            added, places, grown = lists
            *_, slots, count = self._buffers
            slots.index_copy_(0, places, added)
            count.copy_(grown)
        else:
            for buffer, numbers in zip(self._buffers, lists, strict=True):
                buffer[: len(numbers)].copy_(numbers)
            self._buffers[0][len(lists[0]) :].zero_()  # items that are not used have no rows
        self._held = self._due

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

    items, places, ends, slots, grown = lists
    out, lse = attend(shape, items, places, ends, slots, grown, q, k_pool, v_pool)
    return apply_sinks(out, lse, sinks) if sinks is not None else (out, lse)
