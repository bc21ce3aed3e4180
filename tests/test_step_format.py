"""Thoughts with a format: every one matches it, at any budget, and a bad format is refused."""

from __future__ import annotations

import json
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


@pytest.mark.parametrize("pattern", ["[^a]{3}", r"\D\d", r"\s+a", r"ab|\n"])
def test_what_ends_a_thought_comes_after_the_format(pattern: str, tokenizer: Any) -> None:
    grammar, row = Grammar(StepFormat("regex", pattern), ("\n",), tokenizer, (2,)), Row()

    allowed = grammar.mask([row], torch.zeros(1, 640))[0].isfinite()  # type: ignore[list-item]

    (end,) = tokenizer.encode("\n", add_special_tokens=False)
    assert bool(allowed[end]) is (pattern == r"ab|\n")


@pytest.mark.parametrize("pattern", ["[ -~]{5}", ".*", "[<eos>]{5}", "[^a]+"])
def test_special_tokens_are_no_text(pattern: str, tokenizer: Any) -> None:
    grammar, row = Grammar(StepFormat("regex", pattern), ("\n",), tokenizer, (2,)), Row()

    allowed = grammar.mask([row], torch.zeros(1, 640))[0].isfinite()  # type: ignore[list-item]

    assert tokenizer.decode([0, 1, 2]) == "<pad><bos><eos>"
    assert allowed[:3].tolist() == [False, False, pattern == ".*"]


# JSON schemas


def allows(schema: dict[str, Any], value: Any, tokenizer: Any) -> bool:
    """Whether a thought may be the JSON of a value."""
    return allows_text(schema, json.dumps(value), tokenizer)


def allows_text(schema: dict[str, Any], text: str, tokenizer: Any) -> bool:
    grammar = Grammar(StepFormat.parse(schema), ("\n",), tokenizer, (2,))
    row = Row()
    for token in tokenizer.encode(f"{text}\n", add_special_tokens=False):
        if grammar.mask([row], torch.zeros(1, 640))[0, token] != 0.0:  # type: ignore[list-item]
            return False
        row.tokens.append(token)
    return True


A = {"a": {"type": "integer"}}
PETS = {
    "cat": {
        "type": "object",
        "properties": {"kind": {"const": "cat"}, "lives": {"type": "integer"}},
        "required": ["kind", "lives"],
    },
    "dog": {
        "type": "object",
        "properties": {"kind": {"$ref": "#/$defs/dogs"}},
        "required": ["kind"],
    },
    "dogs": {"enum": ["dog", "puppy"]},
}


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"minimum": 5}, [5, 7.5], [1]),
        ({"maxLength": 1}, ["a"], ["abc"]),
        ({"minLength": 2.0, "maxLength": 3}, ["ab", "abc"], ["a", "abcd"]),
        ({"pattern": "b"}, ["b", "abc"], ["", "ac"]),
        ({"pattern": r"^\x41b|c$"}, ["Ab", "Abc", "c", "ac"], ["ab", "Bb", "ca"]),
        ({"pattern": r"^\D+\\$"}, ["ab\\"], ["ab", "1\\", "\\"]),
        ({"patternProperties": {"^x-": {}}}, [{"x-": 1, "x-a": 2}], [{"a": 1}]),
        ({"required": ["a"]}, [{"a": [1]}], [{}]),
        ({"minItems": 1, "minimum": 5}, [[0], 6], [[], 4]),
        ({"type": "array", "maxItems": 2}, [[], [1, "a"]], [[1, 2, 3]]),
        ({"type": "array", "minItems": 1}, [[1]], [[]]),
        (
            {"type": "array", "prefixItems": [{"type": "null"}], "minItems": 2},
            [[None, 1]],
            [[None]],
        ),
        ({"type": "object", "minProperties": 1}, [{"b": 1}], [{}]),
        ({"type": "object", "maxProperties": 1}, [{}, {"b": 1}], [{"b": 1, "c": 2}]),
        ({"properties": A, "required": ["a", "b"]}, [{"a": 1, "b": "x"}], [{"a": 1}]),
        (
            {"required": ["b"], "additionalProperties": {"type": "null"}},
            [{"b": None}],
            [{"b": 1}, {}],
        ),
        ({"type": "number", "multipleOf": 2}, [4, -6], [3, 0.5]),
        (  # in the order of the schema: what is thought of first comes first
            {
                "properties": {"why": {"const": 1}, "answer": {"const": 2}},
                "required": ["answer", "why"],
            },
            [{"why": 1, "answer": 2}],
            [{"answer": 2, "why": 1}],
        ),
        ({"type": "integer", "multipleOf": 1, "minimum": 3}, [3], [2]),
        ({"type": "integer", "enum": [1, 2.5, "a", True]}, [1], [2.5, "a", True]),
        ({"type": "number", "anyOf": [{"type": "integer"}, {"maximum": 2}, A["a"]]}, [1], ["a"]),
        ({"type": ["string", "null"], "oneOf": [{"type": "integer"}, {"const": "a"}]}, ["a"], [3]),
        ({"oneOf": [{"type": ["integer", "null"]}, {"enum": ["a", True]}]}, [3, "a", True], ["b"]),
        (  # as pydantic has unions that a property tells apart
            {"oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}], "$defs": PETS},
            [{"kind": "cat", "lives": 9}, {"kind": "dog"}],
            [{"kind": "dog", "lives": 9}, {"lives": 9}],
        ),
        (
            {"type": "string", "allOf": [{"$ref": "#/$defs/n"}], "$defs": {"n": {"maxLength": 2}}},
            ["ab"],
            ["abc", 1],
        ),
        (
            {"type": "array", "$ref": "#/$defs/n", "$defs": {"n": {"maxItems": 1}}},
            [[1]],
            [[1, 2], 1],
        ),
    ],
)
def test_a_schema_allows_what_is_valid_by_it(
    schema: dict[str, Any], valid: list[Any], invalid: list[Any], tokenizer: Any
) -> None:
    assert [each for each in valid if not allows(schema, each, tokenizer)] == []
    assert [each for each in invalid if allows(schema, each, tokenizer)] == []


@pytest.mark.parametrize("bad", ['"', "\\", "\n", "\t", "\x01"])
@pytest.mark.parametrize(
    "schema",
    [
        *({"pattern": each} for each in (".", "^[^a]$", r"^\S$", r"^\s$", r"^[\W]$", r"\x22")),
        *({"pattern": each} for each in ('"', "\t", r"\\|a", r"\n", r"^[\x00-\x7f]$")),
        *({"minLength": 1}, {"maxLength": 1}),
    ],
)
def test_a_string_with_bounds_is_json(schema: dict[str, Any], bad: str, tokenizer: Any) -> None:
    assert not allows_text(schema, f'"{bad}"', tokenizer)
    assert not allows_text(
        {"patternProperties": {schema.get("pattern", "."): {}}}, f'{{"{bad}": 1}}', tokenizer
    )
    assert not allows_text({"propertyNames": schema}, f'{{"{bad}": 1}}', tokenizer)


# What is refused

FORKS = {f"a{n}": {"anyOf": [{"$ref": f"#/$defs/a{n + 1}"}] * 2} for n in range(40)} | {"a40": {}}


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ({"not": {"type": "string"}}, "'not'"),
        ({"type": "array", "items": {"uniqueItems": True}}, "'uniqueItems'"),
        ({"properties": {"a": {"allOf": [{}, {}]}}}, "'allOf'"),
        ({"anyOf": [{"type": "integer"}], "minimum": 50}, "'minimum' beside 'anyOf'"),
        ({"type": "string", "pattern": "a+", "maxLength": 3}, "a length beside 'pattern'"),
        ({"$defs": {"x": {"pattern": "(?=z)a"}}}, "the pattern"),
        ({"pattern": "a$b"}, r"the pattern 'a\$b' has"),
        ({"patternProperties": {r"\bx": {}}}, "a word boundary"),
        ({"$ref": "#/$defs/n", "maximum": 5, "$defs": {"n": {}}}, r"'maximum' beside '\$ref'"),
        ({"allOf": [{"enum": [7, 8]}], "maximum": 5}, "'maximum' beside 'allOf'"),
        ({"allOf": [{"type": "object"}], "properties": A}, "'properties' beside 'allOf'"),
        ({"enum": ["a", "bb"], "minLength": 2}, "'minLength' beside 'enum'"),
        ({"const": 1, "enum": [1, 2]}, "'enum' beside 'const'"),
        ({"anyOf": [{}], "additionalProperties": False}, "'additionalProperties' beside 'anyOf'"),
        ({"type": "string", "enum": [1]}, "a 'type' that nothing of its 'enum' has"),
        ({"type": "null", "$ref": "#"}, "'#' to itself"),
        ({"$ref": "http://x/y"}, "the reference 'http://x/y'"),
        ({"multipleOf": 0.5}, "'multipleOf' 0.5"),
        ({"multipleOf": 2, "minimum": 0}, "'multipleOf' beside one bound"),
        ({"multipleOf": 2, "minimum": 0, "maximum": 10_000}, "10,000 or more apart"),
        ({"type": "string", "format": "date", "maxLength": 3}, "a length beside 'format'"),
        ({"format": "date", "pattern": "a"}, "'pattern' beside 'format'"),
        ({"required": ["b"], "additionalProperties": False}, "'required' 'b'"),
        ({"type": "object", "minProperties": 2}, "'minProperties' 2"),
        ({"propertyNames": {}, "additionalProperties": False}, "'propertyNames' beside"),
        ({"properties": A, "patternProperties": {"a": {}}}, "the property 'a' and a pattern"),
        ({"patternProperties": {"a": {}, "b": {"type": "null"}}}, "several schemas"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "schemas 1 and 2 of a 'oneOf'"),
        ({"type": "integer", "oneOf": [{"minimum": 0}, {"maximum": 10}]}, "Write 'anyOf'"),
        ({"items": {"oneOf": [{"type": "null"}, {"const": 1}, {"enum": [2, 1.0]}]}}, "2 and 3 of"),
        ({"oneOf": [{"type": "object", "properties": {"a": {"const": n}}} for n in (1, 2)]}, "may"),
        ({"oneOf": [{"$ref": "#/$defs/dog"}, {"required": ["kind"]}], "$defs": PETS}, "may fit"),
        ({"type": "string", "$ref": "#/$defs/a0", "$defs": FORKS}, "more than 2,000 schemas"),
        ({"required": 5}, "It has to be of the type array of strings"),
        ({"exclusiveMinimum": True}, "'exclusiveMinimum' True"),
        ({"const": 10**400}, "a number in it is too large"),
    ],
)
def test_what_a_schema_asks_for_in_vain_is_refused(schema: dict[str, Any], word: str) -> None:
    with pytest.raises(UsageError, match=word):
        check_format(StepFormat.parse(schema))


def test_properties_may_have_the_names_of_keywords() -> None:
    named: dict[str, Any] = {
        name: {"type": "string", "pattern": r"\(?(?:a|b)"} for name in ("not", "if", "anyOf")
    }
    named["then"] = {"enum": [{"not": 1}]}
    check_format(StepFormat.parse({"type": "object", "properties": named}))
