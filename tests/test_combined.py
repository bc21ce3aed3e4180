"""Combinations of verifiers: their rules, settings, and what the parts are asked."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import pytest
from support.fakes import FakeTask
from test_verifiers import PROBLEM, blocks, yes_for

from arbor import Solver
from arbor.components import build, spec_of
from arbor.errors import UsageError
from arbor.tasks.base import Problem, Task
from arbor.verifiers.base import Combines, Encoder, Verdict, Verifier, parts_of
from arbor.verifiers.combined import Combined
from arbor.verifiers.exact import Exact
from arbor.verifiers.self_eval import SelfEval
from arbor.verifiers.vote import Vote

pytestmark = pytest.mark.usefixtures("loaded_once")

HALF, THIRD = Verdict((0.5, 1.0), 2), Verdict((1 / 3, 0.9), 0)


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({}, (5 / 12, 0.95)),
        ({"weights": (3, 1)}, (11 / 24, 0.975)),
        ({"weights": (0, 2)}, (1 / 3, 0.9)),
        ({"rule": "product"}, (1 / 6, 0.9)),
        ({"rule": "product", "weights": (2, 0.5)}, (0.25 / math.sqrt(3), math.sqrt(0.9))),
        ({"rule": "minimum"}, (1 / 3, 0.9)),
    ],
)
def test_values_are_combined_by_the_rule(settings: Any, wanted: tuple[float, ...]) -> None:
    combined = Combined((Exact(), SelfEval()), **settings)

    verdict = combined.combined([HALF, THIRD])

    assert verdict.values == pytest.approx(wanted)
    assert verdict.asked == 2
    assert verdict.scores == ()


def test_the_scores_of_steps_are_combined_with_the_values_of_the_others() -> None:
    combined = Combined((Exact(), SelfEval()))

    verdict = combined.combined([HALF, Verdict((0.1, 0.2), 0, scores=(0.3, 0.4))])

    assert verdict.values == pytest.approx((0.3, 0.6))
    assert verdict.scores == pytest.approx((0.4, 0.7))


def test_every_part_judges_all_candidates_together() -> None:
    engine = yes_for("v3")
    combined = Combined((SelfEval(), "exact"), rule="minimum")
    assert combined.needs_model and not Combined(("exact",)).needs_model

    verdict = combined.verify(FakeTask(), PROBLEM, blocks("v3", "v9!"), engine)

    yes = 1 / (1 + math.exp(-2.0))
    assert verdict.values == pytest.approx((3 / 9, 1 - yes))
    assert len(engine.calls) == 1
    assert isinstance(combined, Verifier) and isinstance(combined, Combines)


def test_parts_are_found_however_deep() -> None:
    inner = Combined(("self", Vote(3)))

    assert parts_of(Combined((inner, "exact"))) == [SelfEval(), Vote(3), Exact()]
    assert parts_of(Exact()) == [Exact()]


def test_it_is_its_own_configuration() -> None:
    combined = Combined(("self", {"name": "vote", "choices": 3}), rule="product", weights=(1, 2))

    spec = json.loads(json.dumps(spec_of(combined)))

    assert spec["parts"] == [{"name": "self"}, {"name": "vote", "choices": 3}]
    assert build("verifier", spec) == combined
    assert hash(combined) == hash(build("verifier", spec))


def test_the_command_line_names_parts_with_and_without_settings() -> None:
    plain = build("verifier", "combined,parts=self,exact,rule=minimum")
    table = 'combined,parts=["self",{"name":"vote","choices":3}],weights=1,2'

    assert plain == Combined((SelfEval(), Exact()), rule="minimum")
    assert build("verifier", table) == Combined((SelfEval(), Vote(3)), weights=(1.0, 2.0))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"parts": ()}, "needs parts"),
        ({"parts": ("exact", "exact"), "weights": (1,)}, "1 for 2 parts"),
        ({"parts": ("exact",), "weights": (-1,)}, "at least 0"),
        ({"parts": ("exact",), "weights": (math.nan,)}, "at least 0"),
        ({"parts": ("exact",), "weights": (0,)}, "not all 0"),
        ({"parts": ("exact",), "weights": (1,), "rule": "minimum"}, "the minimum has no weights"),
        ({"parts": ("selv",)}, "selv"),
    ],
)
def test_settings_are_checked(settings: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Combined(**settings)


def test_the_plan_counts_the_longest_question_of_a_part() -> None:
    def question(verifier: Any) -> int:
        with Solver(verifier=verifier) as solver:
            return solver.plan("4 5 6 10").question_tokens

    assert question(Combined(("self", "vote"))) == question("vote") > question("self")
    assert question(Combined(("exact", "self"))) == question("self")
    assert question(Combined(("exact",))) == 0


def test_a_part_checks_its_questions_before_the_weights_load() -> None:
    checked: list[Problem] = []

    @dataclass(frozen=True)
    class Careful(Exact):
        def check(self, task: Task, problem: Problem, encoder: Encoder) -> None:
            checked.append(problem)

    with Solver(verifier=Combined(("self", Careful()))) as solver:
        solver.plan("4 5 6 10")
        assert solver.checkpoint._weights is None

    assert [problem.text for problem in checked] == ["4 5 6 10"]


def test_a_product_of_negative_values_is_refused() -> None:
    combined = Combined((Exact(), SelfEval()), rule="product", weights=(0.5, 1))

    with pytest.raises(UsageError, match="at least 0"):
        combined.combined([Verdict((-0.5,), 0), Verdict((0.5,), 0)])


@pytest.mark.parametrize(
    ("verdict", "code"),
    [
        (Verdict((), 0), "verdict-count"),
        (Verdict((0.5,) * 10, 0, scores=(0.5,) * 9), "verdict-count"),
        (Verdict((math.nan,) * 10, 0), "verdict-range"),
        (Verdict((0.5,) * 10, 0, scores=(math.inf,) * 10), "verdict-range"),
        (Verdict((0.5,) * 10, 0, scores=None), "verifier-answer"),  # type: ignore[arg-type]
    ],
)
def test_a_part_that_answers_wrongly_is_named(verdict: Verdict, code: str) -> None:
    @dataclass(frozen=True)
    class Wrong:
        needs_model = False

        def verify(self, *_: Any) -> Verdict:
            return verdict

    with (
        Solver(verifier=Combined(("exact", Wrong()))) as solver,
        pytest.raises(UsageError, match="Wrong") as caught,
    ):
        solver.solve("4 5 6 10")

    assert caught.value.code == code
