"""Linear layers: the native kernels against torch and the libraries it packs weights for.

    python scripts/bench_linear.py --rows 128 512 2048 --rounds 25 --csv rows.csv --machine epyc

One thread, CPU time of that thread, contestants in turn. The ratio is the median over rounds of
contestant / native (above 1 = the native kernels are faster), with a 95 % bootstrap interval;
GFLOPS are of the median times.

Contestants: `native`; `onednn` and `mkl`, weights packed by these libraries; `dense`, F.linear. MKL
has float32 alone, and a library that this torch lacks is left out.
"""

from __future__ import annotations

import argparse
import copy
import sys
from functools import partial
from typing import Any

import numpy as np
import torch
from experiment_table import ExperimentTable, add_options
from rounds import RATIO, in_turn, ratio_columns
from torch import nn

from arbor.kernels.linear.layers import Packing, pack_linears
from arbor.kernels.native import native_library, native_state

CONTESTANTS: tuple[Packing, ...] = ("native", "onednn", "mkl", "dense")
SIZES = ("768x768", "768x2048", "2048x768")


def packed_layers(linear: nn.Linear) -> dict[str, nn.Module]:
    """The layer as each contestant computes it; without those that cannot."""
    found: dict[str, nn.Module] = {}
    for kind in CONTESTANTS:
        model = nn.Sequential(copy.deepcopy(linear))
        report = pack_linears(model, choose=kind)
        if kind == "dense" or kind in report.packed:
            found[kind] = model
    return found


def measure(
    inputs: int, outputs: int, rows: int, dtype: torch.dtype, rounds: int
) -> list[dict[str, Any]]:
    """One size: a row per contestant."""
    torch.manual_seed(0)
    linear = nn.Linear(inputs, outputs, bias=False).to(dtype)
    x = torch.randn(rows, inputs).to(dtype)
    calls = {kind: partial(layer, x) for kind, layer in packed_layers(linear).items()}
    with torch.no_grad():
        seconds = in_turn(calls, rounds)
    gflops = {
        kind: round(2e-9 * rows * inputs * outputs / float(np.median(each)), 1)
        for kind, each in seconds.items()
    }
    return [
        {
            "instructions": native_state(),
            "dtype": str(dtype).removeprefix("torch."),
            "inputs": inputs,
            "outputs": outputs,
            "rows": rows,
            "contestant": kind,
            "native_gflops": gflops["native"],
            "gflops": gflops[kind],
            **ratio_columns(seconds[kind] / seconds["native"], RATIO, 2),
            "n": rounds,
            "n_of": "rounds",
        }
        for kind in list(seconds)[1:]
    ]


def main() -> int:
    """Measures every size and prints a line per contestant."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[128, 512, 2048])
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), help="INPUTSxOUTPUTS")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=25)
    add_options(parser)
    given = parser.parse_args()
    if native_library() is None:
        print(f"no native kernels: {native_state()}", file=sys.stderr)
        return 1
    torch.set_num_threads(1)
    table = ExperimentTable(given)
    for dtype in given.dtypes:
        for size in given.sizes:
            inputs, outputs = map(int, size.split("x"))
            for rows in given.rows:
                for row in measure(inputs, outputs, rows, getattr(torch, dtype), given.rounds):
                    table.show(row)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
