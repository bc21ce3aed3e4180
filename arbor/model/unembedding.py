"""Unembedding: logits of a state between the layers, by the model's own norm and head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from arbor.kernels.linear.layers import PackedLinear
from arbor.model.layers import StoppableLayers

TRIAL_ROWS = 3  # of random states, on which the short way is compared with the model's own


class Unembedding:
    """The logits of a state as if the layers had ended with it.

    The model's own forward runs with the state in place of all its layers, so whatever follows them
    (norm, head, scale, soft cap) is the model's. Where the final norm and the head alone give the
    same logits, they are called directly.

    Args:
        model: a `*ForCausalLM`, weights loaded.
        layers: its layers.
    """

    def __init__(self, model: nn.Module, layers: StoppableLayers) -> None:
        self._model = model
        self._layers = layers
        self._head: Any = model.get_output_embeddings()  # type: ignore[operator]
        self._norm: nn.Module | None = None
        self._rows: dict[tuple[int, ...], tuple[Tensor, Tensor | None]] = {}
        self._is_known = False

    def __call__(self, state: Tensor, ids: Sequence[int] | None = None, *, norm: bool) -> Tensor:
        """Logits of states [n, d]; see `ModelRunner.unembed`."""
        if not self._is_known:
            self._find_norm(state)
        chosen = None if ids is None else tuple(ids)
        if norm and self._norm is None:
            logits = self._own(state)
        else:
            normed = self._norm(state[None])[0] if norm and self._norm is not None else state
            if chosen is not None and (rows := self._rows_of(chosen)) is not None:
                weight, bias = rows
                # products and sums row by row: no matrix product, which depends on the batch
                some = (normed.double()[:, None, :] * weight.double()).sum(-1)
                return (some if bias is None else some + bias.double()).float()
            logits = self._head(normed)
        return logits.float() if chosen is None else logits[:, list(chosen)].float()

    def _own(self, state: Tensor) -> Tensor:
        """The model's own way from states [n, d] to logits [n, V]."""
        count = state.shape[0]
        ids = torch.zeros(1, count, dtype=torch.int64, device=state.device)
        with self._layers.giving(state[None]):
            output = self._model(input_ids=ids, position_ids=torch.zeros_like(ids), use_cache=False)
        logits: Tensor = output.logits[0]
        return logits

    def _find_norm(self, like: Tensor) -> None:
        """Look for a norm that, with the head, does all that the model does after its layers."""
        self._is_known = True
        generator = torch.Generator().manual_seed(0)
        trial = torch.randn(TRIAL_ROWS, like.shape[-1], generator=generator)
        state = (trial * like.float().std().cpu()).to(like.device, like.dtype)
        seen: list[nn.Module] = []

        def watch(module: nn.Module, args: Any) -> None:
            taken = args[0] if args else None
            if isinstance(taken, Tensor) and taken.data_ptr() == state.data_ptr():
                seen.append(module)

        inside = set(self._layers.modules())
        others = [each for each in self._model.modules() if each not in inside]
        handles = [each.register_forward_pre_hook(watch) for each in others]
        try:
            own = self._own(state)
        finally:
            for handle in handles:
                handle.remove()
        for module in seen:
            if module is self._head:
                continue
            found = self._head(module(state[None]))[0]
            if torch.equal(found.float(), own.float()):
                self._norm = module
                return

    def _rows_of(self, ids: tuple[int, ...]) -> tuple[Tensor, Tensor | None] | None:
        """Weights [k, d] and biases [k] of the head for some tokens; None where it hides them."""
        if ids not in self._rows:
            weight = self._weight()
            if weight is None:
                return None
            chosen, bias = list(ids), self._head.bias
            self._rows[ids] = (weight[chosen], None if bias is None else bias[chosen])
        return self._rows[ids]

    def _weight(self) -> Tensor | None:
        """The weight [V, d] of the head: its own, or of a packed one the embedding's it is tied
        to."""
        head = self._head
        if type(head) is nn.Linear or (isinstance(head, PackedLinear) and head.packing == "dense"):
            return head.weight.detach()
        tied = getattr(self._model.config, "tie_word_embeddings", False)
        if not tied or not isinstance(head, PackedLinear):
            return None
        embedding: Any = self._model.get_input_embeddings()  # type: ignore[operator]
        weight: Tensor = embedding.weight.detach()
        return weight if weight.shape == (head.out_features, head.in_features) else None
