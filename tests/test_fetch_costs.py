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
from arbor.model.fetch_probe import costs_for
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


@pytest.mark.slow
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
