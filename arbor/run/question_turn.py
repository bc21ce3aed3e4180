"""QuestionTurn: a question in a turn of its own, as the model's chat template writes it."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from arbor.model.control_tokens import control_tokens, encode_marked
from arbor.support.texts import one_line
from arbor.tasks.base import Converses, GivesTokens, Problem, Task
from arbor.tasks.worded import THINKING

logger = logging.getLogger(__name__)

# texts of a conversation whose places are looked up in what the template writes of it
_PROBLEM, _REASONING, _QUESTION = "What is asked?", "What was reasoned.", "What is judged?"


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
    """

    tokenizer: Any
    so_far: str
    before: str
    after: str

    def encode(self, message: str, answer: str = "") -> list[int]:
        """Token ids of the turn, after a path that is not at its end token yet.

        Args:
            message: of the user, outer spaces apart; control tokens named in it are text, and what
                a model wrote may name some.
            answer: the beginning of the assistant's answer.
        """
        head = self._ids(self.so_far)
        words = control_tokens(self.tokenizer).mark(message.strip())
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
