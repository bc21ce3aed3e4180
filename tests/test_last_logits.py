"""Logits kept after blocks' last tokens: which rows, in how much memory."""

from __future__ import annotations

import pytest
import torch

from arbor.engine.forest_state import LastLogits


def test_rows_are_copies_that_hold_no_memory_but_their_own() -> None:
    logits = torch.randn(5, 30)
    kept = LastLogits()

    kept.remember([4, 2, 9], logits[1:4])
    want = {4: logits[1].tolist(), 2: logits[2].tolist(), 9: logits[3].tolist()}
    logits.zero_()

    assert {node: row.tolist() for node, row in kept.items()} == want
    assert all(row.untyped_storage().nbytes() == 30 * 4 for row in kept.values())


@pytest.mark.parametrize(("dtype", "rows"), [(torch.float32, 3), (torch.bfloat16, 6)])
def test_the_oldest_rows_are_dropped_beyond_the_bytes_allowed(
    dtype: torch.dtype, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("arbor.engine.forest_state.MOST_LOGITS", 3 * 30 * 4)
    kept = LastLogits()

    kept.remember(range(rows), torch.zeros(rows, 30, dtype=dtype))
    kept.remember([50, 51], torch.zeros(2, 30, dtype=dtype))

    assert list(kept) == [*range(2, rows), 50, 51]
