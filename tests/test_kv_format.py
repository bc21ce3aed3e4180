"""8-bit KV from the pool to the command line: smaller, lossy once, and the same at every budget."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.models import build
from support.run_cli import in_process
from support.slow_cases import every
from support.trees import Lab, grown, own_answers, relative_error

from arbor import Solver
from arbor.controllers.tot import ToT
from arbor.errors import UsageError
from arbor.kernels.int8 import decode, encode, stored_width
from arbor.kernels.native import native_library, without_native
from arbor.kernels.reference import ReferenceAttention
from arbor.kernels.rowwise import RowwiseAttention
from arbor.memory.kv_format import Int8KV, PlainKV, kv_format
from arbor.memory.pool import KVPool, LayerKV, bytes_per_token
from arbor.memory.stores import DiskStore, HostStore, Store
from arbor.run.solution import Solution

pytestmark = pytest.mark.usefixtures("loaded_once")

CPU = torch.device("cpu")
LAYERS = [LayerKV(1, 2, 1), LayerKV(2, 40, 64)]
PUZZLES = ("4 5 6 10", "1 2 3 4", "2 3 7 11")
SMALL = ToT(beam=3, width=4)

# Largest difference of logits to those of full precision, relative to the largest logit. A head of
# these models has 6 to 14 channels, one group; seen: 0.002 to 0.027.
TOLERANCE = 0.05


def pool_of(slots: int) -> KVPool:
    """A pool of 8-bit KV in which every slot was written."""
    pool = KVPool(LAYERS, slots, torch.int8, CPU)
    generator = torch.Generator().manual_seed(1)
    for number, layer in enumerate(LAYERS):
        sizes = layer.head_dim_qk, layer.head_dim_vo
        k, v = (torch.randn(slots, layer.num_kv_heads, n, generator=generator) for n in sizes)
        pool.write(number, torch.arange(slots), k, v)
    return pool


# The pool


def test_a_dtype_names_its_format() -> None:
    assert kv_format(torch.int8) == Int8KV()
    assert kv_format(torch.bfloat16) == PlainKV(torch.bfloat16)
    assert kv_format(torch.int8).dtype == torch.int8


def test_a_pool_holds_what_its_bytes_per_token_say() -> None:
    pool = pool_of(7)

    stored = sum(part.nbytes for part in (*pool.k, *pool.v))

    assert stored == 8 * pool.bytes_per_token  # the trash slot included
    assert pool.bytes_per_token == pool.numbers == bytes_per_token(LAYERS, torch.int8)
    assert pool.numbers == (4 + 3) + 2 * (44 + 68)


def test_a_written_token_is_quantised_once() -> None:
    pool = KVPool(LAYERS, 6, torch.int8, CPU)
    k, v = torch.randn(3, 2, 40), torch.randn(3, 2, 64)

    pool.write(1, torch.tensor([4, pool.trash, 0]), k, v)

    assert torch.equal(pool.k[1][[4, 0]], encode(k)[[0, 2]])
    assert torch.equal(pool.v[1][[4, 0]], encode(v)[[0, 2]])
    assert (pool.k[1][[1, 2, 3, 5]] == 0).all()


@pytest.mark.parametrize("kind", [HostStore, DiskStore])
def test_lower_tiers_move_codes_and_scales_bit_for_bit(kind: Any) -> None:
    pool = pool_of(12)
    before = [part.clone() for part in (*pool.k, *pool.v)]
    store: Store = kind(9, pool.numbers, pool.dtype)
    slots, records = np.array([7, 2, 11, 3], np.int32), np.array([8, 0, 3, 5], np.int32)

    assert store.write(records, pool.gather(slots)).all()
    pool.poison(slots)
    assert all(decode(part[7], part.shape[2] - 2).isnan().all() for part in (pool.k[0], pool.v[0]))
    rows, intact = store.read(records[::-1], CPU)
    assert intact.all()
    pool.scatter(slots[::-1].copy(), rows)

    for part, was in zip((*pool.k, *pool.v), before, strict=True):
        assert torch.equal(part, was)
    store.close()


# The engine


def lab_of(name: str, backend: Any = None, **settings: Any) -> Lab:
    """A lab with 8-bit KV that checks every invariant and poisons freed slots."""
    lab = Lab(build(name), backend, debug=True, **settings)
    lab.runner.kv_dtype = torch.int8
    return lab


@pytest.mark.parametrize(
    "name",
    ["llama", "llama_gqa7", "qwen3", "gemma2", "mistral_window", "gpt_oss", "deepseek_v3", "gpt2"],
)
def test_logits_are_near_those_of_full_precision(name: str) -> None:
    """Of leaves whose paths the pool holds in 8 bits; under a small budget too."""
    lab = lab_of(name)
    tree, answers = grown(lab)
    assert lab.memory.pool.k[0].dtype == torch.int8

    assert 0 < relative_error(answers, own_answers(build(name), tree)) < TOLERANCE


@pytest.mark.parametrize("backend", [RowwiseAttention, ReferenceAttention])
def test_backends_agree_on_a_tree(backend: Any) -> None:
    lab = lab_of("llama")
    tree, answers = grown(lab)

    other, same = grown(lab_of("llama", backend()))

    assert [node.tokens for node in other] == [node.tokens for node in tree]
    assert relative_error(same, answers) < 1e-4


def test_evicted_kv_that_is_computed_again_is_the_same() -> None:
    """Attention reads a token's own K and V in 8 bits too, in a prefill as in a decode step."""
    lab = lab_of("llama", RowwiseAttention())
    tree, answers = grown(lab)
    full = {node.id: lab.memory.pool.gather(node.span.slot) for node in tree}

    tight = lab_of("llama", RowwiseAttention())
    again, same = grown(tight, slots=40)

    assert [node.tokens for node in again] == [node.tokens for node in tree]
    assert relative_error(same, answers) < 1e-3
    checked = 0
    for node in again:
        held = node.span.exact
        if not held.any():
            continue
        codes = tight.memory.pool.gather(node.span.slot[held]).int()
        checked += len(codes)
        # layers sum in another order in another batch: a code may fall on the other side
        assert ((codes - full[node.id][held].int()).abs() > 1).float().mean() < 0.01
    assert checked > 10


# Solvers


def outline(solution: Solution) -> dict[str, Any]:
    """What a search found, to the last bit."""
    parts = asdict(solution)
    kept = ("answer", "text", "score", "path", "steps", "candidates", "votes")
    return {name: parts[name] for name in kept}


@pytest.fixture(scope="module")
def full() -> dict[str, Any]:
    """A search with all of its 8-bit KV."""
    with Solver(controller=SMALL, kv_dtype="int8", deterministic=True) as solver:
        return outline(solver.solve(PUZZLES[0]))


@pytest.mark.parametrize(
    "lower",
    every(2, [{}, {"host": "1MiB", "fetch": "always"}, {"disk": "60tok", "fetch": "always"}]),
)
def test_a_small_budget_gives_the_tree_of_a_full_one(
    full: dict[str, Any], lower: dict[str, Any]
) -> None:
    """Lossless with respect to 8-bit KV, bit for bit."""
    with Solver(
        controller=SMALL, kv_dtype="int8", deterministic=True, budget="125tok", debug=True, **lower
    ) as solver:
        solution = solver.solve(PUZZLES[0])

    assert outline(solution) == full
    moved = solution.metrics.tokens_fetched if lower else solution.metrics.tokens_recomputed
    assert moved > 0


def test_sapling_solves_puzzles_in_8_bits() -> None:
    with Solver(kv_dtype="int8") as solver:
        solved = [solver.solve(puzzle).correct for puzzle in PUZZLES]
        slots = solver.engine.memory.pool

    assert solved == [True, True, True]
    assert slots.bytes_per_token == 6 * 4 * 2 * stored_width(64)


def test_a_budget_in_bytes_holds_more_tokens_and_one_in_tokens_as_many() -> None:
    plans = {}
    for dtype in ("auto", "int8"):
        with Solver(kv_dtype=dtype) as solver:
            plans[dtype] = [solver.plan(PUZZLES[0], budget=each) for each in ("2MiB", "200tok")]

    (by_bytes, by_tokens), (bytes_8, tokens_8) = plans["auto"], plans["int8"]
    assert tokens_8.budget_tokens == by_tokens.budget_tokens == 200
    assert bytes_8.bytes_per_token == 3_264 and by_bytes.bytes_per_token == 12_288
    assert bytes_8.budget_tokens == (2 << 20) // 3_264
    assert by_bytes.budget_tokens == (2 << 20) // 12_288
    assert bytes_8.to_dict()["kv_dtype"] == "int8"
    assert "kv_dtype" not in by_bytes.to_dict()


def test_a_host_tier_in_bytes_holds_more_tokens() -> None:
    with Solver(kv_dtype="int8", budget=0.5, host="1MiB") as solver:
        assert solver.plan(PUZZLES[0]).host_tokens == (1 << 20) // 3_264


@pytest.mark.parametrize(
    "settings",
    [
        {"mode": "lossy", "budget": 0.5, "policy": "arborkv"},
        {"mode": "lossy", "budget": "300tok", "share": "similar"},
        pytest.param({"verifier": "cgee", "budget": 0.5}, marks=pytest.mark.slow),
        pytest.param({"share": "off", "budget": "150tok"}, marks=pytest.mark.slow),
        {"kv_probe": "8,4,2"},
    ],
    ids=lambda settings: ",".join(map(str, settings.values())),
)
def test_other_settings_work_with_it(settings: dict[str, Any]) -> None:
    with Solver(controller=SMALL, kv_dtype="int8", debug=True, **settings) as solver:
        first, second = solver.solve_batch(PUZZLES[:2])

    assert first.metrics.tokens_generated > 0 and second.metrics.tokens_generated > 0
    assert first.config["kv_dtype"] == "int8"


def test_beams_share_8_bit_kv() -> None:
    with Solver(kv_dtype="int8", debug=True) as solver, Solver() as other:
        found, expected = (
            each.generate("4 5 6 10\n", beams=3, max_tokens=8) for each in (solver, other)
        )

    assert found[0].text == expected[0].text
    assert found[0].score == pytest.approx(expected[0].score, abs=0.05)


def test_a_configuration_names_it_and_a_default_does_not() -> None:
    with Solver(kv_dtype="int8") as solver:
        config = solver.config
    assert config["kv_dtype"] == "int8"
    with Solver.from_config(config) as again:
        assert again.checkpoint.kv_dtype == "int8"
    with Solver() as plain:
        assert "kv_dtype" not in plain.config


@pytest.mark.parametrize(
    ("settings", "message", "hint"),
    [
        ({"kv_dtype": "int8", "device": "cuda"}, "runs on a CPU only", "--device cpu"),
        (
            {"kv_dtype": "int8", "backend": "flashinfer"},
            "--backend flashinfer does not read 8-bit KV",
            "--backend auto",
        ),
        ({"kv_dtype": "int8", "backend": "mine:Attention"}, "does not read", "--backend auto"),
    ],
)
def test_what_does_not_work_is_refused_by_name(
    settings: dict[str, Any], message: str, hint: str
) -> None:
    with pytest.raises(UsageError) as caught:
        Solver(**settings)

    assert caught.value.code == "kv-dtype"
    assert message in caught.value.message
    assert hint in caught.value.hint


@pytest.mark.parametrize("deterministic", [False, True])
def test_auto_selects_a_backend_that_reads_it(deterministic: bool) -> None:
    names = {}
    for native in (True, False):
        with nullcontext() if native else without_native():
            solver = Solver(kv_dtype="int8", deterministic=deterministic)
            names[native] = solver.checkpoint.backend_name(solver.describe())

    assert names[False] == ("rowwise" if deterministic else "torch")
    assert names[True] == ("native" if native_library() is not None else names[False])


def test_a_gpu_that_auto_found_is_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with Solver(kv_dtype="int8") as solver:
        monkeypatch.setattr(solver.checkpoint, "_device", torch.device("cuda", 0))
        with pytest.raises(UsageError, match="the device is cuda:0"):
            solver.load()


# The command line


def test_the_plan_says_that_it_is_lossy(capsys: pytest.CaptureFixture[str]) -> None:
    arbor = in_process(capsys)
    ran = arbor("solve", PUZZLES[0], "--set", "kv_dtype=int8", "--budget", "2MiB", "--dry-run")

    assert ran.code == 0
    assert "KV                int8, lossy: 3.19 KiB per token, scales included" in ran.out
    document = arbor("solve", PUZZLES[0], "--set", "kv_dtype=int8", "--dry-run", "--json").document
    assert document["kv_dtype"] == "int8" and document["bytes_per_token"] == 3_264


def test_a_trace_holds_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.arbor.jsonl"
    given = (
        "--set",
        "kv_dtype=int8",
        "--max-tokens",
        "60",
        "--budget",
        "0.5",
        "--trace",
        str(path),
    )
    ran = in_process(capsys)("solve", PUZZLES[0], *given, "-v")

    header = json.loads(path.read_text().splitlines()[0])
    assert header["config"]["kv_dtype"] == header["model"]["kv_dtype"] == "int8"
    assert header["kv"]["bytes_per_token"] == 3_264 and header["kv"]["kv_dtype"] == "int8"
    assert "KV int8, lossy" in ran.err


def test_an_unknown_dtype_is_an_error_of_usage(capsys: pytest.CaptureFixture[str]) -> None:
    arbor = in_process(capsys)
    assert arbor("solve", PUZZLES[0], "--set", "kv_dtype=int4").code == 2
    ran = arbor("solve", PUZZLES[0], "--set", "kv_dtype=int8", "--device", "cuda")
    assert ran.code == 2 and "--device cpu" in ran.err
