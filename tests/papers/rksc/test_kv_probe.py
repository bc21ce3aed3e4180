"""The KV probe: when rows read a shared span together, measured, kept and repeated."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.models import build

from arbor.kernels.attention.torch_cascade import TorchCascade
from arbor.model.level_rule import BUCKET, NEVER, LevelRule
from arbor.model.plan import ForwardPlan
from arbor.model.runner import ModelRunner
from arbor.papers.rksc import kv_probe
from arbor.papers.rksc.kv_probe import ROWS, level_rule, measured_rule
from arbor.support.cache_dir import cache_dir

pytestmark = pytest.mark.usefixtures("loaded_once")


@pytest.fixture
def runner() -> ModelRunner:
    return ModelRunner(build("llama"), TorchCascade())


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARBOR_CACHE", str(tmp_path / "cache"))


def test_a_measured_rule_counts_rows_by_the_length_of_the_span() -> None:
    rule = LevelRule.parse("0,8,2")

    assert not rule.pays(100, BUCKET - 1)
    assert rule.pays(8, BUCKET) and not rule.pays(7, BUCKET)
    assert rule.pays(2, 2 * BUCKET) and not rule.pays(1, 2 * BUCKET)
    assert rule.pays(2, 100 * BUCKET), "the last bucket holds for longer spans"
    assert LevelRule.parse(str(rule)) == rule


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


@pytest.mark.parametrize("damage", ["", "[]", "{}", '{"schema": "arbor.kv-probe/2"}'])
def test_a_damaged_file_is_ignored(
    runner: ModelRunner, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = map(LevelRule.parse, ("0,4", "2"))
    monkeypatch.setattr(kv_probe, "measure", lambda runner: next(rules))
    level_rule("measure", runner, "m", "torch")
    (file,) = (cache_dir() / "kv_probe").iterdir()
    file.write_text(damage)
    assert level_rule("kept", runner, "m", "torch") is None
    level_rule("measure", runner, "m", "torch")
    assert json.loads(file.read_text())["measured"] == "2"
