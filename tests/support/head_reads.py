"""What each KV head reads for decoded tokens, recorded, and full attention under masks of that."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AttentionInterface

from arbor.engine.forward_pass import DecodeBatch
from arbor.memory import KVMemory
from arbor.model.plan import SegmentTable
from arbor.tree import Node

NAME = "masked_by_head"
# from (row, position) of a decoded token to the positions of the tokens in the cells that it reads
# and the KV heads that these are of, [C, n] each
HeadReads = dict[tuple[int, int], tuple[NDArray[np.int64], NDArray[np.int64]]]


def held(memory: KVMemory, path: list[Node]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Positions of the tokens in the cells of a path's slots, and their KV heads, [C, n] each."""
    slots = np.concatenate([node.span.slot[node.span.resident] for node in path])
    heads = memory.heads
    assert heads is not None, "KV heads hold the same tokens"
    positions = heads.positions(memory.table, slots).astype(np.int64)
    holders = heads.holders(memory.table, slots)
    if holders is None:
        return positions, np.broadcast_to(np.arange(len(positions))[:, None], positions.shape)
    return positions, holders.astype(np.int64)


def recorded(monkeypatch: pytest.MonkeyPatch) -> HeadReads:
    """What each decoded token reads from now on."""
    found: HeadReads = {}
    right = DecodeBatch.table

    def table(self: DecodeBatch) -> SegmentTable:
        result = right(self)
        for node in self._nodes:
            found[node.row, node.end - 1] = held(self._memory, node.path)
        return result

    monkeypatch.setattr(DecodeBatch, "table", table)
    return found


@torch.inference_mode()
def masked_forward(
    model: Any, node: Node, seen: HeadReads, heads: int
) -> tuple[Tensor, NDArray[np.float64], NDArray[np.bool_]]:
    """Attention of O(n^2) over the path to a block, in which each KV head of a decoded token reads
    what it was recorded to, and the prompt all before.

    Args:
        model: of Hugging Face.
        node: the block.
        seen: what was recorded.
        heads: KV heads of all layers, C.

    Returns:
        logits [n, V]; attention of each KV head, the mean over its query heads, [C, n, n]; and what
        was read, [C, n, n]: by query, then by key.
    """
    tokens = torch.tensor([[token for each in node.path for token in each.tokens]])
    count = tokens.shape[1]
    allowed = np.zeros((heads, count, count), np.bool_)
    for block in node.path:
        for at in range(block.start, block.end):
            read = seen.get((block.row, at))
            if read is None:
                allowed[:, at, : at + 1] = True
            else:
                positions, holders = read
                allowed[holders, at, positions] = True
    weights: dict[int, Tensor] = {}

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **given: Any
    ) -> tuple[Tensor, None]:
        group, kv_heads = query.shape[1] // key.shape[1], key.shape[1]
        first = module.layer_idx * kv_heads
        mask = torch.from_numpy(allowed[first : first + kv_heads]).repeat_interleave(group, 0)
        scaling = given.get("scaling") or query.shape[-1] ** -0.5
        logits = query @ key.repeat_interleave(group, 1).mT * scaling
        weight = logits.masked_fill(~mask, -torch.inf).softmax(-1)
        weights[module.layer_idx] = weight[0].unflatten(0, (kv_heads, group)).mean(1)
        return (weight @ value.repeat_interleave(group, 1)).transpose(1, 2), None

    AttentionInterface.register(NAME, attend)
    model.set_attn_implementation(NAME)
    logits: Tensor = model(tokens, use_cache=False).logits[0]
    given = torch.cat([weights[layer] for layer in sorted(weights)])
    return logits, given.double().numpy(), allowed
