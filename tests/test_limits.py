"""Limits that end a search early: which one, when, and what is left."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.slow_cases import only

from arbor import Solver
from arbor.aggregate.argmax import Argmax
from arbor.aggregate.base import AnswerVotes
from arbor.aggregate.confidence import lead_probability
from arbor.aggregate.majority import Majority
from arbor.errors import UsageError
from arbor.events import Boundary, Ended, Event, Terminal, Verified
from arbor.run.answers import confidence
from arbor.run.config import config_text
from arbor.run.limits import Limits
from arbor.run.request import Request
from arbor.run.solution import Solution
from arbor.trace import read_trace

pytestmark = pytest.mark.usefixtures("loaded_once")

PUZZLE = "4 5 6 10"
SEVERAL = "best-of-n,samples=12"  # paths that end at different times, most of them wrong


def solved(
    events: list[Event] | None = None,
    controller: str = SEVERAL,
    limits: Any = None,
    problem: str = PUZZLE,
    **settings: Any,
) -> Solution:
    """One search, with its events."""
    heard = [] if events is None else events
    settings = {"verifier": "exact", "seed": 1} | settings
    with Solver(controller=controller, listeners=[heard.append], **settings) as solver:
        return solver.solve(problem, **(limits or {}))


def votes(*counts: int, scores: tuple[float, ...] = ()) -> list[AnswerVotes]:
    """Ranked answers with these votes."""
    given = scores or (0.5,) * len(counts)
    return [
        AnswerVotes(str(place), count, score, (place,))
        for place, (count, score) in enumerate(zip(counts, given, strict=True))
    ]


# The confidence of an answer


def test_the_lead_of_a_vote_is_the_tail_of_its_posterior() -> None:
    # Beta(a + 1, b + 1) above one half, by hand
    assert lead_probability(votes(1)) == 3 / 4
    assert lead_probability(votes(4)) == 31 / 32
    assert lead_probability(votes(1, 1)) == 1 / 2
    assert lead_probability(votes(2, 1)) == 11 / 16
    assert lead_probability(votes(1, 3)) == 3 / 16, "a leader by score may have fewer votes"
    assert lead_probability(votes(3, 1, 2)) == lead_probability(votes(3, 2))


def test_the_confidence_is_the_score_unless_the_aggregate_has_its_own() -> None:
    ranked = votes(4, 1, scores=(0.3, 0.9))

    assert confidence(Argmax(), ranked) == 0.3
    assert confidence(Majority(), ranked) == lead_probability(ranked)


@dataclass(frozen=True)
class Doubtful:
    """An aggregate whose confidence is not a number."""

    answer: Any = "high"

    def rank(self, paths: Any) -> list[AnswerVotes]:
        return []

    def confidence(self, ranked: Any) -> Any:
        return self.answer


@pytest.mark.parametrize("answer", ["high", None, float("nan")])
def test_a_plug_ins_confidence_is_checked(answer: Any) -> None:
    with pytest.raises(UsageError, match="a finite number"):
        confidence(Doubtful(answer), votes(1))


# Checks


@pytest.mark.parametrize("wrong", ["path", "", 1, True])
def test_first_is_one_of_two_words(wrong: Any) -> None:
    with pytest.raises(UsageError, match="answer, verified") as caught:
        Request(first=wrong)
    assert caught.value.code == "setting-choice"


@pytest.mark.parametrize("wrong", [0, -0.1, 1.01, "0.5", True, float("nan"), 10**400])
def test_a_confidence_is_above_zero_and_at_most_one(wrong: Any) -> None:
    with pytest.raises(UsageError, match="at most 1") as caught:
        Request(confidence=wrong)
    assert caught.value.code == "limit"


def test_what_a_value_ends() -> None:
    assert Limits(3, first="answer").reached_by(0.0)
    assert Limits(3, first="verified").reached_by(0.5)
    assert not Limits(3, first="verified").reached_by(0.49)
    assert not Limits(3).reached_by(1.0)


# Searches


def test_the_first_answer_ends_the_search() -> None:
    events: list[Event] = []
    whole = solved()
    first = solved(events, limits={"first": "answer"})

    assert whole.limit is None and len(whole.candidates) == 12
    assert (first.finish_reason, first.limit) == ("limit", "first")
    assert first.answer is not None
    assert events[-1].status == "limit" and events[-1].limit == "first"  # type: ignore[union-attr]
    verified = [place for place, event in enumerate(events) if isinstance(event, Verified)]
    answers = [
        place
        for place, event in enumerate(events)
        if isinstance(event, Terminal) and event.answer is not None
    ]
    assert sum(place > answers[0] for place in verified) == 1, "nothing grows after it"


def test_a_verified_answer_is_one_that_the_verifier_accepts() -> None:
    answer = solved(controller="tot", limits={"first": "answer"})
    verified = solved(controller="tot", limits={"first": "verified"})
    never = solved(problem="1 1 1 1", limits={"first": "verified"})  # unsolvable

    assert verified.limit == "first" and verified.score >= 0.5 and verified.correct
    assert answer.limit == "first"
    assert answer.metrics.tokens_generated <= verified.metrics.tokens_generated
    assert all(candidate.value < 0.5 for candidate in never.candidates)
    assert never.limit is None


@pytest.mark.parametrize("controller", only(["dpts"], ["dpts", "tot,strategy=dfs", "mcts"]))
def test_searches_with_and_without_rounds_end_at_the_first_solution(controller: str) -> None:
    events: list[Event] = []

    solution = solved(events, controller, {"first": "answer"}, verifier="self", seed=0)

    assert solution.limit == "first" and solution.answer is not None
    ended = events[-1]
    assert isinstance(ended, Ended) and ended.limit == "first"
    whole = solved(None, controller, verifier="self", seed=0)
    assert whole.limit is None
    assert solution.metrics.tokens_generated < whole.metrics.tokens_generated


def test_a_vote_ends_once_its_lead_is_safe_enough() -> None:
    search: Any = {"controller": "tot,strategy=dfs", "aggregate": "majority", "verifier": "self"}

    sure = solved(limits={"confidence": 0.9}, **search)
    whole = solved(limits={"confidence": 0.9999}, **search)

    assert (sure.limit, whole.limit) == ("confidence", None)
    assert lead_probability(sure.votes) >= 0.9
    assert sure.metrics.tokens_generated < whole.metrics.tokens_generated


def test_the_score_ends_a_search_without_a_vote() -> None:
    solution = solved(controller="tot", limits={"confidence": 1.0})

    assert (solution.limit, solution.score) == ("confidence", 1.0)


@pytest.mark.parametrize(
    ("settings", "limits", "status", "limit"),
    [
        ({"max_expansions": 2}, {}, "limit", "max_expansions"),
        ({"max_expansions": 2, "controller": "dpts"}, {}, "limit", "max_expansions"),
        ({}, {"max_tokens": 20}, "limit", "max_tokens"),
        ({}, {"timeout": 0}, "timeout", "timeout"),
        ({"max_expansions": 500}, {"max_tokens": 9999, "confidence": 1}, "solved", None),
    ],
)
def test_every_limit_is_named(
    settings: Any, limits: Any, status: str, limit: str | None, tmp_path: Path
) -> None:
    events: list[Event] = []

    solution = solved(events, **({"verifier": "self", "limits": limits} | settings))

    assert (solution.finish_reason, solution.limit) == (status, limit)
    assert isinstance(events[-1], Ended) and events[-1].limit == limit
    assert Solution.from_dict(solution.to_dict()) == solution


def test_a_trace_names_the_limit_only_where_there_is_one(tmp_path: Path) -> None:
    for name, limits in (("cut", {"max_tokens": 5}), ("whole", {})):
        path = tmp_path / f"{name}.arbor.jsonl"
        solved(limits={"trace": path, **limits}, controller="chain")
        last = path.read_text("utf-8").splitlines()[-1]
        assert ('"limit":"max_tokens"' in last) == (name == "cut")
        end = read_trace(path).events[-1]
        assert isinstance(end, Ended) and end.limit == ("max_tokens" if limits else None)


def test_limits_stand_in_a_configuration(tmp_path: Path) -> None:
    solution = solved(limits={"first": "answer", "confidence": 0.9})

    assert {"first": "answer", "confidence": 0.9}.items() <= solution.config.items()
    file = tmp_path / "run.toml"
    file.write_text(config_text(solution.config), encoding="utf-8")
    assert Solver.from_config(file).config.items() <= solution.config.items()


@pytest.mark.parametrize("controller", ["tot", "dpts", "best-first", "mcts"])
@pytest.mark.parametrize("most", [250, 400])
def test_a_round_gets_as_many_blocks_as_fit_the_tokens(controller: str, most: int) -> None:
    events: list[Event] = []
    step = {"verifier": "self", "seed": 0}

    solution = solved(events, controller, {"max_tokens": most}, **step)

    longest = max(len(event.ids) for event in events if isinstance(event, Boundary))
    assert solution.limit == "max_tokens"
    assert abs(solution.metrics.tokens_generated - most) <= 2 * longest


def test_the_first_round_is_not_cut() -> None:
    solution = solved(limits={"max_tokens": 30})

    assert solution.limit == "max_tokens"
    assert solution.metrics.rounds == 1 and solution.metrics.nodes == 13


# The longest path


@pytest.mark.parametrize("controller", ["chain", "beam", "tot", "mcts", "rebase"])
@pytest.mark.parametrize("budget", ["full", "smallest"])
def test_no_path_is_longer_than_its_tokens(controller: str, budget: str) -> None:
    events: list[Event] = []
    given = {"task": "reasoning", "path_tokens": 21, "step_tokens": 8, "max_depth": 64}
    settings: dict[str, Any] = {"controller": controller, "verifier": "self", "seed": 3} | given
    with Solver(**settings, max_expansions=40, listeners=[events.append]) as solver:
        plan = solver.plan("3+4?")
        assert plan.enough_tokens == plan.prompt_tokens + 21 + plan.question_tokens
        chosen = "full" if budget == "full" else f"{plan.enough_tokens}tok"
        solution = solver.solve("3+4?", budget=chosen)
        tree = solver.engine.tree
        lengths = {node.id: node.reasoned for node in tree}

    assert max(lengths.values()) == 21, "8, 16, and a last thought of 5"
    ended = [event for event in events if isinstance(event, Terminal)]
    assert ended and any(event.cut for event in ended)
    assert all(event.cut == (lengths[event.node] == 21) for event in ended)
    assert {each.node for each in solution.candidates if each.cut} <= {e.node for e in ended}
