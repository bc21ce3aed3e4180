"""The types of ThinKV's segments: densities and their modes, sparsities of solved problems, and the
command."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from support.run_cli import in_process
from transformers import AutoModelForCausalLM
from transformers.models.llama import modeling_llama

from arbor import Solver
from arbor.components import build
from arbor.errors import UsageError
from arbor.model.loading import BUILTIN
from arbor.papers.related.calibrate_thoughts import (
    EveryLayer,
    calibrate_thoughts,
    modes_of,
    path_segments,
    types_of,
)
from arbor.papers.related.thinkv import ThinKV
from arbor.retention.allocators.pooled import Pooled
from arbor.retention.policy import Policy

pytestmark = pytest.mark.usefixtures("loaded_once")

SHORT = "chains,fewest=2,most=2"
FAINT = 0.01


def draws(*modes: tuple[float, int], spread: float = 0.02, seed: int = 0) -> np.ndarray:
    """So many numbers around each mode."""
    rng = np.random.default_rng(seed)
    return np.concatenate([rng.normal(mode, spread, count) for mode, count in modes]).clip(0, 1)


# Densities


@pytest.mark.parametrize("modes", [(0.6,), (0.3, 0.8), (0.1, 0.5, 0.9)])
def test_modes_are_found_and_valleys_lie_between_them(modes: tuple[float, ...]) -> None:
    found, valleys, depth = modes_of(draws(*((mode, 60) for mode in modes)))

    assert found == pytest.approx(modes, abs=0.03)
    assert len(valleys) == len(modes) - 1
    for low, valley, high in zip(found, valleys, found[1:], strict=False):
        assert low < valley < high
    assert depth < 0.6


def test_the_density_is_that_of_gaussian_kernels_of_scotts_width() -> None:
    values = draws((0.3, 40), (0.5, 25), spread=0.05)
    width = values.std(ddof=1) / 65**0.2
    grid = np.linspace(0, 1, 2001)
    density = [sum(np.exp(-(((x - value) / width) ** 2) / 2) for value in values) for x in grid]
    tops = [
        at
        for at in range(1, 2000)
        if density[at - 1] < density[at] and density[at + 1] < density[at]
    ]
    lowest = min(range(tops[0], tops[1]), key=density.__getitem__)

    modes, valleys, depth = modes_of(values)

    assert modes.tolist() == grid[tops].tolist() and valleys.tolist() == [grid[lowest]]
    assert depth == pytest.approx(density[lowest] / min(density[tops[0]], density[tops[1]]))


@pytest.mark.parametrize("values", [[0.4], [0.4] * 9])
def test_numbers_without_a_spread_are_one_mode(values: list[float]) -> None:
    modes, valleys, depth = modes_of(np.array(values))

    assert (modes.tolist(), valleys.tolist(), depth) == (pytest.approx([0.4]), [], 0)


def test_a_few_numbers_far_away_are_no_mode() -> None:
    assert len(modes_of(draws((0.5, 200), (0.95, 3)))[0]) == 1


def test_layers_with_three_modes_count_and_their_valleys_are_averaged() -> None:
    three = [draws((0.2, 60), (0.5, 60), (0.9, 60), seed=seed) for seed in range(2)]
    shifted = draws((0.3, 60), (0.6, 60), (0.8, 60))
    one, two = draws((0.5, 180)), draws((0.2, 90), (0.8, 90))

    starts = np.arange(1, 181)
    found = types_of(np.array([one, three[0], two, shifted, three[1]]), starts, 7)

    assert found.modes == (1, 3, 2, 3, 3) and found.layers == (1, 3, 4)
    # the draws rise with their places
    assert found.by_position > 0.5 and found.narrow_modes[1] >= 3
    wanted = np.mean([modes_of(each)[1] for each in (three[0], shifted, three[1])], axis=0)
    assert found.valleys == pytest.approx(wanted, abs=1e-4)
    assert (found.problems, found.segments) == (7, 180)
    allocator = build("policy", found.settings).allocator
    assert isinstance(allocator, ThinKV)
    assert (allocator.valleys, allocator.layers) == (found.valleys, found.layers)


def test_of_more_than_four_layers_those_with_the_deepest_valleys_count() -> None:
    spreads = (0.04, 0.07, 0.02, 0.05, 0.03, 0.045)
    layers = [draws((0.2, 60), (0.5, 60), (0.85, 60), spread=each) for each in spreads]

    found = types_of(np.array(layers), np.arange(1, 181), 1)

    assert found.modes == (3,) * 6
    depths = [modes_of(each)[2] for each in layers]
    assert found.layers == tuple(sorted(np.argsort(depths)[:4].tolist())) != (0, 1, 2, 3)


def test_without_three_modes_there_are_no_types() -> None:
    layers = np.array([draws((0.5, 100)), draws((0.2, 50), (0.8, 50))])
    found = types_of(layers, np.arange(1, 101), 3)

    assert (found.valleys, found.layers, found.settings) == ((), (), "thinkv")


# Solved problems


def own_sparsity(path: list[int], monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """Of each layer and token, by Hugging Face's forward of the whole path, [layers, n]."""
    found = []
    usual = modeling_llama.eager_attention_forward

    def attend(module: Any, query: Any, key: Any, *args: Any, **kwargs: Any) -> Any:
        groups = query[0].unflatten(0, (key.shape[1], -1)) @ key[0].mT[:, None] * module.scaling
        logits = groups.amax(1).double()  # the largest of those that read one KV head
        row = []
        for at in range(logits.shape[1]):
            seen = logits[:, at, : at + 1].softmax(-1).mean(0)
            row.append(float((seen < FAINT * seen.max()).double().mean()))
        found.append(row)
        return usual(module, query, key, *args, **kwargs)

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", attend)
    model = AutoModelForCausalLM.from_pretrained(BUILTIN["sapling"], attn_implementation="eager")
    with torch.inference_mode():
        model(torch.tensor([path]))
    return np.array(found)


def test_sparsities_are_those_of_a_plain_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Policy(Pooled(), EveryLayer())
    with Solver(task=SHORT, controller="chain", policy=policy, share="off") as solver:
        problem = next(iter(solver.task.problems("train")))
        found, starts = path_segments(solver, solver.solve(problem), 5)
        nodes = [list(node.tokens) for node in solver.engine.tree.nodes]
    own = own_sparsity([token for each in nodes for token in each], monkeypatch)

    begin, wanted, at = len(nodes[0]), [], []
    for tokens in nodes[1:]:
        for first in range(0, len(tokens), 5):
            mine = own[:, begin + first : begin + min(first + 5, len(tokens))]
            wanted.append(mine.mean(1))
            at.append(begin + first)
        begin += len(tokens)
    assert found.shape == (6, len(wanted)) and starts.tolist() == at
    assert np.mean(np.isclose(found, np.array(wanted).T, atol=1e-6)) > 0.95  # rounding at 1 %
    assert found == pytest.approx(np.array(wanted).T, abs=0.05)


def test_problems_without_a_thought_are_refused() -> None:
    policy = Policy(Pooled(), EveryLayer())
    with (
        Solver(task=SHORT, controller="chain", policy=policy, share="off") as solver,
        pytest.raises(UsageError, match="none of 0 solved problems has a thought"),
    ):
        calibrate_thoughts(solver, itertools.islice(solver.task.problems("train"), 0))


@pytest.mark.slow
def test_a_search_takes_what_the_command_prints(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = in_process(capsys)

    done = run("calibrate", "thoughts", "--task", SHORT, "--n", "8", "--json")

    assert done.code == 0, done.err
    written = done.document
    assert (written["task"], written["problems"], len(written["modes"])) == (SHORT, 8, 6)
    assert written["segments"] >= 16 and "nan" not in done.out
    options = ("--task", SHORT, "--controller", "chain", "--mode", "lossy", "--budget", "60tok")
    problem = next(iter(build("task", SHORT).problems("train"))).text
    solved = run("solve", problem, *options, "--policy", written["policy"], "--json")
    assert solved.code in (0, 1), solved.err
