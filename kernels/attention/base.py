"""Attention backends: plan once per forward, run per layer, over slots of a page-size-1 pool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The attention of one kind of layer; layers with equal shapes share one plan.

    Attributes:
        num_qo_heads: query heads, H_q.
        num_kv_heads: key/value heads, H_kv; query head h reads KV head h // (H_q // H_kv).
        head_dim_qk: D_k.
        head_dim_vo: D_v (differs from D_k for multi-head latent attention).
        scaling: factor on q.k before the softmax.
        window: a key is visible iff 0 <= index distance < window; None = everything (FlashInfer's
            ``window_left = window - 1``).
        softcap: logits become softcap * tanh(logits / softcap); None = off.

    Raises:
        ValueError: the query heads are not as many for each KV head, at least one.

    Example:
        Llama 3.1 8B:

        >>> AttentionShape(32, 8, 128, 128, scaling=128**-0.5).group
        4
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int
    scaling: float
    window: int | None = None
    softcap: float | None = None

    def __post_init__(self) -> None:
        queries, keys = self.num_qo_heads, self.num_kv_heads
        if not 0 < keys <= queries or queries % keys:
            raise ValueError(
                f"{queries} query heads over {keys} KV heads: the query heads must be a multiple"
                " of the KV heads, of which there is at least one"
            )

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_qo_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True)
class CascadeLevel:
    """One level: requests that partition the batch's rows, each with its own list of keys.

    Request i has rows ``qo_indptr[i] <= r < qo_indptr[i+1]`` and reads the slots
    ``kv_indices[kv_indptr[i]:kv_indptr[i+1]]``. A request may have no keys (its rows read nothing
    on this level) but always has at least one row. Same meaning as the arguments of FlashInfer's
    paged wrappers at page size 1.

    Attributes:
        qo_indptr: int32 [R + 1], CPU; first 0, last T, strictly increasing.
        kv_indptr: int32 [R + 1], CPU; first 0, non-decreasing.
        kv_indices: int32 [kv_indptr[-1]], CPU; slots in order of position.
        causal: end-aligned causal: row j (0-based) of a request with m rows and n keys reads keys
            ``0 <= i <= n - m + j``; then n >= m. False: every row reads every key (windows do not
            apply).

    Example:
        Rows 0 and 1 read slots 5 6 7, row 2 reads slot 9:

        >>> ints = lambda *values: torch.tensor(values, dtype=torch.int32)
        >>> level = CascadeLevel(ints(0, 2, 3), ints(0, 3, 4), ints(5, 6, 7, 9), causal=False)
    """

    qo_indptr: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor
    causal: bool


@dataclass(frozen=True, slots=True)
class CascadeLayout:
    """Which rows read which slots: attention over the union of a row's levels.

    Levels before the last are shared spans (``causal=False``); the last is each request's private
    remainder (``causal=True``) and never empty of keys. Layouts for windowed shapes have exactly
    one level; a window counts back from a row's own end-aligned key by index, so the planner gives
    such layouts only to requests whose keys have no gaps in position, and splits the others into
    single rows with exact lists.

    Attributes:
        rows: T, rows of the batch.
        levels: at least one.
    """

    rows: int
    levels: tuple[CascadeLevel, ...]


@runtime_checkable
class AttentionBackend(Protocol):
    """Attention over slots, without a tree. Implementations: rowwise, torch,
    native, FlashInfer.

    The pool's tensors are ``k_pool [slots, H_kv, D_k]`` and ``v_pool [slots, H_kv, D_v]``, possibly
    strided, contiguous in the last dimension. Slots that no list names may hold anything, NaN
    included. Queries and pools have one dtype: float32, float64, float16 or bfloat16. The pools of
    8-bit KV are int8 instead, and as wide as `arbor.kernels.int8` says; rowwise, torch, native and
    triton read them.
    """

    def plan(self, layout: CascadeLayout, shape: AttentionShape) -> Any:
        """Host work of one forward for one shape; the result is passed to every `run` of it."""
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
            lse: [T, H_q] float32, natural logarithm of the sum of exp of the (scaled, capped)
                logits over every level, sinks included.
        """
        ...

    def mass(
        self,
        plan: Any,
        q: Tensor,
        k_pool: Tensor,
        lse: Tensor,
        heads: Tensor | None = None,
        *,
        by_head: bool = False,
    ) -> Tensor:
        """Attention mass of each slot in a layer: the sum of exp(logit - lse) over rows and heads.

        Args:
            plan, q, k_pool: as in `run`.
            lse: from `run`: the final one, after merging all levels.
            heads: int64 [n] KV heads to count (all query heads of their groups); None = all.
            by_head: one sum for each of these KV heads instead of one for all.

        Returns:
            [slots] float32; by head [n, slots].
        """
        ...


@runtime_checkable
class ObservingBackend(Protocol):
    """A backend that computes attention mass along with the attention."""

    def run_observed(
        self,
        plan: Any,
        q: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        sinks: Tensor | None = None,
        counted: Tensor | None = None,
        heads: Tensor | None = None,
        *,
        by_head: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`AttentionBackend.run` and `AttentionBackend.mass` in one pass over the keys.

        Args:
            plan, q, k_pool, v_pool, sinks: as in `AttentionBackend.run`.
            counted: bool [T], rows whose attention counts; None = all.
            heads, by_head: as in `AttentionBackend.mass`.

        Returns:
            out [T, H_q, D_v], lse [T, H_q] and the mass, as the two methods do.
        """
        ...


def apply_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """A finished attention with one more key per head, of logit `sinks` and value 0 (gpt-oss).

    Equal to attention over the same keys and a key whose scaled, capped logit is ``sinks[h]`` for
    every row, with a value of zeros.

    Args:
        out: [T, H, D].
        lse: [T, H] float32 or float64, natural logarithm.
        sinks: [H], any floating-point dtype.

    Returns:
        out [T, H, D], lse [T, H], in the dtypes given.

    Example:
        A row that read one key of logit 0 shares its attention equally with a sink of logit 0:

        >>> out, lse = apply_sinks(torch.ones(1, 1, 2), torch.zeros(1, 1), torch.zeros(1))
        >>> out, lse.exp()
        (tensor([[[0.5000, 0.5000]]]), tensor([[2.]]))
    """
    sinks = sinks.to(lse.dtype)
    # the factor is common to a head: rounded to 16 bits, it would shift all of its values alike
    scaled = out * torch.sigmoid(lse - sinks).unsqueeze(-1)
    return scaled.to(out.dtype), torch.logaddexp(lse, sinks.expand_as(lse))


def empty_mass(
    shape: AttentionShape, k_pool: Tensor, heads: Tensor | None, by_head: bool
) -> Tensor:
    """Zeros as `AttentionBackend.mass` returns them, of all slots of a pool."""
    count = shape.num_kv_heads if heads is None else len(heads)
    size = (count, len(k_pool)) if by_head else (len(k_pool),)
    return torch.zeros(size, dtype=torch.float32, device=k_pool.device)


HALF_PRECISION = (torch.float16, torch.bfloat16)


def matmul_float32(left: Tensor, right: Tensor) -> Tensor:
    """The matrix product, accumulated and returned in float32, or in float64 for float64 inputs.

    Equal to ``torch.matmul(left.float(), right.float())`` where `right` is float16 or bfloat16,
    whose products float32 holds exactly; the same bits as ``torch.matmul(left, right)`` in float32
    and float64. A result in half precision would overflow (float16 ends at 65504) or lose the
    digits that tell keys of a large common bias apart (bfloat16 has 8 bits).

    Args:
        left: [..., m, k], of right's dtype, or float32 where that is a half precision one (a GPU
            then rounds it to right's dtype).
        right: [..., k, n]; same device and leading dimensions, at least one of them.

    Returns:
        [..., m, n]; owned by the caller.

    Example:
        >>> q = torch.full((1, 1, 4), 300, dtype=torch.float16)
        >>> k = torch.full((1, 4, 1), 100, dtype=torch.float16)
        >>> torch.matmul(q, k)
        tensor([[[inf]]], dtype=torch.float16)
        >>> matmul_float32(q, k)
        tensor([[[120000.]]])
    """
    if right.dtype not in HALF_PRECISION:
        return torch.matmul(left, right)
    if right.device.type != "cuda":
        return torch.matmul(left.float(), right.float())
    left = left.to(right.dtype)
    product = torch.bmm(left.flatten(0, -3), right.flatten(0, -3), out_dtype=torch.float32)
    return product.view(*left.shape[:-1], right.shape[-1])


def attention_logits(queries: Tensor, keys: Tensor, shape: AttentionShape) -> Tensor:
    """Scaled and capped logits, in at least float32, without masks.

    Equal to ``softcap * tanh(queries @ keys.T * scaling / softcap)``, or to
    ``queries @ keys.T * scaling`` without a softcap.

    Args:
        queries: [..., m, D_k].
        keys: [..., n, D_k]; same dtype, device and leading dimensions, at least one of them.
        shape: of the layer; only `scaling` and `softcap` count.

    Returns:
        [..., m, n] float32, or float64 for float64 inputs; owned by the caller.

    Example:
        >>> shape = AttentionShape(1, 1, 4, 4, scaling=0.5, softcap=2.0)
        >>> q, k = torch.ones(1, 1, 4), torch.tensor([[[1.0, 1, 1, 1], [0, 0, 0, 0]]])
        >>> attention_logits(q, k, shape)  # 2 tanh(4 * 0.5 / 2), 2 tanh(0)
        tensor([[[1.5232, 0.0000]]])
    """
    logits = matmul_float32(queries, keys.transpose(-1, -2)).mul_(shape.scaling)
    if shape.softcap is not None:
        logits = logits.div_(shape.softcap).tanh_().mul_(shape.softcap)
    return logits
