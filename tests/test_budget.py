"""What a user writes as a budget, what it is in slots, and the errors that name a value that
works."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from typing import Any

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
    beyond_prompt=st.none() | st.integers(0, 10**5),
)
budgets = st.one_of(
    st.floats(0, 1, exclude_min=True).map(lambda x: Budget("ratio", x)),
    st.floats(0, 1, exclude_min=True).map(lambda x: Budget("max", x)),
    st.builds(Budget, st.just("ratio"), st.floats(0, 1, exclude_min=True), st.integers(0, 10**6)),
    st.integers(1, 10**6).map(lambda n: Budget("tokens", n)),
    st.integers(1, 10**12).map(lambda n: Budget("bytes", n)),
)


@pytest.mark.parametrize(
    ("written", "unit", "amount"),
    [
        ("full", "max", 1.0),
        ("FULL", "max", 1.0),
        (1, "max", 1.0),
        ("1", "max", 1.0),
        ("1max", "max", 1.0),
        ("0.25max", "max", 0.25),
        ("1e-2 MAX", "max", 0.01),
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
        ("25max", "Did you mean 0.25 (keep 25 %)?"),
        ("0max", "a ratio lies in (0, 1]"),
        ("max", "neither a ratio"),
        ("nanmax", "neither a ratio"),
        ("infmax", "a ratio lies in (0, 1]"),
        ("0,5max", "neither a ratio"),
        ("0.5 max tok", "neither a ratio"),
        ("2 of prompt+5", "a ratio lies in (0, 1]"),
        ("x of prompt+5", "neither a ratio"),
        ("0.5 of prompt+-5", "neither a ratio"),
        ("0.5 of prompt+1.5", "neither a ratio"),
        ("0.5 of prompt", "neither a ratio"),
        ("0.5 of 100tok", "neither a ratio"),
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


@given(budgets)
def test_a_printed_budget_reads_back_as_itself(budget: Budget) -> None:
    assert Budget.parse(str(budget)) == budget
    assert Budget.parse(budget) is budget


def test_a_direct_budget_is_checked_too() -> None:
    for unit, amount in (
        ("ratio", 0.0),
        ("ratio", float("nan")),
        ("tokens", 0),
        ("tokens", 1.5),
        ("bytes", -1),
    ):
        with pytest.raises(BudgetRange):
            Budget(unit, amount)  # type: ignore[arg-type]
    with pytest.raises(BudgetRange, match=r"0.5 of prompt\+-1"):
        Budget("ratio", 0.5, -1)


def test_a_ratio_is_read_as_the_decimal_it_is_written_as() -> None:
    assert int(0.29 * 100) == 28  # what binary floating point alone would give

    assert Budget.parse(0.29).tokens(100, 1) == 29
    assert Budget.parse(0.29).tokens(500, 1, expected_tokens=100) == 29


@pytest.mark.parametrize("unit", ["tokens", "bytes"])
def test_a_budget_without_end_is_none(unit: Any) -> None:
    with pytest.raises(BudgetRange, match="inf"):
        Budget(unit, math.inf)


def test_a_footprint_counts_prompt_blocks_and_question() -> None:
    assert SHAPE.full_tokens == 220 + 192 * 128 + 12
    assert SHAPE.smallest_tokens == 220 + 6 * 128 + 12


def test_a_search_of_fewer_blocks_than_its_depth_needs_no_deeper_path() -> None:
    footprint = Footprint(prompt_tokens=10, step_tokens=8, max_depth=16, blocks=3)

    assert footprint.smallest_tokens == footprint.full_tokens == 10 + 3 * 8


def test_a_ratio_is_a_part_of_the_expected_peak_and_max_of_the_worst_case() -> None:
    measured = replace(SHAPE, beyond_prompt=4000, searches=7)

    plans = {text: Budget.parse(text).plan(measured, BYTES) for text in ("0.5", "0.5max", "full")}

    assert {text: plan.budget_tokens for text, plan in plans.items()} == {
        "0.5": 2110,
        "0.5max": 12404,
        "full": 24808,
    }
    assert {plan.expected_tokens for plan in plans.values()} == {4220}
    assert [plan.ratio for plan in plans.values()] == [0.5, 1.0, 1.0]
    assert plans["0.5"].to_dict()["searches"] == 7
    assert plans["0.5"].unmeasured == Budget.parse("2110tok").plan(SHAPE, BYTES)


def test_an_expected_peak_in_a_budget_replaces_the_measured_one() -> None:
    given_one = Budget.parse("0.5 of prompt+3000")

    plans = [given_one.plan(replace(SHAPE, beyond_prompt=n), BYTES) for n in (None, 1, 4000)]

    assert {plan.budget_tokens for plan in plans} == {1610}
    assert {(plan.expected_tokens, plan.searches) for plan in plans} == {(3220, 0)}
    with pytest.raises(BudgetInfeasible, match=r"Smallest workable: 0\.32 or 1000tok of an expec"):
        Budget.parse("0.3 of prompt+3000").plan(SHAPE, BYTES)


def test_the_expected_peak_is_never_above_the_worst_case() -> None:
    assert replace(SHAPE, beyond_prompt=10**9).expected_tokens == SHAPE.full_tokens


def test_a_plan_holds_every_number_a_user_is_shown() -> None:
    plan = Budget.parse("0.25").plan(SHAPE, BYTES)

    assert plan.to_dict() == {
        "budget_tokens": 6202,
        "full_tokens": 24808,
        "smallest_tokens": 1000,
        "bytes_per_token": BYTES,
        "prompt_tokens": 220,
        "step_tokens": 128,
        "max_depth": 6,
        "blocks": 192,
        "question_tokens": 12,
        "ratio": 0.25,
        "smallest_ratio": 0.041,
        "budget_bytes": 6202 * BYTES,
        "full_bytes": 24808 * BYTES,
    }


def test_bytes_are_whole_tokens_of_kv() -> None:
    assert Budget.parse("1GiB").plan(SHAPE, BYTES).budget_tokens == 8192
    assert Budget("bytes", 1001 * BYTES - 1).plan(SHAPE, BYTES).budget_tokens == 1000


def test_a_budget_above_full_retention_is_full_retention() -> None:
    for written in ("full", "1000000tok", "1TiB"):
        assert Budget.parse(written).plan(SHAPE, BYTES).budget_tokens == SHAPE.full_tokens


def test_an_infeasible_budget_names_what_would_work() -> None:
    with pytest.raises(BudgetInfeasible) as caught:
        Budget.parse("900tok").plan(SHAPE, BYTES)

    assert str(caught.value) == (
        "[budget-infeasible] the budget is 900 tokens, but one path (220 prompt + 6 x 128 + 12 question) needs 1,000. "
        "Smallest workable: 0.041 or 1000tok of 24,808. Or: --max-depth 5, --step-tokens 111."
    )
    assert (caught.value.needed, caught.value.budget) == (1000, 900)
    assert caught.value.exit_code == 6


@pytest.mark.parametrize(
    ("protected", "sum_"),
    [(12, "12 protected + 4 + 2 question"), (500, "10 prompt + 4 x 30 + 2 question")],
)
def test_a_lossy_budget_says_which_sum_is_the_smallest(protected: int, sum_: str) -> None:
    shape = Footprint(10, 30, 4, 20, 2, protected)
    with pytest.raises(BudgetInfeasible) as error:
        Budget.parse("1tok").plan(shape, 1)

    assert sum_ in error.value.message
    assert (
        sum(int(a) * int(b or 1) for a, b in re.findall(r"(\d+)(?: x (\d+))?", sum_))
        == error.value.needed
    )
    assert ("--set recent=0" in error.value.hint) is (protected == 12)


def test_a_ratio_names_no_depth_because_it_shrinks_with_the_search() -> None:
    with pytest.raises(BudgetInfeasible) as caught:
        Budget.parse(0.03).plan(SHAPE, BYTES)

    assert "--max-depth 4" not in caught.value.hint
    assert "Smallest workable: 0.041 or 1000tok" in caught.value.hint


def test_a_prompt_beyond_the_budget_asks_for_a_shorter_prompt() -> None:
    with pytest.raises(BudgetInfeasible, match="a shorter prompt"):
        Budget.parse("100tok").plan(SHAPE, BYTES)


@given(budgets, footprints, st.integers(1, 10**6))
def test_a_plan_lies_between_one_path_and_full_retention(
    budget: Budget, footprint: Footprint, bytes_per_token: int
) -> None:
    try:
        plan = budget.plan(footprint, bytes_per_token)
    except BudgetInfeasible as error:
        assert error.budget < error.needed == footprint.smallest_tokens
        return
    assert footprint.smallest_tokens <= plan.budget_tokens <= footprint.full_tokens
    if budget.unit in ("ratio", "max"):
        whole = plan.reference_tokens if budget.unit == "ratio" else plan.full_tokens
        assert plan.budget_tokens <= max(1.0, budget.amount * whole * (1 + 1e-12))
    assert 0 < plan.ratio <= 1 and 1 <= plan.reference_tokens <= plan.full_tokens
    if budget.unit == "bytes":
        assert plan.budget_bytes <= budget.amount


@given(footprints)
def test_both_smallest_budgets_work(footprint: Footprint) -> None:
    plan = Budget("ratio", 1.0).plan(footprint, 1)

    for smallest in (f"{plan.smallest_ratio:.12g}", f"{plan.smallest_tokens}tok"):
        Budget.parse(smallest).plan(footprint, 1)
    if plan.smallest_tokens > 1:
        with pytest.raises(BudgetInfeasible):
            Budget("tokens", plan.smallest_tokens - 1).plan(footprint, 1)


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


@given(st.floats(0, 1, exclude_min=True), st.floats(0, 1, exclude_min=True), st.integers(1, 10**7))
def test_a_larger_ratio_never_keeps_less(first: float, second: float, full: int) -> None:
    low, high = sorted((first, second))

    assert Budget("ratio", low).tokens(full, 1) <= Budget("ratio", high).tokens(full, 1)
