"""Thoughts with a format: every one matches it, at any budget, and a bad format is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import warm_process
from support.run_cli import in_process

from arbor import InputError, Solver, UsageError
from arbor.engine.grammar import Grammar
from arbor.model.loading import load_tokenizer, locate_model
from arbor.tasks.base import BlockLimits
from arbor.tasks.step_format import StepFormat

pytestmark = pytest.mark.usefixtures("loaded_once")

STEP = r"\d+ [-+*/] \d+ = \d+ \(left: [\d ]+\)"
ODD = r"(plus|minus) [1-9]{1,3}"
SMALL: dict[str, Any] = {"controller": {"name": "tot", "beam": 2, "width": 3}, "seed": 2}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "op": {"enum": ["+", "-"]}},
    "required": ["a", "op"],
    "additionalProperties": False,
}


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


def test_without_it_the_model_writes_what_it_likes() -> None:
    with Solver(sampling={"temperature": 3.0}, **SMALL) as solver:
        solver.solve("4 5 6 10")
        assert not all(re.fullmatch(f"({ODD})\\n?", text) for text in thoughts(solver))


def test_thoughts_of_a_schema_are_json_on_one_line() -> None:
    with Solver(step_format=SCHEMA, step_tokens=60, **SMALL) as solver:
        solver.solve("4 5 6 10")
        found = [text for text in thoughts(solver) if text.endswith("\n")]

    assert found
    for text in found:
        assert json.loads(text).keys() == {"a", "op"}


def test_a_format_the_model_follows_anyway_changes_nothing() -> None:
    answers = []
    for form in (None, r"regex:[\x20-\x7e]*"):
        with Solver(step_format=form, verifier="exact", **SMALL) as solver:
            solution = solver.solve("4 5 6 10")
            answers.append((solution.answer, thoughts(solver)))
    assert answers[0] == answers[1]


@pytest.mark.parametrize("policy", ["reentry", "lru"])
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


def test_searches_next_to_each_other_match_too() -> None:
    form = f"regex:{STEP}"
    with Solver(step_format=form, verifier="exact", **SMALL) as solver:
        alone = [solver.solve(problem).path for problem in ("4 5 6 10", "1 2 3 4", "2 3 4 6")]
        together = solver.solve_batch(["4 5 6 10", "1 2 3 4", "2 3 4 6"])
    assert [solution.path for solution in together] == alone
    assert all(re.fullmatch(f"({STEP})\\n?", step.text) for each in together for step in each.steps)


def test_the_configuration_repeats_it() -> None:
    with Solver(step_format=SCHEMA, **SMALL) as solver:
        config = solver.config
    assert config["step_format"] == f"json:{json.dumps(SCHEMA, sort_keys=True)}"
    with Solver.from_config(config) as again:
        assert again.boundary == solver.boundary
    with Solver(**SMALL) as plain:
        assert "step_format" not in plain.config


def test_a_task_may_bring_its_format() -> None:
    from arbor.tasks.game24 import Game24

    class Strict(Game24):
        @property
        def boundary(self) -> BlockLimits:
            return BlockLimits(("\n",), 32, 3, StepFormat("regex", ODD))

    with Solver(task=Strict(), **SMALL) as solver:
        solver.solve("4 5 6 10")
        assert any(re.fullmatch(f"({ODD})\\n", text) for text in thoughts(solver))


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


def test_an_open_end_may_be_the_end_of_the_text(tokenizer: Any) -> None:
    grammar, row = Grammar(StepFormat("regex", "1+"), ("\n",), tokenizer, (2,)), Row()
    row.tokens = tokenizer.encode("1", add_special_tokens=False)
    allowed = grammar.mask([row], torch.zeros(1, 640))[0].isfinite()  # type: ignore[list-item]
    texts = {tokenizer.decode([i]) for i in allowed.nonzero().squeeze(1).tolist()}
    assert {"1", "\n", "<eos>"} <= texts
    assert not any(text.strip("1\n") for text in texts - {"<eos>"})


# What is refused


@pytest.mark.parametrize(
    ("form", "error", "says"),
    [
        ("xml:a", UsageError, "is not a step format"),
        ("regex:", UsageError, "is not a step format"),
        ("regex:a(", UsageError, "parenthesis is not closed"),
        ("json:{broken", UsageError, "is not JSON"),
        ('json:{"type": 5}', UsageError, "should be a string"),
        ("json:nowhere.json", InputError, "nowhere.json cannot be read"),
        (5, UsageError, "is not a step format"),
    ],
)
def test_a_bad_format_is_refused_before_anything_loads(
    form: Any, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        Solver(step_format=form)


def test_a_schema_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(SCHEMA), encoding="utf-8")
    assert StepFormat.parse(f"json:{path}") == StepFormat.parse(SCHEMA)
    path.write_text("[]", encoding="utf-8")
    with pytest.raises(UsageError, match="an object"):
        StepFormat.parse(f"json:{path}")


def test_a_format_that_no_token_can_spell_is_named(tokenizer: Any) -> None:
    grammar = Grammar(StepFormat("regex", "12"), ("\n",), tokenizer, (2,))
    with pytest.raises(UsageError, match="no token of the model"):
        grammar.mask([Row()], torch.zeros(1, 10))  # type: ignore[list-item]


def test_without_xgrammar_the_extra_is_named() -> None:
    code = (
        "import sys; sys.modules['xgrammar'] = None\n"
        "from arbor import Solver, UsageError\n"
        "try: Solver(step_format='regex:a')\n"
        "except UsageError as error: print(error.code, error.hint)"
    )
    done = warm_process.run("-c", code, check=True)
    assert done.stdout.startswith("extra-missing pip install 'arbor-search[structured]'")


def test_the_command_takes_it(capsys: pytest.CaptureFixture[str]) -> None:
    arbor = in_process(capsys)
    words = ["solve", "4 5 6 10", "--controller", "chain", "--set"]
    ran = arbor(*words, f"step_format=regex:{ODD}", "--json")
    assert ran.document["steps"] and ran.document["config"]["step_format"] == f"regex:{ODD}"
    refused = arbor(*words, "step_format=regex:a(")
    assert refused.code == 2 and "[step-format]" in refused.err
