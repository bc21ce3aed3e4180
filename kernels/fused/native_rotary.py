"""Rotary position embedding and the write of K and V, by one native kernel."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from arbor.kernels.fused.rotary import RotaryForm
from arbor.kernels.native import MOST_DIM, NUMBERS, Library, RotaryJob

DTYPES = {getattr(torch, name): number for name, number in NUMBERS.items()}


class NativeRotary:
    """The `RotaryOps` of a CPU, with the bits of torch.

    Args:
        library: with the kernel.

    Example:
        >>> from arbor.kernels.fused.rotary import ROTARY_FORMS, rotary_ops, rotate_by_torch
        >>> ops, (q, k) = rotary_ops(torch.device("cpu")), torch.randn(2, 3, 4, 16)
        >>> cos, sin = torch.randn(2, 3, 16)
        >>> def agrees(form):
        ...     found = ops.rotate(q, k, cos, sin, form)[0]
        ...     return torch.equal(found, rotate_by_torch(q, cos, sin, form))
        >>> ops is None or agrees(ROTARY_FORMS[0])
        True
    """

    def __init__(self, library: Library) -> None:
        self._library = library

    def rotate(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, form: RotaryForm | None
    ) -> tuple[Tensor, Tensor]:
        """See `RotaryOps.rotate`."""
        q_out, k_out = q.new_empty(q.shape), k.new_empty(k.shape)
        self._run(q, k, None, (cos, sin), form, (q_out, k_out, None), None)
        return q_out, k_out

    def rotate_and_write(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos: Tensor,
        sin: Tensor,
        form: RotaryForm | None,
        pools: tuple[Tensor, Tensor],
        slots: Tensor,
    ) -> Tensor:
        """See `RotaryOps.rotate_and_write`."""
        q_out = q.new_empty(q.shape)
        self._run(q, k, v, (cos, sin), form, (q_out, *pools), slots)
        return q_out

    def _run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        tables: tuple[Tensor, Tensor],
        form: RotaryForm | None,
        into: tuple[Tensor, Tensor, Tensor | None],
        slots: Tensor | None,
    ) -> None:
        q, k = _dense(q), _dense(k)
        cos, sin = map(_dense, tables)
        rows, heads, dim = q.shape
        q_out, k_out, v_out = into
        rotated = 0 if form is None else form.rotated(cos)
        assert rotated <= dim <= MOST_DIM and rotated % 2 == 0, "heads and tables that fit"
        assert q.dtype == k.dtype and cos.dtype == sin.dtype, "heads and tables of one dtype each"
        job = RotaryJob(
            q=q.data_ptr(),
            k=k.data_ptr(),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            q_out=q_out.data_ptr(),
            k_out=k_out.data_ptr(),
            rows=rows,
            q_heads=heads,
            kv_heads=k.shape[1],
            dim_qk=dim,
            rotated=rotated,
            number=DTYPES[q.dtype],
            table_number=DTYPES[cos.dtype],
        )
        job.q_row, job.q_head, _ = q.stride()
        job.k_row, job.k_head, _ = k.stride()
        job.k_out_slot, job.k_out_head, _ = k_out.stride()
        job.cos_row, job.sin_row = cos.stride(0), sin.stride(0)
        if form is not None:
            job.interleaved, job.one_angle = form.interleaved, form.one_angle
            job.rounds_products = form.rounds_products
        if v is not None and v_out is not None:
            v = _dense(v)
            job.v, job.v_out, job.dim_vo = v.data_ptr(), v_out.data_ptr(), v.shape[2]
            job.v_row, job.v_head, _ = v.stride()
            job.v_out_slot, job.v_out_head, _ = v_out.stride()
        if slots is not None:
            slots = slots.contiguous()
            job.slots = slots.data_ptr()
        self._library.rotary(ctypes.addressof(job))


def _dense(x: Tensor) -> Tensor:
    """A tensor whose last dimension is contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()
