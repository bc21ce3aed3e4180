"""What a block is worth: the sigmoid, its fit, its file, and rank correlation."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.offers import SEEDS

from arbor.errors import UsageError
from arbor.retention.msve import MSVE, fit, normalised, rank_correlation


def test_the_score_is_the_sigmoid_of_the_weighted_signals() -> None:
    msve = MSVE((2.0, 1.0, -1.0), bias=0.5)

    scores = msve.scores(np.array([0.5, 1.0]), np.array([0.25, 0.0]), np.array([1.0, 0.0]))

    assert scores == pytest.approx([1 / (1 + math.exp(-0.75)), 1 / (1 + math.exp(-2.5))])


def test_the_defaults_are_the_documented_guess() -> None:
    assert MSVE() == MSVE((2.0, 1.0, 1.0), -2.0, 0)
    assert str(MSVE()) == "2.0,1.0,1.0,-2.0"
    assert hash(MSVE()) == hash(MSVE((2.0, 1.0, 1.0)))


def test_a_cost_outside_the_unit_interval_counts_as_its_end() -> None:
    features, lost = examples(2, 200, (1.0, 1.0, 1.0), 0.0)

    assert fit(features, lost * 3 - 1) == fit(features, lost)


def test_without_a_bias_no_block_would_score_below_one_half() -> None:
    nothing = np.zeros(1)

    assert MSVE((1.0, 1.0, 1.0), bias=0.0).scores(nothing, nothing, nothing)[0] == 0.5
    assert MSVE().scores(nothing, nothing, nothing)[0] < 0.2
    half = np.full(1, 0.5)
    assert MSVE().scores(half, half, half)[0] == pytest.approx(0.5)


@given(seed=SEEDS, scale=st.sampled_from([0.0, 1.0, 1e6, 1e300]))
def test_scores_lie_strictly_between_0_and_1(seed: int, scale: float) -> None:
    rng = np.random.default_rng(seed)
    theta = rng.normal(0, 1, 3) * scale
    msve = MSVE((theta[0], theta[1], theta[2]), bias=float(rng.normal()))

    scores = msve.scores(rng.random(20), rng.random(20), rng.random(20))

    assert ((scores > 0) & (scores < 1)).all()


@given(seed=SEEDS)
def test_scores_grow_with_every_signal_that_has_a_positive_weight(seed: int) -> None:
    rng = np.random.default_rng(seed)
    signals = [np.full(10, 0.5) for _ in range(3)]
    for which in range(3):
        changed = list(signals)
        changed[which] = np.sort(rng.random(10))

        assert (np.diff(MSVE((1.5, 0.5, 2.0)).scores(*changed)) >= 0).all()


def test_values_outside_the_unit_interval_are_scaled_from_least_to_most() -> None:
    assert normalised(np.array([0.2, 0.9])).tolist() == [0.2, 0.9]
    assert normalised(np.array([-10.0, 0.0, 30.0])).tolist() == [0.0, 0.25, 1.0]
    assert normalised(np.array([7.0, 7.0])).tolist() == [0.5, 0.5]
    assert normalised(np.array([])).tolist() == []


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


def loss(msve: MSVE, features: np.ndarray, drop: np.ndarray, ridge: float) -> float:
    """What `fit` minimises."""
    score = msve.scores(*features.T)
    entropy = -np.mean(drop * np.log(score) + (1 - drop) * np.log(1 - score))
    weights = np.array(msve.theta) * features.std(axis=0)
    return float(entropy + ridge / 2 * (weights @ weights))


@given(seed=SEEDS, shares=st.booleans())
def test_no_other_weights_fit_better(seed: int, shares: bool) -> None:
    rng = np.random.default_rng(seed)
    features = rng.random((60, 3))
    drop = rng.random(60) if shares else (rng.random(60) < features[:, 0]).astype(float)

    found = fit(features, drop, ridge=0.01)

    least = loss(found, features, drop, 0.01)
    for _ in range(20):
        step = rng.normal(0, 0.05, 4)
        theta = np.array(found.theta) + step[:3]
        other = MSVE((theta[0], theta[1], theta[2]), found.bias + step[3])
        assert loss(other, features, drop, 0.01) >= least - 1e-7


def test_a_fit_is_the_same_twice_and_whatever_the_order_of_examples() -> None:
    features, lost = examples(1, 500, (1.0, 1.0, 1.0), 0.0)

    again = fit(features, lost)

    assert again == fit(features, lost)
    turned = fit(features[::-1], lost[::-1])
    assert turned.theta == pytest.approx(again.theta, rel=1e-6)


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


def test_a_separable_signal_gets_the_weight() -> None:
    rng = np.random.default_rng(0)
    features = rng.random((200, 3))

    found = fit(features, features[:, 1] > 0.5)

    scores = found.scores(*features.T)
    assert found.theta[1] > 10 * max(abs(found.theta[0]), abs(found.theta[2]))
    assert rank_correlation(scores, features[:, 1]) > 0.95


@pytest.mark.parametrize(
    ("features", "drop"), [([], []), ([[1, 2]], [1]), ([[1, 2, 3]], [1, 2]), ([1, 2, 3], [1])]
)
def test_what_is_no_set_of_examples_is_refused(features: list, drop: list) -> None:
    with pytest.raises(UsageError, match="do not make a fit"):
        fit(features, drop)


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

    with pytest.raises(UsageError):
        MSVE.load(file)
    with pytest.raises(UsageError, match="holds no MSVE weights"):
        MSVE.load(tmp_path / "missing.json")


def test_weights_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(UsageError, match="three weights"):
        MSVE((1.0, math.nan, 0.0))
    with pytest.raises(UsageError, match="three weights"):
        MSVE((1.0, 2.0))  # type: ignore[arg-type]
    for top in (-1, 2.5, True):
        with pytest.raises(UsageError, match=f"top={top}"):
            MSVE(top=top)  # type: ignore[arg-type]
    for text in ("nan,1,1,1", "2,1,1,-2,-5"):
        with pytest.raises(UsageError, match="setting-range"):
            MSVE.parse(text)


# Rank correlation


def test_rank_correlation_by_hand() -> None:
    assert rank_correlation([1, 2, 3, 4], [10, 20, 30, 40]) == 1.0
    assert rank_correlation([1, 2, 3, 4], [4, 3, 2, 1]) == -1.0
    assert rank_correlation([1, 2, 3], [5, 5, 5]) == 0.0
    assert rank_correlation([1, 2], [3, 4]) == 1.0
    assert rank_correlation([1, 2, 3, 4, 5], [2, 1, 4, 3, 5]) == pytest.approx(0.8)
    # ranks 1, 2.5, 2.5, 4 against 1, 3, 2, 4
    assert rank_correlation([1, 2, 2, 3], [1, 3, 2, 4]) == pytest.approx(math.sqrt(0.9))


@given(seed=SEEDS)
def test_rank_correlation_with_ties_is_pearsons_of_mean_ranks(seed: int) -> None:
    rng = np.random.default_rng(seed)
    first, second = rng.integers(0, 4, 12), rng.integers(0, 4, 12)

    def slow_ranks(values: np.ndarray) -> list[float]:
        return [(values < v).sum() + ((values == v).sum() + 1) / 2 for v in values]

    a, b = slow_ranks(first), slow_ranks(second)
    expected = np.corrcoef(a, b)[0, 1] if np.ptp(a) and np.ptp(b) else 0.0

    assert rank_correlation(first, second) == pytest.approx(expected)


@given(seed=SEEDS)
def test_rank_correlation_sees_order_only(seed: int) -> None:
    rng = np.random.default_rng(seed)
    first, second = rng.normal(size=20), rng.normal(size=20)

    assert rank_correlation(np.exp(first), second) == pytest.approx(
        rank_correlation(first, second**3)
    )


def test_a_signal_that_hardly_varies_gets_no_weight_that_decides_alone() -> None:
    rng = np.random.default_rng(0)
    value = rng.random(400)
    confidence = 1 - 1e-5 * rng.random(400)
    drop = (value + 1e5 * (1 - confidence) > 1).astype(float)

    fitted = fit(np.column_stack([value, confidence, np.zeros(400)]), drop)

    assert abs(fitted.theta[1]) < 1
    assert fitted.theta[0] > 1
