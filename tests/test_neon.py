"""The NEON path of the native kernels, run by an emulator, and how a compiler's machine is found.

The kernels for aarch64 are compiled by a cross-compiler and run by QEMU, in a process that copies
every job's memory (`support.native_runner`); the checks are those of the other instruction sets.
They are slow tests, of two minutes of CPU time with the compilation, and skipped without
``apt-get install g++-aarch64-linux-gnu qemu-user`` (Debian), which .ci/run leaves out to be short:
run them after a change of kernels/csrc. The default tests compare the names that both machines
define. An emulator shows no speed.
"""

from __future__ import annotations

import fcntl
import hashlib
import re
import runpy
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import test_blocks
import test_deterministic
import test_int8
import test_native
import test_native_choice
import test_rotary
import torch
from support import native_runner
from support.native_runner import RunnerLibrary, build_runner, in_use
from support.slow_cases import drawn
from test_kernels import decode_level, make_case, make_level, make_shape
from test_native import DTYPES
from test_sampling_reference import ROWS, SAMPLINGS
from torch import nn

from arbor.kernels import native
from arbor.kernels.attention.native_cascade import NativeCascade
from arbor.kernels.fused.parts import ACTIVATIONS, NORM_FORMS
from arbor.kernels.fused.rotary import ROTARY_FORMS
from arbor.kernels.linear.blocks import KINDS
from arbor.kernels.linear.layers import PackedLinear

ROOT = Path(__file__).parents[1]
BUILD = runpy.run_path(str(ROOT / "kernels/csrc/build.py"))
CROSS, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
LIBRARIES = "/usr/aarch64-linux-gnu"  # of the cross-compiler
# an emulated CPU per instruction set: the oldest, a later one, and one with every extension
CPUS = {"neon": "cortex-a53", "neon_dot": "neoverse-n1", "neon_bf16": "max"}


def test_the_runner_has_every_function_of_the_library() -> None:
    text = native_runner.SOURCE.read_text("utf-8")
    listed = text.split("CALLS[] = {")[1].split("}")[0]
    assert re.findall(r'"arbor_native_(\w+)"', listed) == list(native_runner.CALLS)

    functions = {f"arbor_native_{name}": SimpleNamespace() for name in native_runner.CALLS}
    native.Library(SimpleNamespace(arbor_native_run=SimpleNamespace(), **functions), "")


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
        (test_native_choice.test_draws_are_those_of_the_definition, case)
        for case in drawn(SAMPLINGS.values(), (50, 1025), ROWS, DTYPES)
    ),
    *((test_native_choice.test_sums_of_logits_are_those_of_float64, (rows, 50)) for rows in ROWS),
    *((test_blocks.test_weights_and_products_are_those_of_the_format, (kind,)) for kind in KINDS),
    *(
        (test_blocks.test_rows_wider_than_a_cache_have_the_bits_of_any_batch, (kind, dtype))
        for kind in ("Q4_K", "Q6_K", "Q5_0")
        for dtype in DTYPES
    ),
    (test_blocks.test_rows_end_within_a_block, ()),
    (test_blocks.test_numbers_of_any_size_meet_codes, ()),
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
