"""8-bit KV from the pool to the command line: smaller, lossy once, and the same at every budget."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
import torch
from support.models import build
from support.slow_cases import every
from support.trees import Lab, grown, own_answers, relative_error

from arbor import Solver
from arbor.controllers.tot import ToT
from arbor.errors import UsageError
from arbor.kernels.attention.rowwise import RowwiseAttention
from arbor.memory.pool import KVPool, LayerKV, bytes_per_token
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


def test_a_pool_holds_what_its_bytes_per_token_say() -> None:
    pool = pool_of(7)

    stored = sum(part.nbytes for part in (*pool.k, *pool.v))

    assert stored == 8 * pool.bytes_per_token  # the trash slot included
    assert pool.bytes_per_token == pool.numbers == bytes_per_token(LAYERS, torch.int8)
    assert pool.numbers == (4 + 3) + 2 * (44 + 68)


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
    every(3, [{"host": "1MiB", "fetch": "always"}, {}, {"disk": "60tok", "fetch": "always"}]),
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


@pytest.mark.parametrize(
    ("settings", "message", "hint"),
    [
        (
            {"kv_dtype": "int8", "device": "cuda", "backend": "torch"},
            "on a GPU the package triton and --backend triton read 8-bit KV, not torch",
            "--backend triton",
        ),
        (
            {"kv_dtype": "int8", "device": "cpu", "backend": "triton"},
            "--backend triton does not read 8-bit KV",
            "--backend auto",
        ),
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
