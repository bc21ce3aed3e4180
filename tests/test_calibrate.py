"""Losing a block is what it seems to be, and block values are fitted to what it costs."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from support.models import build
from support.run_cli import in_process
from support.trees import GREEDY, Lab, relative_error

from arbor import Solver
from arbor.errors import UsageError
from arbor.measure.calibrate import Example, calibrate, collect
from arbor.retention.msve import MSVE

pytestmark = pytest.mark.usefixtures("loaded_once")


def test_a_hidden_block_is_as_good_as_evicted() -> None:
    logits = []
    for hide in (True, False):
        lab = Lab(build("llama"), policy="h2o", mode="lossy", rehydrate="off", debug=True)
        tree = lab.plant()
        (first,) = lab.sprout([(tree.root, 1)], GREEDY)
        (second,) = lab.sprout([(first, 1)], GREEDY)
        if hide:
            with lab.hiding([first]):
                logits.append(lab.ask([second], [(7, 8)]))
        else:
            lab.memory.evict(first, np.arange(len(first.tokens)))
            logits.append(lab.ask([second], [(7, 8)]))

    assert relative_error(*logits) < 1e-6


def test_hiding_leaves_no_trace() -> None:
    lab = Lab(build("llama"), debug=True)
    tree = lab.plant()
    (first,) = lab.sprout([(tree.root, 1)], GREEDY)
    (second,) = lab.sprout([(first, 1)], GREEDY)
    before = lab.ask([second], [(7, 8)])
    with lab.hiding([first]):
        hidden = lab.ask([second], [(7, 8)])
        grown = lab.sprout([(second, 1)], GREEDY)
    lab.forget(grown)

    assert torch.equal(lab.ask([second], [(7, 8)]), before)
    assert relative_error(hidden, before) > 1e-3


def examples(n: int, seed: int = 0) -> list[Example]:
    """Blocks whose attention says whether they are needed, and nothing else does."""
    rng = random.Random(seed)
    made = []
    for problem in range(n):
        for _ in range(6):
            attention = rng.random()
            drop = float(rng.random() < attention**2)
            made.append(Example(problem, rng.random(), rng.random(), attention, drop))
    return made


def test_the_fit_finds_the_signal_and_is_judged_on_other_problems() -> None:
    found = calibrate(examples(60))
    value, confidence, attention = found.msve.theta

    assert attention > 3 * max(abs(value), abs(confidence))
    assert found.correlation > found.default_correlation
    assert found.correlation > 0.4
    assert found.problems == 60
    assert (found.blocks, found.held_out) == (360, 18 * 6)
    low, high = found.interval
    assert low < found.correlation < high
    assert high - low < calibrated_width(12)  # fewer problems, less certain
    assert found.gain[0] > 0, "the guess does not know which signal it is"
    assert calibrate(examples(60), top=5).msve.top == 5


def calibrated_width(problems: int) -> float:
    low, high = calibrate(examples(problems)).interval
    return high - low


@pytest.mark.slow
def test_what_a_block_was_worth_is_read_before_the_experiment_and_against_a_run_with_it() -> None:
    """The queries of continuations that lost a block say nothing about the search."""
    with Solver(task="chains", policy="h2o", controller="chain", seed=1) as solver:
        found: list[Example] = []
        index = 0
        while not found:  # the first that is solved and has blocks to lose
            index += 1
            found = collect(
                solver, [next(itertools.islice(solver.task.problems("test"), index, None))]
            )
        problem = next(itertools.islice(solver.task.problems("test"), index, None))
        solution = solver.solve(problem)
        path = np.array(solution.path[1:-2], int)
        seen = solver.engine.state.statistics.block_attention(path)

    assert [example.attention for example in found] == pytest.approx(seen.tolist())
    assert {example.drop for example in found} <= {-1.0, 0.0, 1.0}


def test_too_little_is_refused() -> None:
    with pytest.raises(UsageError, match="calibrate-few"):
        calibrate(examples(3))
    flat = [Example(e.problem, e.value, e.confidence, e.attention, 0.0) for e in examples(20)]
    with pytest.raises(UsageError, match="calibrate-flat"):
        calibrate(flat)


def test_every_inner_block_of_a_right_path_is_lost_once() -> None:
    with Solver(
        controller="chain", verifier="exact", policy="arborkv", sampling={"temperature": 0}
    ) as solver:
        right = next(
            problem
            for problem in itertools.islice(solver.task.problems("train"), 40)
            if solver.solve(problem).correct
        )
        solution = solver.solve(right)
        found = collect(solver, [right])

    assert len(found) == len(solution.path) - 3
    assert all(example.drop in (0.0, 1.0) for example in found)
    assert all(example.attention > 0 for example in found)


def test_the_command_says_what_it_could_not_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = in_process(capsys)
    result = run(
        "calibrate", "msve", "--n", "8", "--task", "reasoning", "--out", str(tmp_path / "m.json")
    )
    assert result.code == 2
    assert "no-problems" in result.err
    assert result.out == ""
    result = run("calibrate", "msve", "--out", str(tmp_path / "no" / "m.json"))
    assert result.code == 2
    assert not list(tmp_path.iterdir())


def test_the_fit_is_a_file_that_solve_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = in_process(capsys)
    path = tmp_path / "msve.json"
    MSVE((1.0, 2.0, 3.0), -1.5).save(path, task="chains")
    result = run(
        "solve",
        "4 5 6 10",
        "--policy",
        "arborkv",
        "--set",
        f"msve={path}",
        "--print-config",
        "--json",
    )
    assert json.loads(result.out)["msve"] == "1.0,2.0,3.0,-1.5"
