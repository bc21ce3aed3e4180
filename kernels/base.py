"""What an attention backend is: plan once per forward, run once per layer, over slots of a page-size-1 pool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What one kind of layer asks of attention; layers with equal shapes share one plan.

    Attributes:
        num_qo_heads: query heads, H_q.
        num_kv_heads: key/value heads, H_kv; query head h reads KV head h // (H_q // H_kv).
        head_dim_qk: D_k.
        head_dim_vo: D_v (differs from D_k for multi-head latent attention).
        scaling: factor on q.k before the softmax.
        window: a key is visible iff 0 <= index distance < window; None = everything (FlashInfer's
            ``window_left = window - 1``).
        softcap: logits become softcap * tanh(logits / softcap); None = off.
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int
    scaling: float
    window: int | None = None
    softcap: float | None = None

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_qo_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True)
class CascadeLevel:
    """One level: requests that partition the batch's rows, each with its own list of keys.

    Row r of request i is rows ``qo_indptr[i] <= r < qo_indptr[i+1]`` and reads the slots
    ``kv_indices[kv_indptr[i]:kv_indptr[i+1]]``. A request may have no keys (its rows read nothing on this level) but
    always has at least one row. Same meaning as the arguments of FlashInfer's paged wrappers at page size 1.

    Attributes:
        qo_indptr: int32 [R + 1], CPU; first 0, last T, strictly increasing.
        kv_indptr: int32 [R + 1], CPU; first 0, non-decreasing.
        kv_indices: int32 [kv_indptr[-1]], CPU; slots in order of position.
        causal: end-aligned causal: row j (0-based) of a request with m rows and n keys reads keys
            ``0 <= i <= n - m + j``; then n >= m. False: every row reads every key (windows do not apply).
    """

    qo_indptr: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor
    causal: bool


@dataclass(frozen=True, slots=True)
class CascadeLayout:
    """Which rows read which slots: attention over the union of a row's levels.

    Levels before the last are shared spans (``causal=False``); the last is each request's private remainder
    (``causal=True``) and never empty of keys. Layouts for windowed shapes have exactly one level; a window counts
    back from a row's own end-aligned key by index, so the planner gives such layouts only to requests whose keys
    have no gaps in position, and splits the others into single rows with exact lists.

    Attributes:
        rows: T, rows of the batch.
        levels: at least one.
    """

    rows: int
    levels: tuple[CascadeLevel, ...]


@runtime_checkable
class AttentionBackend(Protocol):
    """Tensors in, tensors out; knows no tree. Implementations: reference, rowwise, torch, FlashInfer.

    The pool's tensors are ``k_pool [slots, H_kv, D_k]`` and ``v_pool [slots, H_kv, D_v]``, possibly strided, contiguous
    in the last dimension. Slots that no list names may hold anything, NaN included.
    """

    def plan(self, layout: CascadeLayout, shape: AttentionShape) -> Any:
        """Host work of one forward for one shape; the result goes to every `run` of it."""
        ...

    def run(
        self, plan: Any, q: Tensor, k_pool: Tensor, v_pool: Tensor, sinks: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Attention of one layer. The rows' own K/V are already in the pool.

        Args:
            plan: from `plan`, with the shape of this layer.
            q: [T, H_q, D_k], position-encoded, not scaled.
            k_pool: [slots, H_kv, D_k].
            v_pool: [slots, H_kv, D_v].
            sinks: [H_q] logits of one more key per head with value 0 (gpt-oss), or None.

        Returns:
            out: [T, H_q, D_v] in q's dtype.
            lse: [T, H_q] float32, natural logarithm of the sum of exp of the (scaled, capped) logits over every level,
                sinks included.
        """
        ...

    def mass(
        self, plan: Any, q: Tensor, k_pool: Tensor, lse: Tensor, heads: Tensor | None = None
    ) -> Tensor:
        """Attention mass each slot received in one layer: sum over rows and query heads of exp(logit - lse).

        Args:
            plan, q, k_pool: as in `run`.
            lse: from `run`: the final one, after merging all levels.
            heads: int64 [n] KV heads to count (all query heads of their groups); None = all.

        Returns:
            [slots] float32.
        """
        ...


def merge_states(out: Tensor, lse: Tensor, out2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint key sets from the two sets' results.

    Args:
        out, out2: [T, H, D].
        lse, lse2: [T, H] float32, natural log; -inf where a row read nothing (then its out is ignored).

    Returns:
        out [T, H, D], lse [T, H]; equal to attention over both sets at once. Rows that read nothing in either give 0
        and -inf.
    """
    merged = torch.logaddexp(lse, lse2)
    safe = torch.where(torch.isinf(merged), torch.zeros_like(merged), merged)
    weight = torch.exp(lse - safe).unsqueeze(-1)
    weight2 = torch.exp(lse2 - safe).unsqueeze(-1)
    return (out * weight + out2 * weight2).to(out.dtype), merged


def apply_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Adds one key per head with logit `sinks` [H] and value 0 to a finished attention (gpt-oss)."""
    sinks = sinks.to(lse.dtype)
    out = out * torch.sigmoid(lse - sinks).unsqueeze(-1).to(out.dtype)
    return out, torch.logaddexp(lse, sinks.expand_as(lse))
