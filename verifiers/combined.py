"""The verifier that combines the values of others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from arbor import components
from arbor.errors import UsageError, check_settings
from arbor.model.loading import ModelLocation
from arbor.tasks.base import Problem, Task
from arbor.tree import Node

from .base import Asker, Compares, TakesCalibration, Verdict

Rule = Literal["sum", "product", "minimum"]

_MOST = 1_000_000  # of a weight
_BELOW_ONE = math.nextafter(1.0, 0.0)  # the largest value that is no proof


@dataclass(frozen=True)
class Combined:
    """Values a state by several verifiers: a weighted sum, a product or the minimum of theirs.

        sum:      value = sum_i w_i v_i / sum_i w_i
        product:  value = prod_i v_i ^ w_i
        minimum:  value = min_i v_i

    Args:
        parts: the verifiers: names (``parts=self,exact``), tables with a name and settings, or
            ready ones. On the command line a part with settings is JSON:
            ``parts=["self",{"name":"prm","model":"PATH"}]``.
        rule: see above.
        weights: one for each part, from 0 to a million, not all of them 0; empty: all 1. The
            minimum has none.

    Each part judges all candidates of a call together. The gate and the early exits of the first
    part that has such are reported, and an audit compares the combined values with what they would
    be by the audited ones. A sum or product is a proof (1) where each part with a weight gives one,
    a minimum where all do. Where a part keeps the scores of single steps, those of the blocks are
    combined likewise.
    """

    parts: tuple[Any, ...] = field(default=("self",), metadata=components.ARE_COMPONENTS)
    rule: Rule = "sum"
    weights: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        check_settings(self)
        built = tuple(components.build("verifier", part) for part in self.parts)
        object.__setattr__(self, "parts", built)
        weights = self.weights
        if not built:
            raise UsageError("setting-range", "'combined' needs parts.", "As in parts=self,exact.")
        if weights and self.rule == "minimum":
            raise UsageError("setting-range", "weights=…: the minimum has no weights.", "")
        if weights and len(weights) != len(built):
            raise UsageError(
                "setting-range", f"weights=…: {len(weights)} for {len(built)} parts.", ""
            )
        if not all(0 <= each <= _MOST for each in weights) or (weights and not any(weights)):
            raise UsageError(
                "setting-range",
                f"weights={','.join(map(str, weights))}: they must be from 0 to {_MOST:,}, and not "
                "all 0.",
            )

    @property
    def needs_model(self) -> bool:
        return any(part.needs_model for part in self.parts)

    @property
    def compares(self) -> bool:
        return any(isinstance(part, Compares) and part.compares for part in self.parts)

    def calibrated(self, source: ModelLocation, task: str) -> Combined:
        """With the parts that were calibrated for a model and a task."""
        parts = tuple(
            part.calibrated(source, task) if isinstance(part, TakesCalibration) else part
            for part in self.parts
        )
        return replace(self, parts=parts)

    def verify(
        self, task: Task, problem: Problem, candidates: Sequence[Node], engine: Asker
    ) -> Verdict:
        return self.combined(
            [part.verify(task, problem, candidates, engine) for part in self.parts]
        )

    def combined(self, verdicts: Sequence[Verdict]) -> Verdict:
        steps = any(verdict.scores for verdict in verdicts)
        gate = next((verdict.gate for verdict in verdicts if verdict.gate), None)
        exits = next((verdict.exits for verdict in verdicts if verdict.exits), None)
        if any(map(_audited, verdicts)):
            audited = self._all([_audited(each) or each.values for each in verdicts])
            if gate is not None and gate.skipped:
                gate = replace(gate, audited=audited)
            elif exits is not None:
                exits = replace(exits, audited=audited)
        return Verdict(
            self._all([verdict.values for verdict in verdicts]),
            sum(verdict.asked for verdict in verdicts),
            scores=self._all([each.scores or each.values for each in verdicts]) if steps else (),
            gate=gate,
            exits=exits,
        )

    def _all(self, values: Sequence[Sequence[float]]) -> tuple[float, ...]:
        """The values of all candidates from those of the parts."""
        return tuple(map(self._value, zip(*values, strict=True)))

    def _value(self, values: Sequence[float]) -> float:
        """The value of one candidate from those of the parts."""
        if self.rule == "minimum":
            return min(values)
        weights = self.weights or (1.0,) * len(values)
        pairs = [pair for pair in zip(weights, values, strict=True) if pair[0]]
        least, most = min(value for _, value in pairs), max(value for _, value in pairs)
        if self.rule == "product" and least < 0:
            raise UsageError(
                "verdict-range",
                f"'combined': a value of {least:g}, and the product needs values of at least 0.",
                "Use rule=sum or rule=minimum.",
            )
        try:
            if self.rule == "product":
                found = math.prod(value**weight for weight, value in pairs)
            else:
                found = math.fsum(weight * value for weight, value in pairs) / math.fsum(weights)
        except OverflowError:
            found = math.inf
        if math.isinf(found):
            raise UsageError(
                "verdict-range",
                f"'combined': a value of {most:g}, and the {self.rule} with these weights is beyond "
                "a float.",
                "Use smaller weights, or parts with values from 0 to 1.",
            )
        return min(found, _BELOW_ONE) if least < 1 and most <= 1 else found


def _audited(verdict: Verdict) -> tuple[float, ...]:
    """What an audit found; empty without one."""
    for part in (verdict.gate, verdict.exits):
        if part is not None and part.audited:
            return part.audited
    return ()
