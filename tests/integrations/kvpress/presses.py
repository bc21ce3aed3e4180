"""Stand-ins for presses of kvpress, whose package cannot be required: it asks for an older
transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass
class ScorerPress:
    """The part of kvpress's class of this name that arbor calls."""

    compression_ratio: float = 0.0

    def compress(self, *given: Any) -> Any:
        raise NotImplementedError

    def score(
        self,
        module: Any,
        hidden_states: Tensor,
        keys: Tensor,
        values: Tensor,
        attentions: Tensor | None,
        kwargs: dict[str, Any],
    ) -> Tensor:
        raise NotImplementedError


@dataclass
class NormPress(ScorerPress):
    """Small keys win.

    Summaries end before this paragraph.
    """

    sign: float = -1.0

    def score(self, module: Any, hidden_states: Tensor, keys: Tensor, *given: Any) -> Tensor:
        return self.sign * keys.norm(dim=-1)


@dataclass
class SnapKVPress(ScorerPress):
    """Tokens that the last queries attended to win."""

    window_size: int = 4

    def score(
        self,
        module: Any,
        hidden_states: Tensor,
        keys: Tensor,
        values: Tensor,
        attentions: Tensor | None,
        kwargs: dict[str, Any],
    ) -> Tensor:
        assert attentions is not None
        assert hidden_states.shape[1] > self.window_size
        last = self.window_size
        given = attentions[..., -last:, :-last].mean(-2)
        groups = module.config.num_attention_heads // module.config.num_key_value_heads
        given = given.view(1, keys.shape[1], groups, -1).mean(2)
        scores = keys.new_full(keys.shape[:3], float(given.max()) + 1)
        scores[..., :-last] = given
        return scores


@dataclass
class SinkPress(ScorerPress):
    """Removes tokens after the first ones, as many as its ratio says."""

    n_sink: int = 4

    def score(self, module: Any, hidden_states: Tensor, keys: Tensor, *given: Any) -> Tensor:
        count = keys.shape[2]
        removed = count - int(count * (1 - self.compression_ratio))
        scores = keys.new_ones(keys.shape[:3])
        scores[:, :, self.n_sink : self.n_sink + removed] = 0
        return scores


@dataclass
class ProjectingPress(ScorerPress):
    """Needs weights of the model."""

    def score(self, module: Any, hidden_states: Tensor, *given: Any) -> Tensor:
        result: Tensor = module.q_proj(hidden_states)
        return result


@dataclass
class FlatPress(ScorerPress):
    """Gives all heads one score."""

    def score(self, module: Any, hidden_states: Tensor, keys: Tensor, *given: Any) -> Tensor:
        return keys.norm(dim=-1).mean(1)


@dataclass
class ChoosingPress(NormPress):
    """Chooses tokens itself."""

    def compress(self, *given: Any) -> Any:
        return given


class NoPress:
    """Of kvpress, but no press."""


for _each in (
    ScorerPress,
    NormPress,
    SinkPress,
    SnapKVPress,
    ProjectingPress,
    FlatPress,
    ChoosingPress,
    NoPress,
):
    _each.__module__ = "kvpress"
