"""Fused parts of a decoder: RMS norms and gated activations as one kernel each.

`arbor.model.fuse.parts` puts them into a model. A device's kernels are an object with the methods
of `FusedOps`; CUDA has one in Triton (`arbor.kernels.fused.triton_parts`), a CPU the native
kernels' (`NativeFusedOps`) where they are built.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Literal, Protocol, cast

import torch
from torch import Tensor

from arbor.kernels.native import NUMBERS, GatedJob, Library, NormJob, native_library
from arbor.kernels.triton_module import triton_module

Activation = Literal["silu", "gelu_tanh"]
ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu_tanh")


@dataclass(frozen=True, slots=True)
class NormForm:
    """How an RMS norm weights what it has normalised, which is always computed in float32.

    Attributes:
        name: of a model family that computes so.
        offset: added to the weight.
        rounds_first: whether the normalised row is rounded to its dtype before it is weighted, and
            rounded once more after; else it is rounded only after.
    """

    name: str
    offset: float = 0.0
    rounds_first: bool = False


NORM_FORMS = (
    NormForm("llama", rounds_first=True),
    NormForm("olmo2"),
    NormForm("gemma", offset=1.0),
)


class FusedOps(Protocol):
    """The fused kernels of a device.

    No method waits for the device or allocates by values, so that CUDA graphs can capture it.

    Attributes:
        row_invariant: whether a row's bits are known not to depend on the other rows.
    """

    row_invariant: bool

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, form: NormForm) -> Tensor:
        """x / sqrt(mean(x^2) + eps), weighted.

        Args:
            x: [..., width] float32, float16 or bfloat16.
            weight: [width], of x's dtype.
            eps: under the root.
            form: of the weighting.

        Returns:
            x's shape and dtype, contiguous.

        Raises:
            ValueError: the weight is not such a one (CPU).
        """
        ...

    def gated(self, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        """activation(gate) * up, both factors rounded to their dtype.

        Args:
            gate: [..., width] float32, float16 or bfloat16.
            up: of gate's shape and dtype.
            activation: of the gate.

        Returns:
            gate's shape and dtype, contiguous.

        Raises:
            ValueError: `up` is of another shape or dtype (CPU).
        """
        ...


def fused_ops(device: torch.device) -> FusedOps | None:
    """The fused kernels of a device; None without, or where they cannot be imported.

    Example:
        >>> fused_ops(torch.device("meta")) is None
        True
    """
    if device.type == "cpu":
        library = native_library()
        if library is None:
            return None

        return NativeFusedOps(library)
    if device.type != "cuda":
        return None
    module = triton_module("fused.triton_parts", "norms and activations")
    return None if module is None else cast(FusedOps, module.TritonFusedOps())


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
        if weight.dtype != x.dtype or weight.shape != (width,):
            raise ValueError(
                f"a weight {list(weight.shape)} of {weight.dtype}: rows of {width} numbers of"
                f" {x.dtype} take one of their width and dtype"
            )
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
        if up.dtype != gate.dtype or up.shape != gate.shape:
            raise ValueError(
                f"up is {list(up.shape)} of {up.dtype}: it must be as gate,"
                f" {list(gate.shape)} of {gate.dtype}"
            )
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
