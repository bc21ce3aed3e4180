"""The FlashInfer backend's planning, against an emulation of the documented wrapper; no GPU."""

from __future__ import annotations

import math
import sys
import types
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from arbor.kernels.base import AttentionShape
from arbor.kernels.flashinfer_cascade import FlashInferCascade
from arbor.kernels.reference import ReferenceAttention
from arbor.model.plan import Piece, Segment, plan_forward

SLOTS = 96


class EmulatedWrapper:
    """`BatchPrefillWithPagedKVCacheWrapper` as documented.

    Requests over page tables, end-aligned causal, base-2 logsumexp.
    """

    def __init__(self, workspace: Tensor, layout: str, backend: str) -> None:
        assert layout == "NHD"
        assert backend == "fa2"
        self.planned = 0

    def plan(
        self,
        qo_indptr: Tensor,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        **settings: Any,
    ) -> None:
        for host in (qo_indptr, indptr, last_page_len):
            assert host.dtype == torch.int32 and host.device.type == "cpu"
        assert page_size == 1 and indices.dtype == torch.int32
        lengths = (indptr[1:] - indptr[:-1] - 1).clamp(min=0) + last_page_len
        assert (lengths == indptr[1:] - indptr[:-1]).all(), "an empty request has no last page"
        self.planned += 1
        self.args = (qo_indptr.tolist(), indptr.tolist(), indices.long(), settings)
        self.group = num_qo_heads // num_kv_heads

    def run(
        self, q: Tensor, paged: tuple[Tensor, Tensor], return_lse: bool
    ) -> tuple[Tensor, Tensor]:
        assert return_lse and q.is_contiguous()
        rows, ends, indices, settings = self.args
        k_pool, v_pool = (pool.squeeze(1).float() for pool in paged)
        out = torch.zeros(q.shape[0], q.shape[1], v_pool.shape[-1])
        lse = torch.full((q.shape[0], q.shape[1]), -torch.inf)
        for i in range(len(rows) - 1):
            keys = indices[ends[i] : ends[i + 1]]
            m, n = rows[i + 1] - rows[i], len(keys)
            for j in range(m):
                last = n - m + j if settings["causal"] else n - 1
                window = settings["window_left"]
                first = max(0, last - window) if window >= 0 else 0
                mine = keys[first : last + 1]
                if len(mine) == 0:
                    continue
                k = k_pool[mine].repeat_interleave(self.group, 1)
                v = v_pool[mine].repeat_interleave(self.group, 1)
                row = rows[i] + j
                logits = torch.einsum("hd,nhd->hn", q[row].float(), k) * settings["sm_scale"]
                cap = settings["logits_soft_cap"]
                if cap:
                    logits = cap * torch.tanh(logits / cap)
                lse[row] = torch.logsumexp(logits, -1) / math.log(2)
                out[row] = torch.einsum("hn,nhd->hd", torch.softmax(logits, -1), v)
        return out.to(q.dtype), lse


def _merge_in_place(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    assert not (torch.isinf(lse) & torch.isinf(more_lse)).any(), (
        "merging two empty states gives NaN"
    )
    first, second = lse * math.log(2), more_lse * math.log(2)
    total = torch.logaddexp(first, second)
    weight, more_weight = torch.exp(first - total)[..., None], torch.exp(second - total)[..., None]
    out.copy_(out.float() * weight + more.float() * more_weight)
    lse.copy_(total / math.log(2))


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> FlashInferCascade:
    module = types.ModuleType("flashinfer")
    module.BatchPrefillWithPagedKVCacheWrapper = EmulatedWrapper  # type: ignore[attr-defined]
    module.merge_state_in_place = _merge_in_place  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    return FlashInferCascade(torch.device("cpu"))


def tree_of_segments() -> list[Segment]:
    """A root of 20 tokens, two blocks of 6, two decoding leaves below each, a hole of 3 rows."""
    slots = np.random.default_rng(0).permutation(SLOTS).astype(np.int32)
    root = Piece("root", slots[:20], np.arange(20, dtype=np.int32))
    blocks = [
        Piece(f"b{i}", slots[20 + 6 * i : 26 + 6 * i], np.arange(20, 26, dtype=np.int32))
        for i in range(2)
    ]
    segments = []
    free = 40
    for block in blocks:
        for length in (1, 4):
            own = slots[free : free + length]
            free += length
            segments.append(
                Segment((root, block), [1], np.array([25 + length]), own, own[-1:], logits=1)
            )
    own = slots[free : free + 3]
    segments.append(Segment((root,), [1, 2, 3], np.arange(20, 23), own, own, logits=1))
    return segments


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("sinks", [False, True])
def test_planned_levels_give_the_reference_attention(
    backend: FlashInferCascade, softcap: float | None, window: int | None, sinks: bool
) -> None:
    torch.manual_seed(0)
    shape = AttentionShape(8, 2, 64, 64, 64**-0.5, window, softcap)
    plan = plan_forward(tree_of_segments())
    layout = plan.layout(window)
    q = torch.randn(plan.rows, 8, 64, dtype=torch.bfloat16)
    k_pool = torch.randn(SLOTS + 1, 2, 64, dtype=torch.bfloat16)
    v_pool = torch.randn(SLOTS + 1, 2, 64, dtype=torch.bfloat16)
    logits = torch.randn(8) if sinks else None
    reference = ReferenceAttention()

    out, lse = backend.run(backend.plan(layout, shape), q, k_pool, v_pool, logits)

    right, right_lse = reference.run(reference.plan(layout, shape), q, k_pool, v_pool, logits)
    torch.testing.assert_close(out.float(), right.float(), atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse, right_lse, atol=2e-2, rtol=1e-2)


def test_one_wrapper_per_level_is_planned_once_per_forward(backend: FlashInferCascade) -> None:
    shape = AttentionShape(8, 2, 64, 64, 0.125)
    layout = plan_forward(tree_of_segments()).layout(None)
    assert len(layout.levels) == 3

    first = backend.plan(layout, shape)
    second = backend.plan(layout, shape)

    assert len(set(map(id, first.wrappers))) == 3
    assert first.wrappers == second.wrappers
    assert [wrapper.planned for wrapper in first.wrappers] == [2, 2, 2]


def test_what_flashinfer_has_no_kernel_for_is_refused(backend: FlashInferCascade) -> None:
    layout = plan_forward(tree_of_segments()).layout(None)

    with pytest.raises(ValueError, match="head_dim"):
        backend.plan(layout, AttentionShape(8, 2, 48, 48, 0.125))
    with pytest.raises(ValueError, match="float32"):
        FlashInferCascade(torch.device("cpu"), torch.float32)
