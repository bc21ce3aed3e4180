"""Reward formats: how a reward model reads a problem with its steps, and where it writes scores."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from arbor.aggregate.base import Steps
from arbor.budget import Budget
from arbor.errors import UsageError, check_settings

Head = Literal["classes", "tags"]

REPLY = "\N{OBJECT REPLACEMENT CHARACTER}"  # stands for the assistant's message in a chat template


@dataclass(frozen=True, slots=True)
class RewardFormat:
    """The text that a reward model reads, and the tokens at which it scores.

        prompt, first, step 1, separator, between, step 2, separator, ...

    Each part is tokenised by itself, so that equal beginnings of paths have equal tokens.

    Attributes:
        head: ``classes``: a score head gives a logit per class; ``tags``: the logits of two tokens
            of the vocabulary do.
        prompt: with ``{problem}``, the problem as the user typed it, and ``{prompt}``, the task's
            prompt for the search's model.
        chat: the prompt is a user's message and the steps are the assistant's, by the model's chat
            template; else the prompt is plain text.
        system: the system message of a chat; none if empty.
        first: text before the first step.
        between: text before every other step.
        separator: text after every step; a process reward model scores at its last token.
        one_token: the separator must be one token of the vocabulary.
        end: text after the last step, at whose last token an outcome reward model scores; None:
            what the chat template writes after the assistant's message.
        good, bad: ``tags``: the tokens for a good and a bad step.
        label: ``classes``: the class of a good step; None: the second of two, the only one of one.
    """

    head: Head
    prompt: str = "{problem}"
    chat: bool = False
    system: str = ""
    first: str = ""
    between: str = ""
    separator: str = ""
    one_token: bool = False
    end: str | None = None
    good: str = ""
    bad: str = ""
    label: int | None = None


# Process reward models. Each is described from the usage that its model card documents.
PROCESS: Mapping[str, RewardFormat] = {
    # peiyi9979/math-shepherd-mistral-7b-prm (Wang et al., arXiv 2312.08935):
    # "question Step 1: ... ки\nStep 2: ... ки", scores at each ки
    "math-shepherd": RewardFormat(
        "tags",
        first=" ",
        between="\n",
        separator=" ки",
        one_token=True,
        good=" +",
        bad=" -",
    ),
    # Qwen/Qwen2.5-Math-PRM-7B and -72B (Zhang et al., arXiv 2501.07301): a chat, scores at each
    # <extra_0>
    "qwen-prm": RewardFormat(
        "classes",
        chat=True,
        system="Please reason step by step, and put your final answer within \\boxed{}.",
        separator="<extra_0>",
        one_token=True,
    ),
    # trl's PRMTrainer: *ForTokenClassification, scores at the line break after each step; nothing
    # stands between the problem and the first step
    "trl": RewardFormat("classes", separator="\n"),
}

# Outcome reward models: a score of the whole path.
OUTCOME: Mapping[str, RewardFormat] = {
    # *ForSequenceClassification: a chat, scored at the last token
    "chat": RewardFormat("classes", chat=True),
    # the same without a chat template
    "text": RewardFormat("classes", prompt="{problem}\n", end=""),
}


def process_family(architecture: str) -> str:
    """The family of a process reward model by the architecture in its config."""
    if architecture.endswith("ForProcessRewardModel"):
        return "qwen-prm"
    return "math-shepherd" if architecture.endswith("ForCausalLM") else "trl"


@dataclass(frozen=True)
class RewardSettings:
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

    families: ClassVar[Mapping[str, RewardFormat]]  # formats of this kind of reward model, by name

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
        if self.family not in ("auto", *self.families):
            known = " or ".join(self.families)
            raise UsageError("setting-range", f"family='{self.family}': it must be auto, {known}.")
        Budget.parse(self.budget)
        check_settings(self, label=(self.label is None or self.label >= 0, "0 or more"))

    @property
    def path_value(self) -> Steps | None:
        """The value of a path from the scores of its steps; None: the path has one score."""
        return None

    def format(self, family: str) -> RewardFormat:
        """The format of a family, with the parts that the settings replace."""
        given = {
            field.name: value
            for field in dataclasses.fields(RewardFormat)
            if (value := getattr(self, field.name, None)) is not None
        }
        texts = ("prompt", "first", "between", "separator", "end", "good", "bad")
        given |= {name: _unescaped(given[name]) for name in texts if name in given}
        found = dataclasses.replace(self.families[family], **given)
        # a separator of the user's own may be any text, unless it looks like a special token
        own = found.separator.strip()
        if self.separator is not None:
            found = dataclasses.replace(
                found, one_token=own.startswith("<") and own.endswith(">") and "><" not in own
            )
        return found


def _unescaped(text: str) -> str:
    return text.replace("\\n", "\n").replace("\\s", " ")
