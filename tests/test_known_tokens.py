"""Tokens that a tokenizer has and its model lacks: what holds one is refused alone, by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.models import VOCABULARY, Words, build, sapling_with_token
from support.trees import PROMPT, Lab

from arbor import Solver
from arbor.engine.operation import GivenBlock, Growth
from arbor.engine.stop_rule import StopRule
from arbor.errors import InputError
from arbor.model.known_tokens import check_known
from arbor.model.sampling_params import Sampling
from arbor.tasks.base import BlockLimits
from arbor.tree import ThoughtTree

NAME = "<more>"
GROWTH = Growth(3, Sampling(), StopRule(Words(), BlockLimits((), 4, 8), ()))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return sapling_with_token(tmp_path / "model", NAME)


def test_a_problem_with_such_a_token_ends_alone(folder: Path) -> None:
    problems = ["1 + 1?", f"What is {NAME}?", "2 + 2?"]
    with Solver(model=folder, task="reasoning", max_depth=2) as solver:
        found = list(solver.solve_batch(problems, on_error="return"))

    failed = [each.error for each in found]
    assert [each is None for each in failed] == [True, False, True]
    assert failed[1] is not None and failed[1]["code"] == "problem-token"
    assert f"the prompt has the token 640 ({NAME})" in failed[1]["message"]


def test_a_prompt_to_continue_with_such_a_token_is_refused(folder: Path) -> None:
    with Solver(model=folder) as solver, pytest.raises(InputError, match="problem-token"):
        solver.generate(NAME, chat=False)


@pytest.mark.parametrize(
    "begin",
    [
        lambda lab, root, tokens: lab.begin_ask([root], [tokens]),
        lambda lab, root, tokens: lab.begin_given([GivenBlock(root, tokens, GROWTH)]),
    ],
    ids=["question", "given block"],
)
def test_an_operation_with_such_a_token_is_refused_before_it_joins_others(
    begin: Callable[[Lab, Any, Sequence[int]], Any],
) -> None:
    lab = Lab(build("llama"), debug=True)
    other, tree = ThoughtTree(PROMPT), ThoughtTree(PROMPT)
    for each in (other, tree):
        lab.open(each, 400, alone=False)
        lab.extend(each.root)
    running = lab.begin_ask([other.root], [(3, 4)])
    with pytest.raises(InputError, match=f"token {VOCABULARY} "):
        begin(lab, tree.root, (5, VOCABULARY))

    while not running.done:
        lab.step()
    assert running.result().shape == (1, VOCABULARY)


@pytest.mark.parametrize("tokens", [(-1,), (97,), (3, 1 << 40)])
def test_ids_outside_the_vocabulary_are_unknown(tokens: tuple[int, ...]) -> None:
    words = Solver().tokenizer
    with pytest.raises(InputError, match=f"token {tokens[-1]}\\b"):
        check_known(tokens, 97, "the prompt", words)
    check_known(tokens, 0, "the prompt", words)
    check_known((), 97, "the prompt", words)
