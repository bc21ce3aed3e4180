"""A tiny attention that a backend computes before it is trusted with a model's."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from arbor.kernels.attention.base import (
    AttentionBackend,
    AttentionShape,
    CascadeLayout,
    CascadeLevel,
)
from arbor.kernels.int8 import store, stored_width


class BackendUnusable(ImportError):
    """A backend's package or kernel cannot be loaded or run here; `name` is the module."""


def computes_a_tiny_attention(
    backend: AttentionBackend,
    shape: AttentionShape,
    dtype: torch.dtype,
    device: torch.device,
    *,
    int8_kv: bool = False,
) -> bool:
    """Whether two rows over a shared and a private key give the average of equal values.

    Args:
        backend: is tried.
        shape: of the layer.
        dtype: of queries, keys and values.
        device: that computes.
        int8_kv: keys and values are written and read in 8 bits.

    Raises:
        Exception: whatever its compilers, loaders and kernels raise.
    """
    if shape.window is None:
        levels: tuple[CascadeLevel, ...] = (
            _tiny_level([0, 2], [0, 1], [0], causal=False),
            _tiny_level([0, 1, 2], [0, 1, 2], [1, 2], causal=True),
        )
        visible = 2
    else:
        levels = (_tiny_level([0, 1, 2], [0, 2, 4], [0, 1, 0, 2], causal=True),)
        visible = min(2, shape.window)
    q = torch.zeros(2, shape.num_qo_heads, shape.head_dim_qk, dtype=dtype).to(device)
    keys = torch.zeros(3, shape.num_kv_heads, shape.head_dim_qk, dtype=dtype).to(device)
    values = torch.ones(3, shape.num_kv_heads, shape.head_dim_vo, dtype=dtype).to(device)
    if int8_kv:
        keys, values = _stored(keys), _stored(values)
    plan = backend.plan(CascadeLayout(2, levels), shape)
    out, lse = backend.run(plan, q, keys, values)
    out, lse = out.float().cpu(), lse.cpu()  # waits for the kernels: their errors come up here
    expected = torch.full_like(lse, math.log(visible))
    return torch.allclose(out, torch.ones_like(out), atol=1e-2) and torch.allclose(
        lse, expected, atol=1e-2
    )


def _stored(x: Tensor) -> Tensor:
    """A pool of 8-bit KV that was given these numbers."""
    rows, heads, dim = x.shape
    pool = torch.zeros(rows, heads, stored_width(dim), dtype=torch.int8, device=x.device)
    store(pool, torch.arange(rows, device=x.device), x)
    return pool


def _tiny_level(rows: list[int], ends: list[int], slots: list[int], causal: bool) -> CascadeLevel:
    qo_indptr, kv_indptr, indices = (
        torch.tensor(numbers, dtype=torch.int32) for numbers in (rows, ends, slots)
    )
    return CascadeLevel(qo_indptr, kv_indptr, indices, causal)


def reason_of(error: Exception) -> str:
    """The first line of an error's message, or its type."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
