"""Stand-ins for the fused kernels of a GPU: torch, with roundings written out."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor
from torch.nn import functional as F

from arbor.kernels.fused.parts import Activation, NormForm
from arbor.kernels.fused.rotary import RotaryForm, rotate_by_torch


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


class TorchRotary:
    """`RotaryOps` in torch.

    Attributes:
        calls: of each method.
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def rotate(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, form: RotaryForm | None
    ) -> tuple[Tensor, Tensor]:
        self.calls["rotate"] += 1
        if form is None:
            return q.clone(), k.clone()
        return rotate_by_torch(q, cos, sin, form), rotate_by_torch(k, cos, sin, form)

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
        q, k = self.rotate(q, k, cos, sin, form)
        self.calls["rotate_and_write"] += 1
        pools[0][slots], pools[1][slots] = k, v
        return q
