"""Whole traces of the built-in model: a refactoring keeps the events, or shows where they part.

``make golden`` rewrites ``tests/golden``; the diff is reviewed like code.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from support.slow_cases import only

from arbor import Solver
from arbor.controllers.beam import Beam
from arbor.controllers.chain import Chain
from arbor.controllers.tot import ToT
from arbor.kernels.native import without_native
from arbor.trace import Replay, read_trace

KERNELS = [nullcontext, without_native]
RUNS: dict[str, dict[str, Any]] = {
    "chain": {"controller": Chain(samples=3), "verifier": "self"},
    "beam": {"controller": Beam(beam_size=2, width=3), "verifier": "exact"},
    "tot": {"controller": ToT(beam=2, width=3), "verifier": "self"},
    "tot_small_budget": {
        "controller": ToT(strategy="dfs", width=3, max_visited=6),
        "verifier": "self",
        "budget": "150tok",
    },
    "tot_tiers": {
        "controller": ToT(beam=4, width=3),
        "verifier": "self",
        "budget": "112tok",
        "host": "20tok",
        "disk": "40tok",
        "fetch": "always",
    },
}


@pytest.mark.parametrize("kernels", only([nullcontext], KERNELS), ids=["native", "torch"])
@pytest.mark.parametrize("name", only(["tot_small_budget", "tot_tiers"], RUNS))
def test_a_search_gives_the_events_it_gave(
    name: str,
    kernels: Callable[[], AbstractContextManager[None]],
    tmp_path: Path,
    golden: Callable[[str, Path], None],
) -> None:
    """By the native kernels, where they are built, and in torch."""
    trace = tmp_path / "run.arbor.jsonl"

    with kernels(), Solver(seed=3, deterministic=True, device="cpu", **RUNS[name]) as solver:
        solver.solve("4 5 6 10", trace=trace)

    assert Replay.of(read_trace(trace)).problems == []
    golden(name, trace)
