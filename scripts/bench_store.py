"""What part of a search a worker thread could take over from the stores of lower tiers.

    python scripts/bench_store.py --n 5 --csv docs/experiments/store_time.csv
    python scripts/bench_store.py --model 100m --n 2 --csv docs/experiments/store_time.csv

Searches at a quarter of their full-retention peak, with host memory, packed host memory (lossy) and
a disk. `--model 100m` is a random Llama. Thread CPU time, one thread. `write` is the part of the
whole that `Store.write` takes, all that can be done while the search goes on, once the rows have
been gathered; `gather` and `read` are what the search itself waits for in any case: a slot is used
again at once, and a path that misses tokens reads them before its next forward. `handover_us` is
what giving a task to another thread and waiting for it takes, per task; `writes_per_s` of them
there are.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

from bench_budget import model
from eval_policies import SEARCHES
from experiment_table import ExperimentTable, add_options
from model_and_problems import add_model_and_problems, problems_of, task_of

from arbor import Solver
from arbor.memory.packed_store import PackedStore
from arbor.memory.pool import KVPool
from arbor.memory.stores import DiskStore, HostStore

ROOM = "20000tok"
LOSSY = {"mode": "lossy", "rehydrate": "selective"}
STORES: dict[str, dict[str, Any]] = {
    "host": {"host": ROOM},
    "host, 8 bits": {"host": ROOM, "host_bits": 8, **LOSSY},
    "host, 4 bits": {"host": ROOM, "host_bits": 4, **LOSSY},
    "disk": {"disk": ROOM},
}
STORE_TYPES = (HostStore, PackedStore, DiskStore)
HANDOVERS = 2000


class Clock:
    """CPU seconds of the thread in functions, by name, and how often they ran, while it is on."""

    def __init__(self) -> None:
        self.on = False
        self.spent: dict[str, float] = defaultdict(float)
        self.calls: dict[str, int] = defaultdict(int)

    def timed(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with its time added."""

        def run(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time()
            try:
                return work(*args, **kwargs)
            finally:
                self.spent[name] += self.on * (time.thread_time() - began)
                self.calls[name] += self.on

        return run


def handover_us() -> float:
    """Microseconds of wall time to have another thread do nothing."""
    times = []
    with ThreadPoolExecutor(1) as worker:
        for _ in range(HANDOVERS):
            began = time.perf_counter()
            worker.submit(int).result()
            times.append(time.perf_counter() - began)
    return 1e6 * sorted(times)[HANDOVERS // 2]


def measure(args: argparse.Namespace, search: str, store: str) -> dict[str, Any]:
    """One row: a search with a store, over the problems."""
    clock, whole, stored = Clock(), 0.0, 0
    with ExitStack() as stack:
        methods = [(kind, part) for kind in STORE_TYPES for part in ("write", "read")]
        for owner, part in (*methods, (KVPool, "gather")):
            work = clock.timed(part, getattr(owner, part))
            stack.enter_context(patch.object(owner, part, work))
        settings = STORES[store] | SEARCHES[search]
        settings |= {"task": task_of(args), "threads": 1, "fetch": "always"}
        solver = stack.enter_context(Solver(**model(args.model), **settings))
        for problem in problems_of(args, solver.task, args.n):
            peak = solver.solve(problem, budget="full").metrics.peak_tokens
            budget = f"{max(solver.plan(problem).enough_tokens, peak // 4)}tok"
            solver.solve(problem, budget=budget)  # warm
            clock.on = True
            began = time.thread_time()
            stored += solver.solve(problem, budget=budget).metrics.tokens_stored
            whole += time.thread_time() - began
            clock.on = False
    row = {"model": args.model, "search": search, "store": store, "cpu_s": round(whole, 2)}
    parts = {f"{part}_percent": 100 * clock.spent[part] / whole for part in clock.spent}
    return {
        **row,
        **{part: round(parts[part], 2) for part in sorted(parts)},
        "writes_per_s": round(clock.calls["write"] / whole, 1),
        "write_us": round(1e6 * clock.spent["write"] / max(1, clock.calls["write"]), 1),
        "stored": stored,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_model_and_problems(parser)
    parser.add_argument("--n", type=int, default=5, help="problems")
    parser.add_argument("--searches", nargs="+", default=["tot-bfs", "beam"])
    parser.add_argument("--stores", nargs="+", choices=list(STORES), default=list(STORES))
    add_options(parser)
    args = parser.parse_args()
    table = ExperimentTable(args)
    handover = round(handover_us(), 1)
    for search in args.searches:
        for store in args.stores:
            row = measure(args, search, store) | {"handover_us": handover}
            print(", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
            table.add(row | {"n": args.n, "n_of": "problems"})


if __name__ == "__main__":
    main()
