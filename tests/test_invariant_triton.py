"""The Triton kernels of `deterministic` on CUDA, in the interpreter and compiled for Hopper."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from arbor.errors import UsageError
from arbor.kernels.attention.base import AttentionShape, CascadeLayout, CascadeLevel
from arbor.kernels.attention.invariant_cascade import InvariantCascade, tile_items
from arbor.model import placement
from arbor.model.placement import refuse_batch_dependent, resolve_backend

ROOT = Path(__file__).parents[1]
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def run_check(check: str, *, interpreted: bool) -> None:
    """Run a check of `support.triton_checks` in a process of its own."""
    pytest.importorskip("triton", reason="Triton is not installed")
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    environment["TRITON_INTERPRET"] = "1" if interpreted else "0"
    ran = subprocess.run(
        [sys.executable, "-m", "support.triton_checks", check],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    found: dict[str, str] = json.loads(ran.stdout)
    assert found == {check: ""}, found[check]


@pytest.mark.slow
@pytest.mark.parametrize("check", ["products", "sums"])
def test_products_and_sums_agree_and_rows_do_not_depend_on_the_batch(check: str) -> None:
    run_check(check, interpreted=True)


@pytest.mark.slow
@pytest.mark.parametrize("check", ["attention", "models"])
def test_attention_and_models_agree_and_rows_do_not_depend_on_the_batch(check: str) -> None:
    run_check(check, interpreted=True)


@pytest.mark.slow
def test_kernels_compile_for_hopper() -> None:
    run_check("hopper", interpreted=False)


# Tiles


def test_a_run_ends_where_slots_differ_lists_get_shorter_or_the_tile_is_full() -> None:
    table = np.array(
        [[1, 2, 3, 4], [1, 2, 3, -1], [1, 2, 3, 5], [9, 2, -1, -1], [9, 2, -1, -1], [9, 2, 3, -1]],
        np.int32,
    )
    lengths = np.array([4, 3, 4, 2, 2, 3], np.int32)

    items = tile_items(table, lengths, most_rows=3, chunk=2).tolist()

    first = [[0, 3, 0], [3, 3, 0]]
    second = [[0, 1, 1], [1, 2, 1], [5, 1, 1]]
    assert items == first + second
    assert tile_items(table, lengths, 2, 2).tolist()[:4] == [
        [0, 2, 0],
        [2, 1, 0],
        [3, 2, 0],
        [5, 1, 0],
    ]


# What is refused


def test_deterministic_on_cuda_is_accepted_with_its_own_attention(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(placement, "find_spec", lambda name: object())

    assert resolve_backend("auto", CUDA, deterministic=True) == "auto"
    assert resolve_backend("invariant", CUDA, deterministic=True) == "invariant"
    for other in ("torch", "flashinfer", "triton"):
        with pytest.raises(UsageError, match="does not") as error:
            resolve_backend(other, CUDA, deterministic=True)
        assert error.value.code == "backend" and "--backend invariant" in error.value.hint
    with pytest.raises(UsageError, match="the device is mps"):
        resolve_backend("auto", torch.device("mps"), deterministic=True)
    for name in ("invariant", "triton"):
        with pytest.raises(UsageError, match=f"{name} needs a GPU"):
            resolve_backend(name, CPU, deterministic=False)


def test_a_dtype_without_kernels_is_named() -> None:
    model = torch.nn.Linear(2, 2, dtype=torch.float64)
    model.dtype = torch.float64  # type: ignore[assignment]

    with pytest.raises(UsageError, match="no kernels for float64"):
        refuse_batch_dependent(model, CUDA)
    refuse_batch_dependent(model, CPU)

    numbers = torch.tensor([0, 1], dtype=torch.int32)
    level = CascadeLevel(numbers, numbers, numbers[:1], causal=True)
    backend = InvariantCascade()
    plan = backend.plan(CascadeLayout(1, (level,)), AttentionShape(1, 1, 2, 2, 1.0))
    with pytest.raises(ValueError, match="float64"):
        backend.run(plan, *(torch.zeros(1, 1, 2, dtype=torch.float64),) * 3)
