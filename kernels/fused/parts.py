"""Fused parts of a decoder: RMS norms and gated activations as one kernel each.

`arbor.model.fuse` puts them into a model. A device's kernels are an object with the methods of
`FusedOps`; CUDA has one in Triton (`arbor.kernels.fused.triton_parts`), a CPU the native kernels'
(`arbor.kernels.fused.native_parts`) where they are built.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, cast

import torch
from torch import Tensor

from arbor.kernels.native import native_library
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
        from arbor.kernels.fused.native_parts import NativeFusedOps

        return NativeFusedOps(library)
    if device.type != "cuda":
        return None
    module = triton_module("fused.triton_parts", "norms and activations")
    return None if module is None else cast(FusedOps, module.TritonFusedOps())
