"""The attention mass kernel: interpreted on the CPU, compiled for Hopper, and where it is used."""

from __future__ import annotations

import importlib.metadata
import json
import os
import random
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_kernels import make_case, make_level, make_shape, random_layout

from arbor.kernels.attention.mass_work import ITEM_KEYS, ITEM_ROWS, mass_work
from arbor.kernels.attention.rowwise import RowwiseAttention

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

    expected = RowwiseAttention().plan(case.layout, shape).keys
    assert [sorted(slots) for slots in met] == [sorted(slots.tolist()) for slots in expected]


# Where the kernel is used


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
