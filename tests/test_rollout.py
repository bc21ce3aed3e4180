"""Rollouts: finished trees as arrays, whose log probabilities are the model's own."""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.slow_cases import every
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import arbor
from arbor import Solver, UsageError
from arbor.registry import builtin
from arbor.run.rollout import Rollout

pytestmark = pytest.mark.usefixtures("loaded_once")

PUZZLES = ("4 5 6 10", "3 3 8 8")
SAMPLING = {"temperature": 0.8, "top_k": 6, "top_p": 0.9}
SAPLING = Path(arbor.__file__).parent / "sapling"


@pytest.fixture(scope="module")
def model() -> Any:
    """Hugging Face's own model, with its own attention."""
    return AutoModelForCausalLM.from_pretrained(SAPLING, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def three() -> list[Rollout]:
    with Solver(controller="chain,samples=3", sampling=SAMPLING) as solver:
        return list(solver.rollouts(PUZZLES, seed=26))  # some answers are right


def of_tokens(rollout: Rollout, logits: Tensor, at: np.ndarray[Any, Any]) -> Tensor:
    """Log probabilities of a path's tokens but the first, raw and as drawn, [2, n - 1]."""
    ids: Any = torch.from_numpy(rollout.tokens[at])[1:, None]
    warpers = LogitsProcessorList(
        [
            TemperatureLogitsWarper(SAMPLING["temperature"]),
            TopKLogitsWarper(int(SAMPLING["top_k"])),
            TopPLogitsWarper(SAMPLING["top_p"]),
        ]
    )
    both = (logits[:-1], warpers(ids, logits[:-1].clone()))
    return torch.stack([torch.log_softmax(each, -1).gather(1, ids)[:, 0] for each in both])


def check(rollout: Rollout, model: Any) -> None:
    """Compare the log probabilities of every path with transformers' own forward."""
    for block in range(1, len(rollout.parents)):
        at = rollout.path(block)
        ids = torch.from_numpy(rollout.tokens[at])[None]
        with torch.no_grad():
            want = of_tokens(rollout, model(input_ids=ids).logits[0], at).numpy()
        mine = rollout.sampled[at][1:]
        found = np.stack((rollout.logprobs[at], rollout.drawn[at]))[:, 1:]
        assert np.abs(found - want)[:, mine].max(initial=0) < 1e-4
        assert not found[:, ~mine].any()
        assert rollout.positions[at].tolist() == list(range(len(at)))


@pytest.mark.parametrize("controller", every(8, sorted(builtin("controller"))))
def test_log_probabilities_are_those_of_transformers(controller: str, model: Any) -> None:
    with Solver(controller=controller, sampling=SAMPLING, dtype="float32") as solver:
        (rollout,) = solver.rollouts(PUZZLES[:1], max_tokens=150)

    assert rollout.sampled.any()
    check(rollout, model)


def test_one_forward_with_the_tree_mask_computes_every_path(model: Any) -> None:
    with Solver(sampling=SAMPLING, dtype="float32") as solver:
        (rollout,) = solver.rollouts(PUZZLES[:1], max_tokens=150)
    with torch.no_grad():
        packed = model(
            input_ids=torch.from_numpy(rollout.tokens)[None],
            position_ids=torch.from_numpy(rollout.positions)[None],
            attention_mask=torch.where(torch.from_numpy(rollout.mask()), 0.0, -1e9)[None, None],
        ).logits[0]

    for block in range(1, len(rollout.parents)):
        at = rollout.path(block)
        found = of_tokens(rollout, packed[at], at)[0].numpy()
        mine = rollout.sampled[at][1:]
        assert np.abs(found - rollout.logprobs[at][1:])[mine].max(initial=0) < 1e-4


def test_trees_have_the_seeds_from_the_first_on_and_are_those_of_solve() -> None:
    with Solver(controller="chain,samples=3", sampling=SAMPLING, seed=5) as solver:
        rollouts = list(solver.rollouts(PUZZLES, group=2))
        seeds = zip([PUZZLES[0]] * 2 + [PUZZLES[1]] * 2, (5, 6, 7, 8), strict=True)
        alone = [solver.solve(puzzle, seed=seed) for puzzle, seed in seeds]

    assert [r.problem.text for r in rollouts] == [PUZZLES[0]] * 2 + [PUZZLES[1]] * 2
    assert [r.solution.seed for r in rollouts] == [5, 6, 7, 8]
    for rollout, solution in zip(rollouts, alone, strict=True):
        assert len(rollout.leaves) == 3
        want = {each.node: each for each in solution.candidates}
        for leaf, answer in zip(rollout.leaves, rollout.answers, strict=True):
            assert want[int(rollout.nodes[leaf])].answer == answer
        for leaf in solution.candidates:
            block = int(np.flatnonzero(rollout.nodes == leaf.node)[0])
            begin, end = rollout.starts[block : block + 2]
            assert math.isclose(rollout.logprobs[begin:end].sum(), leaf.logprob)


def test_rewards_are_the_graders_and_values_the_verifiers() -> None:
    with Solver(sampling=SAMPLING) as solver:
        (rollout,) = solver.rollouts(PUZZLES[:1])
        blocks = rollout.solution.replay().blocks
        graded = [solver.task.grade(rollout.problem, each) for each in rollout.answers]

    assert [bool(reward) for reward in rollout.rewards] == [each.correct for each in graded]
    assert 0 < rollout.rewards.sum() < len(rollout.rewards)
    for at, node in enumerate(rollout.nodes.tolist()):
        assert blocks[node].tokens == rollout.starts[at + 1] - rollout.starts[at]
        value = blocks[node].value if blocks[node].verified else math.nan
        assert rollout.values[at] == value or math.isnan(value)


def test_advantages_of_chains_leave_one_out(three: list[Rollout]) -> None:
    for rollout in three:
        found, rewards = rollout.advantages(), rollout.rewards
        for place, leaf in enumerate(rollout.leaves):
            want = rewards[place] - (rewards.sum() - rewards[place]) / 2
            thoughts = np.unique(rollout.blocks[rollout.path(int(leaf))])[1:]
            assert len(thoughts) > 1
            assert np.allclose(found[thoughts], want)


def test_advantages_compare_a_blocks_paths_with_the_other_paths(three: list[Rollout]) -> None:
    # 0 -> 1 -> (3, 4, 5), 0 -> 2 -> 6, and 7 of 2 was pruned
    tree = dataclasses.replace(
        three[0],
        parents=np.array([-1, 0, 0, 1, 1, 1, 2, 2]),
        leaves=np.array([6, 3, 4, 5]),
        rewards=np.array([0.0, 1.0, 0.0, 1.0]),
    )
    dead = dataclasses.replace(tree, rewards=np.array([1.0, 0.0, 0.0, 0.0]))
    single = dataclasses.replace(tree, leaves=np.array([6]), rewards=np.array([1.0]))
    unfinished = dataclasses.replace(tree, leaves=np.array([], np.int64), rewards=np.array([]))

    assert tree.paths.tolist() == [4, 3, 1, 1, 1, 1, 1, 0]
    assert np.allclose(tree.advantages(), [0, 2 / 9, -2 / 3, 2 / 3, -2 / 3, 2 / 3, -2 / 3, 0])
    # below 1 nothing is better than anything else, wherever the tree branches there
    assert np.allclose(dead.advantages(), [0, -1 / 3, 1, -1 / 3, -1 / 3, -1 / 3, 1, 0])
    assert not single.advantages().any()
    assert not unfinished.advantages().any()


@pytest.mark.parametrize(
    ("controller", "limits", "seed"),
    [("eptree,chains=4,forks=4", {}, 1), ("dpts", {"first": "answer"}, 8)],
)
def test_finished_paths_are_the_same_at_any_budget(controller: str, limits: Any, seed: int) -> None:
    """Those that end early, or after a limit was reached, are others where less KV fits."""
    given: dict[str, Any] = {"controller": controller, "verifier": "self", "seed": seed}
    given["sampling"] = {"temperature": 2.0}
    smallest = Solver(**given).plan(PUZZLES[0]).enough_tokens
    found = []
    for budget in ("full", f"{smallest}tok"):
        with Solver(budget=budget, **given) as solver:
            (rollout,) = solver.rollouts(PUZZLES[:1], **limits)
        assert {each.node for each in rollout.solution.candidates} == set(
            rollout.nodes[rollout.leaves].tolist()
        )
        found.append((rollout.nodes[rollout.leaves].tolist(), rollout.answers))

    assert found[0] == found[1]


def test_greedy_tokens_are_drawn_with_certainty() -> None:
    with Solver(controller="chain,samples=1", sampling={"temperature": 0}) as solver:
        (rollout,) = solver.rollouts(PUZZLES[:1])

    assert not rollout.drawn.any()
    assert (rollout.logprobs[rollout.sampled] < 0).any()


def test_finished_paths_are_a_table_of_pandas_and_arrow(three: list[Rollout]) -> None:
    pandas = pytest.importorskip("pandas")
    answered = dataclasses.replace(three[0], answers=("1 + 2", "3", None))
    unanswered = dataclasses.replace(
        three[1], answers=(None,) * 3, rewards=np.full(3, math.nan), leaves=three[1].leaves[::-1]
    )
    table = pandas.concat([answered.to_pandas(), unanswered.to_pandas()], ignore_index=True)

    assert len(table) == 6
    assert table.problem.tolist() == [PUZZLES[0]] * 3 + [PUZZLES[1]] * 3
    assert table.answer.isna().tolist() == [False] * 2 + [True] * 4
    assert table.reward.isna().tolist() == [False] * 3 + [True] * 3
    for row, rollout in ((table.loc[0], answered), (table.loc[3], unanswered)):
        leaf = int(rollout.leaves[0])
        at = rollout.path(leaf)
        for column in ("sampled", "logprobs", "drawn"):
            assert np.array_equal(row[column], getattr(rollout, column)[at])
        assert np.array_equal(row.ids, rollout.tokens[at])
        assert row.leaf == rollout.nodes[leaf]
        assert row.boundaries[0] == rollout.starts[1]
        assert row.boundaries[-1] == len(at)
        assert len(row["values"]) == len(row.boundaries) - 1
    pyarrow = pytest.importorskip("pyarrow")
    schema = pyarrow.Table.from_pandas(unanswered.to_pandas()).schema
    for name in ("ids", "boundaries"):
        assert schema.field(name).type.value_type == pyarrow.int64()
    assert schema.field("reward").type == pyarrow.float64()
    assert "string" in str(schema.field("answer").type)


def test_a_table_without_pandas_is_refused(
    three: list[Rollout], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UsageError, match="pandas is not installed") as refused:
        three[0].to_pandas()
    assert refused.value.hint == "pip install pandas"


@pytest.mark.parametrize(
    ("settings", "options", "code"),
    [
        ({"mode": "lossy"}, {}, "rollouts-lossy"),
        ({"step_format": "regex:.*"}, {}, "rollouts-format"),
        ({}, {"group": 0}, "limit"),
        ({}, {"trace": "run.arbor.jsonl"}, "trace-shared"),
        ({}, {"problems": "4 5 6 10"}, "problem-type"),
    ],
)
def test_refused(settings: dict[str, Any], options: dict[str, Any], code: str) -> None:
    with Solver(**settings) as solver, pytest.raises(UsageError) as error:
        solver.rollouts(**{"problems": PUZZLES, **options})
    assert error.value.code == code
