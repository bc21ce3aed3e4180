"""The vote between states against shares computed by hand."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.fakes import FakeAsker, FakeTask
from support.models import ARCHITECTURES, config_of
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Split
from tokenizers.pre_tokenizers import Sequence as InTurn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from arbor import Solver
from arbor.errors import UsageError
from arbor.tree import Node, NodeState, ThoughtTree
from arbor.verifiers.base import Inquires, Verifier
from arbor.verifiers.self_eval import CERTAIN
from arbor.verifiers.vote import Vote

pytestmark = pytest.mark.usefixtures("loaded_once")

TASK = FakeTask()
PROBLEM = TASK.parse("fake")


def states(*texts: str) -> list[Node]:
    """Children of a root, one for each text."""
    tree = ThoughtTree([0])
    found = []
    for text in texts:
        node = tree.fork(tree.root)
        node.text, node.state = text, NodeState.CLOSED
        found.append(node)
    return found


def asker(*shares: Sequence[float]) -> FakeAsker:
    """A model with these shares of the vote, one row for each vote in order."""
    rows = iter(shares)

    def judge(node: Node, question: str) -> dict[str, float]:
        assert node.parent is None, "votes follow the prompt"
        return {f" {number}": math.log(share) for number, share in enumerate(next(rows), 1)}

    return FakeAsker(judge)


def test_values_are_the_shares_of_the_vote() -> None:
    model = asker([0.5, 0.2, 0.3])

    verdict = Vote().verify(TASK, PROBLEM, states("a\n", "b\n", "c\n"), model)

    assert verdict.values == pytest.approx((0.5, 0.2, 0.3))
    assert verdict.asked == 1
    [(_, [question])] = model.calls
    assert question == (
        "\nSome choices to go on:\nChoice 1:\na\nChoice 2:\nb\nChoice 3:\nc\nThe best choice is"
    )


def test_equal_states_are_one_choice() -> None:
    verdict = Vote().verify(TASK, PROBLEM, states("a", "b", "a"), asker([0.25, 0.75]))

    assert verdict.values == pytest.approx((0.25, 0.75, 0.25))


def test_many_states_are_divided_into_votes_of_nearly_equal_size() -> None:
    model = asker([0.5, 0.5], [0.9, 0.1], [0.2, 0.2, 0.6])

    verdict = Vote(choices=3).verify(TASK, PROBLEM, states(*"abcdefg"), model)

    assert verdict.asked == 3
    assert verdict.values == pytest.approx((0.5, 0.5, 0.9, 0.1, 0.2, 0.2, 0.6))
    [(_, questions)] = model.calls  # all votes at once
    assert [question.count("Choice") for question in questions] == [2, 2, 3]


def test_a_state_alone_needs_no_vote_and_proves_nothing() -> None:
    model = asker()

    alone = Vote().verify(TASK, PROBLEM, states("a", "a"), model)

    assert (alone.values, alone.asked) == ((CERTAIN, CERTAIN), 0)
    assert Vote().verify(TASK, PROBLEM, [], model).values == ()
    assert not model.calls


def test_a_unanimous_vote_is_no_proof() -> None:
    verdict = Vote().verify(TASK, PROBLEM, states("a", "b"), asker([1.0, 1e-30]))

    assert verdict.values[0] == CERTAIN < 1


def test_numbers_with_the_same_first_token_are_refused() -> None:
    class Blind(FakeAsker):
        """Has one token for all digits."""

        def encode(self, text: str) -> list[int]:
            return super().encode(re.sub(r"\d", "0", text))

    with pytest.raises(UsageError) as caught:
        Vote().check(TASK, PROBLEM, Blind(lambda node, question: {}))
    assert caught.value.code == "verdict-ambiguous"


def test_a_space_that_the_tokenizer_separates_from_digits_is_asked_with_the_question() -> None:
    shares = {"1": math.log(0.5), "2": math.log(0.2), "3": math.log(0.3)}
    model = FakeAsker(lambda node, question: shares, pieces=r"\d|\s?[^\W\d]+|.")

    verdict = Vote().verify(TASK, PROBLEM, states("a", "b", "c"), model)

    assert verdict.values == pytest.approx((0.5, 0.2, 0.3))
    [(_, [question])] = model.calls
    assert question.endswith("\nThe best choice is ")


NUMBERED = {"name": "reasoning", "yes": " 1", "no": " 2", "shots": 0}
# how these cut a text before their merges: a space joins letters, and not digits
QWEN_2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA_3 = QWEN_2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def of_bytes(pattern: str) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes that cuts texts so first, and has a token for a space and a digit."""
    vocabulary = {sign: place for place, sign in enumerate(sorted(ByteLevel.alphabet()))}
    merges = [("\u0120", digit) for digit in "123456789"]
    for space, digit in merges:
        vocabulary[space + digit] = len(vocabulary)
    rules = Tokenizer(BPE(vocabulary, merges))
    joined = ByteLevel(add_prefix_space=False, use_regex=False)
    rules.pre_tokenizer = InTurn([Split(Regex(pattern), "isolated"), joined])
    rules.decoder = ByteLevelDecoder()
    return PreTrainedTokenizerFast(tokenizer_object=rules)


def sized(name: str, tokenizer: Any) -> Any:
    """A random model of an architecture with a vocabulary for the tokenizer."""
    model_type, settings = ARCHITECTURES[name]
    config = config_of(model_type, **settings | {"vocab_size": len(tokenizer)})
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(
    ("pattern", "separate"), [(QWEN_2, True), (LLAMA_3, True), (GPT_2, False)], ids="qlg"
)
@pytest.mark.parametrize("verifier", ["vote", "self"])
def test_models_whose_digits_are_tokens_of_their_own_vote(
    pattern: str, separate: bool, verifier: str
) -> None:
    tokenizer = of_bytes(pattern)
    assert (tokenizer.tokenize("is 1") == ["i", "s", "\u0120", "1"]) is separate
    settings: dict[str, Any] = {
        "task": NUMBERED,
        "controller": {"name": "tot", "beam": 2, "width": 3},
        "verifier": verifier,
        "max_depth": 1,
        "step_tokens": 4,
        "tokenizer": tokenizer,
    }
    with Solver(sized("llama", tokenizer), **settings) as solver:
        smallest = solver.plan("1+1?").enough_tokens
        metrics = solver.solve("1+1?", budget=f"{smallest}tok").metrics

    assert metrics.asked > 0
    assert metrics.peak_tokens <= smallest


@pytest.mark.parametrize(("pattern", "more"), [(QWEN_2, 1), (GPT_2, 0)], ids="qg")
def test_the_plan_counts_the_space_before_digits(pattern: str, more: int) -> None:
    tokenizer = of_bytes(pattern)
    with Solver(
        sized("llama", tokenizer),
        task=NUMBERED,
        tokenizer=tokenizer,
        controller="chain",
        max_depth=1,
        step_tokens=4,
    ) as solver:
        question = solver.task.question(solver.task.parse("1+1?"), ())
        asked = tokenizer.encode(question.text, add_special_tokens=False)
        assert solver.plan("1+1?").question_tokens == len(asked) + more


@pytest.mark.parametrize("pieces", [r"\s?\w+|.", r"\d|\s?[^\W\d]+|."])
def test_no_question_is_longer_than_planned(pieces: str) -> None:
    limits, model = TASK.boundary, FakeAsker(lambda node, question: {}, pieces=pieces)
    longest = Vote(choices=3).most_question_tokens(TASK, PROBLEM, limits, model)
    words = " a" * (limits.max_depth * limits.max_tokens)

    inquiry = Vote(choices=3).inquire(
        TASK, PROBLEM, states(words, f"{words}\n", f"b{words[2:]}"), model
    )

    [tokens] = inquiry.questions
    assert 0.9 * longest < len(tokens) <= longest


def test_it_follows_the_protocols() -> None:
    assert isinstance(Vote(), Verifier)
    assert isinstance(Vote(), Inquires)


@pytest.mark.parametrize("choices", [1, 10])
def test_the_number_of_choices_is_a_digit(choices: int) -> None:
    with pytest.raises(UsageError, match=f"choices={choices}"):
        Vote(choices)


def test_a_search_by_votes_is_the_same_in_the_smallest_budget() -> None:
    settings: dict[str, Any] = {
        "controller": {"name": "tot", "beam": 2, "width": 3},
        "verifier": {"name": "vote", "choices": 3},
        "max_depth": 2,
    }
    with Solver(**settings) as solver:
        smallest = solver.plan("4 5 6 10").enough_tokens
        whole = solver.solve("4 5 6 10")
        small = solver.solve("4 5 6 10", budget=f"{smallest}tok")

    values = [(block.text, block.value) for block in whole.replay().blocks.values()]
    again = [(block.text, block.value) for block in small.replay().blocks.values()]
    assert [text for text, _ in values] == [text for text, _ in again]
    assert [value for _, value in values] == pytest.approx([value for _, value in again], abs=1e-4)
    assert whole.metrics.asked > 0
    assert small.metrics.peak_tokens <= smallest < whole.metrics.full_tokens
