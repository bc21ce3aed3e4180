"""Searches by a solver of several processes and by one of a single process, compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.models import ARCHITECTURES, config_of, random_model

from arbor import Solver
from arbor.events import Boundary, Verified
from arbor.model.loading import BUILTIN
from arbor.trace.read import read_trace

PROBLEM = "4 5 6 10"
TWO: dict[str, Any] = {"device": "cpu", "tp": 2}


def save(folder: Path, name: str, **changes: Any) -> Path:
    """A small random model of an architecture with the built-in model's tokenizer."""
    model_type, settings = ARCHITECTURES[name]
    more = {"vocab_size": 640, "max_position_embeddings": 2048, **changes}
    random_model(config_of(model_type, **{**settings, **more})).save_pretrained(folder)
    for file in BUILTIN["sapling"].glob("tokenizer*"):
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def blocks_of(path: Path) -> list[tuple[Any, ...]]:
    """Every block of a trace: its tokens, and why it ends."""
    events = read_trace(path).events
    return [(each.node, each.ids, each.stop) for each in events if isinstance(each, Boundary)]


def assert_same(two: Solver, one: Solver, tmp_path: Path, within: float = 1e-4) -> None:
    """A search is the same block by block in either solver, and its values up to `within`."""
    traces = [tmp_path / f"{number}.arbor.jsonl" for number in (1, 2)]
    for solver, trace in zip((one, two), traces, strict=True):
        solver.solve(PROBLEM, trace=trace, max_tokens=100)
    assert blocks_of(traces[0])
    assert blocks_of(traces[0]) == blocks_of(traces[1])
    events = [read_trace(each).events for each in traces]
    for mine, other in zip(*events, strict=True):
        assert type(mine) is type(other)
        if isinstance(mine, Verified) and isinstance(other, Verified):
            assert mine.values == pytest.approx(other.values, abs=within)
