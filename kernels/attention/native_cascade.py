"""Cascade attention by the native kernels: shared spans read once, a row's bits fixed."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from arbor.kernels.attention.base import AttentionShape, CascadeLayout
from arbor.kernels.attention.torch_cascade import CascadePlan, TorchCascade
from arbor.kernels.int8 import DTYPES, is_stored, stored_width
from arbor.kernels.native import (
    INT8,
    AttentionJob,
    LevelStruct,
    head_dim_fits,
    native_library,
)


@dataclass(slots=True)
class NativePlan:
    """A layout as the kernels read it.

    Attributes:
        shape: of the layers.
        layout: as given.
        job: all fields but the tensors of a layer; None where the kernels do not compute the shape,
            or there are no rows to divide into blocks.
        slots: int64, key lists of all levels, one after the other; made for `mass`.
        fallback: the plan of the torch backend, where that has to do.
        kept: what `job` points to.
    """

    shape: AttentionShape
    layout: CascadeLayout
    job: AttentionJob | None
    slots: Tensor | None = None
    fallback: CascadePlan | None = None
    kept: list[Any] = field(default_factory=list)


class NativeCascade:
    """The `AttentionBackend` of the native kernels.

    A row's logits are summed over the dimensions in order, its softmax over its own list of keys,
    its output over its keys in order, in float32. So a row's bits depend on its query and its keys
    alone: neither on other rows nor on how its keys are divided into levels, nor on the slots they
    lie in or the number of threads; `deterministic=True` needs no more than that.

    float32 and bfloat16 with head dimensions that are multiples of 16, up to 256; the torch backend
    computes everything else. 8-bit KV is decoded a tile at a time, in the caches.

    Raises:
        RuntimeError: the library is absent.

    Example:
        The same two keys, alone or as two levels, give the same bits (float32, D = 16):

        >>> from arbor.kernels.attention.base import CascadeLevel
        >>> from arbor.kernels.native import native_library
        >>> ints = lambda *values: torch.tensor(values, dtype=torch.int32)
        >>> one = CascadeLevel(ints(0, 1), ints(0, 2), ints(5, 9), causal=True)
        >>> first = CascadeLevel(ints(0, 1), ints(0, 1), ints(5), causal=False)
        >>> second = CascadeLevel(ints(0, 1), ints(0, 1), ints(9), causal=True)
        >>> shape, pool = AttentionShape(1, 1, 16, 16, scaling=0.25), torch.randn(10, 1, 16)
        >>> def attend(*levels):
        ...     backend = NativeCascade()
        ...     plan = backend.plan(CascadeLayout(1, levels), shape)
        ...     return backend.run(plan, pool[:1], pool, pool)
        >>> native_library() is None or torch.equal(attend(one)[0], attend(first, second)[0])
        True
    """

    def __init__(self) -> None:
        library = native_library()
        if library is None:
            raise RuntimeError("the native kernels are not built, or switched off")
        self._attention = library.attention
        self._torch = TorchCascade()
        self._jobs: dict[AttentionShape, AttentionJob | None] = {}  # without levels and tensors

    def plan(self, layout: CascadeLayout, shape: AttentionShape) -> NativePlan:
        """See `AttentionBackend.plan`; costs a few microseconds, as the kernels read the lists.

        Raises:
            ValueError: a list of a level is not int32.
        """
        if shape not in self._jobs:
            self._jobs[shape] = _job_of(shape)
        known = self._jobs[shape]
        in_one = shape.window is None or len(layout.levels) == 1
        if known is None or not in_one or not layout.rows:
            return NativePlan(shape, layout, None)
        levels = (LevelStruct * len(layout.levels))()
        kept: list[Any] = [levels]
        for struct, level in zip(levels, layout.levels, strict=True):
            rows, keys = level.qo_indptr.contiguous(), level.kv_indptr.contiguous()
            slots = level.kv_indices.contiguous()
            if not rows.dtype == keys.dtype == slots.dtype == torch.int32:
                raise ValueError(
                    f"lists of {rows.dtype}, {keys.dtype} and {slots.dtype}: a level has int32"
                )
            kept += (rows, keys, slots)
            struct.rows, struct.keys = rows.data_ptr(), keys.data_ptr()
            struct.slots = slots.data_ptr()
            struct.requests, struct.causal = len(rows) - 1, level.causal
        job = AttentionJob.from_buffer_copy(known)
        job.levels, job.level_count, job.row_count = levels, len(levels), layout.rows
        return NativePlan(shape, layout, job, kept=kept)

    def run(
        self,
        plan: NativePlan,
        q: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        sinks: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See `AttentionBackend.run`. A row without keys gives 0 and -inf.

        Raises:
            ValueError: an argument is not of the plan's shape, or they are of several dtypes.
        """
        q = _dense(q)
        job = self._filled(plan, q, k_pool, v_pool)
        if job is None:
            return self._torch.run(self._fallback(plan), q, k_pool, v_pool, sinks)
        return self._run(plan, job, q, v_pool, sinks)

    def run_observed(
        self,
        plan: NativePlan,
        q: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        sinks: Tensor | None = None,
        counted: Tensor | None = None,
        heads: Tensor | None = None,
        *,
        by_head: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `ObservingBackend.run_observed`."""
        q = _dense(q)
        job = self._filled(plan, q, k_pool, v_pool)
        if job is None:
            fallback = self._fallback(plan)
            out, lse = self._torch.run(fallback, q, k_pool, v_pool, sinks)
            seen = lse if counted is None else lse.masked_fill(~counted[:, None], torch.inf)
            mass = self._torch.mass(fallback, q, k_pool, seen, heads, by_head=by_head)
            return out, lse, mass
        received, weights = self.received(plan), None
        if counted is not None:
            weights = _listed("rows that count", counted, job.row_count)
        job.mass = received.data_ptr()
        job.counted = None if weights is None else weights.data_ptr()
        out, lse = self._run(plan, job, q, v_pool, sinks)
        return out, lse, self.by_slot(plan, received, k_pool.shape[0], heads, by_head)

    def mass(
        self,
        plan: NativePlan,
        q: Tensor,
        k_pool: Tensor,
        lse: Tensor,
        heads: Tensor | None = None,
        *,
        by_head: bool = False,
    ) -> Tensor:
        """See `AttentionBackend.mass`. Reads K once more, as the cascade does, and no V.

        Raises:
            ValueError: queries, keys or sums are not of the plan's shape, or of several dtypes.
        """
        q = _dense(q)
        job = self._filled(plan, q, k_pool, None)
        if job is None:
            return self._torch.mass(self._fallback(plan), q, k_pool, lse, heads, by_head=by_head)
        received = self.received(plan)
        lse = _listed("logarithms", lse, job.row_count, plan.shape.num_qo_heads)
        job.v, job.out, job.sinks = None, None, None
        job.lse, job.mass = lse.data_ptr(), received.data_ptr()
        self._attention(ctypes.addressof(job), torch.get_num_threads())
        return self.by_slot(plan, received, k_pool.shape[0], heads, by_head)

    def _run(
        self, plan: NativePlan, job: AttentionJob, q: Tensor, v_pool: Tensor, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        shape = plan.shape
        out = q.new_empty(q.shape[0], shape.num_qo_heads, shape.head_dim_vo)
        lse = torch.empty(q.shape[0], shape.num_qo_heads, dtype=torch.float32)
        job.v, job.out, job.lse = v_pool.data_ptr(), out.data_ptr(), lse.data_ptr()
        job.v_slot, job.v_head, _ = v_pool.stride()
        if sinks is not None:
            sinks = _listed("sinks", sinks, shape.num_qo_heads)
        job.sinks = None if sinks is None else sinks.data_ptr()
        self._attention(ctypes.addressof(job), torch.get_num_threads())
        return out, lse

    def received(self, plan: NativePlan) -> Tensor:
        """Zeros [H_kv, keys of all levels], what the kernels add mass to."""
        if plan.slots is None:
            plan.slots = torch.cat([level.kv_indices for level in plan.layout.levels]).long()
        return torch.zeros(plan.shape.num_kv_heads, len(plan.slots), dtype=torch.float32)

    def by_slot(
        self,
        plan: NativePlan,
        received: Tensor,
        slots: int,
        heads: Tensor | None,
        by_head: bool,
    ) -> Tensor:
        """What the slots of a pool received, as `AttentionBackend.mass` returns it.

        Args:
            plan: of the layers.
            received: `received`, after the kernels added to it.
            slots: of the pool.
            heads, by_head: see `AttentionBackend.mass`.
        """
        chosen = received if heads is None else received[heads]
        assert plan.slots is not None, "made by `received`"
        if by_head:
            return chosen.new_zeros(len(chosen), slots).index_add_(1, plan.slots, chosen)
        return chosen.new_zeros(slots).index_add_(0, plan.slots, chosen.sum(0))

    def _filled(
        self, plan: NativePlan, q: Tensor, k_pool: Tensor, v_pool: Tensor | None
    ) -> AttentionJob | None:
        """The job with queries and keys of a layer; None where the torch backend has to do."""
        job, number, shape = plan.job, DTYPES.get(q.dtype), plan.shape
        if job is None or number is None or not q.is_cpu:
            return None
        if q.shape != (job.row_count, shape.num_qo_heads, shape.head_dim_qk):
            raise ValueError(
                f"queries {list(q.shape)}: the plan has {job.row_count} rows of"
                f" {shape.num_qo_heads} heads of {shape.head_dim_qk}"
            )
        stored = is_stored(k_pool)
        _check_pool(k_pool, q, stored, shape.num_kv_heads, shape.head_dim_qk)
        if v_pool is not None:
            _check_pool(v_pool, q, stored, shape.num_kv_heads, shape.head_dim_vo)
        job.number, job.mass, job.counted = number, None, None
        job.kv_number = INT8 if stored else number
        job.q, job.k = q.data_ptr(), k_pool.data_ptr()
        job.q_row, job.q_head, _ = q.stride()
        job.k_slot, job.k_head, _ = k_pool.stride()
        return job

    def _fallback(self, plan: NativePlan) -> CascadePlan:
        if plan.fallback is None:
            plan.fallback = self._torch.plan(plan.layout, plan.shape)
        return plan.fallback


def _job_of(shape: AttentionShape) -> AttentionJob | None:
    """What the kernels are told of a shape; None where they do not compute it."""
    if not (head_dim_fits(shape.head_dim_qk) and head_dim_fits(shape.head_dim_vo)):
        return None
    return AttentionJob(
        kv_heads=shape.num_kv_heads,
        group=shape.group,
        dim_qk=shape.head_dim_qk,
        dim_vo=shape.head_dim_vo,
        window=shape.window or 0,
        scaling=shape.scaling,
        softcap=shape.softcap or 0.0,
    )


def _check_pool(pool: Tensor, q: Tensor, stored: bool, heads: int, dim: int) -> None:
    """Refuses a pool that the kernels would read as something else, or past its end."""
    _, own_heads, width = pool.shape
    wanted = stored_width(dim) if stored else dim
    dtype = torch.int8 if stored else q.dtype
    if pool.dtype != dtype or own_heads != heads or width != wanted:
        raise ValueError(
            f"a pool {list(pool.shape)} of {pool.dtype}: queries of {q.dtype} take slots of"
            f" {heads} heads of {wanted} {dtype} here"
        )
    if pool.stride(2) != 1 or not pool.is_cpu:
        raise ValueError(
            f"a pool of strides {pool.stride()} on {pool.device}: the kernels read pools on cpu,"
            " contiguous in the last dimension"
        )


def _listed(what: str, values: Tensor, *size: int) -> Tensor:
    """Numbers as the kernels read them, float32 and contiguous; refuses another size."""
    if values.shape != size or not values.is_cpu:
        raise ValueError(
            f"{what} {list(values.shape)} on {values.device}: the plan has {list(size)} on cpu"
        )
    return values.to(torch.float32).contiguous()


def _dense(q: Tensor) -> Tensor:
    """Queries whose last dimension is contiguous, as everywhere but in tests."""
    return q if q.stride(2) == 1 else q.contiguous()
