"""When KV in a lower tier comes back faster by copying than by computing it again.

    python scripts/bench_fetch.py --rounds 5 --csv ../docs/experiments/fetch.csv

For runs of 1 to 256 missing tokens after 0 to 768 others, next to no rows or 16 that decode: the
time to copy them from host memory or disk to the pool, and what computing them adds to the
forward. `arbor.model.fetch_probe` predicts both from the few points that it measures; here every
point is measured by itself, later in the same process, in turn with the others. The predicted
choice is right where it is the faster one as measured. CPU time of the thread, one thread; medians
of the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from bench_concurrency import engine_of
from experiment_table import ExperimentTable, add_options
from model_and_problems import SAPLING
from random_llama import SIZES

from arbor import Solver
from arbor.memory.pool import KVPool
from arbor.memory.stores import LowerRoom, Store
from arbor.model.fetch_costs import Run
from arbor.model.fetch_probe import measure
from arbor.model.plan import ForwardPlan, Piece, Segment, plan_forward
from arbor.model.runner import ModelRunner

LENGTHS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = (0, 256, 768)
ROWS = (0, 16)
BELOW = LowerRoom(host=max(LENGTHS), disk=max(LENGTHS))


def runner_of(name: str) -> ModelRunner:
    """A model, or a random Llama by its size."""
    if name in SIZES:
        return engine_of(name).runner
    return Solver(SAPLING if name == "sapling" else name, threads=1).engine.runner


def forward(context: int, tokens: int, rows: int) -> ForwardPlan:
    """A forward that computes a run after a context, and a token of each of some rows."""
    shared = np.arange(context, dtype=np.int32)
    before = (Piece("context", shared, shared),) if context else ()
    own = np.arange(context, context + tokens, dtype=np.int32)
    segments = []
    if tokens:
        segments = [
            Segment(before, [0] * tokens, np.arange(context, context + tokens), own, own, 0)
        ]
    for row in range(rows):
        slot = np.array([context + tokens + row], np.int32)
        segments.append(Segment(before, [0], np.array([context]), slot, slot, 1))
    return plan_forward(segments)


def copy_of(store: Store, pool: KVPool, tokens: int) -> Callable[[], None]:
    """Copies so many tokens from a store to the pool."""
    records = np.arange(tokens, dtype=np.int32)
    store.write(records, pool.gather(records))
    return lambda: pool.scatter(records, store.read(records, pool.device)[0])


def seconds(work: Callable[[], Any]) -> float:
    """CPU time of the thread."""
    began = time.thread_time()
    work()
    return time.thread_time() - began


def added(runner: ModelRunner, pool: KVPool, context: int, tokens: int, rows: int) -> float:
    """Seconds that a run adds to a forward of some rows."""
    together = seconds(partial(runner.forward, forward(context, tokens, rows), pool))
    if not rows:
        return together
    return together - seconds(partial(runner.forward, forward(context, 0, rows), pool))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--models",
        nargs="+",
        default=["sapling", "100m"],
        metavar="MODEL",
        help=f"as in `arbor solve`, or {' and '.join(SIZES)}, random Llamas",
    )
    parser.add_argument("--rounds", type=int, default=5)
    add_options(parser)
    given = parser.parse_args()
    torch.set_num_threads(1)
    table = ExperimentTable(given)
    for model in given.models:
        runner = runner_of(model)
        costs = measure(runner, BELOW)
        print(f"{model}: {costs}", flush=True)
        pool = KVPool(
            runner.layer_kv, max(CONTEXTS) + max(LENGTHS) + max(ROWS), runner.dtype, runner.device
        )
        stores = {store.tier.name.lower(): store for store in BELOW.stores(pool)}
        found: dict[tuple[Any, ...], list[float]] = defaultdict(list)
        for _ in range(given.rounds + 1):  # the first one warms up
            for length in LENGTHS:
                for tier, store in stores.items():
                    found["copy", tier, length].append(seconds(copy_of(store, pool, length)))
                for context in CONTEXTS:
                    for rows in ROWS:
                        taken = added(runner, pool, context, length, rows)
                        found["compute", context, rows, length].append(taken)
        middle = {key: 1e6 * statistics.median(times[1:]) for key, times in found.items()}
        for tier in stores:
            for context in CONTEXTS:
                for rows in ROWS:
                    right = 0
                    for length in LENGTHS:
                        run = Run(length, context, tier)
                        copied = middle["copy", tier, length]
                        computed = middle["compute", context, rows, length]
                        chosen = costs.fetched([run], rows)[0]
                        right += chosen == (copied < computed)
                        row = {
                            "model": model,
                            "tier": tier,
                            "context": context,
                            "rows": rows,
                            "tokens": length,
                            "copy_us": round(copied, 1),
                            "copy_predicted_us": round(costs.of_fetch([run]), 1),
                            "compute_us": round(computed, 1),
                            "compute_predicted_us": round(costs.of_recompute([run], rows), 1),
                            "chosen": "fetch" if chosen else "recompute",
                            "right": chosen == (copied < computed),
                            "n": given.rounds,
                            "n_of": "rounds",
                        }
                        table.add(row)
                    many = middle["copy", tier, 256] / middle["compute", context, rows, 256]
                    print(
                        f"{model}, {tier}, context {context}, {rows} rows: copy / compute {many:.4f} "
                        f"at 256 tokens; choice right in {right} of {len(LENGTHS)}",
                        flush=True,
                    )
        for store in stores.values():
            store.close()


if __name__ == "__main__":
    main()
