"""A model's forward as its parts alone: embedding, table of angles, layers, final norm, head.

A model's own forward also makes masks, reads its configuration and records outputs, none of which
arbor reads. Its parts are called directly where nothing else stands beside them, and only after
the results were compared with those of its own forward (`ModelRunner.fuse_layers`): a factor of
embeddings or a soft cap of logits differs there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from arbor.model.layers import StoppableLayers

Run = Callable[[Tensor, Any], Tensor]  # all layers: of a state [1, T, d] and its tables of angles


class DirectForward:
    """The parts of a model, one after the other.

    Args:
        embedding, rotary, norm, head: of the model; rotary makes the table of angles.
        passed_over: modules whose own forward is not called.

    Attributes:
        passed_over: see above.
    """

    def __init__(
        self,
        embedding: nn.Module,
        rotary: nn.Module,
        norm: nn.Module,
        head: nn.Module,
        passed_over: Sequence[nn.Module],
    ) -> None:
        self._embedding, self._rotary, self._norm, self._head = embedding, rotary, norm, head
        self.passed_over = tuple(passed_over)

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


def direct_forward(model: Any, layers: StoppableLayers) -> DirectForward | None:
    """The parts of a model, not compared with its own forward yet; None where others stand there.

    Args:
        model: a `*ForCausalLM`, or one around it that makes its logits scores.
        layers: its layers.
    """
    if not hasattr(model, "get_output_embeddings"):
        return None
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    for decoder in model.children():
        parts = {each for each in decoder.children() if not isinstance(each, nn.Dropout)}
        rotary: Any = getattr(decoder, "rotary_emb", None)
        norm: Any = getattr(decoder, "norm", None)
        if parts == {embedding, layers, rotary, norm} and set(model.children()) == {decoder, head}:
            return DirectForward(embedding, rotary, norm, head, (model, decoder))
    return None
