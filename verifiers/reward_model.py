"""Reward models as verifiers: their settings. The model itself runs in an engine of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from arbor.aggregate.base import Steps, check_steps
from arbor.budget import Budget
from arbor.errors import UsageError
from arbor.registry import name_of
from arbor.tasks.base import Problem, Task
from arbor.tree import Node

from .base import Asker, Placement, Verdict, VerifierModel
from .reward.format import OUTCOME, PROCESS, Head, RewardFormat


@dataclass(frozen=True)
class RewardModel:
    """The settings that every reward model has.

    Args:
        model: a directory or a Hub id; required.
        family: the format of its input and output; ``auto`` goes by the architecture.
        budget: KV of the reward model, as for `Solver`: ``full``, a part, ``8192tok``, ``6GiB``.
        revision: branch, tag or commit of a model of the Hub.
        dtype: of its weights and KV.
        head, prompt, chat, system, first, between, separator, end, good, bad, label: replace parts
            of the family's format, see `RewardFormat`; in a text ``\\n`` is a line break and
            ``\\s`` a space, which the command line removes at the ends.
    """

    model: str = ""
    family: str = "auto"
    budget: float | str = "full"
    revision: str | None = None
    dtype: str = "auto"
    head: Head | None = None
    prompt: str | None = None
    chat: bool | None = None
    system: str | None = None
    first: str | None = None
    between: str | None = None
    separator: str | None = None
    end: str | None = None
    good: str | None = None
    bad: str | None = None
    label: int | None = None

    def __post_init__(self) -> None:
        families = self.families()
        if self.family not in ("auto", *families):
            raise UsageError(
                "setting-range",
                f"family='{self.family}': it must be auto, {' or '.join(families)}.",
            )
        Budget.parse(self.budget)
        if self.label is not None and self.label < 0:
            raise UsageError("setting-range", f"label={self.label}: classes are counted from 0.")

    @property
    def needs_model(self) -> bool:
        """False: the search's own model is not asked."""
        return False

    @classmethod
    def families(cls) -> Mapping[str, RewardFormat]:
        """The formats of this kind of reward model, by name."""
        raise NotImplementedError

    @property
    def path_value(self) -> Steps | None:
        """The value of a path from the scores of its steps; None: the path has one score."""
        raise NotImplementedError

    def format(self, family: str) -> RewardFormat:
        """The format of a family, with the parts that the settings replace."""
        given = {
            field.name: value
            for field in dataclasses.fields(RewardFormat)
            if (value := getattr(self, field.name, None)) is not None
        }
        texts = ("prompt", "first", "between", "separator", "end", "good", "bad")
        given |= {name: _unescaped(given[name]) for name in texts if name in given}
        found = dataclasses.replace(self.families()[family], **given)
        # a separator of the user's own may be any text, unless it looks like a special token
        own = found.separator.strip()
        if self.separator is not None:
            found = dataclasses.replace(
                found, one_token=own.startswith("<") and own.endswith(">") and "><" not in own
            )
        return found

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

    @classmethod
    def families(cls) -> Mapping[str, RewardFormat]:
        """``chat`` and ``text``."""
        return OUTCOME

    @property
    def path_value(self) -> Steps | None:
        """None: the path has one score."""
        return None


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

    steps: Steps = "last"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_steps(self.steps)

    @classmethod
    def families(cls) -> Mapping[str, RewardFormat]:
        """``math-shepherd``, ``qwen-prm`` and ``trl``."""
        return PROCESS

    @property
    def path_value(self) -> Steps | None:
        """By `steps`."""
        return self.steps


def _unescaped(text: str) -> str:
    return text.replace("\\n", "\n").replace("\\s", " ")
