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
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from experiment_table import ExperimentTable, add_options
from torch import Tensor, nn

from arbor.kernels.linear.layers import Packing, pack_linears
from arbor.kernels.native import native_library, native_state
from arbor.measure.statistics import bootstrap

CONTESTANTS: tuple[Packing, ...] = ("native", "onednn", "mkl", "dense")
SIZES = ("768x768", "768x2048", "2048x768")


def thread_s(call: Callable[[Tensor], Tensor], x: Tensor) -> float:
    """CPU time of this thread for one call, in seconds."""
    begin = time.thread_time()
    call(x)
    return time.thread_time() - begin


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
    layers = packed_layers(linear)
    times: dict[str, list[float]] = {kind: [] for kind in layers}
    with torch.no_grad():
        for number in range(rounds + 1):
            for kind, layer in layers.items():
                taken = thread_s(layer, x)
                if number:  # the first round is not counted
                    times[kind].append(taken)
    found = []
    for kind in list(layers)[1:]:
        ratios = [one / other for one, other in zip(times[kind], times["native"], strict=True)]
        low, high = bootstrap(ratios, "median")
        operations = 2e-9 * rows * inputs * outputs
        found.append(
            {
                "dtype": str(dtype).removeprefix("torch."),
                "inputs": inputs,
                "outputs": outputs,
                "rows": rows,
                "contestant": kind,
                "native_gflops": round(operations / statistics.median(times["native"]), 1),
                "gflops": round(operations / statistics.median(times[kind]), 1),
                "ratio": round(statistics.median(ratios), 2),
                "ratio_low": round(low, 2),
                "ratio_high": round(high, 2),
                "n": rounds,
                "n_of": "rounds",
            }
        )
    return found


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
                    table.add({"instructions": native_state(), **row})
                    print(
                        f"{dtype} {inputs} -> {outputs}, {rows} rows, {row['contestant']}: "
                        f"{row['ratio']:.2f} ({row['ratio_low']:.2f} to {row['ratio_high']:.2f}) "
                        f"times native, {row['gflops']} and {row['native_gflops']} GFLOPS",
                        flush=True,
                    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
