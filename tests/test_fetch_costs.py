"""What decides between copying KV back and computing it again."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.models import build

from arbor import Solver
from arbor.controllers.tot import ToT
from arbor.errors import UsageError
from arbor.kernels.attention.torch_cascade import TorchCascade
from arbor.memory.stores import LowerRoom
from arbor.model import fetch_probe
from arbor.model.fetch_costs import FetchCosts, Run
from arbor.model.fetch_probe import costs_for, measure
from arbor.model.runner import ModelRunner
from arbor.support.cache_dir import cache_dir

pytestmark = pytest.mark.usefixtures("loaded_once")

COSTS = FetchCosts((("host", 100.0, 1.0), ("disk", 200.0, 5.0)), 0.1, ((1, 900.0), (11, 1000.0)))
BOTH = LowerRoom(100, 100)

runs = st.lists(
    st.builds(Run, st.integers(1, 99), st.integers(0, 999), st.sampled_from(["host", "disk"])),
    min_size=1,
    max_size=6,
)
numbers = st.floats(0, 1e6).map(lambda number: float(f"{number:.4g}"))
costs = st.builds(
    FetchCosts,
    st.tuples(
        st.tuples(st.just("host"), numbers, numbers), st.tuples(st.just("disk"), numbers, numbers)
    ),
    numbers,
    st.lists(
        st.tuples(st.integers(1, 500), numbers), min_size=1, max_size=5, unique_by=lambda p: p[0]
    ).map(lambda points: tuple(sorted(points))),
)


def test_a_forward_is_measured_at_some_rows_and_linear_between_them() -> None:
    assert COSTS.of_forward(0) == 0
    assert COSTS.of_forward(1) == 900
    assert COSTS.of_forward(6) == pytest.approx(950)
    assert COSTS.of_forward(11) == 1000
    assert COSTS.of_forward(31) == pytest.approx(1200), "as steep as before the last point"
    assert FetchCosts((), 0.0, ((4, 40.0),)).of_forward(9) == 40


def test_a_fetch_costs_an_event_per_tier_and_its_tokens() -> None:
    assert COSTS.of_fetch([]) == 0
    host, disk = Run(3, 0, "host"), Run(2, 0, "disk")
    assert COSTS.of_fetch([host]) == 103
    assert COSTS.of_fetch([host, host]) == 106
    assert COSTS.of_fetch([host, disk]) == 103 + 210


def test_tokens_that_ride_along_cost_what_they_add() -> None:
    runs = [Run(2, 10, "host"), Run(3, 100, "host")]
    alone = COSTS.of_recompute(runs, 0)
    assert alone == pytest.approx(COSTS.of_forward(5) + 0.1 * (2 * 10 + 3 * 100))
    assert COSTS.of_recompute(runs, 6) == pytest.approx(50 + 32)


def test_few_tokens_ride_along_and_many_are_fetched() -> None:
    few, many = Run(2, 0, "host"), Run(40, 0, "host")
    assert COSTS.fetched([few], rows=4) == [False], "20 or 102"
    assert COSTS.fetched([many], rows=4) == [True], "400 or 140"
    assert COSTS.fetched([many, few], rows=4) == [True, True], "2 more or 20"
    assert COSTS.fetched([few], rows=0) == [True], "nothing runs in which it could ride along"
    assert COSTS.fetched([Run(2, 9000, "host")], rows=4) == [True], "the context counts"
    assert COSTS.fetched([], rows=4) == []


@given(costs, runs, st.integers(0, 99))
def test_the_choice_is_the_cheapest_of_those_it_considers(
    costs: FetchCosts, runs: list[Run], rows: int
) -> None:
    def price(fetched: list[bool]) -> float:
        back = [run for run, one in zip(runs, fetched, strict=True) if one]
        again = [run for run, one in zip(runs, fetched, strict=True) if not one]
        return costs.of_fetch(back) + costs.of_recompute(again, rows)

    chosen = price(costs.fetched(runs, rows))
    assert chosen <= price([True] * len(runs))
    assert chosen <= price([False] * len(runs))


@given(costs)
def test_costs_are_read_back_as_they_were_written(costs: FetchCosts) -> None:
    assert FetchCosts.parse(str(costs)) == costs


@pytest.mark.parametrize(
    "text",
    [
        "",
        "never",
        "host=1",
        "host=1+2;key=3",
        "host=1+2;forward=1:2",
        "host=1+2;key=x;forward=1:2",
        "host=1+2;key=nan;forward=1:2",
        "host=1+2;key=-1;forward=1:2",
        "attic=1+2;key=1;forward=1:2",
        "host=1+2;key=1;forward=2:2,1:1",
        "host=1+2;key=1;forward=0:2",
        "host=1+2+3;key=1;forward=1:2",
    ],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"\[fetch\].*auto, always, or costs"):
        FetchCosts.parse(text)
    with pytest.raises(UsageError, match=r"\[fetch\]"):
        Solver(fetch=text)


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return ModelRunner(build("llama"), TorchCascade())


def test_every_tier_and_forward_is_measured(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch_probe, "ROWS", (1, 2, 4))
    monkeypatch.setattr(fetch_probe, "MANY", 8)
    monkeypatch.setattr(fetch_probe, "CONTEXT", 4)
    costs = measure(runner, BOTH)
    assert [name for name, *_ in costs.tiers] == ["host", "disk"]
    assert [rows for rows, _ in costs.forward] == [1, 2, 4]
    assert all(event >= 0 and token >= 0 for _, event, token in costs.tiers)
    assert all(time > 0 for _, time in costs.forward)
    assert [name for name, *_ in measure(runner, LowerRoom(disk=9)).tiers] == ["disk"]


def test_the_fit_goes_through_what_was_measured(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch_probe, "_fetch", lambda store, pool, tokens: 30.0 + 2.0 * tokens)
    times = iter([*(100.0 + 10 * place for place in range(9)), 180.0 + 0.5 * 256 * 128])
    monkeypatch.setattr(fetch_probe, "_least", lambda work, device: next(times))
    monkeypatch.setattr(runner.config, "max_position_embeddings", 256 + 128)
    costs = measure(runner, LowerRoom(9))
    assert costs.tiers == (("host", 30.0, 2.0),)
    assert costs.key == pytest.approx(0.5)
    assert costs.forward[0] == (1, 100.0) and costs.forward[-1] == (256, 180.0)


def test_what_was_measured_is_kept_for_the_model_the_tiers_and_the_machine(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[Any] = []

    def count(runner: ModelRunner, room: LowerRoom) -> FetchCosts:
        measured.append(room)
        return COSTS

    monkeypatch.setattr(fetch_probe, "measure", count)
    for model, sizes in (("a", BOTH), ("a", BOTH), ("b", BOTH), ("a", LowerRoom(9))):
        assert costs_for(runner, sizes, model, "torch") == COSTS
    assert len(measured) == 3
    half = ModelRunner(build("llama").to(torch.bfloat16), TorchCascade())
    costs_for(half, BOTH, "a", "torch")
    assert len(measured) == 4

    for file in (cache_dir() / "fetch_costs").iterdir():
        file.write_text(json.dumps(json.loads(file.read_text()) | {"measured": "nonsense"}))
    assert costs_for(runner, BOTH, "a", "torch") == COSTS
    assert len(measured) == 5


def test_a_search_follows_the_costs() -> None:
    cheap = "host=0+0;key=1;forward=1:900,64:9000"
    dear = "host=1000000+1;key=0;forward=1:900,64:901"
    counts = []
    for rule in (cheap, dear, "always"):
        with Solver(
            controller=ToT(beam=3, width=4), budget="70tok", host="9999tok", fetch=rule
        ) as solver:
            metrics = solver.solve("4 5 6 10").metrics
            counts.append((metrics.tokens_fetched > 50, metrics.tokens_recomputed > 50))
    assert counts == [(True, False), (False, True), (True, False)]


def test_auto_measures_once_and_writes_it_into_the_header(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_probe, "measure", lambda runner, room: COSTS)
    with Solver(host="1MiB") as solver:
        assert solver.engine.costs == COSTS
    with Solver(host="1MiB", fetch="always") as solver:
        assert solver.engine.costs is None
    with Solver() as solver:
        assert solver.engine.costs is None


def test_forwards_that_take_long_end_the_measurement(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([50.0, 90.0, fetch_probe.LONGEST_US + 1.0, *[200.0] * 9])
    monkeypatch.setattr(fetch_probe, "_least", lambda work, device: next(times))
    costs = measure(runner, LowerRoom(9))
    assert [rows for rows, _ in costs.forward] == [1, 2, 4]
