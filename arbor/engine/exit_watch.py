"""ExitWatch: looks at the questions of one forward between the layers, and lets them leave."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from arbor.engine.early_exit import Exiting
from arbor.model.runner import ModelRunner


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
