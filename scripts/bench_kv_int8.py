"""8-bit KV against the model's own: errors, answers, and the speed of decoding.

    python scripts/bench_kv_int8.py errors --csv rows.csv
    python scripts/bench_kv_int8.py answers --n 500 --csv rows.csv
    python scripts/bench_kv_int8.py decode --dtype float32 --rounds 5 --csv rows.csv

`errors`: K and V of a model over problems and what it wrote, quantised as the
pool does it and in four other ways; RMS of the error in percent of the RMS of the numbers.
`answers`: problems solved with and without 8-bit KV, paired (by default those of game24, by the
built-in model);
percent solved with a Clopper-Pearson 95 % interval, the difference with a bootstrap one, and the
percentage of trees that differ. `decode`: a prefix of 512 tokens and 8 branches of 128 (F8) of a
random Llama of 100 million parameters; contestants take turns within a round, thread CPU time, one
thread; the median of the ratios to full precision with its bootstrap 95 % interval.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from bench_decode import Arbor, generated, interval, timed
from experiment_table import ExperimentTable, add_options
from model_and_problems import add_model_and_problems, problems_of, settings_of, task_of
from random_llama import random_llama
from torch import Tensor

from arbor import Solver
from arbor.kernels.attention.native_cascade import NativeCascade
from arbor.kernels.attention.torch_cascade import TorchCascade
from arbor.kernels.int8 import MOST_CODE, decode, encode
from arbor.measure.statistics import clopper_pearson, paired
from arbor.run.solution import Solution

Row = dict[str, Any]
CONTROLLER, MOST_TOKENS, AT_ONCE = "tot", 300, 8


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


def outcomes(args: argparse.Namespace, settings: Row, most_tokens: int | None) -> list[Solution]:
    """The solutions of one arm."""
    with Solver(**settings_of(args), threads=1, **settings) as solver:
        problems = problems_of(args, solver.task, args.n)
        return solver.solve_batch(problems, concurrency=AT_ONCE, max_tokens=most_tokens)


def answers(
    args: argparse.Namespace,
    setting: str = "kv_dtype",
    *,
    controller: str = CONTROLLER,
    most_tokens: int | None = MOST_TOKENS,
    note: Callable[[Solution], str] = lambda found: (
        f"KV {found.metrics.bytes_per_token} bytes per token"
    ),
) -> Iterator[Row]:
    """Shares solved with a setting ``auto`` and ``int8``, and the paired difference.

    Args:
        args: the script's options: model, problems and how many.
        setting: of `Solver`.
        controller, most_tokens: of the searches.
        note: on an arm, made of its first solution.
    """
    case = controller if most_tokens is None else f"{controller}, {most_tokens} tokens"
    task = task_of(args)
    case = case if task == "game24" else f"{task}, {case}"
    arms = {
        name: outcomes(args, {"controller": controller, setting: name}, most_tokens)
        for name in ("auto", "int8")
    }
    n = len(arms["auto"])
    right = {name: [bool(each.correct) for each in found] for name, found in arms.items()}
    for name, found in arms.items():
        low, high = clopper_pearson(sum(right[name]), n)
        yield {
            "case": case,
            "arm": name,
            "unit": "percent solved",
            "value": round(100 * sum(right[name]) / n, 2),
            "value_low": round(100 * low, 2),
            "value_high": round(100 * high, 2),
            "n": n,
            "note": note(found[0]),
        }
    against = paired(right["int8"], right["auto"])
    low, high = against.interval
    yield {
        "case": case,
        "arm": "int8 against auto",
        "unit": "points",
        "value": round(100 * against.difference, 2),
        "value_low": round(100 * low, 2),
        "value_high": round(100 * high, 2),
        "n": n,
        "note": f"only int8 {against.only_first}, only auto {against.only_second}, "
        f"McNemar p {against.p:.3f}",
    }
    pairs = zip(arms["auto"], arms["int8"], strict=True)
    other = sum(tree_of(one) != tree_of(two) for one, two in pairs)
    low, high = clopper_pearson(other, n)
    yield {
        "case": case,
        "arm": "int8 against auto",
        "unit": "percent of trees that differ",
        "value": round(100 * other / n, 2),
        "value_low": round(100 * low, 2),
        "value_high": round(100 * high, 2),
        "n": n,
    }


def tree_of(solution: Solution) -> list[tuple[int | None, str]]:
    """Every block's parent and text."""
    blocks = solution.replay().blocks
    return [(blocks[number].parent, blocks[number].text) for number in sorted(blocks)]


def decode_speed(dtype: str, rounds: int) -> Iterator[Row]:
    """Times of a decode by backend, with and without 8-bit KV."""
    torch.set_num_threads(1)
    number: torch.dtype = getattr(torch, dtype)
    for backend in (NativeCascade, TorchCascade):
        contestants = {}
        for name in ("auto", "int8"):
            model = random_llama("100m", number)
            contestant = Arbor(model, "F8", model.config.vocab_size, backend())
            if name == "int8":
                contestant.engine.runner.kv_dtype = torch.int8
            contestants[name] = contestant
            timed(contestant)
        times: dict[str, list[float]] = {name: [] for name in contestants}
        for _ in range(rounds):
            for name, contestant in contestants.items():
                times[name].append(timed(contestant))
        ratio, low, high = interval(np.array(times["int8"]) / np.array(times["auto"]))
        speeds = {name: generated("F8") / float(np.median(each)) for name, each in times.items()}
        sizes = {name: contestant.kv_bytes() for name, contestant in contestants.items()}
        yield {
            "case": f"F8, 100m, {dtype}",
            "arm": backend.__name__,
            "unit": "time of int8 / time of auto",
            "value": round(ratio, 3),
            "value_low": round(low, 3),
            "value_high": round(high, 3),
            "n": rounds,
            "note": f"tokens per CPU second: auto {speeds['auto']:.1f}, int8 {speeds['int8']:.1f}; "
            f"KV bytes: {sizes['auto']}, {sizes['int8']}",
        }


def write(args: argparse.Namespace, rows: Iterator[Row], counted: str) -> None:
    """Print rows as they come, and append them to the table.

    Args:
        args: the script's options, with `part`.
        rows: measurements.
        counted: what their n counts.
    """
    table = ExperimentTable(args)
    for row in rows:
        full = {
            "part": args.part,
            **{name: row.get(name, "") for name in ("case", "arm", "unit")},
            **{name: row.get(name, "") for name in ("value", "value_low", "value_high", "n")},
            "n_of": counted,
        }
        print(", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
        table.add(full, row.get("note", ""))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", choices=["errors", "answers", "decode"])
    add_model_and_problems(parser)
    parser.add_argument("--n", type=int, default=500, help="problems")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    add_options(parser)
    args = parser.parse_args()
    if args.part == "errors":
        rows, counted = errors(args), "problems"
    elif args.part == "answers":
        rows, counted = answers(args), "problems"
    else:
        rows, counted = decode_speed(args.dtype, args.rounds), "rounds"
    write(args, rows, counted)


if __name__ == "__main__":
    main()
