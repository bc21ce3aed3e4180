"""A model's forward as its parts alone: embedding, table of angles, layers, final norm, head.

A model's own forward also makes masks, reads its configuration and records outputs, none of which
arbor reads. Its parts are called directly where nothing else stands beside them, and only after
the results were compared with those of its own forward (`ModelRunner.fuse_layers`): a factor of
embeddings or a soft cap of logits differs there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from arbor.model.layers import StoppableLayers

Run = Callable[[Tensor, Any], Tensor]  # all layers: of a state [1, T, d] and its tables of angles


class DirectForward:
    """The parts of a model, one after the other.

    Args:
        decoder: holds the layers.
        model: holds the decoder and the head.
    """

    def __init__(self, decoder: nn.Module, model: nn.Module) -> None:
        self._embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
        self._head: Any = model.get_output_embeddings()  # type: ignore[operator]
        self._rotary: Any = decoder.rotary_emb
        self._norm: Any = decoder.norm
        passed_over = (model, decoder)
        self._hooks: list[Any] = [each._forward_hooks for each in passed_over]
        self._hooks += [each._forward_pre_hooks for each in passed_over]

    @property
    def hooked(self) -> bool:
        """Whether a module whose forward is not called has hooks."""
        return any(self._hooks)

    def __call__(self, ids: Tensor, positions: Tensor, logit_rows: Tensor, layers: Run) -> Tensor:
        """Logits [n, V] of some rows, in the model's dtype.

        Args:
            ids, positions: int64 [T].
            logit_rows: int64 [n].
            layers: run in place of the decoder's.
        """
        state = self._embedding(ids.unsqueeze(0))
        state = layers(state, self._rotary(state, positions.unsqueeze(0)))
        logits: Tensor = self._head(self._norm(state)[:, logit_rows])[0]
        return logits


def direct_forward(model: nn.Module, layers: StoppableLayers) -> DirectForward | None:
    """The parts of a model, not compared with its own forward yet; None where others stand there.

    Args:
        model: a `*ForCausalLM`, or one around it that makes its logits scores.
        layers: its layers.
    """
    if not hasattr(model, "get_output_embeddings"):
        return None
    for decoder in model.modules():
        parts = {each for each in decoder.children() if not isinstance(each, nn.Dropout)}
        if layers not in parts:
            continue
        wanted = [getattr(decoder, name, None) for name in ("rotary_emb", "norm")]
        known = {layers, model.get_input_embeddings(), *wanted}  # type: ignore[operator]
        around = {decoder, model.get_output_embeddings()}  # type: ignore[operator]
        if parts != known or set(model.children()) != around:
            return None
        return DirectForward(decoder, model)
    return None
