"""Thoughts with a format: every one matches it, at any budget, and a bad format is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.slow_cases import every

from arbor import Solver
from arbor.engine.grammar import Grammar, check_format
from arbor.errors import UsageError
from arbor.model.loading import load_tokenizer, locate_model
from arbor.tasks.step_format import StepFormat

pytestmark = pytest.mark.usefixtures("loaded_once")

STEP = r"\d+ [-+*/] \d+ = \d+ \(left: [\d ]+\)"
ODD = r"(plus|minus) [1-9]{1,3}"
SMALL: dict[str, Any] = {"controller": {"name": "tot", "beam": 2, "width": 3}, "seed": 2}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(locate_model("builtin:sapling"))


def thoughts(solver: Solver) -> list[str]:
    return [node.text for node in solver.engine.tree if node.parent is not None and node.tokens]


def whole(text: str, most: int, tokenizer: Any) -> bool:
    """Whether a thought was not cut for its length."""
    return len(tokenizer.encode(text, add_special_tokens=False)) < most


@pytest.mark.parametrize("pattern", [STEP, ODD])
@pytest.mark.parametrize("temperature", [0.0, 1.0, 3.0])
def test_every_thought_matches(pattern: str, temperature: float, tokenizer: Any) -> None:
    with Solver(
        step_format=f"regex:{pattern}", sampling={"temperature": temperature}, **SMALL
    ) as solver:
        solver.solve("4 5 6 10")
        found = thoughts(solver)

    assert len(found) >= 3
    for text in found:
        if whole(text, 32, tokenizer):
            assert re.fullmatch(f"({pattern})\\n?", text), text
    assert any(whole(text, 32, tokenizer) for text in found)


@pytest.mark.parametrize("policy", every(2, ["reentry", "lru"]))
def test_the_tree_is_the_same_at_any_budget(policy: str) -> None:
    found, recomputed = [], []
    for budget in ("full", "120tok"):
        with Solver(
            step_format=f"regex:{STEP}",
            controller={"name": "tot", "beam": 4, "width": 5},
            seed=1,
            budget=budget,
            policy=policy,
            deterministic=True,
        ) as solver:
            solution = solver.solve("1 1 1 8")
            found.append(thoughts(solver))
            recomputed.append(solution.metrics.tokens_recomputed)
    assert found[0] == found[1]
    assert recomputed[0] == 0 < recomputed[1]


# The grammar alone


class Row:
    """A row as the grammar sees it."""

    def __init__(self) -> None:
        self.node = self
        self.tokens: list[int] = []


@given(st.integers(0, 10_000), st.integers(0, 6))
@settings(max_examples=30)
def test_tokens_taken_back_leave_no_trace(seed: int, back: int) -> None:
    words = load_tokenizer(locate_model("builtin:sapling"))
    form, generator = StepFormat("regex", STEP), torch.Generator().manual_seed(seed)
    grammar, row, fresh = Grammar(form, ("\n",), words, (2,)), Row(), Row()

    def grow(count: int) -> None:
        for _ in range(count):
            allowed = grammar.mask([row], torch.zeros(1, 640))[0].isfinite()  # type: ignore[list-item]
            pick = torch.multinomial(allowed.float(), 1, generator=generator)
            row.tokens.append(int(pick))
            if row.tokens[-1] == 2:
                row.tokens.pop()
                return

    grow(8)
    del row.tokens[max(0, len(row.tokens) - back) :]
    fresh.tokens = list(row.tokens)
    got, want = grammar.mask([row, fresh], torch.zeros(2, 640))  # type: ignore[list-item]
    assert torch.equal(got, want)


@pytest.mark.parametrize("stop", ["\n", "é", "\u2028", "😀"])
def test_a_thought_may_end_with_any_stop_text(stop: str, tokenizer: Any) -> None:
    grammar, row = Grammar(StepFormat("regex", "[0-9]"), (stop,), tokenizer, (2,)), Row()

    for token in tokenizer.encode(f"7{stop}", add_special_tokens=False):
        allowed = grammar.mask([row], torch.zeros(1, 640))  # type: ignore[list-item]
        assert allowed[0, token] == 0.0, row.tokens
        row.tokens.append(token)


# What is refused


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ({"not": {"type": "string"}}, "'not'"),
        ({"type": "array", "items": {"uniqueItems": True}}, "'uniqueItems'"),
        ({"properties": {"a": {"allOf": [{}, {}]}}}, "'allOf'"),
        ({"anyOf": [{"type": "integer"}], "minimum": 50}, "'minimum' beside 'anyOf'"),
        ({"type": "string", "pattern": "a+", "maxLength": 3}, "a length beside 'pattern'"),
        ({"$defs": {"x": {"pattern": "(?=z)a"}}}, "the pattern"),
    ],
)
def test_what_a_schema_asks_for_in_vain_is_refused(schema: dict[str, Any], word: str) -> None:
    with pytest.raises(UsageError, match=word):
        check_format(StepFormat.parse(schema))


def test_properties_may_have_the_names_of_keywords() -> None:
    named = {name: {"type": "string", "pattern": r"\(?(?:a|b)"} for name in ("not", "if", "anyOf")}
    check_format(StepFormat.parse({"type": "object", "properties": named, "enum": [{"not": 1}]}))
