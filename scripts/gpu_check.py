"""Check arbor on a CUDA machine: agreement with the reference, losslessness, decode speed.

    python scripts/gpu_check.py --json gpu.json
    python scripts/gpu_check.py --device cpu    # small: shows only that the checks run

Prints one JSON line per check as it ends, so that a run cut short still reports what it saw. Exit
code 1 if any check failed. Checks: attention of every CUDA backend against the float64 reference on
random tree layouts; the engine on a random Llama in bfloat16, cascade against the plain torch
backend and against `transformers`' own forward; the same tree at a small budget; searches of the
built-in model from the problem to the answer, at full retention and at a quarter; decode speed
against `generate` with a batched cache (CUDA events, warm-up, interleaved rounds).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_decode import SHAPES, Arbor, Batched, generated, interval
from eval_policies import Blocks, compared, problems_of
from random_llama import NoText, fixed_length, prefix, random_llama
from transformers import LlamaConfig, LlamaForCausalLM

from arbor import Solver
from arbor.engine.engine import Engine
from arbor.engine.token_source import Growth
from arbor.kernels.base import AttentionBackend, AttentionShape
from arbor.kernels.reference import ReferenceAttention
from arbor.kernels.torch_cascade import TorchCascade
from arbor.model.plan import Piece, Segment, plan_forward
from arbor.model.runner import ModelRunner
from arbor.model.sampling_params import Sampling
from arbor.retention.policy import POLICIES
from arbor.tree import Node, ThoughtTree

SLOTS = {"cuda": 200_000, "cpu": 5_000}  # of the pool
SEARCHES = {"cuda": 50, "cpu": 1}  # problems


def backends(device: torch.device) -> dict[str, AttentionBackend]:
    """Every backend this machine can run."""
    found: dict[str, AttentionBackend] = {"torch": TorchCascade()}
    if device.type == "cuda" and find_spec("flashinfer") is not None:
        from arbor.kernels.flashinfer_cascade import FlashInferCascade

        found["flashinfer"] = FlashInferCascade(device)
    return found


def segments(
    rng: np.random.Generator, pool: int, root: int, fans: tuple[int, ...], own: int
) -> Any:
    """A random tree with decoding leaves and one prefill hole; slots scattered."""
    slots = rng.permutation(pool).astype(np.int32)
    used = 0

    def take(count: int) -> Any:
        nonlocal used
        used += count
        return slots[used - count : used]

    found: list[Segment] = []

    def grow(context: tuple[Piece, ...], depth: int, position: int) -> None:
        if depth == len(fans):
            tail = take(own)
            found.append(
                Segment(context, [1], np.array([position + own - 1]), tail, tail[-1:], logits=1)
            )
            return
        for _ in range(fans[depth]):
            count = int(rng.integers(5, 60))
            places = np.arange(position, position + count, dtype=np.int32)
            piece = Piece((depth, used), take(count), places)
            grow((*context, piece), depth + 1, position + count)

    top = Piece("root", take(root), np.arange(root, dtype=np.int32))
    grow((top,), 0, root)
    hole = take(33)
    found.append(Segment((top,), [1] * 33, np.arange(root, root + 33), hole, hole, logits=1))
    return found


def check_attention(backend: AttentionBackend, device: torch.device) -> dict[str, Any]:
    """Largest error against the reference over shapes of real models."""
    rng, slots = np.random.default_rng(0), SLOTS[device.type]
    worst, worst_lse = 0.0, 0.0
    for heads, kv_heads, dim, window, softcap in (
        (32, 8, 128, None, None),
        (28, 4, 128, None, None),
        (8, 4, 256, None, 50.0),
        (32, 8, 128, 64, None),
        (64, 8, 64, None, None),
    ):
        plan = plan_forward(segments(rng, slots, 700, (3, 2, 4), 9), min_saved_reads=0)
        shape = AttentionShape(heads, kv_heads, dim, dim, dim**-0.5, window, softcap)
        layout = plan.layout(window)
        torch.manual_seed(0)
        q = torch.randn(plan.rows, heads, dim, dtype=torch.bfloat16, device=device)
        k = torch.randn(slots + 1, kv_heads, dim, dtype=torch.bfloat16, device=device)
        v = torch.randn_like(k)
        out, lse = backend.run(backend.plan(layout, shape), q, k, v)
        reference = ReferenceAttention()
        right, right_lse = reference.run(
            reference.plan(layout, shape), q.cpu().double(), k.cpu().double(), v.cpu().double()
        )
        worst = max(worst, float((out.cpu().double() - right).abs().max()))
        worst_lse = max(worst_lse, float((lse.cpu().double() - right_lse).abs().max()))
    return {"ok": worst < 2e-2 and worst_lse < 2e-2, "error": worst, "lse_error": worst_lse}


def llama(layers: int, device: torch.device) -> Any:
    """Llama-3.1-8B with fewer layers, random bfloat16 weights; on a CPU the 5M model."""
    if device.type == "cpu":
        return random_llama("5m", torch.bfloat16)
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128_256,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    with device:
        model: Any = LlamaForCausalLM(config)
        return model.to(torch.bfloat16).eval()


def leaves_of(tree: ThoughtTree) -> list[Node]:
    """Blocks without children, in order."""
    return [node for node in tree if not node.children]


def first_differences(first: ThoughtTree, second: ThoughtTree) -> list[tuple[list[int], int, int]]:
    """Per differing block of two trees: common tokens after the prompt, and the two tokens."""
    found = []
    for one, other in zip(first, second, strict=True):
        paths = [
            [token for node in leaf.path[1:] for token in node.tokens] for leaf in (one, other)
        ]
        pairs = zip(*paths, strict=False)
        at = next((place for place, (a, b) in enumerate(pairs) if a != b), None)
        if at is not None:
            found.append((paths[0][:at], paths[0][at], paths[1][at]))
    return found


def engine_agrees(seen: dict[str, Any]) -> bool:
    """Whether every difference of `check_engine` is rounding: 5 % of the largest logit."""
    most = 0.05 * max(1.0, seen["logit_scale"])
    return all(seen[name] < most for name in ("logit_error", "tie_gap", "budget_logit_error"))


def check_engine(backend: AttentionBackend, device: torch.device) -> dict[str, Any]:
    """A prompt against the model's own forward, and a grown tree at a small budget against itself.

    `tie_gap` is the largest difference between the logits of two tokens where the trees go apart:
    rounding may decide between equals. `budget_logit_error` is over the leaves with the same path.
    """
    model = llama(4, device)
    prompt = prefix(300, 1000)
    seen: dict[str, Any] = {}

    def tree_at(slots: int) -> tuple[ThoughtTree, torch.Tensor]:
        tree = ThoughtTree(prompt)
        engine.open(tree, slots)
        engine.extend(tree.root)
        growth = Growth(1, Sampling(0), fixed_length(24))
        first = engine.grow([(tree.root, 3)], growth)
        leaves = engine.grow([(leaf, 2) for leaf in first], growth)
        return tree, engine.ask(leaves, [[5, 6]] * len(leaves))

    with torch.inference_mode():
        whole = [*prompt, *([7] * 40)]
        right = model(torch.tensor([whole], device=device), logits_to_keep=1).logits[0, -1].float()
        engine = Engine(ModelRunner(model, backend), NoText(), policy=POLICIES["lru"], debug=True)
        tree = ThoughtTree(prompt)
        engine.open(tree, 4096)
        engine.extend(tree.root)
        mine = engine.ask([tree.root], [[7] * 40])[0]
    seen["logit_error"] = float((mine - right.to(mine.device)).abs().max())
    seen["logit_scale"] = float(right.abs().max())
    full, full_logits = tree_at(4096)
    small, small_logits = tree_at(300 + 2 * 24 + 2 * 24)
    differences = first_differences(full, small)
    engine.open(ThoughtTree(prompt[:-1]), 4096)
    engine.extend(engine.tree.root)
    gaps = [0.0]
    for begin, first, second in differences:
        logits = engine.ask([engine.tree.root], [[prompt[-1], *begin]])[0]
        gaps.append(float((logits[first] - logits[second]).abs()))
    same = [
        index
        for index, (one, other) in enumerate(zip(leaves_of(full), leaves_of(small), strict=True))
        if [node.tokens for node in one.path] == [node.tokens for node in other.path]
    ]
    errors = (full_logits[same] - small_logits[same]).abs()
    seen["same_tokens_at_small_budget"] = not differences
    seen["tie_gap"] = max(gaps)
    seen["budget_logit_error"] = float(errors.max()) if same else 0.0
    seen["ok"] = engine_agrees(seen)
    return seen


def check_search(name: str, device: torch.device) -> dict[str, Any]:
    """Problems of game24 solved by the built-in model, at full retention and a quarter of its peak.

    In float32 where the backend has it.
    """
    blocks, dtype = Blocks(), "bfloat16" if name == "flashinfer" else "float32"
    with Solver(device=str(device), dtype=dtype, backend=name, listeners=(blocks.hear,)) as solver:
        chosen = problems_of(solver.task, "test", SEARCHES[device.type])
        full = [(problem, solver.solve(problem), blocks.take()) for problem in chosen]
        seen = compared(solver, blocks, full, 0.25)
    seen["solved"] = sum(bool(solution.correct) for _, solution, _ in full)
    return {"ok": seen["over_budget"] == 0 and 2 * seen["solved"] >= seen["n"], **seen}


def timed_ms(run: Callable[[], None], device: torch.device) -> float:
    """Milliseconds a call takes, by CUDA events where it runs on a GPU."""
    if device.type == "cpu":
        began = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - began)
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def check_speed(
    backend: AttentionBackend, device: torch.device, size: str, rounds: int
) -> dict[str, Any]:
    """Decode of F8, F32 and T4 (on a CPU F8) against `generate` with a batched cache."""
    result: dict[str, Any] = {"ok": True}
    for shape in ("F8", "F32", "T4") if device.type == "cuda" else ("F8",):
        ours: Any = random_llama(size, torch.bfloat16)
        theirs: Any = random_llama(size, torch.bfloat16)
        ours, theirs = ours.to(device), theirs.to(device)
        vocabulary = theirs.config.vocab_size
        arbor = Arbor(ours, shape, vocabulary, backend)
        batched = Batched(theirs, shape, vocabulary)
        batched.prompt = batched.prompt.to(device)
        times: dict[str, list[float]] = {"arbor": [], "batched": []}
        for round_index in range(rounds + 1):
            for label, contestant in (("arbor", arbor), ("batched", batched)):
                contestant.prepare()
                elapsed_ms = timed_ms(contestant.run, device)
                if round_index:
                    times[label].append(elapsed_ms)
        ratio = interval(np.array(times["batched"]) / np.array(times["arbor"]))
        median = float(np.median(times["arbor"]))
        result[shape] = {
            "ratio": ratio,
            "n": rounds,
            "ms_per_step": median / (SHAPES[shape][1] * len(SHAPES[shape][0])),
            "tok_per_s": 1e3 * generated(shape) / median,
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--size", default="100m", choices=["5m", "100m"])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("gpu_check: torch sees no CUDA device")
    what = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    rows: list[dict[str, Any]] = [{"device": what, "torch": torch.__version__}]
    print(json.dumps(rows[0]), flush=True)
    for name, backend in backends(device).items():
        checks = {
            "attention": partial(check_attention, backend, device),
            "engine": partial(check_engine, backend, device),
            "search": partial(check_search, name, device),
            "speed": partial(check_speed, backend, device, args.size, args.rounds),
        }
        for label, check in checks.items():
            row: dict[str, Any] = {"backend": name, "check": label}
            try:
                row |= check()
            except Exception:
                row |= {"ok": False, "error": traceback.format_exc()}
            rows.append(row)
            print(json.dumps(row), flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    sys.exit(any(row.get("ok") is False for row in rows))


if __name__ == "__main__":
    main()
