"""The vote between states against shares computed by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from support.fakes import FakeAsker, FakeTask

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
    model = FakeAsker(lambda node, question: {}, pieces=".")  # a space is a token

    with pytest.raises(UsageError) as caught:
        Vote().check(TASK, PROBLEM, model)
    assert caught.value.code == "verdict-ambiguous"


def test_no_question_is_longer_than_planned() -> None:
    limits, model = TASK.boundary, asker([0.5, 0.5, 0.5])
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
        smallest = solver.plan("4 5 6 10").smallest_tokens
        whole = solver.solve("4 5 6 10")
        small = solver.solve("4 5 6 10", budget=f"{smallest}tok")

    values = [(block.text, block.value) for block in whole.replay().blocks.values()]
    again = [(block.text, block.value) for block in small.replay().blocks.values()]
    assert [text for text, _ in values] == [text for text, _ in again]
    assert [value for _, value in values] == pytest.approx([value for _, value in again], abs=1e-4)
    assert whole.metrics.asked > 0
    assert small.metrics.peak_tokens <= smallest < whole.metrics.full_tokens
