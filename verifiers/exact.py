"""The exact verifier: values by the task's own checker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from arbor.tasks.base import Problem, Task
from arbor.tree import Node

from .base import Asker, Verdict


@dataclass(frozen=True)
class Exact:
    """Values a state by `Task.value`: from the problem alone, without answer key or model.

    A value of 1 is a proof: a finished path worth 1 solves the problem, and a search may stop.
    """

    needs_model = False

    def verify(
        self, task: Task, problem: Problem, candidates: Sequence[Node], engine: Asker
    ) -> Verdict:
        """The task's values; the model is not asked.

        Raises:
            UsageError: the task has no exact checker.
        """
        return Verdict(tuple(task.value(problem, node.thoughts) for node in candidates), 0)
