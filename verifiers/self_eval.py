"""The verifier that asks the model about its own thoughts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from arbor.errors import UsageError
from arbor.tasks.base import Problem, Question, Task
from arbor.tree import Node

from .base import Asker, Encoder, Inquiry, Verdict

if TYPE_CHECKING:
    import torch

# The largest value of a model's judgement: 1 is a proof, which only `Exact` gives.
CERTAIN = 1 - 2**-20


@dataclass(frozen=True)
class SelfEval:
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

    @property
    def needs_model(self) -> bool:
        return True

    def verify(
        self, task: Task, problem: Problem, candidates: Sequence[Node], engine: Asker
    ) -> Verdict:
        """Values of the candidates, by one `engine.ask`; see `inquire`."""
        inquiry = self.inquire(task, problem, candidates, engine)
        if not inquiry.nodes:
            return Verdict((), 0)
        return inquiry.verdict(engine.ask(inquiry.nodes, inquiry.questions))

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
        asked = [
            verdict_tokens(question, self._encode(question, encoder), encoder)
            for question in questions
        ]
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

        encoded = [each.asked for each in asked]
        return Inquiry(nodes, encoded, verdict, rows, [list(worth) for worth in worths])

    def check(self, task: Task, problem: Problem, encoder: Encoder) -> None:
        """Refuse verdicts that this model cannot tell apart, by the question at no thoughts.

        Raises:
            UsageError: the question is empty, or two verdicts of different worth begin with the
                same token.
        """
        question = task.question(problem, ())
        verdict_tokens(question, self._encode(question, encoder), encoder)

    def _encode(self, question: Question, engine: Encoder) -> list[int]:
        tokens = engine.encode(question.text)
        if not tokens:
            raise UsageError("question-empty", "the task's question to the model is empty.")
        return tokens


def expected_worth(logits: torch.Tensor, worths: Sequence[float]) -> float:
    """The mean worth of verdicts under the softmax of their logits, in [0, `CERTAIN`].

    Args:
        logits: [n] float32 on the CPU, one per verdict.
        worths: n worths.

    Raises:
        ModelError: the logits are not finite.
    """
    import torch

    from arbor.engine.sampling import not_finite

    probabilities = torch.softmax(logits.double(), dim=0)
    value = float(probabilities @ torch.tensor(worths, dtype=torch.float64))
    if math.isnan(value):
        raise not_finite()
    return min(max(value, 0.0), CERTAIN)


@dataclass(frozen=True)
class VerdictTokens:
    """A question as it is asked, and what its verdicts are identified by.

    Attributes:
        asked: the question's tokens, and those that all of its verdicts begin with
            (`common_start`).
        worth: the first token of each verdict after these -> the verdict's worth.
    """

    asked: list[int]
    worth: dict[int, float]


def verdict_tokens(question: Question, asked: Sequence[int], engine: Encoder) -> VerdictTokens:
    """What the model is asked, and the tokens that it answers with.

    Args:
        question: text and verdicts.
        asked: the question's tokens.

    Raises:
        UsageError: a verdict is empty, or two of different worth begin with the same token.
    """
    tails = _tails(question, asked, engine)
    start = _start_of(question, tails)
    worth: dict[int, float] = {}
    first_with: dict[int, str] = {}
    for (verdict, value), tail in zip(question.values.items(), tails, strict=True):
        if not tail:
            raise UsageError("verdict-empty", f"the verdict '{verdict}' has no token.")
        token = tail[len(start)]
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
    return VerdictTokens([*asked, *start], worth)


def common_start(question: Question, asked: Sequence[int], engine: Encoder) -> list[int]:
    """The tokens that all verdicts of a question begin with, such as a space that the tokenizer
    separates from digits; they are asked with the question.

    At least one token of each verdict is left. Without verdicts of different worth there is nothing
    to tell apart, and none are asked.

    Args:
        question: text and verdicts.
        asked: the question's tokens.
    """
    return _start_of(question, _tails(question, asked, engine))


def _start_of(question: Question, tails: Sequence[Sequence[int]]) -> list[int]:
    """`common_start`, of verdicts with these tokens."""
    if len(set(question.values.values())) < 2:
        return []
    most = max(0, min(map(len, tails)) - 1)
    start: list[int] = []
    for tokens in zip(*(tail[:most] for tail in tails), strict=True):
        if len(set(tokens)) > 1:
            break
        start.append(tokens[0])
    return start


def _tails(question: Question, asked: Sequence[int], engine: Encoder) -> list[list[int]]:
    """The tokens of each verdict, as written after the question."""
    known, tails = list(asked), []
    for verdict in question.values:
        whole = list(engine.encode(question.text + verdict))
        # A tokenizer may join the verdict to the question's last token; then encode it by itself.
        joined = whole[: len(known)] != known
        tails.append(list(engine.encode(verdict)) if joined else whole[len(known) :])
    return tails
