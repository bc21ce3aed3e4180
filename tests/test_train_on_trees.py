"""Training on trees: the gradient of a packed tree, and going on from a checkpoint."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from arbor import Solver
from arbor.run.rollout import Rollout

PUZZLES = ("4 5 6 10", "3 3 8 8")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = Path(__file__).parents[1] / "scripts" / "train_on_trees.py"
    spec = importlib.util.spec_from_file_location("train_on_trees", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(path.parent))
        spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def trees(script: ModuleType) -> list[Rollout]:
    controller = "eptree,chains=2,forks=2,width=1"
    with Solver(controller=controller, verifier="exact", sampling=script.INDEPENDENT) as solver:
        found = list(solver.rollouts(PUZZLES))
    every_other = [np.arange(len(each.leaves)) % 2.0 for each in found]
    return [
        dataclasses.replace(each, rewards=rewards)
        for each, rewards in zip(found, every_other, strict=True)
    ]


def weights(training: Any) -> list[torch.Tensor]:
    return [each.detach().clone() for each in training.model.parameters()]


@pytest.mark.slow
def test_the_gradient_of_packed_trees_is_that_of_their_paths(
    script: ModuleType, trees: list[Rollout]
) -> None:
    model = script.Training("builtin:sapling", 1e-3).model
    assert any(each.advantages().any() for each in trees)
    total = sum(each.sampled[each.path(leaf)].sum() for each in trees for leaf in each.leaves)
    for each in trees:
        factors = each.advantages()[each.blocks] * each.sampled
        for leaf in each.leaves:
            at = each.path(leaf)
            ids = torch.from_numpy(each.tokens[at])
            found = torch.log_softmax(model(input_ids=ids[None]).logits[0, :-1], -1)
            found = found.gather(1, ids[1:, None])[:, 0]
            (-(found * torch.from_numpy(factors[at][1:])).sum() / total).backward()
    wanted = [each.grad.clone() for each in model.parameters()]
    model.zero_grad()

    script.add_gradients(model, trees)

    largest = max(float(each.abs().max()) for each in wanted)
    assert largest > 1e-3
    for one, other in zip(model.parameters(), wanted, strict=True):
        assert (one.grad - other).abs().max() < 1e-4 * largest


def test_going_on_from_a_checkpoint_is_training_on(
    script: ModuleType, trees: list[Rollout], tmp_path: Path
) -> None:
    first = script.Training("builtin:sapling", 1e-3)
    begin = weights(first)
    first.learn(trees)
    first.save(tmp_path / "checkpoint.pt")
    first.learn(trees)
    second = script.Training("builtin:sapling", 1e-3)
    second.restore(tmp_path / "checkpoint.pt")
    second.learn(trees)

    assert second.step == first.step == 2
    assert second.generated == first.generated > 0
    assert second.packed < second.unpacked
    for one, other, before in zip(weights(first), weights(second), begin, strict=True):
        assert torch.equal(one, other)
        assert not torch.equal(one, before)


def test_trainings_are_compared_pair_by_pair(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn = np.random.default_rng(0)
    before = drawn.random(100)
    common = drawn.random((2, 100))
    folders: list[list[Path]] = [[], []]
    for kind, more in enumerate((0.05, 0.0)):
        for seed in range(2):
            folder = tmp_path / f"{kind}-{seed}"
            folder.mkdir()
            np.save(folder / script.BEFORE, before)
            np.save(folder / script.AFTER, common[seed] + more)
            folders[kind].append(folder)

    script.compare(*folders)

    assert capsys.readouterr().out == "each seed: 5.0, 5.0\ndifference: 5.0 points (5.0 to 5.0)\n"
