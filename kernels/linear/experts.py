"""BlockExperts: the experts of a layer of a mixture, their matrices in blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from arbor.kernels.linear.blocks import BlockWeight, multiply


class BlockExperts(nn.Module):
    """Gated experts for inference: each token's results are weighted and added, expert by expert.

    Args:
        gate, up, down: of each expert.
        activation: of the gate.

    Example:
        >>> from arbor.kernels.linear.blocks import encode_q8_0
        >>> each = [encode_q8_0(torch.eye(32) * 127)] * 2
        >>> experts = BlockExperts(each, each, each, nn.ReLU())
        >>> x, chosen = torch.ones(1, 32), torch.tensor([[0, 1]])
        >>> float(experts(x, chosen, torch.tensor([[0.25, 0.75]]))[0, 0]) == 127.0**3
        True
    """

    def __init__(
        self,
        gate: Sequence[BlockWeight],
        up: Sequence[BlockWeight],
        down: Sequence[BlockWeight],
        activation: Callable[[Tensor], Tensor],
    ) -> None:
        super().__init__()
        self.gate, self.up, self.down = tuple(gate), tuple(up), tuple(down)
        self.act_fn = activation

    @property
    def tensors(self) -> list[Tensor]:
        """What it keeps in memory, or maps."""
        return [each.data for each in (*self.gate, *self.up, *self.down)]

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The sum of the experts of each token.

        Args:
            hidden_states: [T, d].
            top_k_index: int64 [T, k], experts of a token.
            top_k_weights: [T, k].

        Returns:
            [T, d].
        """
        out = torch.zeros_like(hidden_states)
        for expert in top_k_index.unique().tolist():
            if expert >= len(self.gate):  # of no token
                continue
            token, place = torch.where(top_k_index == expert)
            x = hidden_states[token]
            gate, up = (multiply(x, each[expert], None) for each in (self.gate, self.up))
            found = multiply(self.act_fn(gate) * up, self.down[expert], None)
            out.index_add_(0, token, (found * top_k_weights[token, place, None]).to(out.dtype))
        return out
