"""RMS norms and gated activations by the native kernels."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from arbor.kernels.fused.parts import ACTIVATIONS, Activation, NormForm
from arbor.kernels.native import NUMBERS, GatedJob, Library, NormJob

DTYPES = {getattr(torch, name): number for name, number in NUMBERS.items()}


class NativeFusedOps:
    """The `FusedOps` of a CPU: one pass over a row, whose bits do not depend on the other rows.

    Args:
        library: with the kernels.

    Example:
        >>> from arbor.kernels.fused.parts import NORM_FORMS, fused_ops
        >>> ops, x = fused_ops(torch.device("cpu")), torch.tensor([[3.0, 4.0]])
        >>> ops is None or ops.rms_norm(x, torch.ones(2), 0.0, NORM_FORMS[0]).pow(2).mean().item()
        1.0
    """

    row_invariant = True

    def __init__(self, library: Library) -> None:
        self._library = library

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, form: NormForm) -> Tensor:
        """See `FusedOps.rms_norm`; float16 is computed by torch."""
        number = DTYPES.get(x.dtype)
        if number is None:
            return _rms_norm(x, weight, eps, form)
        width = x.shape[-1]
        rows, weight = _rows(x), weight.contiguous()
        out = x.new_empty(x.shape)
        job = NormJob(
            rows.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            rows.stride(0),
            rows.shape[0],
            width,
            number,
            form.rounds_first,
            eps,
            form.offset,
        )
        self._library.norm(ctypes.addressof(job))
        return out

    def gated(self, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        """See `FusedOps.gated`; float16 is computed by torch."""
        number = DTYPES.get(gate.dtype)
        if number is None:
            tanh = activation == "gelu_tanh"
            functional = torch.nn.functional
            active = functional.gelu(gate, approximate="tanh") if tanh else functional.silu(gate)
            return active * up
        gates, ups = _rows(gate), _rows(up)
        out = gate.new_empty(gate.shape)
        job = GatedJob(
            gates.data_ptr(),
            ups.data_ptr(),
            out.data_ptr(),
            gates.stride(0),
            ups.stride(0),
            gates.shape[0],
            gate.shape[-1],
            number,
            ACTIVATIONS.index(activation),
        )
        self._library.gated(ctypes.addressof(job))
        return out


def _rows(x: Tensor) -> Tensor:
    """[..., width] as [rows, width], contiguous in the last dimension; a view where possible."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _rms_norm(x: Tensor, weight: Tensor, eps: float, form: NormForm) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if form.rounds_first:
        wide = wide.to(x.dtype).float()
    return (wide * (weight.float() + form.offset)).to(x.dtype)
