"""A task whose poisoned problem kills the process that searches it, for tests of workers."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

from arbor.tasks.base import Problem
from arbor.tasks.game24 import Game24


@dataclass(frozen=True)
class Deadly(Game24):
    """Game of 24, with one problem that ends any process but one with SIGKILL.

    Attributes:
        poison: the text of that problem.
        spared: id of the process that survives.
    """

    poison: str = ""
    spared: int = 0

    def prompt(self, problem: Problem) -> str:
        if problem.text == self.poison and os.getpid() != self.spared:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().prompt(problem)
