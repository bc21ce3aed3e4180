"""The NEON path of the native kernels, run by an emulator, and how a compiler's machine is found.

The kernels for aarch64 are compiled by a cross-compiler and run by QEMU, in a process that copies
every job's memory (`support.native_runner`); the checks are those of the other instruction sets.
They are slow tests, of 45 s of CPU time with the compilation, and are skipped without
``apt-get install g++-aarch64-linux-gnu qemu-user`` (Debian), which .ci/run leaves out to be short:
run them after a change of kernels/csrc. The default tests compare the names that both machines
define. An emulator shows no speed.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_deterministic
import test_int8
import test_native
import test_rotary
import torch
from support import native_runner
from support.native_runner import RunnerLibrary, build_runner, in_use
from test_kernels import decode_level, make_case, make_level, make_shape
from test_native import DTYPES
from torch import Tensor, nn

from arbor.kernels import native
from arbor.kernels.attention.native_cascade import NativeCascade
from arbor.kernels.fused.parts import ACTIVATIONS, NORM_FORMS
from arbor.kernels.fused.rotary import ROTARY_FORMS
from arbor.kernels.linear.layers import PackedLinear
from arbor.kernels.native import native_library
from arbor.kernels.native_heads import head_moves, held_by_head, shared_moves

ROOT = Path(__file__).parents[1]
BUILD = runpy.run_path(str(ROOT / "kernels/csrc/build.py"))
CROSS, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
LIBRARIES = "/usr/aarch64-linux-gnu"  # of the cross-compiler
# an emulated CPU per instruction set: the oldest, and one with every extension
CPUS = {"neon": "cortex-a53", "neon_bf16": "max"}


# Which sources a compiler gets


def compiler_for(triple: str, folder: Path) -> str:
    """A compiler of some machine, as far as it is asked for its target."""
    path = folder / f"{triple}-g++"
    path.write_text(f"#!/bin/sh\necho {triple}\n", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("triple", "machine"),
    [
        ("x86_64-linux-gnu", "x86_64"),
        ("x86_64-apple-darwin22.6.0", "x86_64"),
        ("aarch64-linux-gnu", "aarch64"),
        ("aarch64-unknown-linux-musl", "aarch64"),
        ("arm64-apple-darwin23.6.0", "aarch64"),
    ],
)
def test_the_target_of_a_compiler_names_the_sources(
    triple: str, machine: str, tmp_path: Path
) -> None:
    assert BUILD["target"](compiler_for(triple, tmp_path)) == machine
    sources = BUILD["FLAGS"][machine]
    assert all((ROOT / f"kernels/csrc/{name}.cpp").exists() for name in sources)


@pytest.mark.parametrize("triple", ["riscv64-linux-gnu", "i686-linux-gnu", "aarch64_be-linux-gnu"])
def test_other_machines_have_no_kernels(triple: str, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=f"{triple}; there are kernels for x86_64, aarch64"):
        BUILD["build"](tmp_path / "out.so", command=compiler_for(triple, tmp_path))


def test_an_installation_does_not_take_a_compiler_for_another_machine(tmp_path: Path) -> None:
    here = BUILD["SAME"].get(os.uname().machine, os.uname().machine)
    other = "aarch64" if here == "x86_64" else "x86_64"
    settings = {**os.environ, "CXX": compiler_for(f"{other}-linux-gnu", tmp_path)}
    command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", str(tmp_path)]

    done = subprocess.run(command, cwd=ROOT, env=settings, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    assert f"compiles for {other}, and this is {here}" in done.stderr
    assert not list(tmp_path.rglob("*.so"))


def test_every_instruction_set_has_a_source_and_a_name() -> None:
    sources = {name for flags in BUILD["FLAGS"].values() for name in flags}

    assert sources == {"library", *native.SETS}


def vector_functions(header: str) -> set[tuple[str, ...]]:
    """Result, name and types of the arguments of what the kernels call, not of helpers."""
    text = (ROOT / f"kernels/csrc/{header}.h").read_text(encoding="utf-8")
    found = set()
    for result, name, given in re.findall(r"^inline (\w+) (operator.|\w+)\(([^)]*)\)", text, re.M):
        types = [re.sub(r"\s*\w+$", "", each.strip()) for each in given.split(",")]
        own = any(re.search(r"__m|x\d_t", each) for each in (result, *types))
        if not own and not re.search(r"transpose\d", name):
            found.add((result, name, *types))
    return found


def test_both_machines_define_the_same_functions() -> None:
    functions = vector_functions("vector_x86")
    common = vector_functions("vector")  # with loops, for machines that have no instruction

    assert vector_functions("vector_neon") - common == functions - common
    assert len(functions) > 25


# The runner, on this machine


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunnerLibrary]:
    """The library of this machine in a process of its own."""
    library, compiler = native_library(), BUILD["compiler"]()
    if library is None or compiler is None:
        pytest.skip("the library is not built, or there is no compiler")
    runner = tmp_path_factory.mktemp("runner") / "runner"
    build_runner(compiler, runner)
    there = RunnerLibrary([str(runner)], native.FILE, library.name)
    yield there
    there.close()


def results(seed: int) -> list[Tensor]:
    """What every function of the library gives for some numbers."""
    case = test_native.random_case(seed)
    coded, _ = test_int8.stored_case(case)
    backend, found = NativeCascade(), []
    for each in (case, coded):
        plan = backend.plan(each.layout, each.shape)
        found += backend.run_observed(plan, each.q, each.k_pool, each.v_pool, each.sinks)
    torch.manual_seed(seed)
    dtype = DTYPES[seed % 2]
    x, layer = torch.randn(9, 100).to(dtype), nn.Linear(100, 77).to(dtype)
    ops = test_native.native_ops()
    found += [PackedLinear(layer, kind)(x) for kind in ("native", "int8")]
    found += [ops.rms_norm(x, x[0], 1e-6, NORM_FORMS[seed % 3])]
    found.append(ops.gated(x[:, :50], x[:, 50:], ACTIVATIONS[seed % 2]))
    form, kv = ROTARY_FORMS[seed % len(ROTARY_FORMS)], torch.randn(2, 4, 2, 32).to(dtype)
    cos, sin = test_rotary.tables(4, 32, form, dtype)
    pools, slots = torch.zeros(2, 12, 2, 40).to(dtype), torch.tensor([7, 9, 2, 9])
    k_pool, v_pool = pools[0][..., :32], pools[1][..., 4:36]
    found.append(
        test_rotary.native_rotary().rotate_and_write(
            kv[0], kv[0], kv[1], cos, sin, form, (k_pool, v_pool), slots
        )
    )
    codes = torch.zeros(10, 2, 34, dtype=torch.int8)
    test_int8.store(codes, slots, kv[1])
    scores = torch.rand(3, 150).round(decimals=1).numpy()  # many are equal
    protected, sizes, lose = np.arange(150) % 7 == seed, np.array([90, 60]), np.array([50, 20])
    moves = head_moves(scores, protected, sizes, lose)
    assert moves is not None
    found += map(torch.from_numpy, moves)
    own = np.arange(4, dtype=(np.int16, np.int32)[seed % 2])[:, None]
    holder = np.where(np.arange(150) % 5 == 0, own[::-1], own)
    scores, keep = np.concatenate([scores, scores[:1]]), sizes - lose
    held = held_by_head(holder, sizes)
    assert held is not None
    for of, competes, pools_of in ((holder, False, 1), (holder, True, 1), (None, True, 2)):
        has = held if of is not None else np.tile(sizes, (4, 1))
        given = (of, protected, sizes, keep, np.minimum(keep // 4, has), has)
        if not competes:
            given = (of, protected, sizes, keep, np.tile(keep, (4, 1)), has)
        shared = shared_moves(scores, *given, pools_of, pools_of, competes)
        assert shared is not None
        found += map(torch.from_numpy, shared)
    return [*found, torch.from_numpy(held), pools, codes]


@pytest.mark.parametrize("seed", range(6))
def test_the_runner_gives_the_bits_of_the_library(here: RunnerLibrary, seed: int) -> None:
    expected, calls = results(seed), here.calls

    with in_use(here):
        found = results(seed)

    assert here.calls == calls + 17, "of its own"
    assert all(map(torch.equal, found, expected))


def test_the_runner_has_the_layout_of_this_python(here: RunnerLibrary) -> None:
    assert here.layout == native._layout()


# NEON, emulated


@pytest.fixture(scope="module")
def built() -> tuple[Path, Path]:
    """Library and runner for aarch64, compiled once for these sources, whichever process asks."""
    missing = [name for name in (CROSS, EMULATOR) if shutil.which(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    version = subprocess.run([CROSS, "--version"], check=True, capture_output=True).stdout
    sources = [*sorted((ROOT / "kernels/csrc").glob("*.*")), native_runner.SOURCE]
    digest = hashlib.sha256(b"".join([version, *(path.read_bytes() for path in sources)]))
    folder = ROOT / "build" / f"aarch64-{digest.hexdigest()[:16]}"
    library, runner = folder / "libarbor_native.so", folder / "runner"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            build_runner(CROSS, runner)
            BUILD["build"](library, command=CROSS)
    return library, runner


def emulated(built: tuple[Path, Path], cpu: str, name: str = "") -> RunnerLibrary:
    library, runner = built
    return RunnerLibrary([EMULATOR, "-cpu", cpu, "-L", LIBRARIES, str(runner)], library, name)


@pytest.fixture(scope="module", params=CPUS)
def neon(request: pytest.FixtureRequest, built: tuple[Path, Path]) -> Iterator[RunnerLibrary]:
    """An instruction set of aarch64, in use by everything that asks for the library."""
    library = emulated(built, CPUS[request.param], request.param)
    with in_use(library):
        yield library
    library.close()


@pytest.mark.slow
def test_the_best_instruction_set_of_an_emulated_cpu_is_taken(built: tuple[Path, Path]) -> None:
    for name, cpu in CPUS.items():
        library = emulated(built, cpu)
        assert (library.name, library.layout) == (name, native._layout())
        library.close()
    with pytest.raises(RuntimeError, match="ended with 1"):
        emulated(built, "cortex-a53", "neon_bf16")


CHECKS: list[tuple[Callable[..., None], tuple[Any, ...]]] = [
    *((test_native.test_attention_agrees_with_the_reference, (seed,)) for seed in range(40)),
    *((test_native.test_mass_comes_along_with_the_attention, (seed,)) for seed in range(6)),
    *(
        (test_native.test_a_row_has_the_same_bits_in_every_batch_and_division_into_levels, each)
        for each in ((32, torch.float32), (64, torch.bfloat16), (256, torch.float32))
    ),
    *(
        (test_native.test_a_token_of_a_prompt_has_the_bits_of_one_that_is_decoded, (window, dtype))
        for window in (None, 20)
        for dtype in DTYPES
    ),
    *(
        (test_native.test_products_agree_and_a_row_keeps_its_bits, (size, dtype))
        for size in ((100, 77), (33, 1), (1, 16), (31, 200))
        for dtype in DTYPES
    ),
    *((test_native.test_products_of_small_whole_numbers_are_exact, (dtype,)) for dtype in DTYPES),
    *((test_native.test_bfloat16_is_widened_exactly, (seed,)) for seed in range(4)),
    (test_native.test_keys_far_below_the_largest_logit_weigh_nothing, ()),
    (test_native.test_results_are_rounded_to_the_nearest_even_number_and_nan_stays, ()),
    *(
        (test_native.test_norms_agree_with_float64, (width, form, dtype))
        for width in (1, 15, 64, 250)
        for form in NORM_FORMS
        for dtype in DTYPES
    ),
    *(
        (test_native.test_gated_activations_agree_with_float64, (activation, dtype))
        for activation in ACTIVATIONS
        for dtype in DTYPES
    ),
    *(
        (test_rotary.test_the_kernel_has_the_bits_of_torch, (form, dtype, size))
        for form in ROTARY_FORMS
        for dtype in DTYPES
        for size in test_rotary.SIZES
    ),
    *(
        (test_rotary.test_keys_and_values_are_written_to_their_slots_alone, (form, dtype))
        for form in (ROTARY_FORMS[0], None)
        for dtype in DTYPES
    ),
    *(
        (test_int8.test_the_native_kernel_stores_the_bits_of_torch, (dim, dtype))
        for dim in (16, 48, 128, 256)
        for dtype in DTYPES
    ),
    *(
        (test_int8.test_the_native_kernel_stores_nan_where_torch_does, (wrong,))
        for wrong in (torch.nan, torch.inf, -torch.inf, 1e30)
    ),
    *(
        (test_int8.test_a_row_of_8_bit_kv_has_the_same_bits_in_every_batch_if_native, (seed, dtype))
        for seed in range(2)
        for dtype in DTYPES
    ),
    (test_int8.test_attention_mass_of_8_bit_kv_comes_along, ()),
    *(
        (test_deterministic.check, ("llama", (144, 173, 3), dtype, (2, 7), NativeCascade))
        for dtype in DTYPES
    ),
]
NAMES = sorted({check.__name__ for check, _ in CHECKS})


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_neon_passes_the_checks_of_the_other_instruction_sets(
    neon: RunnerLibrary, name: str
) -> None:
    calls = neon.calls

    for check, arguments in CHECKS:
        if check.__name__ == name:
            check(*arguments)

    assert neon.calls > calls


@pytest.mark.slow
def test_8_bit_kv_is_read_as_it_was_stored(neon: RunnerLibrary) -> None:
    for seed in range(10):
        test_int8.assert_reads_what_is_stored(test_native.random_case(seed), NativeCascade())


@pytest.mark.slow
def test_threads_leave_no_trace(neon: RunnerLibrary) -> None:
    shape = make_shape(num_kv_heads=4, num_qo_heads=8, head_dim_qk=64, head_dim_vo=64)
    levels = [make_level([(64, list(range(300)))], False), decode_level([20] * 64, 30)]
    case, layer = make_case(levels, shape), PackedLinear(nn.Linear(256, 640), "native")
    x = torch.randn(20, 256)
    expected, product = test_native.attend(case, levels, list(range(64))), layer(x)
    try:
        for threads in (2, 3, 5):
            torch.set_num_threads(threads)
            assert test_native.same(test_native.attend(case, levels, list(range(64))), expected)
            assert torch.equal(layer(x), product)
    finally:
        torch.set_num_threads(1)
