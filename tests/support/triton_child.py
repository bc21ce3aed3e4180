"""The attention mass kernel without a GPU, in a process of its own: its results go out as JSON.

``interpret`` compares it with the reference in float64; ``TRITON_INTERPRET=1`` must be set, which
triton reads while it is imported. ``compile`` compiles it for a Hopper GPU.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from test_kernels import Case, decode_level, make_case, make_level, make_shape, random_layout

from arbor.kernels.attention.base import AttentionShape
from arbor.kernels.attention.mass_work import TILES, MassKernel, MassWork, mass_work
from arbor.kernels.attention.rowwise import RowwiseAttention
from arbor.kernels.attention.torch_cascade import TorchCascade

CPU = torch.device("cpu")


def prompt(rows: int, keys: int, **changes: object) -> Case:
    return make_case([make_level([(rows, list(range(9, 9 + keys)))], True)], make_shape(**changes))


def leaves(dtype: torch.dtype = torch.float32, **changes: object) -> Case:
    """Two shared levels, of which rows miss parts, over leaves of different lengths."""
    first = make_level([(1, list(range(900, 970))), (11, [])], False)
    second = make_level([(5, []), (7, list(range(130, 0, -1)))], False)
    own = decode_level([7, 3, 40, 40, 41, 1, 70, 2, 2, 64, 65, 2], 80)
    return make_case([first, second, own], make_shape(**changes), dtype)


def cases() -> dict[str, Case]:
    """Layouts and shapes by name."""
    found = {
        "one row": prompt(1, 1),
        "prompt": prompt(150, 150),
        "prompt of several items": prompt(530, 530, num_qo_heads=1, num_kv_heads=1),
        "after a context": prompt(70, 200),
        "leaves": leaves(),
        "soft cap": leaves(softcap=2.0),
        "float16": leaves(torch.float16),
        "heads of 24": leaves(head_dim_qk=24),
        "one head": leaves(num_qo_heads=1, num_kv_heads=1),
        "groups of 3": leaves(num_qo_heads=6),
        "groups of 7": leaves(num_qo_heads=7, num_kv_heads=1),
        "strided": make_case([decode_level([30] * 3, 40)], make_shape(), strided=True),
    }
    for window in (1, 5, 64, 65, 1000):
        found[f"window {window}"] = prompt(100, 170, window=window)
    for seed in range(6):
        windowed = seed % 3 == 2
        shape = make_shape(window=20) if windowed else make_shape()
        levels = random_layout(random.Random(seed), windowed)
        found[f"random {seed}"] = make_case(levels, shape, seed=seed)
    return found


def interpreted() -> dict[str, float]:
    """The largest error of each case, relative to the largest mass of a slot, at least 1."""
    from arbor.kernels.attention.triton_mass import triton_mass

    errors = {}
    for name, case in cases().items():
        lse, expected = exact(case)
        work = mass_work(case.layout, case.shape, CPU)
        errors[name] = error(triton_mass(work, case.q, case.k_pool, lse), expected)

    case = leaves()
    lse, _ = exact(case)
    work = mass_work(case.layout, case.shape, CPU)
    head = torch.tensor([1])
    _, expected = exact(case, head)
    errors["one of the heads"] = error(triton_mass(work, case.q, case.k_pool, lse, head), expected)

    lse[3:7] = torch.inf
    _, expected = exact(case, lse=lse)
    errors["rows that give none"] = error(triton_mass(work, case.q, case.k_pool, lse), expected)

    # a captured graph: more items than count, of rows and slots that do not exist
    beyond = torch.full((5, 6), 1 << 24, dtype=torch.int32)
    captured = replace(work, items=torch.cat([work.items, beyond]))
    errors["room for items"] = error(triton_mass(captured, case.q, case.k_pool, lse), expected)

    MassKernel.runs = lambda self, q: True  # type: ignore[method-assign]
    backend = TorchCascade()
    plan = backend.plan(case.layout, case.shape)
    errors["backend"] = error(backend.mass(plan, case.q, case.k_pool, lse), expected)
    assert "tasks" not in vars(plan), "matmuls were planned"
    return errors


def exact(
    case: Case, heads: Tensor | None = None, lse: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Logsumexp and mass in float64."""
    reference = RowwiseAttention()
    plan = reference.plan(case.layout, case.shape)
    q, k_pool, v_pool = (x.double() for x in (case.q, case.k_pool, case.v_pool))
    if lse is None:
        lse = reference.run(plan, q, k_pool, v_pool)[1]
    return lse, reference.mass(plan, q, k_pool, lse, heads)


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.max().clamp(min=1))


def compiled() -> dict[str, dict[str, Any]]:
    """Registers, bytes of spilled ones and tensor core use of the kernel by variant."""
    variants = [(torch.bfloat16, dim, tile) for dim in (64, 128, 256) for tile in TILES]
    found = {}
    for dtype, head_dim, tile in (*variants, (torch.float16, 128, TILES[-1])):
        softcap = 50.0 if head_dim == 256 else None  # as in Gemma 2
        shape = AttentionShape(32, 8, head_dim, head_dim, 0.1, softcap=softcap)
        found[f"{dtype} {head_dim} {tile}"] = compile_for_hopper(shape, dtype, tile)
    return found


def compile_for_hopper(shape: AttentionShape, dtype: torch.dtype, tile: int) -> dict[str, Any]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from arbor.kernels.attention.triton_mass import constants, launch_options, mass_kernel

    none = torch.empty(0)
    fixed = constants(MassWork(shape, none, none, none, none, tile))
    values = "*bf16" if dtype == torch.bfloat16 else "*fp16"
    types = {"q": values, "k_pool": values, "lse": "*fp32", "mass": "*fp32", "heads": "*i64"}
    types |= dict.fromkeys(("slots", "items", "count"), "*i32")
    types |= dict.fromkeys(("scaling", "softcap"), "fp32")
    types |= dict.fromkeys(fixed, "constexpr")
    signature = {name: types.get(name, "i32") for name in mass_kernel.arg_names}
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, (name, kind) in enumerate(signature.items())
        if kind.startswith("*") or name in ("q_row", "q_head", "k_slot", "k_head")
    }
    kernel = triton.compile(
        ASTSource(mass_kernel, signature, fixed, aligned),
        target=GPUTarget("cuda", 90, 32),
        options=launch_options(shape.head_dim_qk, dtype),
    )
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [str(tool), "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    resources = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert resources is not None, usage
    return {
        "registers": int(resources[1]),
        "spilled": int(resources[2]),
        "shared": kernel.metadata.shared,
        "tensor_cores": bool(re.search(r"wgmma|mma\.sync", kernel.asm["ptx"])),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(interpreted() if sys.argv[1] == "interpret" else compiled()))
