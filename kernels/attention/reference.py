"""The reference: attention over slots in the clearest way, one row and one head at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from arbor.kernels.attention.base import AttentionShape, CascadeLayout, apply_sinks
from arbor.kernels.int8 import decode, is_stored


@dataclass(frozen=True, slots=True)
class ReferencePlan:
    """The slots every row reads.

    Attributes:
        shape: of the layer.
        slots: per row, int64 [n] slots in order of level and position; may be empty.
    """

    shape: AttentionShape
    slots: tuple[Tensor, ...]


class ReferenceAttention:
    """The `AttentionBackend` all others must agree with.

    Computes in float32 (float64 for float64 inputs), never batches, touches only the slots a row
    reads. Per row and head, over the keys K and values V that the row reads, equal to
    ``softmax(K @ q * scaling) @ V`` and ``logsumexp(K @ q * scaling)``.

    Example:
        One row of one head reads two equal keys (float32, D = 2):

        >>> from arbor.kernels.attention.base import CascadeLevel
        >>> ints = lambda *values: torch.tensor(values, dtype=torch.int32)
        >>> level = CascadeLevel(ints(0, 1), ints(0, 2), ints(0, 1), causal=True)
        >>> backend, shape = ReferenceAttention(), AttentionShape(1, 1, 2, 2, scaling=1.0)
        >>> plan = backend.plan(CascadeLayout(1, (level,)), shape)
        >>> q, k_pool, v_pool = torch.ones(1, 1, 2), torch.zeros(3, 1, 2), torch.eye(3, 2)
        >>> out, lse = backend.run(plan, q, k_pool, v_pool.unsqueeze(1))
        >>> out, lse.exp()
        (tensor([[[0.5000, 0.5000]]]), tensor([[2.]]))
        >>> backend.mass(plan, q, k_pool, lse)
        tensor([0.5000, 0.5000, 0.0000])
    """

    def plan(self, layout: CascadeLayout, shape: AttentionShape) -> ReferencePlan:
        """Every row's key list, written out: no levels, causality or windows are left."""
        slots: list[list[int]] = [[] for _ in range(layout.rows)]
        for level in layout.levels:
            qo_indptr = level.qo_indptr.tolist()
            kv_indptr = level.kv_indptr.tolist()
            kv_indices = level.kv_indices.tolist()
            for request in range(len(qo_indptr) - 1):
                first_row, end_row = qo_indptr[request], qo_indptr[request + 1]
                keys = kv_indices[kv_indptr[request] : kv_indptr[request + 1]]
                for row in range(first_row, end_row):
                    first, last = 0, len(keys) - 1
                    if level.causal:
                        last = len(keys) - (end_row - first_row) + (row - first_row)
                        if shape.window is not None:
                            first = max(0, last - shape.window + 1)
                    slots[row] += keys[first : last + 1]
        return ReferencePlan(shape, tuple(torch.tensor(s, dtype=torch.int64) for s in slots))

    def run(
        self,
        plan: ReferencePlan,
        q: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        sinks: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See `AttentionBackend.run`. A row without keys gives 0 and -inf."""
        shape, work = plan.shape, _work_dtype(q)
        out = torch.zeros(*q.shape[:2], shape.head_dim_vo, dtype=work, device=q.device)
        lse = torch.full(q.shape[:2], -torch.inf, dtype=work, device=q.device)
        for row, slots in enumerate(plan.slots):
            if not len(slots):
                continue
            for head in range(shape.num_qo_heads):
                logits = _logits(shape, q[row, head], k_pool, slots.to(q.device), head)
                stored = v_pool[slots.to(q.device), head // shape.group]
                values = _numbers(stored, shape.head_dim_vo).to(work)
                out[row, head] = torch.softmax(logits, 0) @ values
                lse[row, head] = torch.logsumexp(logits, 0)
        if sinks is not None:
            out, lse = apply_sinks(out, lse, sinks)
        return out.to(q.dtype), lse.float()

    def mass(
        self,
        plan: ReferencePlan,
        q: Tensor,
        k_pool: Tensor,
        lse: Tensor,
        heads: Tensor | None = None,
        *,
        by_head: bool = False,
    ) -> Tensor:
        """See `AttentionBackend.mass`."""
        shape = plan.shape
        counted = range(shape.num_kv_heads) if heads is None else heads.tolist()
        mass = torch.zeros(len(counted), k_pool.shape[0], dtype=_work_dtype(q), device=q.device)
        for row, row_slots in enumerate(plan.slots):
            slots = row_slots.to(q.device)
            for place, kv_head in enumerate(counted):
                for head in range(kv_head * shape.group, (kv_head + 1) * shape.group):
                    logits = _logits(shape, q[row, head], k_pool, slots, head)
                    mass[place].index_add_(0, slots, torch.exp(logits - lse[row, head]))
        return (mass if by_head else mass.sum(0)).float()


def _work_dtype(q: Tensor) -> torch.dtype:
    return torch.promote_types(q.dtype, torch.float32)


def _numbers(stored: Tensor, dim: int) -> Tensor:
    """Numbers [n, dim] of a head, decoded if they are 8-bit KV."""
    return decode(stored, dim) if is_stored(stored) else stored


def _logits(shape: AttentionShape, q: Tensor, k_pool: Tensor, slots: Tensor, head: int) -> Tensor:
    """Scaled, capped logits [n] of one query [D_k] over the keys in `slots`."""
    work = _work_dtype(q)
    keys = _numbers(k_pool[slots, head // shape.group], shape.head_dim_qk).to(work)
    logits = keys @ q.to(work) * shape.scaling
    if shape.softcap is not None:
        logits = shape.softcap * torch.tanh(logits / shape.softcap)
    return logits
