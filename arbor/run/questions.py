"""Questions: the engine as a verifier sees it, with the plan that its questions have to fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from arbor.budget import Plan
from arbor.errors import BudgetInfeasible, InputError
from arbor.run.question_turn import QuestionTurn
from arbor.support.texts import refuse_surrogates
from arbor.tree import Node
from arbor.verifiers.base import Asker

if TYPE_CHECKING:
    from torch import Tensor


class PlannedQuestions:
    """An `Asker` that explains a question longer than planned, where it does not fit.

    The plan of a search counts the task's question at no thoughts, or `max_question_tokens` where
    the task declares it. A longer question is asked as long as the budget and the model's context
    have room for it; where they have not, the error names the task and what would work.

    Args:
        engine: answers.
        task: the task's name.
        plan: of the search.
        context: positions of the model.
        turn: how the model is asked in turns; None: in the text that it continues.
    """

    def __init__(
        self,
        engine: Asker,
        task: str,
        plan: Plan,
        context: int,
        turn: QuestionTurn | None = None,
    ) -> None:
        self._engine = engine
        self._turn = turn
        self._task = task
        self._plan = plan
        self._context = context

    def encode(self, text: str) -> list[int]:
        """Token ids of a continuation (no special tokens).

        Raises:
            InputError: the text has half of a character.
        """
        refuse_surrogates(text, "the question to the model")
        return self._engine.encode(text)

    def turn(self, message: str, answer: str = "") -> list[int] | None:
        """See `TakesTurns`.

        Raises:
            InputError: the message has half of a character.
        """
        refuse_surrogates(message, "the question to the model")
        return None if self._turn is None else self._turn.encode(message, answer)

    def ask(self, nodes: Sequence[Node], questions: Sequence[Sequence[int]]) -> Tensor:
        """The model's next-token logits, see `Asker.ask`.

        Raises:
            BudgetInfeasible: a question does not fit; says so if it is longer than planned.
            InputError: a question longer than planned exceeds the model's context.
        """
        with self.explaining(nodes, questions):
            return self._engine.ask(nodes, questions)

    @contextmanager
    def explaining(
        self, nodes: Sequence[Node], questions: Sequence[Sequence[int]]
    ) -> Iterator[None]:
        """Within, these questions are asked; see `ask`."""
        longest = max(map(len, questions), default=0)
        if longest <= self._plan.question_tokens:
            yield
            return
        self._check_context(nodes, questions, longest)
        try:
            yield
        except BudgetInfeasible as error:
            raise self._infeasible(longest) from error

    def _check_context(
        self, nodes: Sequence[Node], questions: Sequence[Sequence[int]], longest: int
    ) -> None:
        ends = [node.end + len(question) for node, question in zip(nodes, questions, strict=True)]
        if max(ends) > self._context:
            raise InputError(
                "problem-too-long",
                f"{self._described(longest)}, exceeds the model's context of {self._context:,} by "
                f"{max(ends) - self._context:,}.",
                f"Use a smaller --max-depth. {self._remedy(longest)}: then the plan checks it.",
                tokens=max(ends),
                context=self._context,
                question_tokens=longest,
            )

    def _infeasible(self, longest: int) -> BudgetInfeasible:
        plan = self._plan
        more = longest - plan.question_tokens
        needed = plan.enough_tokens + more
        if needed <= plan.budget_tokens:  # the policy gives up too little: room for everything
            needed = plan.full_tokens + more
        error = BudgetInfeasible(
            needed,
            plan.budget_tokens,
            f"the search with {self._described(longest)},",
            f"{self._remedy(longest)}: then {needed}tok works.",
        )
        error.data["question_tokens"] = longest
        return error

    def _described(self, longest: int) -> str:
        return (
            f"a question of {longest:,} tokens by the task '{self._task}', "
            f"planned for {self._plan.question_tokens:,}"
        )

    def _remedy(self, longest: int) -> str:
        return f"Let the task declare max_question_tokens = {longest} or more"
