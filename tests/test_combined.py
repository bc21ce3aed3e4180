"""Combinations of verifiers: their rules, settings, and what the parts are asked."""

from __future__ import annotations

import math
from typing import Any

import pytest
from support.fakes import FakeTask
from test_verifiers import PROBLEM, blocks, yes_for

from arbor.errors import UsageError
from arbor.verifiers.base import Combines, Verdict, Verifier
from arbor.verifiers.combined import Combined
from arbor.verifiers.exact import Exact
from arbor.verifiers.self_eval import SelfEval

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


@pytest.mark.parametrize("rule", ["sum", "product"])
def test_what_no_part_proves_alone_is_no_proof_at_any_weight(rule: Any) -> None:
    combined = Combined(("exact", "exact"), rule=rule, weights=(1, 1e-17))

    refuted, nearly, proved = combined.combined(
        [Verdict((1.0, 1.0, 1.0), 0), Verdict((0.0, 1 - 2**-20, 1.0), 0)]
    ).values

    assert refuted <= nearly < 1 == proved
    unlike = Combined(("exact", "exact"), rule=rule, weights=(1, 0))
    assert unlike.combined([Verdict((1.0,), 0), Verdict((0.0,), 0)]).values == (1.0,)


@pytest.mark.parametrize(
    ("rule", "values"),
    [("product", (1e10, 1.0)), ("product", (1e308, 1e308)), ("sum", (1e308, 1e308))],
)
def test_a_value_beyond_a_float_is_refused(rule: Any, values: tuple[float, float]) -> None:
    weights = (1e6, 1) if values[1] == 1 else (1, 1)
    combined = Combined(("exact", "exact"), rule=rule, weights=weights)

    with pytest.raises(UsageError, match="beyond a float") as caught:
        combined.combined([Verdict((value,), 0) for value in values])

    assert caught.value.code == "verdict-range"


def test_every_part_judges_all_candidates_together() -> None:
    engine = yes_for("v3")
    combined = Combined((SelfEval(), "exact"), rule="minimum")
    assert combined.needs_model and not Combined(("exact",)).needs_model

    verdict = combined.verify(FakeTask(), PROBLEM, blocks("v3", "v9!"), engine)

    yes = 1 / (1 + math.exp(-2.0))
    assert verdict.values == pytest.approx((3 / 9, 1 - yes))
    assert len(engine.calls) == 1
    assert isinstance(combined, Verifier) and isinstance(combined, Combines)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"parts": ()}, "needs parts"),
        ({"parts": ("exact", "exact"), "weights": (1,)}, "1 for 2 parts"),
        ({"parts": ("exact",), "weights": (-1,)}, "from 0 to 1,000,000"),
        ({"parts": ("exact",), "weights": (math.nan,)}, "from 0 to 1,000,000"),
        ({"parts": ("exact",), "weights": (1e308,)}, "from 0 to 1,000,000"),
        ({"parts": ("exact",), "weights": (0,)}, "not all 0"),
        ({"parts": ("exact",), "weights": (1,), "rule": "minimum"}, "the minimum has no weights"),
        ({"parts": ("selv",)}, "selv"),
    ],
)
def test_settings_are_checked(settings: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Combined(**settings)
