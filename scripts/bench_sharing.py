"""Branches over one prefix in RKSC's setting: time and KV bytes of four ways to hold the prefix.

    python scripts/bench_sharing.py --size 5m --prefixes 64 128 256 512 1024 --branches 2 8
        --rounds 5 --csv rows.csv
    python scripts/bench_sharing.py --model ./m.gguf --dataset gsm8k.jsonl --task gsm8k

The model is a random one (`--size`) whose tokens repeat, or `--model` over the prompts of problems,
one after another. Each branch is the prefix, a suffix of its own and t greedy tokens (arXiv
2606.09937, section 2.1, with t = 8). The arms, on the same weights and kernels:

    unshared    every branch runs the prefix itself, into slots of its own ("No-KV" there)
    copied      the prefix runs once, and its K and V are copied for every branch (their cache)
    shared      the prefix runs once, every branch names its slots, and each row reads it by itself
    cascade     the same, and it is read once for all rows (a level of the cascade)

The prefill is timed with the decoding. Arms run in turn within each round; a time is the median of
the rounds, in seconds of CPU time on a CPU and of wall time on a GPU. All arms must give the same
tokens.

Two models of the time are fitted to the medians by least squares without negative terms: the
paper's (its appendix A; A = B for unshared, else 1; P = B s for shared arms, else 0)

    T = alpha A n^2 + beta P + gamma B t + delta

and one with the term it leaves out, a prefill's cost per token, and a constant per arm, the second
pass of the shared arms

    T = alpha A n^2 + beta (A n + B s) + gamma B t + delta_arm

From each follows a prefix length from which sharing pays, printed with the one that was met: the
first measured length at which the arm is not slower than unshared, interpolated on the line through
it and the one before.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from experiment_table import ExperimentTable, add_options
from model_and_problems import add_model_and_problems, problems_of, settings_of
from numpy.typing import NDArray
from random_llama import SIZES, prefix, random_llama

from arbor import Solver
from arbor.kernels.attention.torch_cascade import TorchCascade
from arbor.kernels.linear.layers import pack_linears
from arbor.memory.pool import KVPool, bytes_per_token
from arbor.model.plan import Piece, Segment, plan_forward
from arbor.model.runner import ModelRunner

ARMS = ("unshared", "copied", "shared", "cascade")
NO_LEVELS = 1 << 60  # key reads that no shared span saves


@dataclass(frozen=True)
class Shape:
    """One setting."""

    n: int
    branches: int
    suffix: int
    decoded: int

    @property
    def own(self) -> int:
        """Tokens of a branch after the prefix that are run."""
        return self.suffix + self.decoded

    def slots(self, arm: str) -> int:
        """Slots that an arm holds at its peak."""
        prefixes = {"unshared": self.branches, "copied": self.branches + 1}.get(arm, 1)
        return prefixes * self.n + self.branches * self.own


class Bench:
    """Runs the arms on one model."""

    def __init__(self, runner: ModelRunner, tokens: Sequence[int], most: int) -> None:
        """
        Args:
            runner: of the model.
            tokens: as many as the longest prefix has, or more.
            most: slots of the largest arm.
        """
        self.runner = runner
        self.tokens = tokens
        self.pool = KVPool(runner.layer_kv, most, runner.dtype, runner.device)

    def run(self, arm: str, shape: Shape) -> list[list[int]]:
        """The tokens that each branch decodes."""
        n, count = shape.n, shape.branches
        tokens = list(self.tokens[:n])
        suffixes = [
            [self.tokens[(7 * branch + 3 * at + 5) % n] for at in range(shape.suffix)]
            for branch in range(count)
        ]
        first = np.arange(n, dtype=np.int32)
        alone = arm in ("unshared", "copied")
        heads = [first + branch * n if alone else first for branch in range(count)]
        if arm == "copied":
            heads = [head + n for head in heads]
        own = np.arange(shape.slots(arm) - count * shape.own, shape.slots(arm), dtype=np.int32)
        tails = np.split(own, count)
        least = 0 if arm == "cascade" else NO_LEVELS
        if arm == "unshared":
            segments = [
                self._segment((), [*tokens, *suffix], 0, np.concatenate([head, tail]))
                for head, suffix, tail in zip(heads, suffixes, tails, strict=True)
            ]
        else:
            self._forward([self._segment((), tokens, 0, first)], NO_LEVELS)
            if arm == "copied":
                self._copy(first, heads)
            segments = [
                self._segment(self._context(head), suffix, n, tail)
                for head, suffix, tail in zip(heads, suffixes, tails, strict=True)
            ]
        logits = self._forward(segments, least)
        chosen = [logits.argmax(-1).tolist()]
        contexts = [self._context(head) for head in heads]
        for step in range(shape.suffix, shape.own - 1):
            segments = [
                self._segment(context, [token], n + step, tail, at=step)
                for context, token, tail in zip(contexts, chosen[-1], tails, strict=True)
            ]
            chosen.append(self._forward(segments, least).argmax(-1).tolist())
        return [list(branch) for branch in zip(*chosen, strict=True)]

    def seconds(self, arm: str, shape: Shape) -> float:
        """The time of `run`."""
        on_gpu = self.runner.device.type == "cuda"
        clock: Callable[[], float] = time.perf_counter if on_gpu else time.process_time
        if on_gpu:
            torch.cuda.synchronize()
        began = clock()
        self.run(arm, shape)
        if on_gpu:
            torch.cuda.synchronize()
        return clock() - began

    def _context(self, slots: NDArray[np.int32]) -> tuple[Piece, ...]:
        return (Piece(int(slots[0]), slots, np.arange(len(slots), dtype=np.int32)),)

    def _segment(
        self,
        context: tuple[Piece, ...],
        tokens: Sequence[int],
        start: int,
        slots: NDArray[np.int32],
        at: int = 0,
    ) -> Segment:
        """New tokens at `start` of the path, whose slots begin `at` places into `slots`."""
        end = at + len(tokens)
        positions = np.arange(start, start + len(tokens))
        return Segment(context, tokens, positions, slots[:end], slots[at:end], logits=1)

    def _forward(self, segments: Sequence[Segment], least: int) -> torch.Tensor:
        return self.runner.forward(plan_forward(segments, min_saved_reads=least), self.pool).logits

    def _copy(self, source: NDArray[np.int32], targets: Sequence[NDArray[np.int32]]) -> None:
        device = self.runner.device
        taken = torch.from_numpy(source).long().to(device)
        given = torch.from_numpy(np.concatenate(targets)).long().to(device)
        for tensor in (*self.pool.k, *self.pool.v):
            tensor[given] = tensor[taken].repeat(len(targets), 1, 1)


# Models of the time

Row = dict[str, Any]


def non_negative(columns: NDArray[np.float64], seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Least squares of relative errors without negative coefficients."""
    from scipy.optimize import nnls

    scale = 1 / seconds
    size = np.maximum(np.abs(columns * scale[:, None]).max(axis=0), 1e-300)
    found, _ = nnls(columns * scale[:, None] / size, seconds * scale)
    return np.asarray(found / size)


def fit(rows: Sequence[Row], arm: str) -> dict[str, float]:
    """Both models, fitted to one arm and to unshared.

    Returns:
        Their coefficients, the largest relative error of each, and the two predicted lengths for
        each number of branches.
    """
    some = [row for row in rows if row["arm"] in ("unshared", arm)]
    seconds = np.array([row["seconds"] for row in some])
    n, count, suffix, decoded = (
        np.array([row[name] for row in some], float)
        for name in ("prefix", "branches", "suffix", "decoded")
    )
    alone = np.array([row["arm"] == "unshared" for row in some])
    runs = np.where(alone, count, 1)
    ones = np.ones(len(some))
    paper = np.stack(
        [runs * n**2, np.where(alone, 0, count * suffix), count * decoded, ones], axis=1
    )
    full = np.stack(
        [runs * n**2, runs * n + count * suffix, count * decoded, alone * ones, ~alone * ones],
        axis=1,
    )
    found: dict[str, float] = {}
    for name, columns, terms in (
        ("paper", paper, ("alpha", "beta", "gamma", "delta")),
        ("full", full, ("alpha", "beta", "gamma", "delta_unshared", "delta_shared")),
    ):
        values = non_negative(columns, seconds)
        found |= {f"{name}_{term}": float(each) for term, each in zip(terms, values, strict=True)}
        found[f"{name}_error"] = float(np.abs(columns @ values / seconds - 1).max())
    for branches in sorted(set(count.astype(int).tolist())):
        mean = float(suffix.mean())
        saved = (branches - 1) * found["paper_alpha"]
        found[f"paper_n_{branches}"] = (
            math.sqrt(branches * found["paper_beta"] * mean / saved) if saved else math.inf
        )
        a, b = (branches - 1) * found["full_alpha"], (branches - 1) * found["full_beta"]
        more = max(0.0, found["full_delta_shared"] - found["full_delta_unshared"])
        found[f"full_n_{branches}"] = (
            (-b + math.sqrt(b * b + 4 * a * more)) / (2 * a) if a else more / b if b else math.inf
        )
        found[f"met_n_{branches}"] = break_even(rows, arm, branches)
    return found


def break_even(rows: Sequence[Row], arm: str, branches: int) -> float:
    """The prefix length at which an arm is as fast as unshared; infinite if it never is, 0 if it is
    at every measured length."""
    times = {
        (row["arm"], row["prefix"]): row["seconds"] for row in rows if row["branches"] == branches
    }
    before: tuple[int, float] | None = None
    for n in sorted({length for _, length in times}):
        more = times[arm, n] - times["unshared", n]
        if more <= 0:
            if before is None:
                return 0.0
            return float(before[0] + (n - before[0]) * before[1] / (before[1] - more))
        before = n, more
    return math.inf


def measured(bench: Bench, shapes: Sequence[Shape], rounds: int, arms: Sequence[str]) -> list[Row]:
    """A row for each setting and arm."""
    rows: list[Row] = []
    width = bytes_per_token(bench.runner.layer_kv, bench.runner.dtype)
    for shape in shapes:
        tokens = {arm: bench.run(arm, shape) for arm in arms}  # warm up
        taken: dict[str, list[float]] = {arm: [] for arm in arms}
        for _ in range(rounds):
            for arm in arms:
                taken[arm].append(bench.seconds(arm, shape))
        for arm in arms:
            low, median, high = np.percentile(taken[arm], (25, 50, 75)).tolist()
            rows.append(
                {
                    "prefix": shape.n,
                    "branches": shape.branches,
                    "suffix": shape.suffix,
                    "decoded": shape.decoded,
                    "arm": arm,
                    "seconds": round(median, 6),
                    "q1": round(low, 6),
                    "q3": round(high, 6),
                    "n": rounds,
                    "n_of": "rounds",
                    "kv_bytes": shape.slots(arm) * width,
                    "same_output": tokens[arm] == tokens[arms[0]],
                }
            )
    return rows


def of_size(given: argparse.Namespace, longest: int) -> tuple[ModelRunner, list[int]]:
    """A random model, and a prefix for it."""
    model = random_llama(given.size, getattr(torch, given.dtype or "float32")).to(given.device)
    if given.device == "cpu":
        pack_linears(model)
    vocabulary = int(SIZES[given.size]["vocab_size"])
    return ModelRunner(model, TorchCascade()), prefix(longest, vocabulary)


def of_problems(given: argparse.Namespace, longest: int) -> tuple[ModelRunner, list[int]]:
    """A pretrained model, and the prompts of as many problems as the longest prefix takes."""
    solver = Solver(
        **settings_of(given), device=given.device, dtype=given.dtype or "auto", threads=1
    )
    solver.load()
    tokens: list[int] = []
    for problem in problems_of(given, solver.task, longest):
        tokens += solver.engine.encode(solver.task.prompt(problem))
        if len(tokens) >= longest:
            return solver.engine.runner, tokens[:longest]
    raise SystemExit(f"the prompts have {len(tokens)} tokens: shorten --prefixes")


def main() -> None:
    """Measure, fit and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add_model_and_problems(parser)
    parser.set_defaults(model=None)
    parser.add_argument("--size", choices=sorted(SIZES), default="5m", help="without --model")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="float32; --model's own")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--prefixes", type=int, nargs="+", default=(64, 128, 256, 512, 1024))
    parser.add_argument("--branches", type=int, nargs="+", default=(2, 8))
    parser.add_argument("--suffix", type=int, default=16)
    parser.add_argument("--decoded", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    add_options(parser)
    given = parser.parse_args()
    torch.set_num_threads(1)
    shapes = [
        Shape(n, branches, given.suffix, given.decoded)
        for n in sorted(given.prefixes)
        for branches in given.branches
    ]
    most = max(shape.slots(arm) for shape in shapes for arm in ARMS)
    longest = max(given.prefixes)
    runner, tokens = of_problems(given, longest) if given.model else of_size(given, longest)
    bench = Bench(runner, tokens, most)
    name = Path(given.model).name if given.model else given.size
    rows = measured(bench, shapes, given.rounds, ARMS)
    table = ExperimentTable(given)
    for row in rows:
        table.show({"model": name, "dtype": str(runner.dtype).removeprefix("torch."), **row})
    for arm in ARMS[1:]:
        found = fit(rows, arm)
        print(
            f"\n{arm}: largest error of the paper's model {found['paper_error']:.0%}, "
            f"of the full one {found['full_error']:.0%}"
        )
        for model in ("paper", "full"):
            terms = {key: f"{value:.3g}" for key, value in found.items() if key.startswith(model)}
            print("  " + ", ".join(f"{key} {value}" for key, value in terms.items()))
        for branches in sorted(set(given.branches)):
            if branches > 1:
                names = ("paper_n", "full_n", "met_n")
                paper, full, met = (found[f"{name}_{branches}"] for name in names)
                print(
                    f"  B {branches:3}: pays from {paper:.0f} tokens by the paper's model, "
                    f"{full:.0f} by the full one; met at {met:.0f}"
                )


if __name__ == "__main__":
    main()
