"""Verifiers against a scripted model: what is asked, how logits become values, what is refused."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.fakes import FakeAsker, FakeTask, Thought, grow, scripted

from arbor.controllers.chain import Chain
from arbor.tasks.base import Problem, Question
from arbor.tree import Node, ThoughtTree
from arbor.verifiers.self_eval import CERTAIN, SelfEval, verdict_tokens

PROBLEM = Problem("0", "fake", "fake")


def blocks(*texts: str) -> list[Node]:
    """Children of one root with these texts."""
    tree = ThoughtTree([0])
    script = scripted({(i,): Thought(text) for i, text in enumerate(texts)})
    return grow(tree, Chain(len(texts)).start(tree, 3).ask(1), script)


def yes_for(text: str, yes: float = 2.0) -> FakeAsker:
    """A model that says yes to blocks with this text, else no; its favourite token is neither."""
    return FakeAsker(
        lambda node, _: {
            " yes": yes if text in node.text else 0.0,
            " no": 0.0 if text in node.text else yes,
            " hm": 9.0,
        }
    )


def test_self_asks_about_all_states_at_once_and_once_about_equal_ones() -> None:
    engine = yes_for("good")

    verdict = SelfEval().verify(FakeTask(), PROBLEM, blocks("a", "good", "a", "good"), engine)

    [(asked, questions)] = engine.calls
    assert [node.text for node in asked] == ["a", "good"]
    assert questions == [" ok?", " ok?"]
    assert verdict.asked == 2
    assert verdict.values[0] == verdict.values[2] < verdict.values[1] == verdict.values[3]


def test_verdicts_of_several_tokens_are_identified_by_their_first() -> None:
    engine = FakeAsker(lambda node, question: {"y": 3.0, "n": 0.0}, pieces=".")
    task = FakeTask(verdicts={"yes": 1.0, "no": 0.0})

    [value] = SelfEval().verify(task, PROBLEM, blocks("a"), engine).values

    assert value == pytest.approx(1 / (1 + math.exp(-3)))


@pytest.mark.parametrize(
    ("verdicts", "start", "worth"),
    [
        ({" yes": 1.0, " no": 0.0}, " ", {"y": 1.0, "n": 0.0}),
        ({"not": 1.0, "now": 0.5, "nor": 0.0}, "no", {"t": 1.0, "w": 0.5, "r": 0.0}),
        ({"yes": 1.0, "no": 0.0}, "", {"y": 1.0, "n": 0.0}),
        ({" a": 1.0, "no": 0.0}, "", {" ": 1.0, "n": 0.0}),
        ({" a": 1.0, " b": 1.0}, "", {" ": 1.0}),  # nothing to tell apart
        ({" a": 1.0}, "", {" ": 1.0}),
    ],
)
def test_verdicts_are_told_apart_after_their_common_start(
    verdicts: dict[str, float], start: str, worth: dict[str, float]
) -> None:
    engine = FakeAsker(lambda node, question: {}, pieces=".")
    question = Question("ok?", verdicts)

    found = verdict_tokens(question, engine)

    assert engine.decode(found.asked) == f"ok?{start}"
    assert {engine.decode([token]): value for token, value in found.worth.items()} == worth


def test_a_tokenizer_that_joins_question_and_verdict_still_has_verdict_tokens() -> None:
    engine = FakeAsker(lambda node, question: {}, pieces=r"\? yes|\? no|\s?[a-z]+|.")
    question = Question("ok?", {" yes": 1.0, " no": 0.0})

    worth = verdict_tokens(question, engine).worth

    assert worth == {engine.ids[" yes"]: 1.0, engine.ids[" no"]: 0.0}


@given(st.lists(st.tuples(st.floats(-80, 80, width=32), st.floats(0, 1)), min_size=1, max_size=6))
def test_a_value_is_the_mean_worth_under_the_softmax_of_the_verdicts(
    verdicts: list[tuple[float, float]],
) -> None:
    words = {f" w{i}": worth for i, (_, worth) in enumerate(verdicts)}
    logits = {f" w{i}": logit for i, (logit, _) in enumerate(verdicts)}
    engine = FakeAsker(lambda node, question: logits)

    [value] = SelfEval().verify(FakeTask(verdicts=words), PROBLEM, blocks("a"), engine).values

    weights = torch.softmax(torch.tensor(list(logits.values()), dtype=torch.float64), 0).tolist()
    mean = sum(w * worth for w, worth in zip(weights, words.values(), strict=True))
    assert value == pytest.approx(min(mean, CERTAIN), abs=1e-9)
    assert 0.0 <= value <= CERTAIN
