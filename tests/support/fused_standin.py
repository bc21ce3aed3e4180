"""A stand-in for the fused kernels of a GPU: torch, with roundings written out."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor
from torch.nn import functional as F

from arbor.kernels.fused import Activation, NormForm


class TorchFusedOps:
    """`FusedOps` in torch.

    Attributes:
        calls: of each kernel.
    """

    row_invariant = False

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, form: NormForm) -> Tensor:
        self.calls["rms_norm"] += 1
        wide = x.float()
        normal = wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt()
        if form.rounds_first:
            normal = normal.to(x.dtype).float()
        return (normal * (weight.float() + form.offset)).to(x.dtype)

    def gated(self, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        self.calls["gated"] += 1
        wide = gate.float()
        if activation == "silu":
            active = wide * torch.sigmoid(wide)
        else:
            active = F.gelu(wide, approximate="tanh")
        return (active.to(gate.dtype).float() * up.float()).to(gate.dtype)
