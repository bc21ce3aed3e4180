"""A verifier that asks the model only about thoughts that the model found likely."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from arbor.tasks.base import Problem, Task
from arbor.tree import Node
from arbor.verifiers.base import Asker, Verdict
from arbor.verifiers.self_eval import SelfEval


@dataclass(frozen=True)
class Thrifty:
    """Values unlikely thoughts at 0; the model judges the others.

    Args:
        least: mean probability of a thought's tokens from which the model is asked.
    """

    least: float = 0.4
    needs_model = True

    def verify(
        self, task: Task, problem: Problem, candidates: Sequence[Node], engine: Asker
    ) -> Verdict:
        likely = [node for node in candidates if self._mean(node) >= self.least]
        judged = SelfEval().verify(task, problem, likely, engine)
        value = {node.id: each for node, each in zip(likely, judged.values, strict=True)}
        return Verdict(tuple(value.get(node.id, 0.0) for node in candidates), judged.asked)

    def _mean(self, node: Node) -> float:
        """The geometric mean of the probabilities of a thought's tokens."""
        return math.exp(node.logprob / len(node.tokens))
