"""The KV probe: when rows read a shared span together, measured, kept and repeated."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.models import build

from arbor import Solver
from arbor.errors import UsageError
from arbor.events import Event, Header
from arbor.kernels.attention.torch_cascade import TorchCascade
from arbor.model.level_rule import BUCKET, NEVER, LevelRule
from arbor.model.plan import ForwardPlan
from arbor.model.runner import ModelRunner
from arbor.papers.rksc import kv_probe
from arbor.papers.rksc.kv_probe import ROWS, keep_rule, kept_rule, measure, measured_rule
from arbor.support.cache_dir import cache_dir

pytestmark = pytest.mark.usefixtures("loaded_once")


@pytest.fixture
def runner() -> ModelRunner:
    return ModelRunner(build("llama"), TorchCascade())


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARBOR_CACHE", str(tmp_path / "cache"))


@given(rows=st.integers(1, 40), tokens=st.integers(1, 500), least=st.integers(0, 2000))
def test_an_unmeasured_rule_counts_saved_reads(rows: int, tokens: int, least: int) -> None:
    assert LevelRule(least).pays(rows, tokens) == ((rows - 1) * tokens > least)


def test_a_measured_rule_counts_rows_by_the_length_of_the_span() -> None:
    rule = LevelRule.parse("0,8,2")

    assert not rule.pays(100, BUCKET - 1)
    assert rule.pays(8, BUCKET) and not rule.pays(7, BUCKET)
    assert rule.pays(2, 2 * BUCKET) and not rule.pays(1, 2 * BUCKET)
    assert rule.pays(2, 100 * BUCKET), "the last bucket holds for longer spans"
    assert LevelRule.parse(str(rule)) == rule


@pytest.mark.parametrize("text", ["", "some", "2,", "-1", "2;3"])
def test_an_unknown_setting_is_refused(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        Solver(kv_probe=text)
    assert caught.value.code == "kv-probe"


def seconds_by(launch: float, noise: Iterator[float] | None = None) -> kv_probe.Seconds:
    """A clock on which a key read takes a second and a level takes `launch` seconds."""

    def seconds(plan: ForwardPlan) -> float:
        levels = len(plan.layout(None).levels) - 1
        return float(plan.unique_reads.sum()) + launch * levels + (next(noise) if noise else 0.0)

    return seconds


@pytest.mark.parametrize("launch", [0.0, 40.0, 300.0, 2000.0, 1e9])
def test_the_probe_finds_from_how_many_rows_on_a_level_pays(launch: float) -> None:
    buckets = 6
    rule = measured_rule(seconds_by(launch), buckets)

    for bucket in range(buckets):
        tokens = bucket * BUCKET + BUCKET // 2
        least = next((rows for rows in ROWS if (rows - 1) * tokens > launch), NEVER)
        assert rule.least_rows[min(bucket, len(rule.least_rows) - 1)] == least


def test_the_fastest_of_three_timings_counts() -> None:
    """One slow timing in three changes nothing."""
    slow = iter([0.0, 0.0, 1e6, 0.0, 0.0, 1e6, 0.0, 0.0] * 100)

    assert measured_rule(seconds_by(40.0, slow), 3) == measured_rule(seconds_by(40.0), 3)


def test_a_model_is_measured(runner: ModelRunner) -> None:
    rule = measure(runner, buckets=2)

    assert 1 <= len(rule.least_rows) <= 2
    assert set(rule.least_rows) <= {NEVER, *ROWS}


def test_a_measurement_is_kept_for_its_model_and_machine(runner: ModelRunner) -> None:
    rule = LevelRule.parse("0,4")
    keep_rule(rule, runner, "some/model", "torch")

    assert kept_rule(runner, "some/model", "torch") == rule
    assert kept_rule(runner, "some/other", "torch") is None
    assert kept_rule(runner, "some/model", "rowwise") is None
    half = ModelRunner(build("llama").to(torch.bfloat16), TorchCascade())
    assert kept_rule(half, "some/model", "torch") is None


@pytest.mark.parametrize("damage", ["", "[]", "{}", '{"schema": "arbor.kv-probe/2"}'])
def test_a_damaged_file_is_ignored(runner: ModelRunner, damage: str) -> None:
    keep_rule(LevelRule.parse("0,4"), runner, "m", "torch")
    (file,) = (cache_dir() / "kv_probe").iterdir()
    file.write_text(damage)
    assert kept_rule(runner, "m", "torch") is None
    keep_rule(LevelRule.parse("2"), runner, "m", "torch")
    assert json.loads(file.read_text())["measured"] == "2"


def header_of(solver: Solver) -> Header:
    heard: list[Event] = []
    solver.listeners = [heard.append]
    with solver:
        solver.solve("4 5 6 10")
    (header,) = (event for event in heard if isinstance(event, Header))
    return header


def test_what_was_measured_is_in_the_header_and_repeats_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small = {"controller": "chain", "verifier": "exact"}
    assert "kv_probe" not in header_of(Solver(**small)).config  # type: ignore[arg-type]

    monkeypatch.setattr(kv_probe, "measure", lambda runner: LevelRule.parse("16,0,4"))
    assert header_of(Solver(kv_probe="measure", **small)).config["kv_probe"] == "16,0,4"  # type: ignore[arg-type]
    monkeypatch.setattr(kv_probe, "measure", None)

    config = header_of(Solver(**small)).config  # type: ignore[arg-type]
    assert config["kv_probe"] == "16,0,4", "kept"
    assert header_of(Solver(kv_probe="off", **small)).config["kv_probe"] == "off"  # type: ignore[arg-type]
    monkeypatch.setenv("ARBOR_CACHE", "/nonexistent")
    again = Solver.from_config(config)
    assert header_of(again).config["kv_probe"] == "16,0,4"


def test_a_deterministic_run_is_not_affected() -> None:
    with Solver(kv_probe="16,0,4", deterministic=True) as solver:
        assert solver.engine.levels == LevelRule()
    with Solver(kv_probe="16,0,4") as solver:
        assert solver.engine.levels == LevelRule.parse("16,0,4")
