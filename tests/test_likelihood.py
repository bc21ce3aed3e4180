"""Log probabilities of given tokens are the model's own, whatever is computed together."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.models import build

from arbor import Solver
from arbor.engine.likelihood import GivenTokens, TokenScores, score_tokens
from arbor.kernels.attention.torch_cascade import TorchCascade
from arbor.model.runner import ModelRunner

TEXTS = st.lists(st.integers(3, 9), min_size=1, max_size=7)


class Pair:
    """A model under arbor and the same one under transformers."""

    def __init__(self, name: str) -> None:
        self.own = build(name)
        self.runner = ModelRunner(copy.deepcopy(self.own), TorchCascade())

    def expected(self, text: GivenTokens) -> TokenScores:
        """By the model's own forward over one text."""
        with torch.inference_mode():
            logits = self.own(input_ids=torch.tensor([text.read])).logits[0].float()
        lines = logits[len(text.before) - 1 :].log_softmax(-1)
        return TokenScores(
            tuple(line[token].item() for line, token in zip(lines, text.tokens, strict=True)),
            tuple(
                bool(line.argmax() == token) for line, token in zip(lines, text.tokens, strict=True)
            ),
        )

    def found(self, texts: list[GivenTokens], slots: int = 4096) -> list[TokenScores]:
        """By arbor, together."""
        scores: dict[int, TokenScores] = {}
        for batch in score_tokens(self.runner, texts, slots):
            scores |= dict(batch)
        return [scores[place] for place in range(len(texts))]


PAIRS = {name: Pair(name) for name in ("llama", "qwen2_sliding")}


def check(pair: Pair, texts: list[GivenTokens], **settings: Any) -> None:
    for found, text in zip(pair.found(texts, **settings), texts, strict=True):
        expected = pair.expected(text)
        assert found.logprobs == pytest.approx(expected.logprobs, abs=2e-5)
        assert found.greedy == expected.greedy
        assert found.total == pytest.approx(sum(expected.logprobs), abs=1e-4)


@given(pairs=st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=6), slots=st.integers(1, 60))
def test_scores_are_those_of_each_text_alone(
    pairs: list[tuple[list[int], list[int]]], slots: int
) -> None:
    """Few different tokens, so that texts begin alike, contain each other and repeat."""
    texts = [GivenTokens(tuple(before), tuple(tokens)) for before, tokens in pairs]

    check(PAIRS["llama"], texts, slots=slots)


@pytest.mark.parametrize("name", list(PAIRS))
def test_choices_after_one_question_share_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    question = tuple(5 + i * 7 % 60 for i in range(40))
    choices = [(10, 11), (10, 12, 13), (20,), (10,)]
    texts = [GivenTokens(question, choice) for choice in choices]
    rows: list[int] = []
    right = ModelRunner.forward

    def forward(self: ModelRunner, plan: Any, *args: Any, **kwargs: Any) -> Any:
        rows.append(plan.rows)
        return right(self, plan, *args, **kwargs)

    monkeypatch.setattr(ModelRunner, "forward", forward)
    check(PAIRS[name], texts)

    assert rows == [40 + 2]  # the question, 10 once, and 12


def test_scores_are_computed_with_the_kv_of_the_solver() -> None:
    pair = ([5, 6, 7, 8], [9, 10])
    with Solver() as exact, Solver(kv_dtype="int8") as rounded:
        (one,), (other,) = exact.logprobs([pair]), rounded.logprobs([pair])

    assert one is not None and other is not None
    assert one.logprobs != other.logprobs
    assert one.logprobs == pytest.approx(other.logprobs, abs=0.2)
