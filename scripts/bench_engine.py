"""What the engine costs in addition to the model: forks, and host work per decode step.

    python scripts/bench_engine.py --json out.json
    python scripts/bench_engine.py --only step --json out.json
    python scripts/bench_engine.py --only search --model MODEL --dataset gsm8k.jsonl --task gsm8k

One thread, thread CPU time, medians. Host work of a step is everything that is not inside the
model's layers: the step's plan (layout and the backend's own), slots, sampling, boundaries, events.
The engine's own Python (`--only step`) is what is left of that without sampling and the backend's
plan. It is measured with a model that computes nothing; to compare two commits, run this script
with either in PYTHONPATH, alternately. `--only search`: the share of `tot` searches, eight problems
at once and thoughts of up to 24 tokens, that is not inside the model's forwards.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from model_and_problems import SAPLING, add_model_and_problems, problems_of, settings_of
from random_llama import NoText, fixed_length, prefix, random_llama

from arbor import Solver
from arbor.engine import token_source
from arbor.engine.engine import Engine
from arbor.engine.operation import Growth
from arbor.engine.sampling import confidence, sample
from arbor.engine.stop_rule import StopRule
from arbor.kernels.attention.torch_cascade import TorchCascade
from arbor.kernels.linear.layers import pack_linears
from arbor.memory.pool import KVPool, LayerKV
from arbor.model.level_rule import LevelRule
from arbor.model.plan import CUDA_SAVED_READS, ForwardPlan
from arbor.model.runner import ForwardResult, ModelRunner
from arbor.model.sampling_params import Sampling
from arbor.retention.policy import POLICIES
from arbor.tasks.base import BlockLimits
from arbor.tree import Node, NodeState, ThoughtTree

PREFIX = 512


class Stopwatch:
    """Thread CPU seconds spent inside wrapped calls."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, function: Any) -> Any:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.thread_time() - began

        return timed


def make_engine(size: str, dtype: torch.dtype = torch.float32) -> tuple[Engine, int]:
    model = random_llama(size, dtype)
    engine = Engine(ModelRunner(model, TorchCascade()), NoText(), policy=POLICIES["lru"])
    pack_linears(model)
    return engine, model.config.vocab_size


def fork_cost(rounds: int) -> dict[str, float]:
    """Eight branches from a 512-token path: microseconds, and KV bytes that they took."""
    engine, vocabulary = make_engine("5m")
    tree = ThoughtTree(prefix(PREFIX, vocabulary))
    engine.open(tree, 4096)
    engine.extend(tree.root)
    before = engine.memory.used
    times = []
    for _ in range(rounds):
        began = time.perf_counter_ns()
        for _ in range(8):
            tree.fork(tree.root)
        times.append((time.perf_counter_ns() - began) / 1e3)
    taken = (engine.memory.used - before) * engine.memory.bytes_per_token
    return {
        "n": rounds,
        "fork_of_8_us_median": round(float(np.median(times)), 1),
        "fork_of_8_us_p95": round(float(np.percentile(times, 95)), 1),
        "kv_bytes": taken,
    }


def host_share(size: str, leaves: int, rounds: int, tokens: int = 32) -> dict[str, float]:
    """Part of a decode step that is not the model's layers."""
    engine, vocabulary = make_engine(size)
    backend = engine.runner.backend
    inside, planning = Stopwatch(), Stopwatch()
    engine.runner.model.forward = inside.around(engine.runner.model.forward)
    backend_plan = planning.around(backend.plan)
    object.__setattr__(backend, "plan", backend_plan)
    growth = Growth(0, Sampling(temperature=1.0, top_p=1.0), fixed_length(tokens))
    shares, steps_ms = [], []
    for index in range(rounds + 1):
        tree = ThoughtTree(prefix(PREFIX, vocabulary))
        engine.open(tree, PREFIX + leaves * tokens)
        engine.extend(tree.root)
        inside.seconds = planning.seconds = 0.0
        began = time.thread_time()
        engine.grow([(tree.root, leaves)], growth)
        total = time.thread_time() - began
        engine.finish()
        if index:
            shares.append((total - inside.seconds + planning.seconds) / total)
            steps_ms.append(1e3 * total / tokens)
    return {
        "n": rounds,
        "leaves": leaves,
        "step_ms_median": round(float(np.median(steps_ms)), 2),
        "host_share_median": round(float(np.median(shares)), 3),
        "host_share_max": round(float(np.max(shares)), 3),
    }


class NoModel:
    """A runner that computes nothing: each row's next token is 7, except where one is to end.

    Attributes:
        outside: time that is not the engine's.
        entries: of each forward, the engine's seconds so far, and its rows.
        ends: whether one row's next token is `EOS`, from `WARM` forwards on.
    """

    layer_kv = (LayerKV(1, 1, 1),)
    layer_count = 1
    dtype = kv_dtype = torch.float32
    device = torch.device("cpu")
    weight_bytes = 0
    graphs = None
    is_asynchronous = False

    def __init__(self, outside: Stopwatch) -> None:
        self.outside = outside
        self.entries: list[tuple[float, int]] = []
        self.ends = False
        self._answer = outside.around(self._logits)

    def forward(self, plan: ForwardPlan, pool: KVPool, *, mass: Any = None) -> ForwardResult:
        """Has the layout made, as a model would."""
        self.entries.append((time.thread_time() - self.outside.seconds, plan.rows))
        plan.layout(None)
        return ForwardResult(self._answer(len(plan.logit_rows)))

    def _logits(self, rows: int) -> torch.Tensor:
        logits = torch.full((rows, 16), -100.0)
        logits[:, 7] = 100.0
        late = len(self.entries) - WARM
        if self.ends and late > 0:
            # a row in the middle; the one that was to end before it is still there in this forward
            at = min(self.entries[0][1] // 2 + (late > 1), rows - 1)
            logits[at] = logits[at].roll(EOS - 7)
        return logits


WARM, EOS = 16, 3


def deep_tree(engine: Engine, leaves: int) -> tuple[ThoughtTree, list[Node]]:
    """A tree with KV whose leaves, a multiple of 8, have paths of 30 blocks, and these leaves.

    A prompt of 512 tokens, then blocks of 16: 10 that all leaves share, 8 times 10 that an eighth
    of them shares, and 9 of each leaf's own.
    """
    tree = ThoughtTree(prefix(PREFIX, 2048))
    engine.open(tree, PREFIX + 16 * (10 + 80 + 9 * leaves) + 80 * leaves)

    def chain(node: Node, blocks: int) -> Node:
        for _ in range(blocks):
            node = tree.fork(node)
            for _ in range(16):
                tree.append(node, 5)
            node.state = NodeState.CLOSED
        return node

    trunk = chain(tree.root, 10)
    branches = [chain(trunk, 10) for _ in range(8)]
    ends = [chain(branch, 9) for branch in branches for _ in range(leaves // 8)]
    for leaf in ends:
        engine.extend(leaf)
    return tree, ends


def engine_step(leaves: int, rounds: int, *, ending: bool, saved: int) -> list[float]:
    """The engine's own time of each of many decode steps, in milliseconds.

    Args:
        leaves: rows, each the only child of a leaf of `deep_tree`.
        rounds: how often they decode, after once to warm up.
        ending: whether a row ends with each step; steps count until a quarter of the rows has.
        saved: the engine's `LevelRule.min_saved_reads`.
    """
    outside = Stopwatch()
    runner: Any = NoModel(outside)
    engine = Engine(runner, NoText(), policy=POLICIES["lru"], levels=LevelRule(saved))
    _, ends = deep_tree(engine, leaves)
    runner.ends = ending
    stop = StopRule(NoText(), BlockLimits(("\n",), max_tokens=64, max_depth=64), (EOS,))
    growth = Growth(0, Sampling(arithmetic=False), stop)
    found: list[float] = []
    for index in range(rounds + 1):
        runner.entries.clear()
        with (
            patch.object(token_source, "sample", outside.around(sample)),
            patch.object(token_source, "confidence", outside.around(confidence)),
        ):
            children = engine.grow([(leaf, 1) for leaf in ends], growth)
        engine.forget(children)
        seconds, rows = np.array(runner.entries).T
        steps = 1e3 * np.diff(seconds)
        if index:
            found += steps[WARM + 1 :][rows[WARM + 2 :] >= 0.75 * leaves].tolist()
    return found


def step_cost(rounds: int) -> list[dict[str, float]]:
    """`engine_step` of small and large batches: medians and quartiles."""
    found = []
    for leaves, ending, saved in product((64, 256), (False, True), (0, CUDA_SAVED_READS)):
        times = engine_step(leaves, rounds, ending=ending, saved=saved)
        low, median, high = (round(float(q), 3) for q in np.percentile(times, (25, 50, 75)))
        found.append(
            {
                "leaves": leaves,
                "ending": ending,
                "min_saved_reads": saved,
                "n": len(times),
                "step_ms": median,
                "step_q1_ms": low,
                "step_q3_ms": high,
            }
        )
    return found


def search_share(given: argparse.Namespace) -> dict[str, Any]:
    """The share of searches outside the model's forwards, %, and their CPU seconds."""
    shares, seconds = [], []
    with Solver(**settings_of(given), threads=1, max_depth=3, step_tokens=24) as solver:
        solver.load()
        problems = problems_of(given, solver.task, 8)
        model = type(solver.engine.runner.model)
        for _ in range(given.rounds):
            forwards = Stopwatch()
            with patch.object(model, "forward", forwards.around(model.forward)):
                began = time.thread_time()
                solver.solve_batch(problems, concurrency=len(problems))
                seconds.append(time.thread_time() - began)
            shares.append(100 * (1 - forwards.seconds / seconds[-1]))
    return {
        "outside_percent": round(statistics.median(shares), 2),
        "outside_percent_largest": round(max(shares), 2),
        "cpu_s": round(statistics.median(seconds), 2),
        "n": given.rounds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", choices=["step", "search"], help="measure this only")
    parser.add_argument("--json", type=Path)
    add_model_and_problems(parser)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.only != "search" and (args.model, args.dataset, args.task) != (SAPLING, None, None):
        parser.error("--model, --dataset and --task are of --only search")
    result: dict[str, Any] = {}
    if args.only == "search":
        result["search"] = search_share(args)
    else:
        result["step"] = step_cost(args.rounds)
    if not args.only:
        result |= {
            "fork": fork_cost(200),
            "host_5m_32": host_share("5m", 32, args.rounds),
            "host_5m_8": host_share("5m", 8, args.rounds),
        }
    print(json.dumps(result, indent=1))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
