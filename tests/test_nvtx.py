"""Ranges for a GPU profiler: around every nvtx_range where they are asked for, nowhere else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from arbor import Solver
from arbor.engine.forward_pass import NVTX_VARIABLE, nvtx_range


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The ranges that were open together, outermost first, each time one was opened."""
    seen: list[tuple[str, ...]] = []
    inside: list[str] = []

    @contextmanager
    def listen(name: str) -> Iterator[None]:
        inside.append(name)
        seen.append(tuple(inside))
        yield
        inside.pop()

    monkeypatch.setattr(torch.cuda.nvtx, "range", listen)
    return seen


def search() -> None:
    with Solver(device="cpu", controller="tot", budget="full", max_expansions=8) as solver:
        budget = f"{solver.plan('4 5 6 10').enough_tokens}tok"
        solver.solve("4 5 6 10", budget=budget)


@pytest.mark.slow
def test_every_phase_of_a_search_has_its_range(
    opened: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NVTX_VARIABLE, "1")
    with monkeypatch.context() as gpu:
        gpu.setattr("arbor.engine.forward_pass.torch.cuda.is_available", lambda: True)
        search()

    phases = ("prefill", "decode", "verify", "rehydrate", "policy")
    assert {open_[-1] for open_ in opened} == {f"arbor.{name}" for name in phases}
    assert ("arbor.decode", "arbor.rehydrate") in opened, "a rehydration rides along"


@pytest.mark.parametrize(("value", "gpu"), [("1", False), ("0", True), ("", True), (None, True)])
def test_no_range_is_opened_without_a_gpu_or_without_being_asked(
    opened: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch, value: str | None, gpu: bool
) -> None:
    if value is None:
        monkeypatch.delenv(NVTX_VARIABLE, raising=False)
    else:
        monkeypatch.setenv(NVTX_VARIABLE, value)
    monkeypatch.setattr("arbor.engine.forward_pass.torch.cuda.is_available", lambda: gpu)

    with nvtx_range("decode"):
        pass

    assert opened == []
