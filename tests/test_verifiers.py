"""Verifiers against a scripted model: what is asked, how logits become values, what is refused."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.fakes import FakeAsker, FakeTask, Thought, grow, scripted
from support.far_device import FarTensor
from torch import Tensor

from arbor.controllers.chain import Chain
from arbor.errors import ModelError, UsageError
from arbor.tasks.base import Problem, Question
from arbor.tasks.reasoning import Reasoning
from arbor.tree import Node, ThoughtTree
from arbor.verifiers.base import Verdict, Verifier
from arbor.verifiers.exact import Exact
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


def test_both_are_verifiers_and_say_whether_they_need_the_model() -> None:
    assert isinstance(Exact(), Verifier) and not Exact().needs_model
    assert isinstance(SelfEval(), Verifier) and SelfEval().needs_model


def test_exact_gives_the_tasks_values_and_asks_no_model() -> None:
    engine = FakeAsker(lambda node, question: {})

    verdict = Exact().verify(FakeTask(), PROBLEM, blocks("v3", "v9!", "none"), engine)

    assert verdict == Verdict((3 / 9, 1.0, 0.0), 0)
    assert engine.calls == []


def test_exact_refuses_a_task_without_an_exact_checker() -> None:
    with pytest.raises(UsageError, match="--verifier self"):
        Exact().verify(Reasoning(), PROBLEM, blocks("a"), FakeAsker(lambda node, question: {}))


def test_self_reads_the_probability_of_yes_among_the_verdicts_only() -> None:
    verdict = SelfEval().verify(FakeTask(), PROBLEM, blocks("good", "bad"), yes_for("good"))

    yes = 1 / (1 + math.exp(-2.0))
    assert verdict.values == pytest.approx((yes, 1 - yes))
    assert verdict.asked == 2


def test_self_asks_about_all_states_at_once_and_once_about_equal_ones() -> None:
    engine = yes_for("good")

    verdict = SelfEval().verify(FakeTask(), PROBLEM, blocks("a", "good", "a", "good"), engine)

    [(asked, questions)] = engine.calls
    assert [node.text for node in asked] == ["a", "good"]
    assert questions == [" ok?", " ok?"]
    assert verdict.asked == 2
    assert verdict.values[0] == verdict.values[2] < verdict.values[1] == verdict.values[3]


def test_equal_last_thoughts_on_different_paths_are_different_states() -> None:
    first, second = blocks("a", "b")
    tree_nodes = [first, second]
    for node in tree_nodes:
        child = Node(id=9 + node.id, parent=node, index=0, start=1, depth=2, text="same")
        node.children.append(child)
    engine = yes_for("good")

    verdict = SelfEval().verify(
        FakeTask(), PROBLEM, [node.children[0] for node in tree_nodes], engine
    )

    assert verdict.asked == 2


def test_self_asks_nothing_about_nobody() -> None:
    engine = yes_for("good")

    assert SelfEval().verify(FakeTask(), PROBLEM, [], engine) == Verdict((), 0)
    assert engine.calls == []


def test_a_question_may_have_the_words_of_tree_of_thoughts() -> None:
    task = FakeTask(verdicts={"sure": 1.0, "likely": 0.05, "impossible": 0.0})
    engine = FakeAsker(
        lambda node, question: {
            "sure": math.log(3),
            "likely": math.log(5),
            "impossible": math.log(2),
        }
    )

    [value] = SelfEval().verify(task, PROBLEM, blocks("a"), engine).values

    assert value == pytest.approx(0.3 * 1.0 + 0.5 * 0.05)


def test_a_model_is_never_as_certain_as_a_proof() -> None:
    [value] = SelfEval().verify(FakeTask(), PROBLEM, blocks("good"), yes_for("good", 500.0)).values

    assert value == CERTAIN < 1.0


def test_verdicts_whose_logits_are_not_finite_are_refused() -> None:
    with pytest.raises(ModelError, match="logits-not-finite"):
        SelfEval().verify(FakeTask(), PROBLEM, blocks("a", "b"), yes_for("a", math.nan))


def test_logits_on_another_device_come_to_the_cpu_once() -> None:
    class Far(FakeAsker):
        def ask(self, nodes: Sequence[Node], questions: Sequence[Sequence[int]]) -> Tensor:
            return FarTensor.of(super().ask(nodes, questions))

    near = yes_for("good")
    candidates = blocks("good", "bad", "worse")
    expected = SelfEval().verify(FakeTask(), PROBLEM, candidates, near)

    verdict = SelfEval().verify(FakeTask(), PROBLEM, candidates, Far(near.judge))

    assert verdict == expected
    assert FarTensor.transfers == 1


def test_each_state_is_read_by_the_verdicts_of_its_own_question() -> None:
    class Mixed(FakeTask):
        def question(self, problem: Problem, thoughts: Sequence[str]) -> Question:
            if "good" in thoughts[-1]:
                return Question(" sure?", {" sure": 1.0, " hm": 0.5})
            return super().question(problem, thoughts)

    engine = FakeAsker(lambda node, question: {" yes": 1.0, " no": 0.0, " sure": 0.0, " hm": 2.0})

    values = SelfEval().verify(Mixed(), PROBLEM, blocks("bad", "good"), engine).values

    yes, sure = 1 / (1 + math.exp(-1.0)), 1 / (1 + math.exp(2.0))
    assert values == pytest.approx((yes, sure + 0.5 * (1 - sure)))


def test_verdicts_of_several_tokens_are_identified_by_their_first() -> None:
    engine = FakeAsker(lambda node, question: {"y": 3.0, "n": 0.0}, pieces=".")
    task = FakeTask(verdicts={"yes": 1.0, "no": 0.0})

    [value] = SelfEval().verify(task, PROBLEM, blocks("a"), engine).values

    assert value == pytest.approx(1 / (1 + math.exp(-3)))


def test_what_all_verdicts_begin_with_is_asked_with_the_question() -> None:
    engine = FakeAsker(
        lambda node, question: {"y": 3.0, "n": 0.0}, pieces="."
    )  # a space is a token

    [value] = SelfEval().verify(FakeTask(), PROBLEM, blocks("a"), engine).values

    assert value == pytest.approx(1 / (1 + math.exp(-3)))
    assert [questions for _, questions in engine.calls] == [[" ok? "]]


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


@pytest.mark.parametrize("verdicts", [{" no": 0.0, " not": 1.0}, {"a": 0.0, "ab": 0.5, "b": 1.0}])
def test_verdicts_that_begin_alike_are_refused_by_name(verdicts: dict[str, float]) -> None:
    engine = FakeAsker(lambda node, question: {}, pieces=".")
    first, second = list(verdicts)[:2]

    with pytest.raises(UsageError, match=f"'{first}' and '{second}'") as caught:
        SelfEval().verify(FakeTask(verdicts=verdicts), PROBLEM, blocks("a"), engine)

    assert caught.value.code == "verdict-ambiguous"
    assert engine.calls == []


def test_verdicts_of_one_worth_may_begin_alike_and_count_once() -> None:
    engine = FakeAsker(lambda node, question: {"y": 1.0, "n": 1.0}, pieces=".")
    task = FakeTask(verdicts={"yes": 1.0, "yeah": 1.0, "no": 0.0})

    assert SelfEval().verify(task, PROBLEM, blocks("a"), engine).values == pytest.approx((0.5,))


def test_a_verdict_is_the_token_the_tokenizer_writes_after_the_question() -> None:
    class Prefixed(FakeAsker):
        """Writes a mark before every text, as SentencePiece tokenizers do."""

        def encode(self, text: str) -> list[int]:
            return super().encode(f"_{text}")

    engine = Prefixed(lambda node, question: {}, pieces=r"_|\s?[a-z]+|.")
    question = Question("ok?", {" yes": 1.0, " no": 0.0})

    worth = verdict_tokens(question, engine).worth

    assert worth == {engine.ids[" yes"]: 1.0, engine.ids[" no"]: 0.0}


def test_a_tokenizer_that_joins_question_and_verdict_still_has_verdict_tokens() -> None:
    engine = FakeAsker(lambda node, question: {}, pieces=r"\? yes|\? no|\s?[a-z]+|.")
    question = Question("ok?", {" yes": 1.0, " no": 0.0})

    worth = verdict_tokens(question, engine).worth

    assert worth == {engine.ids[" yes"]: 1.0, engine.ids[" no"]: 0.0}


@pytest.mark.parametrize(
    ("task", "code"),
    [
        (FakeTask(ask_about=""), "question-empty"),
        (FakeTask(verdicts={}), "verdict-empty"),
        (FakeTask(verdicts={"": 1.0, " no": 0.0}), "verdict-empty"),
    ],
)
def test_a_question_that_asks_nothing_is_refused(task: FakeTask, code: str) -> None:
    with pytest.raises(UsageError) as caught:
        SelfEval().verify(task, PROBLEM, blocks("a"), yes_for("good"))

    assert caught.value.code == code


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
