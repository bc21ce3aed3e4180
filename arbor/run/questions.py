"""Questions: the engine as a verifier sees it, with the plan that its questions have to fit."""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from arbor.budget import Plan
from arbor.errors import BudgetInfeasible, InputError
from arbor.model.control_tokens import control_tokens, encode_marked
from arbor.support.texts import one_line, refuse_surrogates
from arbor.tasks.base import Converses, GivesTokens, Problem, Task
from arbor.tasks.worded import THINKING
from arbor.tree import Node
from arbor.verifiers.base import Asker

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

# texts of a conversation whose places are looked up in what the template writes of it
_PROBLEM, _REASONING, _QUESTION = "What is asked?", "What was reasoned.", "What is judged?"

MOST_KNOWN = 256  # turns of one problem whose token ids are remembered


def in_conversation(tokenizer: Any, task: Task | None) -> bool:
    """Whether the prompt of a task is a user's message to this model.

    Args:
        tokenizer: of the model.
        task: a `Converses` decides by itself; None: the chat template alone does.
    """
    chats = not isinstance(task, Converses) or task.uses_chat
    return bool(getattr(tokenizer, "chat_template", None)) and chats


def question_turn(tokenizer: Any, task: Task, problem: Problem) -> QuestionTurn | None:
    """How this model is asked in turns about a problem; None: in the text that it continues.

    It is None for a prompt that is not a conversation (`in_conversation`; of token ids already,
    `GivesTokens`, the problem's data say it), and where the template cannot write a further turn:
    it refuses one, changes the messages, or lets the answer begin with a thought. The log says so
    for such a template.
    """
    given = isinstance(task, GivesTokens) and not problem.data.get("is_conversation")
    if given or not in_conversation(tokenizer, task):
        return None
    try:
        return _derived(tokenizer)
    except Exception as error:  # the template's own
        logger.warning(
            "the model is asked to judge within its own text: its chat template cannot write a "
            "further turn: %s",
            one_line(str(error)),
        )
        return None


@dataclass(frozen=True, slots=True)
class QuestionTurn:
    """The end of the assistant's turn, a user's turn with a question, and the head of an answer.

    Attributes:
        tokenizer: of the model.
        so_far: a conversation as the template writes it, up to the end of the assistant's text.
        before: what it writes between that text and a user's next message.
        after: what it writes after that message, up to the answer.
        known: token ids of turns by message and answer; most tasks ask the same after each thought.
    """

    tokenizer: Any
    so_far: str
    before: str
    after: str
    known: dict[tuple[str, str], list[int]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def encode(self, message: str, answer: str = "") -> list[int]:
        """Token ids of the turn, after a path that is not at its end token yet.

        Args:
            message: of the user, outer spaces apart; control tokens named in it are text, and what
                a model wrote may name some.
            answer: the beginning of the assistant's answer.
        """
        key = message.strip(), answer
        if key not in self.known:
            if len(self.known) == MOST_KNOWN:
                self.known.clear()
            self.known[key] = self._encoded(*key)
        return list(self.known[key])

    def _encoded(self, message: str, answer: str) -> list[int]:
        head = self._ids(self.so_far)
        words = control_tokens(self.tokenizer).mark(message)
        turn = f"{self.before}{words}{self.after}{answer}"
        whole = self._ids(self.so_far + turn)
        # a tokenizer may join the turn's first characters to the text before
        return whole[len(head) :] if whole[: len(head)] == head else self._ids(turn)

    def _ids(self, text: str) -> list[int]:
        return encode_marked(self.tokenizer, text, add_special_tokens=False)


def _derived(tokenizer: Any) -> QuestionTurn:
    """The turn, cut out of a conversation that the template writes.

    Raises:
        Exception: the template's own.
        ValueError: what it writes does not hold the messages, in their order, as they are.
    """
    conversation = [
        {"role": "user", "content": _PROBLEM},
        {"role": "assistant", "content": _REASONING},
        {"role": "user", "content": _QUESTION},
    ]
    text = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    so_far, reasoned, rest = text.partition(_REASONING)
    before, asked, after = rest.partition(_QUESTION)
    if not (reasoned and asked and _PROBLEM in so_far):
        raise ValueError("it does not write the messages as they are")
    if not before.strip() and not after.strip():
        raise ValueError("it writes nothing between two messages")
    if THINKING in after:
        raise ValueError("the answer begins with a thought")
    return QuestionTurn(tokenizer, so_far + reasoned, before, after)


def wrong_in(
    nodes: Sequence[Node], questions: Sequence[Sequence[int]], vocabulary: int
) -> str | None:
    """What the engine cannot be asked, with what it can; None where there is nothing.

    Args:
        nodes, questions: of a plug-in, so that they may be anything.
        vocabulary: token ids of the model; 0: not known.
    """
    if len(nodes) != len(questions):
        counts = f"questions: {len(questions)}, blocks: {len(nodes)}"
        return f"{counts}; engine.ask takes one question for each"
    for node in nodes:
        if not isinstance(node, Node):
            return f"{node!r:.20} is no block: engine.ask takes candidates"
    for question in questions:
        if isinstance(question, str):
            return "a question is a text: engine.ask takes token ids, engine.encode(text)"
        if not len(question):
            return "a question has no token: engine.ask takes at least one"
        for token in question:
            if not _is_token(token, vocabulary or math.inf):
                return f"{token!r:.20} is no token id: engine.ask takes 0 to {vocabulary - 1}"
    return None


def _is_token(value: Any, vocabulary: float) -> bool:
    try:
        return 0 <= operator.index(value) < vocabulary
    except TypeError:
        return False


class Words:
    """Token ids of questions, as a verifier asks for them.

    Args:
        encode: of a continuation (no special tokens).
        turn: how the model is asked in turns; None: in the text that it continues.
    """

    def __init__(self, encode: Callable[[str], list[int]], turn: QuestionTurn | None) -> None:
        self._encode = encode
        self._turn = turn

    def encode(self, text: str) -> list[int]:
        """Token ids of a continuation (no special tokens).

        Raises:
            InputError: the text has half of a character.
        """
        refuse_surrogates(text, "the question to the model")
        return list(self._encode(text))

    def turn(self, message: str, answer: str = "") -> list[int] | None:
        """See `TakesTurns`.

        Raises:
            InputError: the message has half of a character.
        """
        refuse_surrogates(message, "the question to the model")
        return None if self._turn is None else self._turn.encode(message, answer)


class PlannedQuestions(Words):
    """An `Asker` that explains a question longer than planned, where it does not fit.

    The plan of a search counts the task's question at no thoughts, or `max_question_tokens` where
    the task declares it. A longer question is asked as long as the budget and the model's context
    have room for it; where they have not, the error names who asks it and what would work.

    Args:
        engine: answers.
        task: the task's name.
        verifier: the name of a plug-in's, which has questions of its own; None: the task's are
            asked.
        plan: of the search.
        context: positions of the model.
        vocabulary: its token ids; 0: not known.
        turn: as for `Words`.
    """

    def __init__(
        self,
        engine: Asker,
        task: str,
        verifier: str | None,
        plan: Plan,
        context: int,
        vocabulary: int,
        turn: QuestionTurn | None = None,
    ) -> None:
        super().__init__(engine.encode, turn)
        self._engine = engine
        self._task = task
        self._verifier = verifier
        self._plan = plan
        self._context = context
        self.vocabulary = vocabulary

    def ask(self, nodes: Sequence[Node], questions: Sequence[Sequence[int]]) -> Tensor:
        """The model's next-token logits, see `Asker.ask`.

        Raises:
            BudgetInfeasible: a question does not fit; says so if it is longer than planned.
            InputError: a question longer than planned exceeds the model's context.
            ValueError: not token ids for each block, see `wrong_in`.
        """
        if wrong := wrong_in(nodes, questions, self.vocabulary):
            raise ValueError(wrong)
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
        asks = f"the task '{self._task}'"
        if self._verifier is not None:
            asks = f"the verifier '{self._verifier}'"
        return (
            f"a question of {longest:,} tokens by {asks}, "
            f"planned for {self._plan.question_tokens:,}"
        )

    def _remedy(self, longest: int) -> str:
        if self._verifier is not None:
            return f"Let the verifier's most_question_tokens(…) return {longest} or more"
        return f"Let the task declare max_question_tokens = {longest} or more"
