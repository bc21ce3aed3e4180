"""KV or weights in 8 bits against the model's own: errors, answers, and the speed of decoding.

    python scripts/bench_int8.py errors --csv rows.csv
    python scripts/bench_int8.py answers --of weights --n 500 --csv rows.csv
    python scripts/bench_int8.py decode --of kv --dtype float32 --rounds 5 --csv rows.csv

`errors`: K and V of a model over problems and what it wrote, quantised as the pool does it and in
four other ways; RMS of the error in percent of the RMS of the numbers. `answers`: problems solved
with and without 8 bits, paired: `tot` with 300 tokens on game24, greedy chains elsewhere; percent
solved with a Clopper-Pearson 95 % interval, the difference with a bootstrap one, and the percentage
of trees that differ. `decode`: trees of `bench_decode.py` by a random Llama; contestants take turns
within a round, thread CPU time, one thread; the median of the ratios to full precision with its
bootstrap 95 % interval.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from bench_decode import SHAPES, Arbor, generated, rounds_of
from experiment_table import ExperimentTable, add_options
from model_and_problems import add_model_and_problems, problems_of, settings_of, task_of, tree_of
from random_llama import random_llama
from rounds import ratio_columns
from torch import Tensor

from arbor import Solver
from arbor.kernels.attention.native_cascade import NativeCascade
from arbor.kernels.int8 import MOST_CODE, decode, encode
from arbor.kernels.linear.layers import encode_linears, pack_linears
from arbor.measure.statistics import clopper_pearson, paired

Row = dict[str, Any]
CONTROLLER, MOST_TOKENS, AT_ONCE = "tot", 300, 8
SETTINGS = {"kv": "kv_dtype", "weights": "weights"}  # of `Solver`


def by_scale(x: Tensor, most: Tensor) -> Tensor:
    """Numbers as codes of -127 .. 127 of the magnitudes `most`, and back."""
    scale = (most / MOST_CODE).clamp_min(1e-30)
    return (x / scale).round().clamp(-MOST_CODE, MOST_CODE) * scale


# K or V of one layer [tokens, H_kv, D] -> what comes back
SCHEMES: dict[str, Callable[[Tensor], Tensor]] = {
    "groups of 32 channels": lambda x: decode(encode(x), x.shape[2]),
    "one scale per head": lambda x: by_scale(x, x.abs().amax(2, keepdim=True)),
    "one scale per token": lambda x: by_scale(x, x.abs().amax((1, 2), keepdim=True)),
    "one scale per channel": lambda x: by_scale(x, x.abs().amax(0, keepdim=True)),
    "one scale per tensor": lambda x: by_scale(x, x.abs().amax()),
}


def errors(args: argparse.Namespace) -> Iterator[Row]:
    """Errors of K and of V, over all layers and searches."""
    sums: dict[tuple[str, str], list[float]] = {}
    with Solver(**settings_of(args), controller=CONTROLLER) as solver:
        problems = problems_of(args, solver.task, args.n)
        for problem in problems:
            solver.solve(problem, max_tokens=MOST_TOKENS)
            pool = solver.engine.memory.pool
            used = np.flatnonzero(solver.engine.memory.table.references > 0)
            for kind, layers in (("K", pool.k), ("V", pool.v)):
                for layer in layers:
                    x = layer[torch.from_numpy(used)].float()
                    for scheme, there_and_back in SCHEMES.items():
                        both = sums.setdefault((kind, scheme), [0.0, 0.0])
                        both[0] += float((there_and_back(x) - x).square().sum())
                        both[1] += float(x.square().sum())
    for (kind, scheme), (error, size) in sums.items():
        value = 100 * (error / size) ** 0.5
        yield {
            "case": kind,
            "arm": scheme,
            "unit": "percent",
            "value": round(value, 4),
            "n": len(problems),
        }


def answers(args: argparse.Namespace) -> Iterator[Row]:
    """Shares solved in both ways, their paired difference, and the share of other trees."""
    task = task_of(args)
    whole = task == "game24"  # a chain goes wrong as soon as a line is wrong
    controller, most = (CONTROLLER, MOST_TOKENS) if whole else ("chain", None)
    case = f"{controller}, {most} tokens" if whole else f"{task}, {controller}"
    arms = {}
    for name in ("auto", "int8"):
        settings = settings_of(args) | {"controller": controller, SETTINGS[args.of]: name}
        with Solver(**settings, threads=1) as solver:
            problems = problems_of(args, solver.task, args.n)
            arms[name] = solver.solve_batch(problems, concurrency=AT_ONCE, max_tokens=most)
    n = len(problems)
    right = {name: [bool(each.correct) for each in found] for name, found in arms.items()}

    def row(arm: str, unit: str, value: float, ends: tuple[float, float], note: str = "") -> Row:
        shares = zip(("value", "value_low", "value_high"), (value, *ends), strict=True)
        columns = {name: round(100 * share, 2) for name, share in shares}
        return {"case": case, "arm": arm, "unit": unit, **columns, "n": n, "note": note}

    for name, found in arms.items():
        count = sum(right[name])
        note = f"KV {found[0].metrics.bytes_per_token} bytes per token" if args.of == "kv" else ""
        yield row(name, "percent solved", count / n, clopper_pearson(count, n), note)
    against = paired(right["int8"], right["auto"])
    only = f"only int8 {against.only_first}, only auto {against.only_second}"
    note = f"{only}, McNemar p {against.p:.3f}"
    both = "int8 against auto"
    yield row(both, "points", against.difference, against.interval, note)
    pairs = zip(arms["auto"], arms["int8"], strict=True)
    other = sum(tree_of(one) != tree_of(two) for one, two in pairs)
    yield row(both, "percent of trees that differ", other / n, clopper_pearson(other, n))


def decode_speed(args: argparse.Namespace) -> Iterator[Row]:
    """Times of a decode with and without 8 bits, by shape."""
    torch.set_num_threads(1)
    for shape in args.shapes:
        contestants = {}
        for name in ("auto", "int8"):
            model = random_llama(args.size, getattr(torch, args.dtype))
            if (args.of, name) == ("weights", "int8"):
                encode_linears(model)
                pack_linears(model, deterministic=True)
            contestants[name] = Arbor(model, shape, model.config.vocab_size, NativeCascade())
            if (args.of, name) == ("kv", "int8"):
                contestants[name].engine.runner.kv_dtype = torch.int8
        times = rounds_of(contestants, args.rounds)
        speeds = {name: generated(shape) / float(np.median(each)) for name, each in times.items()}
        weights = [each.engine.runner.weight_bytes for each in contestants.values()]
        kv = [each.kv_bytes() for each in contestants.values()]
        yield {
            "case": f"{shape}, {args.size}, {args.dtype}",
            "arm": "int8 against auto",
            "unit": "time of int8 / time of auto",
            **ratio_columns(times["int8"] / times["auto"], ("value", "value_low", "value_high")),
            "n": args.rounds,
            "note": f"tokens per CPU second: auto {speeds['auto']:.1f}, int8 {speeds['int8']:.1f}; "
            f"bytes of weights: {weights}, of KV: {kv}",
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", choices=["errors", "answers", "decode"])
    parser.add_argument("--of", choices=list(SETTINGS), default="kv", help="what has 8 bits")
    add_model_and_problems(parser)
    parser.add_argument("--n", type=int, default=500, help="problems")
    parser.add_argument("--shapes", nargs="+", default=["F8"], choices=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--size", default="100m", choices=["5m", "100m"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    add_options(parser)
    args = parser.parse_args()
    rows = {"errors": errors, "answers": answers, "decode": decode_speed}[args.part](args)
    table = ExperimentTable(args)
    for row in rows:
        note = row.pop("note", "")
        empty = dict.fromkeys(("value_low", "value_high"), "")
        counted = "rounds" if args.part == "decode" else "problems"
        table.show({"part": args.part, **empty, **row, "n_of": counted}, note)


if __name__ == "__main__":
    main()
