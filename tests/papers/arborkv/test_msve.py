"""What a block is worth: the sigmoid, its fit, its file, and rank correlation."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from arbor.errors import UsageError
from arbor.papers.arborkv.msve import MSVE, fit, rank_correlation


def test_the_score_is_the_sigmoid_of_the_weighted_signals() -> None:
    msve = MSVE((2.0, 1.0, -1.0), bias=0.5)

    scores = msve.scores(np.array([0.5, 1.0]), np.array([0.25, 0.0]), np.array([1.0, 0.0]))

    assert scores == pytest.approx([1 / (1 + math.exp(-0.75)), 1 / (1 + math.exp(-2.5))])


def examples(seed: int, count: int, theta: tuple[float, float, float], bias: float) -> tuple:
    rng = np.random.default_rng(seed)
    features = rng.random((count, 3)) * [1.0, 0.3, 0.1]
    chance = MSVE(theta, bias).scores(*features.T)
    return features, (rng.random(count) < chance).astype(float)


def test_a_fit_finds_the_weights_that_made_the_outcomes() -> None:
    features, lost = examples(0, 50_000, (4.0, -3.0, 9.0), -2.0)

    found = fit(features, lost, ridge=1e-6)

    assert found.theta == pytest.approx((4.0, -3.0, 9.0), rel=0.2)
    assert found.bias == pytest.approx(-2.0, rel=0.1)


@pytest.mark.parametrize(
    ("features", "drop"),
    [
        ([[0.5, 0.5, 0.5]] * 4, [0, 1, 0, 1]),  # nothing varies
        ([[0.1 * i, 0.0, 1.0] for i in range(10)], [int(i > 4) for i in range(10)]),  # separable
        ([[0.1 * i, 0.2 * i, 0.3 * i] for i in range(10)], [1] * 10),  # one outcome, collinear
        ([[0.0, 1.0, 0.5]], [0.5]),  # one example
        ([[0.1, 0.2, 0.3], [0.3, 0.2, 0.1]], [-2.0, 3.0]),  # drops beyond their range
    ],
)
def test_hard_examples_have_finite_fits(features: list, drop: list) -> None:
    found = fit(features, drop)

    assert all(map(math.isfinite, (*found.theta, found.bias)))
    assert all(abs(weight) < 1000 for weight in found.theta)


def test_a_fit_is_saved_with_where_it_comes_from(tmp_path: Path) -> None:
    file = tmp_path / "msve.json"
    msve = MSVE((1.25, -0.5, 1 / 3), bias=-1e-3)

    msve.save(file, model="builtin:sapling", task="game24", trajectories=100, correlation=0.31)

    assert MSVE.load(file) == msve
    for each in (msve, MSVE(top=50)):
        assert MSVE.parse(str(each)) == each
    MSVE(top=7).save(tmp_path / "top.json")
    assert MSVE.load(tmp_path / "top.json").top == 7
    document = json.loads(file.read_text())
    assert document["schema"] == "arbor.msve/1"
    assert document["provenance"]["trajectories"] == 100
    assert file.read_text() == json.dumps(document, indent=2, sort_keys=True) + "\n"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"schema": "arbor.msve/9", "theta": [1, 2, 3], "bias": 0}',
        '{"schema": "arbor.msve/1", "theta": [1, 2], "bias": 0}',
        '{"schema": "arbor.msve/1", "theta": [1, 2, "x"], "bias": 0}',
        '{"schema": "arbor.msve/1", "theta": [1, 2, NaN], "bias": 0}',
        '{"schema": "arbor.msve/1", "theta": [1, 2, 3]}',
        '{"schema": "arbor.msve/1", "theta": [1, 2, 3], "bias": 0, "top": Infinity}',
        '{"schema": "arbor.msve/1", "theta": [1, 2, 3], "bias": 0, "top": 2.7}',
    ],
)
def test_a_file_that_holds_no_weights_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "msve.json"
    file.write_text(text)

    with pytest.raises(UsageError) as refused:
        MSVE.load(file)
    without = (refused.value.hint or "").partition("--set msve=")[2].split()[0]
    assert MSVE.parse(without) == MSVE(), "the hint says how to search without the file"
    with pytest.raises(UsageError, match="holds no MSVE weights"):
        MSVE.load(tmp_path / "missing.json")


# Rank correlation


def test_rank_correlation_by_hand() -> None:
    assert rank_correlation([1, 2, 3, 4], [10, 20, 30, 40]) == 1.0
    assert rank_correlation([1, 2, 3, 4], [4, 3, 2, 1]) == -1.0
    assert rank_correlation([1, 2, 3], [5, 5, 5]) == 0.0
    assert rank_correlation([1, 2], [3, 4]) == 1.0
    assert rank_correlation([1, 2, 3, 4, 5], [2, 1, 4, 3, 5]) == pytest.approx(0.8)
    # ranks 1, 2.5, 2.5, 4 against 1, 3, 2, 4
    assert rank_correlation([1, 2, 2, 3], [1, 3, 2, 4]) == pytest.approx(math.sqrt(0.9))
