"""Weights in 8 bits against the model's own: answers, and the speed of decoding.

    python scripts/bench_int8_weights.py answers --task game24 --n 500 --csv rows.csv
    python scripts/bench_int8_weights.py decode --dtype float32 --rounds 7 --csv rows.csv

`answers`: problems solved with and without, paired: `tot` with 300
tokens on game24, greedy chains elsewhere; percent solved with a Clopper-Pearson 95 % interval, the
difference with a bootstrap one, and the percentage of trees that differ. `decode`: trees of
`bench_decode.py` by a random Llama of 100 million parameters; contestants take turns within a
round, thread CPU time, one thread; the median of the ratios of times to full precision with its
bootstrap 95 % interval.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from bench_decode import SHAPES, Arbor, generated, interval, timed
from bench_kv_int8 import answers, write
from experiment_table import add_options
from model_and_problems import add_model_and_problems, task_of
from random_llama import random_llama

from arbor.kernels.attention.native_cascade import NativeCascade
from arbor.kernels.linear.layers import encode_linears, pack_linears

Row = dict[str, Any]
# How a task is solved; others by one chain, which goes wrong as soon as a line is wrong.
SEARCHES: dict[str, Row] = {"game24": {}}
CHAIN: Row = {"controller": "chain", "most_tokens": None}


def decode_speed(dtype: str, shapes: list[str], rounds: int) -> Iterator[Row]:
    """Times of a decode with and without weights in 8 bits, by shape."""
    torch.set_num_threads(1)
    number: torch.dtype = getattr(torch, dtype)
    for shape in shapes:
        contestants = {}
        for name in ("auto", "int8"):
            model = random_llama("100m", number)
            if name == "int8":
                encode_linears(model)
            pack_linears(model, deterministic=True)
            contestants[name] = Arbor(model, shape, model.config.vocab_size, NativeCascade())
            timed(contestants[name])
        times: dict[str, list[float]] = {name: [] for name in contestants}
        for turn in range(rounds):
            order = list(contestants) if turn % 2 else list(contestants)[::-1]
            for name in order:
                times[name].append(timed(contestants[name]))
        ratio, low, high = interval(np.array(times["int8"]) / np.array(times["auto"]))
        speeds = {name: generated(shape) / float(np.median(each)) for name, each in times.items()}
        sizes = {name: each.engine.runner.weight_bytes for name, each in contestants.items()}
        yield {
            "case": f"{shape}, 100m, {dtype}",
            "arm": "int8 against auto",
            "unit": "time of int8 / time of auto",
            "value": round(ratio, 3),
            "value_low": round(low, 3),
            "value_high": round(high, 3),
            "n": rounds,
            "note": f"tokens per CPU second: auto {speeds['auto']:.1f}, int8 {speeds['int8']:.1f}; "
            f"bytes of weights: {sizes['auto']}, {sizes['int8']}",
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", choices=["answers", "decode"])
    add_model_and_problems(parser)
    parser.add_argument("--n", type=int, default=500, help="problems")
    parser.add_argument("--shapes", nargs="+", default=["F1", "F8", "F32"], choices=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    add_options(parser)
    args = parser.parse_args()
    if args.part == "answers":
        search = SEARCHES.get(task_of(args), CHAIN)
        rows, counted = answers(args, "weights", note=lambda found: "", **search), "problems"
    else:
        rows, counted = decode_speed(args.dtype, args.shapes, args.rounds), "rounds"
    write(args, rows, counted)


if __name__ == "__main__":
    main()
