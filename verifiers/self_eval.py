"""The verifier that asks the model about its own thoughts."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from arbor.errors import UsageError, logits_not_finite
from arbor.tasks.base import Problem, Question, Task
from arbor.tree import Node

from .base import Asker, Encoder, Inquiry, TakesTurns, Verdict

if TYPE_CHECKING:
    import torch

# The largest value of a model's judgement: 1 is a proof, which only `Exact` gives.
CERTAIN = 1 - 2**-20


class AsksOnce(ABC):
    """Base of the verifiers that ask all of their questions to the search's model at once."""

    needs_model = True

    def verify(
        self, task: Task, problem: Problem, candidates: Sequence[Node], engine: Asker
    ) -> Verdict:
        """Values of the candidates, by one `engine.ask`; see `inquire`."""
        from arbor.engine.operation import NO_LOGITS

        inquiry = self.inquire(task, problem, candidates, engine)
        nodes, questions = inquiry.nodes, inquiry.questions
        return inquiry.verdict(engine.ask(nodes, questions) if nodes else NO_LOGITS)

    @abstractmethod
    def inquire(
        self, task: Task, problem: Problem, candidates: Sequence[Node], encoder: Encoder
    ) -> Inquiry:
        """See `Inquires`."""


@dataclass(frozen=True)
class SelfEval(AsksOnce):
    """Asks the model about every state and reads the probabilities of its next token as a value.

        value = sum_w p(w) v(w),   p = softmax of the logits of the verdicts w only, temperature 1

    The question, the verdicts w and their worths v(w) are the task's (`Task.question`): P(yes) for
    yes and no, or other words, such as Tree of Thoughts' sure, likely and impossible (Yao et al.,
    arXiv 2305.10601, section 3, "value each state independently"). All states are asked in one
    batch; states with the same path and question are asked once.

    A verdict is identified by its first token after the question; tokens that all verdicts begin
    with are a part of the question. Verdicts of different worth need different first tokens then; a
    token that several verdicts of one worth begin with counts once.

    Differs from the paper: one forward pass gives the expectation that the paper estimates from
    n_evaluate sampled evaluations, with no scratch text before the verdict; worths lie in [0, 1]
    (released: sure 20, likely 1, impossible 0.001, summed). A value never reaches 1 (`CERTAIN`),
    however sure the model is.
    """

    def inquire(
        self, task: Task, problem: Problem, candidates: Sequence[Node], encoder: Encoder
    ) -> Inquiry:
        """The questions about the candidates, one for each state.

        Raises:
            UsageError: the question is empty, or two verdicts of different worth begin with the
                same token.
            ModelError: by the verdict: the model's logits are not finite.
        """
        place: dict[tuple[tuple[str, ...], str], int] = {}
        rows: list[int] = []  # per candidate, the index of its state
        nodes: list[Node] = []
        questions: list[Question] = []
        for node in candidates:
            question = task.question(problem, node.thoughts)
            state = (tuple(node.thoughts), question.text)
            if state not in place:
                place[state] = len(nodes)
                nodes.append(node)
                questions.append(question)
            rows.append(place[state])
        asked = [verdict_tokens(question, encoder) for question in questions]
        worths = [each.worth for each in asked]
        columns = sorted({token for worth in worths for token in worth})
        column_of = {token: column for column, token in enumerate(columns)}

        def verdict(logits: torch.Tensor) -> Verdict:
            known = logits[:, columns].cpu()  # the only copy from a GPU
            values = [
                expected_worth(row[[column_of[token] for token in worth]], list(worth.values()))
                for row, worth in zip(known, worths, strict=True)
            ]
            return Verdict(tuple(values[row] for row in rows), len(nodes))

        encoded = [each.after(node) for each, node in zip(asked, nodes, strict=True)]
        return Inquiry(nodes, encoded, verdict, rows, [list(worth) for worth in worths])

    def check(self, task: Task, problem: Problem, encoder: Encoder) -> None:
        """Refuse verdicts that this model cannot tell apart, by the question at no thoughts.

        Raises:
            UsageError: the question is empty, or two verdicts of different worth begin with the
                same token.
        """
        verdict_tokens(task.question(problem, ()), encoder)


def expected_worth(logits: torch.Tensor, worths: Sequence[float]) -> float:
    """The mean worth of verdicts under the softmax of their logits, in [0, `CERTAIN`].

    Args:
        logits: [n] float32 on the CPU, one per verdict.
        worths: n worths.

    Raises:
        ModelError: the logits are not finite.
    """
    import torch

    probabilities = torch.softmax(logits.double(), dim=0)
    value = float(probabilities @ torch.tensor(worths, dtype=torch.float64))
    if math.isnan(value):
        raise logits_not_finite()
    return min(max(value, 0.0), CERTAIN)


@dataclass(frozen=True)
class VerdictTokens:
    """A question as it is asked, and what its verdicts are identified by.

    Attributes:
        asked: the question's tokens, and those that all of its verdicts begin with.
        worth: the first token of each verdict after these -> the verdict's worth.
        ends_turn: the first token ends the assistant's turn.
    """

    asked: list[int]
    worth: dict[int, float]
    ends_turn: bool

    def after(self, node: Node) -> list[int]:
        """The tokens asked after a path, which may have ended the assistant's turn itself."""
        ended = self.ends_turn and node.tokens[-1:] == self.asked[:1]
        return self.asked[ended:]


def verdict_tokens(question: Question, encoder: Encoder) -> VerdictTokens:
    """What the model is asked, and the tokens that it answers with.

    Raises:
        UsageError: the question or a verdict is empty, or two verdicts of different worth begin
            with the same token.
    """
    phrased = _phrased(question, encoder)
    if not phrased.asked:
        raise UsageError("question-empty", "the task's question to the model is empty.")
    start = phrased.start()
    worth: dict[int, float] = {}
    first_with: dict[int, str] = {}
    for verdict, tokens in phrased.verdicts.items():
        value = phrased.values[verdict]
        if not tokens:
            raise UsageError("verdict-empty", f"the verdict '{verdict}' has no token.")
        token = tokens[len(start)]
        if token in worth and worth[token] != value:
            raise UsageError(
                "verdict-ambiguous",
                f"the verdicts '{first_with[token]}' and '{verdict}' begin with the same token of this model.",
                "Use verdicts that differ from their first token on, as in --task "
                "reasoning,yes=right,no=wrong, or a verifier that asks no model.",
                verdicts=[first_with[token], verdict],
            )
        worth[token] = value
        first_with.setdefault(token, verdict)
    if not worth:
        raise UsageError("verdict-empty", "the task's question names no verdict.")
    return VerdictTokens([*phrased.asked, *start], worth, phrased.ends_turn)


def asked_tokens(question: Question, encoder: Encoder) -> int:
    """Tokens of a question, with those that all of its verdicts begin with."""
    phrased = _phrased(question, encoder)
    return len(phrased.asked) + len(phrased.start())


@dataclass(frozen=True)
class _Phrased:
    """A question in the words of one model.

    Attributes:
        asked: its tokens.
        values: verdict as this model writes it -> its worth.
        verdicts: verdict -> its tokens after the question.
        ends_turn: the first token ends the assistant's turn.
    """

    asked: list[int]
    values: Mapping[str, float]
    verdicts: Mapping[str, list[int]]
    ends_turn: bool

    def start(self) -> list[int]:
        """The tokens that all verdicts begin with, such as a space that the tokenizer separates
        from digits; they are asked with the question.

        At least one token of each verdict is left. Without verdicts of different worth there is
        nothing to tell apart, and none are asked.
        """
        if len(set(self.values.values())) < 2:
            return []
        most = max(0, min(map(len, self.verdicts.values())) - 1)
        start: list[int] = []
        for tokens in zip(*(each[:most] for each in self.verdicts.values()), strict=True):
            if len(set(tokens)) > 1:
                break
            start.append(tokens[0])
        return start


def _phrased(question: Question, encoder: Encoder) -> _Phrased:
    """A question in a turn of its own where the model takes turns, else after the path's text."""
    spoken = question.turn
    if spoken is not None and isinstance(encoder, TakesTurns):
        turn = encoder.turn(spoken.text)
        if turn is not None:
            values = {verdict.strip(): value for verdict, value in spoken.values.items()}
            answered = {each: encoder.turn(spoken.text, each) or [] for each in values}
            return _Phrased(turn, values, _tails(turn, answered, encoder), True)
    asked = list(encoder.encode(question.text))
    wholes = {each: list(encoder.encode(question.text + each)) for each in question.values}
    return _Phrased(asked, question.values, _tails(asked, wholes, encoder), False)


def _tails(
    asked: Sequence[int], wholes: Mapping[str, Sequence[int]], encoder: Encoder
) -> dict[str, list[int]]:
    """The tokens of each verdict after a question.

    Args:
        asked: the question's tokens.
        wholes: verdict -> tokens of the question with it.
    """
    tails = {}
    for verdict, whole in wholes.items():
        # A tokenizer may join the verdict to the question's last token; then encode it by itself.
        joined = list(whole[: len(asked)]) != list(asked)
        tails[verdict] = list(encoder.encode(verdict)) if joined else list(whole[len(asked) :])
    return tails
