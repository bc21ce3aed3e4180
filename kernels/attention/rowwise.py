"""Attention row by row, in the order of the path: a row's bits do not depend on the batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from arbor.kernels.attention.base import (
    AttentionShape,
    CascadeLayout,
    apply_sinks,
    attention_logits,
    empty_mass,
    matmul_float32,
)
from arbor.kernels.int8 import is_stored, read_slots
from arbor.kernels.invariant import plain


@dataclass(frozen=True, slots=True)
class RowwisePlan:
    """The slots every row reads.

    Attributes:
        shape: of the layer.
        keys: per row, int64 [n] slots in order of position.
    """

    shape: AttentionShape
    keys: tuple[Tensor, ...]


@dataclass(frozen=True)
class RowwiseAttention:
    """The backend that all others must agree with, and that of `deterministic=True`.

    A row's keys are gathered from all its levels into one list, so the cascade's grouping, the
    number of rows and the places of the slots leave no trace in the result: equal keys and queries
    give equal bits. Slower than the cascade: it reads shared spans once per row. Computes in at
    least float32.

    Example:
        The same two keys in other slots, in a batch of two rows or of one (float32, D = 2):

        >>> from arbor.kernels.attention.base import CascadeLevel
        >>> ints = lambda *values: torch.tensor(values, dtype=torch.int32)
        >>> backend, shape = RowwiseAttention(), AttentionShape(1, 1, 2, 2, scaling=1.0)
        >>> two = CascadeLevel(ints(0, 1, 2), ints(0, 2, 4), ints(0, 1, 2, 3), causal=True)
        >>> one = CascadeLevel(ints(0, 1), ints(0, 2), ints(2, 3), causal=True)
        >>> pool = torch.tensor([[0.1, 0.7], [0.2, 0.3]]).repeat(2, 1).view(4, 1, 2)
        >>> plans = (backend.plan(CascadeLayout(2, (two,)), shape),
        ...          backend.plan(CascadeLayout(1, (one,)), shape))
        >>> (in_two, _), (alone, _) = (
        ...     backend.run(plan, pool[: len(plan.keys)], pool, pool) for plan in plans)
        >>> torch.equal(in_two[0], alone[0])
        True
    """

    def plan(self, layout: CascadeLayout, shape: AttentionShape) -> RowwisePlan:
        """Flatten a layout into one key list per row."""
        parts: list[list[Tensor]] = [[] for _ in range(layout.rows)]
        for level in layout.levels:
            rows, ends = level.qo_indptr.tolist(), level.kv_indptr.tolist()
            for request in range(len(rows) - 1):
                keys = level.kv_indices[ends[request] : ends[request + 1]].long()
                for row in range(rows[request], rows[request + 1]):
                    last = len(keys) - (rows[request + 1] - 1 - row) if level.causal else len(keys)
                    first = 0
                    if level.causal and shape.window is not None:
                        first = max(0, last - shape.window)
                    parts[row].append(keys[first:last])
        return RowwisePlan(shape, tuple(torch.cat(part) for part in parts))

    def run(
        self,
        plan: RowwisePlan,
        q: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        sinks: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See `AttentionBackend.run`. A row without keys gives 0 and -inf."""
        shape = plan.shape
        heads, group = shape.num_kv_heads, shape.group
        work = torch.promote_types(q.dtype, torch.float32)
        out = q.new_empty(q.shape[0], shape.num_qo_heads, shape.head_dim_vo, dtype=work)
        lse = q.new_empty(q.shape[0], shape.num_qo_heads, dtype=work)
        with plain(q.device):
            for row, keys in enumerate(plan.keys):
                k = _read(k_pool, keys, shape.head_dim_qk, q.dtype)
                v = _read(v_pool, keys, shape.head_dim_vo, q.dtype)
                queries = q[row].to(k.dtype).clone(memory_format=torch.contiguous_format)
                logits = attention_logits(queries.view(heads, group, -1), k, shape)
                total = torch.logsumexp(logits, dim=-1, keepdim=True)
                weights = torch.exp(logits - total)
                out[row] = matmul_float32(weights, v).reshape(shape.num_qo_heads, -1)
                lse[row] = total.reshape(-1)
        if sinks is not None:
            out, lse = apply_sinks(out, lse, sinks)
        return out.to(q.dtype), lse.float()

    def mass(
        self,
        plan: RowwisePlan,
        q: Tensor,
        k_pool: Tensor,
        lse: Tensor,
        heads: Tensor | None = None,
        *,
        by_head: bool = False,
    ) -> Tensor:
        """See `AttentionBackend.mass`."""
        shape = plan.shape
        mass = empty_mass(shape, k_pool, heads, by_head)
        for row, keys in enumerate(plan.keys):
            keys = keys.to(k_pool.device)
            k = _read(k_pool, keys, shape.head_dim_qk, q.dtype)
            grouped = q[row].to(k.dtype).reshape(shape.num_kv_heads, shape.group, -1)
            logits = attention_logits(grouped, k, shape)
            weights = torch.exp(logits.float() - lse[row].reshape(shape.num_kv_heads, -1, 1))
            chosen = weights if heads is None else weights.index_select(0, heads)
            mass.index_add_(-1, keys, chosen.sum(dim=1 if by_head else (0, 1)))
        return mass


def _read(pool: Tensor, keys: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """K or V of a row [H_kv, n, dim] in the queries' dtype; of 8-bit KV in at least float32."""
    rows = read_slots(pool, keys.to(pool.device), dim)
    work = torch.promote_types(dtype, torch.float32) if is_stored(pool) else dtype
    return rows.to(work).transpose(0, 1)
