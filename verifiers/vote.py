"""The verifier that lets the model vote between thoughts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from arbor.errors import UsageError
from arbor.tasks.base import BlockLimits, Problem, Question, Task
from arbor.tree import Node

from .base import Encoder, Inquiry, Verdict
from .self_eval import CERTAIN, AsksOnce, asked_tokens, expected_worth, verdict_tokens

if TYPE_CHECKING:
    from torch import Tensor

MOST_CHOICES = 9  # one digit each


@dataclass(frozen=True)
class Vote(AsksOnce):
    """Shows the model several states together and takes its shares of the vote as values.

        value of choice i = p(i),   p = softmax of the logits of the choices' numbers, temperature 1

    "Vote across states" of Tree of Thoughts (Yao et al., arXiv 2305.10601, section 3, state
    evaluator (b); there for creative writing, 5 votes between 5 plans). The question follows the
    prompt, lists the states' thoughts with numbers, and asks for the best one; a space that the
    tokenizer separates from the numbers is a part of it. Equal states are one choice.

    Args:
        choices: most states of one vote, from 2 to 9. More states are divided, in order, into votes
            of nearly equal size; a value then compares the states of one vote.

    Differs from the paper: one forward pass gives the shares that the paper estimates from sampled
    votes, without the reasoning before each vote; a state that stands alone has the value 1 (less
    `CERTAIN`'s margin). A value never reaches 1, so no vote is a proof.
    """

    compares: ClassVar[bool] = True

    choices: int = 5

    def __post_init__(self) -> None:
        if not 2 <= self.choices <= MOST_CHOICES:
            raise UsageError(
                "setting-range", f"choices={self.choices}: it must be from 2 to {MOST_CHOICES}."
            )

    def inquire(
        self, task: Task, problem: Problem, candidates: Sequence[Node], encoder: Encoder
    ) -> Inquiry:
        """The votes between the candidates, one question each.

        Raises:
            UsageError: two numbers begin with the same token of this model.
            ModelError: by the verdict: the model's logits are not finite.
        """
        states: dict[tuple[str, ...], int] = {}
        places = [states.setdefault(tuple(node.thoughts), len(states)) for node in candidates]
        thoughts = list(states)
        votes = [range(*bounds) for bounds in _divided(len(thoughts), self.choices)]
        asked = [vote for vote in votes if len(vote) > 1]
        root = candidates[0].path[0] if candidates else None
        questions = [_question([thoughts[place] for place in vote]) for vote in asked]
        tokens = [verdict_tokens(question, encoder) for question in questions]
        encoded = [each.after(root) for each in tokens] if root else []
        columns = [list(each.worth) for each in tokens]

        def verdict(logits: Tensor) -> Verdict:
            values = [CERTAIN] * len(thoughts)
            for row, vote in enumerate(asked):
                known = logits[row, columns[row]].cpu()
                for place, state in enumerate(vote):
                    chosen = [float(place == other) for other in range(len(vote))]
                    values[state] = expected_worth(known, chosen)
            return Verdict(tuple(values[place] for place in places), len(asked))

        vote_of = {place: row for row, vote in enumerate(asked) for place in vote}
        rows = [vote_of.get(place, -1) for place in places]
        return Inquiry([root] * len(asked) if root else [], encoded, verdict, rows, columns)

    def check(self, task: Task, problem: Problem, encoder: Encoder) -> None:
        """Refuse numbers that this model's tokenizer cannot keep apart.

        Raises:
            UsageError: two numbers begin with the same token.
        """
        verdict_tokens(_question([()] * self.choices), encoder)

    def most_question_tokens(
        self, task: Task, problem: Problem, boundary: BlockLimits, encoder: Encoder
    ) -> int:
        """Tokens of the longest question: every choice is a path of the greatest length."""
        frame = asked_tokens(_question([()] * self.choices), encoder)
        return frame + self.choices * boundary.longest_path


def _divided(count: int, most: int) -> list[tuple[int, int]]:
    """Begin and end of the parts of 0 to count, each of at most `most`, nearly equal in size."""
    parts = math.ceil(count / most)
    bounds = [count * part // parts for part in range(parts + 1)] if parts else []
    return list(itertools.pairwise(bounds))


def _question(choices: Sequence[Sequence[str]]) -> Question:
    """The question between some states, each given by its thoughts; numbers begin with 1."""
    listed = "\n".join(
        f"Choice {number}:\n{''.join(thoughts).strip()}"
        for number, thoughts in enumerate(choices, 1)
    )
    choices_shown = f"Some choices to go on:\n{listed}"
    text = f"\n{choices_shown}\nThe best choice is"
    message = f"{choices_shown}\nWhich choice is the best? Answer with its number only."
    # worths differ, so that two numbers with the same first token are refused
    numbers = {f" {number}": number / len(choices) for number in range(1, len(choices) + 1)}
    return Question(text, numbers, Question(message, numbers))
