"""Reward models as verifiers: their settings. The models run in engines of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from arbor.aggregate.base import Steps
from arbor.errors import UsageError
from arbor.registry import name_of
from arbor.tasks.base import Problem, Task
from arbor.tree import Node

from .base import Asker, Placement, Verdict, VerifierModel
from .reward.format import OUTCOME, PROCESS, RewardSettings


@dataclass(frozen=True)
class RewardModel(RewardSettings):
    """A verifier that asks a reward model in an engine of its own."""

    needs_model = False  # of the search

    def own_model(self, placement: Placement) -> VerifierModel:
        """The reward model, located and not loaded.

        Raises:
            UsageError: no model is named.
            ModelError: the model does not exist.
        """
        from .reward.engine import RewardEngine  # imports torch

        if not self.model:
            name = name_of(self)
            raise UsageError(
                "setting-missing",
                f"'{name}' needs a value for 'model'.",
                f"As in --verifier {name},model=PATH.",
                name=name,
                setting="model",
            )
        return RewardEngine(self, placement)

    def verify(
        self, task: Task, problem: Problem, candidates: Sequence[Node], engine: Asker
    ) -> Verdict:
        """Not possible without the reward model's engine, which a `Solver` opens.

        Raises:
            UsageError: always.
        """
        name = name_of(self)
        raise UsageError(
            "reward-unopened",
            f"the verifier '{name}' runs a model of its own, which belongs to a Solver.",
            f"Use Solver(verifier={type(self).__name__}(…)), or a part of 'combined'.",
            name=name,
        )


@dataclass(frozen=True)
class OutcomeRewardModel(RewardModel):
    """Values a path by an outcome reward model: one score of the whole text, at its last token.

    A score head with one label (`AutoModelForSequenceClassification`) gives sigmoid(score), the
    probability of preference over a score of 0 (Bradley-Terry); with two, the probability of the
    second; ``label`` names another class.

    Args:
        family: ``chat``: the problem is a user's message, the path the assistant's; ``text``: plain
            text; ``auto``: ``chat`` where the tokenizer has a chat template.

    The other settings are those of every reward model, see docs/verifier.md. A value never reaches
    1, so no score is a proof.
    """

    families = OUTCOME


@dataclass(frozen=True)
class ProcessRewardModel(RewardModel):
    """Values a path by a process reward model: a score at the end of each of its steps.

    Either a score head reads the separator after a step (`AutoModelForTokenClassification`,
    Qwen2.5-Math-PRM), or the logits of two tokens do (Math-Shepherd): the value of a step is the
    softmax of the good one.

    Args:
        steps: the value of a path from the scores of its steps: ``last`` (Snell et al., arXiv
            2408.03314), ``min`` (Lightman et al., arXiv 2305.20050; Wang et al., arXiv 2312.08935),
            ``mean`` or ``product``. The scores themselves stay on the blocks, where ``--aggregate``
            reads them.
        family: ``math-shepherd``, ``qwen-prm``, ``trl``, or ``auto``.

    The other settings are those of every reward model, see docs/verifier.md. A value never reaches
    1, so no score is a proof.
    """

    families = PROCESS

    steps: Steps = "last"

    @property
    def path_value(self) -> Steps | None:
        return self.steps
