"""Losing a block is what it seems to be, and block values are fitted to what it costs."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from support.models import build
from support.run_cli import in_process
from support.trees import GREEDY, Lab, relative_error

from arbor.papers.arborkv.calibrate import Example, _losses, calibrate
from arbor.papers.arborkv.msve import MSVE
from arbor.retention.token_statistics import TokenStatistics

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


def test_attention_of_masked_blocks_is_theirs_while_another_tree_is_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("arbor.papers.arborkv.calibrate.StopRule", mock.MagicMock())
    monkeypatch.setattr("arbor.papers.arborkv.calibrate._continues", lambda *_: True)
    statistics = TokenStatistics()
    ahead = 3  # rows that the other tree has
    for row in range(ahead + 5):
        statistics.open(row, 0, 1)
        one = np.array([1])
        statistics.observe(np.array([row]), np.array([0]), 0.1 * (row + one), one)
    solver = mock.MagicMock()
    solver.engine.state.statistics = statistics
    path = [SimpleNamespace(id=i, row=ahead + i, value=0.5, confidence=0.5) for i in range(5)]

    found = _losses(solver, mock.MagicMock(), path, 0)

    assert [each.attention for each in found] == pytest.approx([0.5, 0.6])


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
