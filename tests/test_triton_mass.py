"""The attention mass kernel: interpreted on the CPU, compiled for Hopper, and where it is used."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import random
import subprocess
import sys
import types
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_kernels import decode_level, make_case, make_level, make_shape, random_layout
from torch import Tensor

from arbor.kernels.attention import mass_work as mass_kernel
from arbor.kernels.attention.mass_work import ITEM_KEYS, ITEM_ROWS, MassKernel, MassWork, mass_work
from arbor.kernels.attention.reference import ReferenceAttention
from arbor.kernels.attention.torch_cascade import TorchCascade

CHILD = Path(__file__).parent / "support" / "triton_child.py"
CPU = torch.device("cpu")

needs_triton = pytest.mark.skipif(
    find_spec("triton") is None, reason="triton is not installed (Linux on x86-64: the extra test)"
)


def release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def child(what: str, tmp_path: Path, **environment: str) -> Any:
    """The child's results. Triton decides at its import whether it interprets kernels."""
    done = subprocess.run(
        [sys.executable, str(CHILD), what],
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path), **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


@needs_triton
@pytest.mark.slow
def test_the_interpreted_kernel_agrees_with_float64(tmp_path: Path) -> None:
    version = importlib.metadata.version("triton")
    if release(version) < (3, 7) and release(np.__version__) >= (2, 4):
        pytest.skip(f"the interpreter of triton {version} fails with numpy {np.__version__}")

    errors = child("interpret", tmp_path, TRITON_INTERPRET="1")

    assert len(errors) > 25
    assert not {name: error for name, error in errors.items() if not error < 3e-6}


@needs_triton
@pytest.mark.slow
def test_the_kernel_compiles_for_hopper_without_spills(tmp_path: Path) -> None:
    variants = child("compile", tmp_path, TRITON_INTERPRET="0")

    assert len(variants) == 7
    for name, found in variants.items():
        assert found["tensor_cores"], name
        assert found["spilled"] == 0, name
        assert found["registers"] <= 255 and found["shared"] <= 227 * 1024, name


# Items


@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_every_row_meets_each_of_its_keys_in_one_item(seed: int, windowed: bool) -> None:
    shape = make_shape(window=30 if windowed else None)
    levels = random_layout(random.Random(seed), windowed)
    if seed % 2:  # a prompt of more than one block of keys in place of the leaves
        rows = int(levels[-1].qo_indptr[-1])
        levels[-1] = make_level([(rows, list(range(50, 80 + rows + 7 * seed)))], True)
    case = make_case(levels, shape)
    work = mass_work(case.layout, shape, CPU)

    met: list[list[int]] = [[] for _ in range(case.layout.rows)]
    for first_row, end_row, first_key, end_key, offset, span in work.items.tolist():
        assert 0 < end_row - first_row <= ITEM_ROWS and 0 < end_key - first_key <= ITEM_KEYS
        for row in range(first_row, end_row):
            for key in range(first_key, end_key):
                if 0 <= row + offset - key < span:
                    met[row].append(int(work.slots[key]))

    expected = ReferenceAttention().plan(case.layout, shape).slots
    assert [sorted(slots) for slots in met] == [sorted(slots.tolist()) for slots in expected]


def test_a_long_prompt_leaves_out_pairs_that_nothing_reads() -> None:
    shape = make_shape(window=100)
    prompt = make_level([(3000, list(range(3000)))], True)

    work = mass_work(make_case([prompt], shape).layout, shape, CPU)

    pairs = (work.items[:, 1] - work.items[:, 0]).sum() * ITEM_KEYS
    assert pairs <= 3000 * (100 + 2 * ITEM_KEYS)
    assert int(work.count) == len(work.items)


@pytest.mark.parametrize(("rows", "tile"), [(1, 16), (8, 16), (9, 64)])
def test_short_requests_have_small_tiles(rows: int, tile: int) -> None:
    shape = make_shape()  # two query heads per KV head
    level = make_level([(rows, list(range(20)))], True)

    assert mass_work(make_case([level], shape).layout, shape, CPU).tile == tile


# Where the kernel is used


def queries(device: str, dtype: torch.dtype) -> Any:
    return types.SimpleNamespace(device=torch.device(device), dtype=dtype)


def test_the_kernel_is_for_half_precision_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mass_kernel, "_installed", lambda: True)
    kernel = MassKernel()

    assert kernel.runs(queries("cuda", torch.bfloat16))
    assert kernel.runs(queries("cuda", torch.float16))
    assert not kernel.runs(queries("cuda", torch.float32))
    assert not kernel.runs(queries("cpu", torch.bfloat16))
    monkeypatch.setattr(mass_kernel, "_installed", lambda: False)
    assert not kernel.runs(queries("cuda", torch.bfloat16))


def test_the_kernel_is_not_for_deterministic_algorithms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mass_kernel, "_installed", lambda: True)
    torch.use_deterministic_algorithms(True)
    try:
        assert not MassKernel().runs(queries("cuda", torch.bfloat16))
    finally:
        torch.use_deterministic_algorithms(False)


def use_kernel(monkeypatch: pytest.MonkeyPatch, function: Any) -> None:
    """Let `function` stand for `triton_mass`, and every backend use it."""
    module = types.ModuleType("arbor.kernels.attention.triton_mass")
    module.triton_mass = function  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(MassKernel, "runs", lambda self, q: not self._failed)


def test_a_kernel_that_fails_is_replaced_by_matmuls(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls = []

    def fails(*arguments: Any) -> Tensor:
        calls.append(arguments)
        raise RuntimeError("Failed to find C compiler.\nPlease specify one.")

    shared = make_level([(3, list(range(50)))], False)
    case = make_case([shared, decode_level([4, 9, 4], 20)], make_shape())
    backend = TorchCascade()
    plan = backend.plan(case.layout, case.shape)
    _, lse = backend.run(plan, case.q, case.k_pool, case.v_pool)
    expected = backend.mass(plan, case.q, case.k_pool, lse)
    use_kernel(monkeypatch, fails)

    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            by_mass = backend.plan_mass(case.layout, case.shape)
            assert torch.equal(backend.mass(by_mass, case.q, case.k_pool, lse), expected)

    assert len(calls) == 1
    message = (
        "Attention mass runs on torch: triton failed (RuntimeError: Failed to find C compiler.)."
    )
    assert [record.getMessage() for record in caplog.records] == [message]


def test_too_little_memory_is_not_a_failure_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    case = make_case([decode_level([4, 9, 4], 20)], make_shape())
    backend = TorchCascade()
    plan = backend.plan_mass(case.layout, case.shape)
    use_kernel(monkeypatch, full)

    with pytest.raises(torch.OutOfMemoryError):
        backend.mass(plan, case.q, case.k_pool, torch.zeros(3, 4))
    assert backend._mass_kernel.runs(case.q)


def test_the_kernel_plans_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[MassWork] = []

    def kernel(work: MassWork, q: Tensor, k_pool: Tensor, lse: Tensor, heads: Any) -> Tensor:
        seen.append(work)
        return torch.ones(len(k_pool))

    case = make_case([decode_level([4, 9, 4], 20)], make_shape())
    backend = TorchCascade()
    plan = backend.plan_mass(case.layout, case.shape)
    use_kernel(monkeypatch, kernel)

    for _ in range(2):
        mass = backend.mass(plan, case.q, case.k_pool, torch.zeros(3, 4))
        assert torch.equal(mass, torch.ones(len(case.k_pool)))
    assert seen[0] is seen[1] and not plan.tasks


@pytest.mark.slow
def test_a_cpu_never_imports_triton() -> None:
    code = (
        "import sys, torch\n"
        "from test_kernels import decode_level, make_case, make_shape\n"
        "from arbor.kernels.attention.torch_cascade import TorchCascade\n"
        "case, backend = make_case([decode_level([4, 9], 20)], make_shape()), TorchCascade()\n"
        "plan = backend.plan(case.layout, case.shape)\n"
        "_, lse = backend.run(plan, case.q, case.k_pool, case.v_pool)\n"
        "backend.mass(plan, case.q, case.k_pool, lse)\n"
        "assert 'arbor.kernels.attention.triton_mass' not in sys.modules\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", code], cwd=CHILD.parents[1], capture_output=True, text=True
    )

    assert done.returncode == 0, done.stderr
