"""Presses of kvpress as scorers: those that give every token of a layer a score."""

from __future__ import annotations

import dataclasses
import functools
import math
import typing
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

from arbor.components import ONLY_IF_SET
from arbor.errors import UsageError
from arbor.retention.allocators.pooled import Pooled
from arbor.retention.policy import Policy
from arbor.retention.token_kv import HeadKVScorer, KVSequence, Observation, attention_of

if TYPE_CHECKING:
    from torch import Tensor

_READS = "Presses work that read keys, values and the attention of the last queries"
_MOST_REMOVED = math.nextafter(1, 0)  # kvpress takes what is below 1
_SUCH_AS = f"{_READS}, such as SnapKVPress, TOVAPress, KeyDiffPress, KnormPress and LagKVPress."


@dataclass(frozen=True, kw_only=True)
class PressScorer(HeadKVScorer):
    """A token scores what a press of kvpress gives its key and value in each KV head.

    Each press has a class of its own (`scorer_of`), whose settings are those of the press.

    Source: `ScorerPress.score` of kvpress 0.5.4. Differs: asked whenever room runs out, where a
    press is asked once, after the prompt; where one set is kept for all heads, the mean over those
    of the observed layers (`granularity=head` keeps one for each, as kvpress does); keys in their
    own order of position, without those that left; SnapKVPress and TOVAPress read the attention
    that the last queries gave from their own positions, which kvpress, while decoding, computes
    from one position for all; in a tree, a press sees all tokens of the tree, and the last queries
    of all its paths. Hidden states and weights of the model are not kept for it. A press that
    scores by its `compression_ratio`, as StreamingLLMPress does, is asked with the greatest one:
    tokens that it would remove at some budget rank below those that it never removes.

    Attributes:
        compression_ratio: of kvpress, the part removed; the budget says how much is kept, so it is
            refused.
    """

    press: ClassVar[type[Any]]

    compression_ratio: float | None = field(default=None, metadata=ONLY_IF_SET)

    def __post_init__(self) -> None:
        if self.compression_ratio is not None:
            kept = 1 - self.compression_ratio
            raise UsageError(
                "press",
                f"compression_ratio={self.compression_ratio:g}: the budget says how much is kept.",
                f"Leave it out, and take --budget {kept:g}." if 0 < kept <= 1 else "Leave it out.",
            )
        self._check()

    @property
    def observation(self) -> Observation:
        """Keys and values, and the queries of the press's window."""
        return Observation(keys=True, window=self._window)

    def of_heads(self, sequence: KVSequence, layer: int) -> Tensor:
        keys, values = sequence.keys(layer), sequence.values(layer)
        rows = None
        if self._window:
            pieces = [attention_of(piece) for piece in sequence.logits(layer)]
            rows = keys.new_zeros(
                sum(map(len, pieces)), sequence.queries(layer).shape[1], len(keys)
            )
            end = len(rows)
            for piece in pieces:  # the last queries come first
                rows[end - len(piece) : end] = piece
                end -= len(piece)
        return self._scores(keys, values, rows, layer)

    @property
    def _window(self) -> int:
        """Last queries whose attention the press reads."""
        names = {base.__name__ for base in self.press.__mro__}
        if "SnapKVPress" in names:
            return int(getattr(self, "window_size"))  # noqa: B009  # a setting of the press
        return 1 if "TOVAPress" in names else 0

    def _scores(
        self, keys: Tensor, values: Tensor, attention: Tensor | None, layer: int = 0
    ) -> Tensor:
        """The press's scores, [H_kv, n].

        Args:
            keys, values: [n, H_kv, D].
            attention: that of the last queries, the oldest first, [w, H_q, n].
            layer: its number.
        """
        count, heads = keys.shape[:2]
        own = {name: getattr(self, name) for name in _settings_of(self.press)}
        rows, query_heads = None, heads
        if attention is not None:
            # a press needs a token outside its window
            window = min(self._window, len(attention), count - 1)
            if window < 1:
                return keys.new_zeros(heads, count)
            if "window_size" in own:
                own["window_size"] = window
            query_heads = attention.shape[1]
            rows = attention.transpose(0, 1)[None]
        read_by_presses = SimpleNamespace(
            layer_idx=layer,
            head_dim=keys.shape[2],
            config=SimpleNamespace(num_attention_heads=query_heads, num_key_value_heads=heads),
        )
        try:
            press = self.press(**own)
            press.compression_ratio = _MOST_REMOVED
            scores = press.score(
                read_by_presses,
                keys.new_zeros(1, count, 0),  # hidden states, of which presses read the number
                keys.transpose(0, 1)[None],
                values.transpose(0, 1)[None],
                rows,
                {},
            )
            shape = tuple(scores.shape)
        except Exception as error:
            raise UsageError(
                "press",
                f"{self.press.__name__} of kvpress cannot score these tokens: "
                f"{type(error).__name__}: {error}",
                _SUCH_AS,
            ) from error
        if shape != (1, heads, count):
            raise UsageError(
                "press",
                f"{self.press.__name__} of kvpress answers with shape {shape} instead of "
                f"{(1, heads, count)}.",
                _SUCH_AS,
            )
        return typing.cast("Tensor", scores[0].float())

    def _check(self) -> None:
        """Refuse a press that needs what is not kept, before a model runs: ask it once."""
        import torch

        draw = torch.Generator().manual_seed(0)
        count, heads, group, dim = self._window + 300, 2, 2, 8
        made: dict[str, Any] = {"generator": draw, "dtype": torch.float32}
        keys, values = torch.randn(2, count, heads, dim, **made)
        rows = torch.randn(self._window, heads * group, count, **made).softmax(-1)
        self._scores(keys, values, rows if self._window else None)

    def __reduce__(self) -> tuple[Any, ...]:
        return _made, (self.press, {name: getattr(self, name) for name in _settings_of(self.press)})


def adapted(kind: str, press: Any, name: str) -> Any:
    """A press as a component: a scorer, or a policy around it.

    Args:
        kind: ``policy`` or ``scorer``.
        press: of kvpress, or derived from one of its.
        name: by which it was asked for.

    Raises:
        UsageError: another kind, or a press that does not score tokens.
    """
    if kind not in ("policy", "scorer"):
        raise UsageError("press", f"'{name}' is a press of kvpress, not a {kind}.", "")
    scorer = scorer_of(press)
    if kind == "scorer":
        return scorer
    summary = " ".join((press.__doc__ or "").strip().partition("\n\n")[0].split())
    return Policy(Pooled(), scorer(), summary=f"{summary} (kvpress)", registered_as=name)


@functools.cache
def scorer_of(press: Any) -> type[PressScorer]:
    """The scorer class of a press.

    Raises:
        UsageError: it does not score tokens, or chooses them by more than their scores.
    """
    ranks = [base for base in press.__mro__ if base.__name__ == "ScorerPress"]
    if not ranks or press.compress is not ranks[0].compress:
        raise UsageError(
            "press",
            f"{press.__name__} of kvpress does not rank tokens by one score each.",
            _SUCH_AS,
        )
    hints = typing.get_type_hints(press)
    settings = [(name, hints[name], each) for name, each in _settings_of(press).items()]
    made = dataclasses.make_dataclass(
        press.__name__,
        settings,
        bases=(PressScorer,),
        frozen=True,
        kw_only=True,
        namespace={"press": press, "__doc__": PressScorer.__doc__},
    )
    # the path by which it is found again
    made.__module__, made.__qualname__ = press.__module__, press.__qualname__
    return made


def _settings_of(press: type[Any]) -> dict[str, Any]:
    """The settings of a press, as fields of another dataclass."""
    found: dict[str, Any] = {}
    for each in dataclasses.fields(press):
        if not each.init or each.name == "compression_ratio":
            continue
        if each.default_factory is not dataclasses.MISSING:
            found[each.name] = field(default_factory=each.default_factory)
        else:
            found[each.name] = field(default=each.default)
    return found


def _made(press: Any, settings: dict[str, Any]) -> PressScorer:
    return scorer_of(press)(**settings)
