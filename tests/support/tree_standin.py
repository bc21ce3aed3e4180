"""Tree attention without a GPU: what its kernel reads in its lists, computed in torch."""

from __future__ import annotations

import sys
import types
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.graph_tape import opaque
from torch import Tensor

from arbor.kernels.attention.base import AttentionShape
from arbor.kernels.attention.rowwise import RowwiseAttention, RowwisePlan
from arbor.kernels.attention.tree_work import COLUMNS

KERNEL = "arbor.kernels.attention.triton_tree_kernel"


def keys_read(lists: Sequence[Tensor], rows: int) -> list[list[int]]:
    """The slots that each row reads, in the order of the items.

    Args:
        lists: of a `TreeWork`, or buffers that hold them.
        rows: of the batch.
    """
    items, _, _, slots, grown = (each.flatten().tolist() for each in lists)
    found: list[list[int]] = [[] for _ in range(rows)]
    for at in range(0, len(items), COLUMNS):
        first_row, end_row, first_key, end_key, offset, span, _, grows = items[at : at + COLUMNS]
        more = grows * grown[0]
        for row in range(first_row, end_row):
            last = row + offset + more
            first = max(first_key, last - span + 1)
            found[row] += slots[first : min(end_key + more, last + 1)]
    return found


def install(patch: pytest.MonkeyPatch) -> None:
    """Have the backend `triton` run on a CPU, without Triton."""
    kernel: Any = types.ModuleType(KERNEL)
    kernel.attend = attend
    patch.setitem(sys.modules, KERNEL, kernel)


def attend(
    shape: AttentionShape,
    items: Tensor,
    places: Tensor,
    ends: Tensor,
    slots: Tensor,
    grown: Tensor,
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
) -> tuple[Tensor, Tensor]:
    """In place of the kernels; they read their lists when they run."""
    lists = (items, places, ends, slots, grown)
    out = q.new_empty(*q.shape[:2], shape.head_dim_vo)
    lse = torch.empty(q.shape[:2])

    def kernel() -> None:
        keys = tuple(torch.tensor(each) for each in keys_read(lists, len(q)))
        found = RowwiseAttention().run(RowwisePlan(shape, keys), q, k_pool, v_pool)
        for mine, theirs in zip((out, lse), found, strict=True):
            mine.copy_(theirs)

    opaque(kernel)
    return out, lse
