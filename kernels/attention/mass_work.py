"""Work items of the attention mass kernel: which rows meet which block of keys."""

from __future__ import annotations

import functools
import importlib
import logging
from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor

from arbor.kernels.attention.base import AttentionShape, CascadeLayout
from arbor.kernels.attention.work_items import level_items

# Keys of an item; a power of two.
ITEM_KEYS = 64
# Rows of an item; a prompt's first keys are read by all of its rows, which several items share.
ITEM_ROWS = 512
# Row and head pairs of a tile: what one product takes; small ones where no item has more.
TILES = (16, 64)


@dataclass(frozen=True, slots=True)
class MassWork:
    """Items of one layout and shape, on the device.

    Row r of an item reads key k iff ``0 <= r + offset - k < span``, where keys are counted through
    `slots`. Nothing but the pointers depends on the values in these tensors, so that a captured
    graph may be given other values, and fewer items than there is room for.

    Attributes:
        shape: of the layers.
        items: int32 [W, 6]: first_row, end_row, first_key, end_key, offset, span.
        count: int32 [1]: the items that count are the first so many.
        slots: int32 [keys of all levels].
        heads: int64 [H_kv]: all KV heads.
        tile: pairs of a row and a query head that one product takes.
    """

    shape: AttentionShape
    items: Tensor
    count: Tensor
    slots: Tensor
    heads: Tensor
    tile: int


def mass_work(layout: CascadeLayout, shape: AttentionShape, device: torch.device) -> MassWork:
    """The items of a layout: each row meets each key it reads in exactly one.

    Example:
        Two rows of a prompt, and a third that reads 70 keys in two blocks:

        >>> ints = lambda *values: torch.tensor(values, dtype=torch.int32)
        >>> level = CascadeLevel(ints(0, 2, 3), ints(0, 2, 72), torch.arange(72).int(), causal=True)
        >>> shape = AttentionShape(1, 1, 64, 64, scaling=0.125)
        >>> mass_work(CascadeLayout(3, (level,)), shape, torch.device("cpu")).items[:, :4].tolist()
        [[0, 2, 0, 2], [2, 3, 2, 66], [2, 3, 66, 72]]
    """
    parts, first_key = [], 0
    for level in layout.levels:
        parts.append(level_items(level, shape, first_key, ITEM_KEYS, ITEM_ROWS))
        first_key += len(level.kv_indices)
    items = np.concatenate(parts)
    rows = items[:, 1] - items[:, 0]
    items = items[np.argsort(-rows, kind="stable")]  # the longest first, so that none ends last
    pairs = int(rows.max(initial=0)) * shape.group
    slots = torch.cat([level.kv_indices for level in layout.levels])
    return MassWork(
        shape,
        torch.from_numpy(items.astype(np.int32)).to(device),
        torch.tensor([len(items)], dtype=torch.int32).to(device),
        slots.to(device, torch.int32),
        torch.arange(shape.num_kv_heads, device=device),
        TILES[0] if pairs <= TILES[0] else TILES[1],
    )


logger = logging.getLogger(__name__)

# float32 products of a tile spill registers, so that matmuls are better there.
DTYPES = (torch.float16, torch.bfloat16)


class MassKernel:
    """Calls `triton_mass`, which is imported at first use; a failure is logged once and final.

    Triton compiles the kernel at first use, which takes a C compiler and a supported GPU.
    """

    def __init__(self) -> None:
        self._failed = False

    def runs(self, q: Tensor) -> bool:
        """Whether the kernel is to be used for these queries.

        Not where torch is asked for deterministic algorithms: the kernel's sums are atomic.
        """
        return (
            q.device.type == "cuda"
            and q.dtype in DTYPES
            and not self._failed
            and not torch.are_deterministic_algorithms_enabled()
            and _installed()
        )

    def __call__(
        self, work: MassWork, q: Tensor, k_pool: Tensor, lse: Tensor, heads: Tensor | None
    ) -> Tensor | None:
        """See `triton_mass`; None if it failed, now or before."""
        if self._failed:
            return None
        try:
            module = importlib.import_module("arbor.kernels.attention.triton_mass")
            mass: Tensor = module.triton_mass(work, q, k_pool, lse, heads)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # compilers, loaders and CUDA fail in many ways
            self._failed = True
            lines = str(error).strip().splitlines() or [""]
            logger.warning(
                "Attention mass runs on torch: triton failed (%s: %s).",
                type(error).__name__,
                lines[0],
            )
            return None
        return mass


@functools.cache
def _installed() -> bool:
    return find_spec("triton") is not None
