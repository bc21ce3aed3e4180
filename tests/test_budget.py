"""What a user writes as a budget, what it is in slots, and the errors that name a value that
works."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arbor.budget import Budget, Footprint, Plan
from arbor.errors import BudgetInfeasible, BudgetRange

SHAPE = Footprint(prompt_tokens=220, step_tokens=128, max_depth=6, blocks=192, question_tokens=12)
BYTES = 131_072

footprints = st.builds(
    Footprint,
    prompt_tokens=st.integers(0, 5000),
    step_tokens=st.integers(1, 300),
    max_depth=st.integers(1, 40),
    blocks=st.integers(1, 3000),
    question_tokens=st.integers(0, 60),
)
budgets = st.one_of(
    st.floats(0, 1, exclude_min=True).map(lambda x: Budget("ratio", x)),
    st.integers(1, 10**6).map(lambda n: Budget("tokens", n)),
    st.integers(1, 10**12).map(lambda n: Budget("bytes", n)),
)


@pytest.mark.parametrize(
    ("written", "unit", "amount"),
    [
        ("full", "ratio", 1.0),
        ("FULL", "ratio", 1.0),
        (1, "ratio", 1.0),
        ("1", "ratio", 1.0),
        (0.25, "ratio", 0.25),
        (" 0.25 ", "ratio", 0.25),
        ("1e-2", "ratio", 0.01),
        ("8192tok", "tokens", 8192),
        ("8,192 tokens", "tokens", 8192),
        ("8_192tok", "tokens", 8192),
        ("6GiB", "bytes", 6 * 2**30),
        ("512mib", "bytes", 512 * 2**20),
        ("1.5GB", "bytes", 1_500_000_000),
        (".5 KiB", "bytes", 512),
        ("700B", "bytes", 700),
    ],
)
def test_a_budget_is_read_from_each_form(written: float | str, unit: str, amount: float) -> None:
    assert Budget.parse(written) == Budget(unit, amount)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("written", "text"),
    [
        (
            25,
            "[budget-range] --budget 25: a ratio lies in (0, 1] and is the part KEPT. "
            "Did you mean 0.25 (keep 25 %)? For an absolute size write 8192tok or 6GiB. "
            "(kvpress compression_ratio r = budget 1-r)",
        ),
        ("25%", "Did you mean 0.25 (keep 25 %)?"),
        ("8192", "Did you mean 8192tok?"),
        (1.5, "Did you mean 0.015 (keep 1.5 %)?"),
        ("6G", "Did you mean 6GiB?"),
        ("512 mb/s", "neither a ratio"),
        ("8192t", "Did you mean 8192tok?"),
        ("6 furlongs", "neither a ratio"),
        ("0tok", "a whole number of tokens"),
        ("1.5tok", "a whole number of tokens"),
        ("0GiB", "at least one byte"),
        ("", "neither a ratio"),
        ("nan", "neither a ratio"),
        ("-0.5", "a ratio lies in (0, 1]"),
        (0, "a ratio lies in (0, 1]"),
        ("inf", "a ratio lies in (0, 1]"),
        (float("nan"), "neither a ratio"),
        (10**400, "a ratio lies in (0, 1]"),
        (True, "neither a ratio"),
        (None, "neither a ratio"),
        ("0.25max", "Did you mean 0.25?"),
        ("0,25", "Did you mean 0.25 (keep 25 %)?"),
        ("1,5", "Did you mean 0.015 (keep 1.5 %)?"),
        ("1,5GiB", "Did you mean 1.5GiB?"),
        ("0,500MiB", "Did you mean 0.5MiB?"),
        ("2,5tok", "neither a ratio"),
        ("1,,,2tok", "neither a ratio"),
        ("0.5 of prompt+5", "neither a ratio"),
    ],
)
def test_a_wrong_budget_names_the_one_that_was_meant(written: float | str, text: str) -> None:
    with pytest.raises(BudgetRange) as caught:
        Budget.parse(written)

    assert text in str(caught.value)
    assert caught.value.code == "budget-range"
    assert caught.value.exit_code == 2
    json.dumps(caught.value.to_dict(), allow_nan=False)


@given(st.text(max_size=12))
def test_any_text_is_a_budget_or_a_budget_range_error(text: str) -> None:
    try:
        budget = Budget.parse(text)
    except BudgetRange:
        return
    assert Budget.parse(str(budget)) == budget


def test_a_plan_holds_every_number_a_user_is_shown() -> None:
    plan = Budget.parse("0.25").plan(SHAPE, BYTES)

    assert plan.to_dict() == {
        "budget_tokens": 24808,
        "full_tokens": 24808,
        "smallest_tokens": 360,
        "enough_tokens": 1000,
        "bytes_per_token": BYTES,
        "prompt_tokens": 220,
        "step_tokens": 128,
        "max_depth": 6,
        "blocks": 192,
        "question_tokens": 12,
        "part": 0.25,
        "ratio": 0.25,
        "budget_bytes": 24808 * BYTES,
        "full_bytes": 24808 * BYTES,
    }


def test_an_infeasible_budget_names_what_would_work() -> None:
    with pytest.raises(BudgetInfeasible) as caught:
        Budget.parse("343tok").plan(SHAPE, BYTES)

    assert str(caught.value) == (
        "[budget-infeasible] the budget is 343 tokens, but the first thought (220 prompt + 128 + 12 question) needs 360. "
        "Smallest workable: 360tok, or a ratio as in --budget 0.25. Or: --step-tokens 111."
    )
    assert (caught.value.needed, caught.value.budget) == (360, 343)
    assert caught.value.exit_code == 6


@pytest.mark.parametrize(
    ("protected", "sum_"),
    [(12, "12 protected + 4 + 2 question"), (500, "10 prompt + 30 + 2 question")],
)
def test_a_lossy_budget_says_which_sum_is_the_smallest(protected: int, sum_: str) -> None:
    shape = Footprint(10, 30, 4, 20, 2, protected)
    with pytest.raises(BudgetInfeasible) as error:
        Budget.parse("1tok").plan(shape, 1)

    assert sum_ in error.value.message
    assert sum(map(int, re.findall(r"\d+", sum_))) == error.value.needed
    assert ("--set recent=0" in error.value.hint) is (protected == 12)


@given(footprints)
def test_the_smallest_amount_works_and_one_token_less_does_not(footprint: Footprint) -> None:
    smallest = Budget("ratio", 1.0).plan(footprint, 1).smallest_tokens

    Budget("tokens", smallest).plan(footprint, 1)
    if smallest > 1:
        with pytest.raises(BudgetInfeasible):
            Budget("tokens", smallest - 1).plan(footprint, 1)


@given(budgets, footprints, st.integers(1, 1000))
def test_every_lever_an_error_names_works(
    budget: Budget, footprint: Footprint, bytes_per_token: int
) -> None:
    def plan(depth: int, step: int) -> Plan:
        changed = replace(footprint, step_tokens=step, max_depth=depth)
        return budget.plan(changed, bytes_per_token)

    try:
        plan(footprint.max_depth, footprint.step_tokens)
    except BudgetInfeasible as error:
        if depth := re.search(r"--max-depth (\d+)", error.hint):
            plan(int(depth[1]), footprint.step_tokens)
        if step := re.search(r"--step-tokens (\d+)", error.hint):
            plan(footprint.max_depth, int(step[1]))
