"""What decoded tokens attend to, recorded, and full attention under a mask of that."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from arbor.engine.forward_pass import DecodeBatch
from arbor.model.plan import SegmentTable
from arbor.tree import Node

Reads = dict[tuple[int, int], list[int]]


def recorded(monkeypatch: pytest.MonkeyPatch) -> Reads:
    """What each decoded token attends to from now on: from (row, position) to positions on its
    path, on the device or in host memory that attention reads."""
    found: Reads = {}
    right = DecodeBatch.table

    def table(self: DecodeBatch) -> SegmentTable:
        result = right(self)
        for node in self._nodes:
            held = [
                each.start + np.flatnonzero(each.span.resident | each.span.attended)
                for each in node.path
            ]
            found[node.row, node.end - 1] = np.concatenate(held).tolist()
        return result

    monkeypatch.setattr(DecodeBatch, "table", table)
    return found


@torch.inference_mode()
def masked_logits(model: Any, node: Node, seen: Reads, window: int | None) -> torch.Tensor:
    """Hugging Face's logits over the path to a block, where each token of it attends to the
    positions it was recorded to attend to, and the prompt to all before; [n, V]."""
    tokens = torch.tensor([[token for each in node.path for token in each.tokens]])
    count = tokens.shape[1]
    mask = torch.full((count, count), torch.finfo(torch.float32).min)
    for at in range(count):
        positions = seen.get((node.row, at), list(range(at + 1)))
        near = [p for p in positions if window is None or at - p < window]
        mask[at, near] = 0
    logits: torch.Tensor = model(tokens, attention_mask=mask[None, None], use_cache=False).logits[0]
    return logits
