"""Cascade attention on CUDA: FlashInfer's paged prefill kernels per level, merged by logsumexp."""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .base import AttentionShape, CascadeLayout, CascadeLevel, apply_sinks
from .torch_cascade import TorchCascade

DTYPES = (torch.float16, torch.bfloat16)
HEAD_DIMS = (64, 128, 256)
WORKSPACE_BYTES = 128 << 20


@dataclass(slots=True)
class FlashInferPlan:
    """The planned wrappers of one forward for one shape.

    Attributes:
        shape: of the layers.
        layout: as given.
        wrappers: one per level, the last level first (the only one in which every row has keys).
        by_hand: the plan of `TorchCascade`, made when attention mass is asked for.
    """

    shape: AttentionShape
    layout: CascadeLayout
    wrappers: tuple[Any, ...]
    by_hand: Any = None


class FlashInferCascade:
    """`BatchPrefillWithPagedKVCacheWrapper` of FlashInfer at page size 1, a call per level.

    `MultiLevelCascadeAttentionWrapper` does the same with a fixed number of levels and keeps no
    logsumexp, which attention mass and sinks need; so the levels are called one by one here. The
    backend is always ``fa2``: ``fa3`` takes no page-size-1 tables as fast and has let NaN of unused
    memory through.

    Equal to `ReferenceAttention` up to rounding in `dtype`; logits are float32.

    Args:
        device: a CUDA device.
        dtype: of queries and pool: float16 or bfloat16 (float32 stays with `TorchCascade`).

    Raises:
        ImportError: flashinfer is not installed; the message says what to install.
        ValueError: a dtype FlashInfer has no kernels for.

    Example:
        Needs a GPU; `TorchCascade` has an example of these calls for any machine::

            backend = FlashInferCascade(torch.device("cuda"), torch.bfloat16)
            plan = backend.plan(layout, AttentionShape(32, 8, 128, 128, scaling=128**-0.5))
            out, lse = backend.run(plan, q, k_pool, v_pool)  # [T, 32, 128], [T, 32]
    """

    def __init__(self, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> None:
        if dtype not in DTYPES:
            raise ValueError(f"FlashInfer runs float16 and bfloat16, not {dtype}.")
        try:
            self._flashinfer = importlib.import_module("flashinfer")
        except ImportError as error:
            raise ImportError(
                "The CUDA backend needs flashinfer: pip install 'arbor-search[cuda]'."
            ) from error
        self.device = device
        self.dtype = dtype
        # Partial results of one run. Runs of a stream are sequential, so all wrappers share it, as
        # in FlashInfer's own cascade wrapper; each wrapper has a buffer of its own for its plan.
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrappers: dict[tuple[AttentionShape, int], Any] = {}
        self._torch = TorchCascade()

    def plan(self, layout: CascadeLayout, shape: AttentionShape) -> FlashInferPlan:
        """Plan every level; see `AttentionBackend.plan`.

        Raises:
            ValueError: a head dimension FlashInfer has no kernel for.
        """
        if shape.head_dim_qk not in HEAD_DIMS or shape.head_dim_vo not in HEAD_DIMS:
            raise ValueError(f"FlashInfer has kernels for head_dim {HEAD_DIMS}, not {shape}.")
        wrappers = []
        for index, level in enumerate(reversed(layout.levels)):
            wrapper = self._wrapper(shape, index)
            self._plan_level(wrapper, level, shape)
            wrappers.append(wrapper)
        return FlashInferPlan(shape, layout, tuple(wrappers))

    def _wrapper(self, shape: AttentionShape, index: int) -> Any:
        key = (shape, index)
        if key not in self._wrappers:
            self._wrappers[key] = self._flashinfer.BatchPrefillWithPagedKVCacheWrapper(
                self._workspace, "NHD", backend="fa2"
            )
        return self._wrappers[key]

    def _plan_level(self, wrapper: Any, level: CascadeLevel, shape: AttentionShape) -> None:
        requests = len(level.qo_indptr) - 1
        lengths = level.kv_indptr[1:] - level.kv_indptr[:-1]
        window = -1 if shape.window is None or not level.causal else shape.window - 1
        wrapper.plan(
            level.qo_indptr,
            level.kv_indptr,
            level.kv_indices.to(self.device, non_blocking=True),
            (lengths > 0).to(torch.int32),  # slots of the last page: 0 where nothing is read
            shape.num_qo_heads,
            shape.num_kv_heads,
            shape.head_dim_qk,
            1,
            head_dim_vo=shape.head_dim_vo,
            causal=level.causal,
            sm_scale=shape.scaling,
            window_left=window,
            logits_soft_cap=shape.softcap,
            q_data_type=self.dtype,
            kv_data_type=self.dtype,
            non_blocking=True,
        )
        assert requests >= 1, "a level has at least one request"

    def run(
        self,
        plan: FlashInferPlan,
        q: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        sinks: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See `AttentionBackend.run`. FlashInfer's logsumexp is in base 2; ours is natural."""
        paged = (k_pool.unsqueeze(1), v_pool.unsqueeze(1))
        q = q.contiguous()
        first, *others = plan.wrappers
        out, lse = first.run(q, paged, return_lse=True)
        for wrapper in others:
            more, more_lse = wrapper.run(q, paged, return_lse=True)
            self._flashinfer.merge_state_in_place(out, lse, more, more_lse)
        lse = lse * math.log(2)
        return apply_sinks(out, lse, sinks) if sinks is not None else (out, lse)

    def mass(
        self,
        plan: FlashInferPlan,
        q: Tensor,
        k_pool: Tensor,
        lse: Tensor,
        heads: Tensor | None = None,
    ) -> Tensor:
        """See `AttentionBackend.mass`; a torch pass over K, as no shipped kernel returns sums."""
        if plan.by_hand is None:
            plan.by_hand = self._torch.plan(plan.layout, plan.shape)
        return self._torch.mass(plan.by_hand, q, k_pool, lse, heads)
