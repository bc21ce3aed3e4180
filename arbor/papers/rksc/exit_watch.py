"""Exiting: one question on its way through the layers; ExitWatch looks at those of one forward."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from arbor.errors import UsageError
from arbor.model.runner import ModelRunner
from arbor.papers.rksc.exit_thresholds import DECIMALS, LayerExit
from arbor.verifiers.base import Exits


@dataclass(slots=True, eq=False)
class Exiting:
    """One question on its way through the layers.

    Attributes:
        rule: when it leaves.
        verdicts: token ids whose probabilities decide, for the measure ``margin``.
        audit: it runs through every layer, and is answered by what it would have left with.
        keep: whether `kept` is filled.
        layers: layers it ran through, or would have; 0 before the forward.
        depth: layers of the model; 0 before the forward.
        checked: layers of the checks.
        values: uncertainties there.
        early: float32 [V], logits of the state it would have left with; None where it would not.
        full: float32 [V], logits after the last layer, under an audit; None before the answer.
        kept: float32 [V] on the CPU, logits at each check.
    """

    rule: LayerExit
    verdicts: Sequence[int] = ()
    audit: bool = False
    keep: bool = False
    layers: int = 0
    depth: int = 0
    checked: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    early: Tensor | None = None
    full: Tensor | None = None
    kept: list[Tensor] = field(default_factory=list)

    @staticmethod
    def watch(
        runner: ModelRunner, ways: Sequence[Exiting], ends: Sequence[int], counts: Sequence[int]
    ) -> ExitWatch:
        """Looks at the questions of one forward, see `Way`."""
        return ExitWatch(runner, ways, ends, counts)

    def answer(self, logits: Tensor) -> Tensor:
        """The answer, given the logits of the state that it ended with."""
        if not self.audit:
            return logits
        self.full = logits
        return logits if self.early is None else self.early

    def begin(self, layers: int) -> None:
        """A forward begins; one that failed may have gone before.

        Args:
            layers: of the model.
        """
        self.layers = self.depth = layers
        self.checked, self.values, self.early, self.kept = [], [], None, []

    def look(self, layers: int, value: float) -> bool:
        """Record a check; whether the question leaves, or would."""
        self.checked.append(layers)
        self.values.append(value)
        if self.rule.is_over(layers, self.values):
            self.layers = layers
            return True
        return False

    @property
    def by_layer(self) -> tuple[float, ...]:
        """The uncertainty after each of the model's layers; nan where it was not looked at."""
        known = dict(zip(self.checked, self.values, strict=True))
        return tuple(
            round(known.get(layer, math.nan), DECIMALS) for layer in range(1, self.depth + 1)
        )


def ways_of(
    rule: LayerExit, count: int, verdicts: Sequence[Sequence[int]] = (), *, audit: bool = False
) -> list[Exiting]:
    """The ways of so many questions.

    Args:
        rule: when a question leaves.
        count: of the questions.
        verdicts: token ids that each answer is read at, for a rule that compares verdicts.
        audit: every layer runs all the same; the answers are those without it.

    Raises:
        UsageError: the rule compares verdicts, and a question has none.
    """
    known = verdicts or [()] * count
    if rule.measure == "margin" and not all(known):
        raise UsageError(
            "exit-verdicts",
            "measure=margin compares verdicts, and this verifier's questions name none.",
            "Use measure=entropy.",
        )
    return [Exiting(rule, ids, audit) for ids in known]


def exits_of(ways: Sequence[Exiting], rows: Sequence[int], audited: Sequence[float]) -> Exits:
    """Where questions left, by candidate.

    Args:
        ways: of the questions through the layers.
        rows: of each candidate, the place of its question; -1: none. Empty: one for each.
        audited: the candidates' values after the last layer; empty without an audit.
    """
    depth = ways[0].depth
    unknown = (math.nan,) * depth
    mine = [ways[row] if row >= 0 else None for row in rows or range(len(ways))]
    return Exits(
        exit_layer=tuple(-1 if way is None else way.layers - 1 for way in mine),
        layers=depth,
        entropy=tuple(unknown if way is None else way.by_layer for way in mine),
        audited=tuple(audited),
    )


class ExitWatch:
    """Asked after each layer which rows leave (`Leave`).

    The rows of a question leave together; rows of no question never do, so the KV of a path is
    never written in part.

    Args:
        runner: unembeds states.
        questions: those that may leave.
        ends: int64 [n], the row after each question's last one.
        counts: int64 [n], rows of each.
    """

    def __init__(
        self,
        runner: ModelRunner,
        questions: Sequence[Exiting],
        ends: Sequence[int],
        counts: Sequence[int],
    ) -> None:
        self._runner = runner
        self._places = {
            question: (end, count)
            for question, end, count in zip(questions, ends, counts, strict=True)
        }
        for question in questions:
            question.begin(runner.layer_count)

    def __call__(self, layer: int, state: Tensor, rows: Tensor) -> Tensor | None:
        """The rows that leave now.

        Args:
            layer: that has run, from 0.
            state: [T', d], of the rows running.
            rows: int64 [T'], these rows, increasing.

        Returns:
            bool [T'] on the CPU; None: nobody.
        """
        layers = layer + 1
        due = [question for question in self._places if question.rule.checks(layers)]
        if not due:
            return None
        running = rows.numpy()
        last = np.searchsorted(running, [self._places[question][0] - 1 for question in due])
        states = state[torch.from_numpy(last).to(state.device)]
        leaving = torch.zeros(len(running), dtype=torch.bool)
        for place, question, value, logits in self._looked_at(due, states):
            if question.keep:
                question.kept.append(logits.cpu())
            if not question.look(layers, value):
                continue
            count = self._places.pop(question)[1]
            if question.audit:
                question.early = self._runner.unembed(states[place][None])[0]
            else:
                leaving[last[place] - count + 1 : last[place] + 1] = True
        return leaving if bool(leaving.any()) else None

    def _looked_at(
        self, due: Sequence[Exiting], states: Tensor
    ) -> list[tuple[int, Exiting, float, Tensor]]:
        """Each question's place, uncertainty, and logits as they were compared."""
        found = []
        kinds = dict.fromkeys((each.rule.measure, each.rule.norm, each.keep) for each in due)
        for measure, norm, keep in kinds:
            places = [
                place
                for place, each in enumerate(due)
                if (each.rule.measure, each.rule.norm, each.keep) == (measure, norm, keep)
            ]
            mine = [due[place] for place in places]
            chosen = states if len(places) == len(due) else states[places]
            if measure == "entropy":
                logits = self._runner.unembed(chosen, norm=norm)
                values = entropy(logits).tolist()
            else:
                known = sorted({token for each in mine for token in each.verdicts})
                logits = self._runner.unembed(chosen, None if keep else known, norm=norm)
                column = {token: at for at, token in enumerate(known)}
                values = [
                    lack_of_margin(
                        row[list(each.verdicts) if keep else [column[t] for t in each.verdicts]]
                    )
                    for row, each in zip(logits.float().cpu(), mine, strict=True)
                ]
            found += list(zip(places, mine, values, logits, strict=True))
        return found


def entropy(logits: Tensor) -> Tensor:
    """Entropies of rows of logits [n, V], relative to ln V: float [n] in [0, 1]."""
    logarithms = torch.log_softmax(logits.double(), dim=-1)
    terms = torch.where(logarithms > -math.inf, logarithms.exp() * logarithms, 0.0)
    return -terms.sum(-1) / math.log(logits.shape[-1])


def lack_of_margin(logits: Tensor) -> float:
    """1 - (p1 - p2) of the two largest probabilities of logits [n]; 0 for a single one."""
    chances = torch.softmax(logits.double(), dim=0).sort(descending=True).values.tolist()
    return float(1 - (chances[0] - (chances[1] if len(chances) > 1 else 0.0)))
