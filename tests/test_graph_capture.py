"""Capturing CUDA graphs, with stand-ins for torch's: what may not happen in a capture."""

from __future__ import annotations

import gc
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from arbor.model.graphs import CudaRecorder


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The memory pool of every capture."""
    used: list[int] = []
    made = iter(range(10))

    @contextmanager
    def graph(of: Any, *, pool: int, **_: Any) -> Any:
        used.append(pool)
        yield

    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(made))
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: nullcontext())
    for name in ("Stream", "current_stream", "CUDAGraph"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 0)
    return used


def test_no_garbage_is_collected_in_a_capture(pools: list[int]) -> None:
    seen: list[bool] = []
    CudaRecorder(torch.device("cuda")).record(lambda: seen.append(gc.isenabled()))
    assert seen == [True, False], "the first run warms up, the second is captured"
    assert gc.isenabled()


def test_a_capture_that_fails_leaves_the_next_a_pool_of_its_own(pools: list[int]) -> None:
    recorder, runs = CudaRecorder(torch.device("cuda")), iter((None, None, None, "fails"))

    def step() -> None:
        if next(runs, None):
            raise RuntimeError("operation not permitted")

    recorder.record(step)
    with pytest.raises(RuntimeError, match="not permitted"):
        recorder.record(step)
    assert gc.isenabled()
    recorder.record(step)
    assert pools == [0, 0, 1]


def test_a_first_run_that_fails_is_waited_for(
    pools: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, current = MagicMock(), MagicMock()
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: current)

    def step() -> None:
        current.wait_stream.assert_not_called()
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        CudaRecorder(torch.device("cuda")).record(step)
    current.wait_stream.assert_called_once_with(stream)
    assert pools == []
