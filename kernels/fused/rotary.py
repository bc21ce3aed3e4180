"""Rotary position embedding: its forms, in torch, and with the write of K and V to their slots.

`arbor.model.fuse.attention` finds the form of a layer by comparing it with the layer's own forward,
bit for bit. A CPU has a kernel (`NativeRotary`) where the native library is built, CUDA one in
Triton (`triton_rotary.py`).
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor

from arbor.kernels.native import MOST_DIM, NUMBERS, Library, RotaryJob, native_library
from arbor.kernels.triton_module import triton_module


@dataclass(frozen=True, slots=True)
class RotaryForm:
    """How the heads of queries and keys are rotated, by tables of cosines and sines per row.

    The first R numbers of a head are R / 2 pairs (a, b), which become
    (a cos - b sin, b cos + a sin); the others stay.

    Attributes:
        name: of a model family that computes so.
        interleaved: whether a pair is two neighbours; else it is number i of either half.
        one_angle: whether both numbers of pair i use number i of the tables; else each uses the
            number at its own place.
        half_table: whether the tables have R / 2 numbers a row; else R.
        rounds_products: whether products are rounded to the dtype of the heads before they are
            added; else only the sum is.
    """

    name: str
    interleaved: bool = False
    one_angle: bool = False
    half_table: bool = False
    rounds_products: bool = True

    def rotated(self, tables: Tensor) -> int:
        """R, for tables [..., numbers]."""
        return int(tables.shape[-1]) * (2 if self.half_table else 1)


ROTARY_FORMS = (
    RotaryForm("llama"),
    RotaryForm("olmo2", rounds_products=False),
    RotaryForm("gpt_oss", one_angle=True, half_table=True),
    RotaryForm("glm", interleaved=True, one_angle=True),
    RotaryForm("ernie4_5", interleaved=True, one_angle=True, rounds_products=False),
    RotaryForm("cohere", interleaved=True, rounds_products=False),
)


class RotaryOps(Protocol):
    """The rotary kernel of a device. A row's bits do not depend on the other rows."""

    def rotate(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, form: RotaryForm | None
    ) -> tuple[Tensor, Tensor]:
        """Queries and keys, position-encoded.

        Args:
            q: [T, H_q, D] float32 or bfloat16; k: [T, H_kv, D], D at most 256.
            cos, sin: [T, numbers], in the dtype of q or float32.
            form: of the rotation; None: as they are.

        Returns:
            [T, H_q, D] and [T, H_kv, D], new tensors.
        """
        ...

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
        """Queries, position-encoded; keys, likewise, and values are written to their slots.

        Args:
            q, k, cos, sin, form: as in `rotate`.
            v: [T, H_kv, D_v].
            pools: of K and of V, [slots, H_kv, D] and [slots, H_kv, D_v], in the dtype of q.
            slots: int64 [T]; where several rows name one, the last one remains on a CPU and any
                of them on CUDA, as with torch's own indexing.

        Returns:
            [T, H_q, D], a new tensor.
        """
        ...


def rotary_ops(device: torch.device) -> RotaryOps | None:
    """The rotary kernel of a device; None without.

    Example:
        >>> rotary_ops(torch.device("meta")) is None
        True
    """
    if device.type == "cuda":
        module = triton_module("fused.triton_rotary", "rotary embeddings")
        return None if module is None else cast(RotaryOps, module.TritonRotary())
    library = native_library() if device.type == "cpu" else None
    if library is None:
        return None

    return NativeRotary(library)


def rotate_by_torch(x: Tensor, cos: Tensor, sin: Tensor, form: RotaryForm) -> Tensor:
    """Heads, position-encoded in torch: the reference.

    Products with tables wider than the heads are not rounded, whatever the form.

    Args:
        x: [T, H, D].
        cos, sin: [T, numbers].
        form: of the rotation.

    Returns:
        [T, H, D].

    Example:
        A quarter turn, of pairs of halves:

        >>> x = torch.tensor([[[1.0, 2.0, 3.0, 4.0, 5.0]]])
        >>> rotate_by_torch(x, torch.zeros(1, 4), torch.ones(1, 4), ROTARY_FORMS[0])
        tensor([[[-3., -4.,  1.,  2.,  5.]]])
    """
    rotated = form.rotated(cos)
    angles = [_by_pair(table.unsqueeze(1), rotated, form) for table in (cos, sin)]
    (cos_a, cos_b), (sin_a, sin_b) = angles
    a, b = _pairs(x[..., :rotated], form.interleaved)
    if not form.rounds_products:
        a, b = a.float(), b.float()
    first = (a * cos_a - b * sin_a).to(x.dtype)
    second = (b * cos_b + a * sin_b).to(x.dtype)
    if form.interleaved:
        turned = torch.stack((first, second), dim=-1).flatten(-2)
    else:
        turned = torch.cat((first, second), dim=-1)
    return torch.cat((turned, x[..., rotated:]), dim=-1)


def _by_pair(table: Tensor, rotated: int, form: RotaryForm) -> tuple[Tensor, Tensor]:
    """What the first and the second numbers of pairs use of a table."""
    if form.one_angle:
        half = table[..., : rotated // 2]
        return half, half
    return _pairs(table, form.interleaved)


def _pairs(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    if interleaved:
        return x[..., ::2], x[..., 1::2]
    first, second = x.chunk(2, dim=-1)
    return first, second


DTYPES = {getattr(torch, name): number for name, number in NUMBERS.items()}


class NativeRotary:
    """The `RotaryOps` of a CPU, with the bits of `rotate_by_torch`.

    But for tables wider than the heads: `rounds_products` rounds products with them too.

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
