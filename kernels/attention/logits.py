"""Attention logits: query-key products, scaled and capped, in at least float32."""

from __future__ import annotations

import torch
from torch import Tensor

from arbor.kernels.attention.base import AttentionShape

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
