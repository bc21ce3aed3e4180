"""What a smaller budget costs in time, and where the time goes.

    python scripts/bench_budget.py --n 30 --csv rows.csv
    python scripts/bench_budget.py --n 16 --host --csv rows.csv
    python scripts/bench_budget.py --model m.gguf --dataset gsm8k.jsonl --task gsm8k --host

Budgets are parts of what full retention holds at the time, as `--budget 0.25`. Every problem is
solved at every budget in turn, with the same seed, each problem beginning with another budget. The
ratio is per problem against full retention, its median with a bootstrap 95 % interval. Thread CPU
time, one thread; on a GPU wall time, and each phase waits for the GPU before and after itself.

The time above full retention is split by nvtx_range of the engine, each without the phases inside
it: `rehydrate` (forward passes that recompute), `policy` (deciding, evicting and storing), `fetch`
(copying back from a lower tier), `lost_width` (decoding and asking in more and narrower forward
passes), and `rest` (prefill and everything outside the engine). The parts are of sums over
problems.

With `--host` every budget is measured without and with host memory for what is evicted. `--model
100m` is a random Llama with the built-in model's tokenizer, whose searches end by their limits.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from eval_policies import SEARCHES, Blocks
from experiment_table import ExperimentTable, add_options
from model_and_problems import add_model_and_problems, problems_of, task_of
from random_llama import SIZES, random_llama
from rounds import interval

from arbor import Solver
from arbor.engine import fetching, forward_pass, residency
from arbor.measure.timing import turned

PHASES = ("prefill", "decode", "verify", "rehydrate", "fetch", "policy")
HOST = "1000000tok"

Arm = tuple[float, bool]  # the part of full retention's KV, and whether the host holds the rest


def on_cpu() -> float:
    """CPU seconds of the thread."""
    return time.thread_time()


def on_gpu() -> float:
    """Wall seconds, once the GPU has done what it was given."""
    torch.cuda.synchronize()
    return time.perf_counter()


class Phases:
    """Seconds in each nvtx_range of the engine, without those of phases inside it."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self._spent: dict[str, float] = defaultdict(float)
        self._inside = [0.0]

    @contextmanager
    def nvtx_range(self, name: str) -> Iterator[None]:
        """Stands in for `arbor.engine.forward_pass.nvtx_range`."""
        began = self.now()
        self._inside.append(0.0)
        try:
            yield
        finally:
            whole = self.now() - began
            self._spent[name] += whole - self._inside.pop()
            self._inside[-1] += whole

    def take(self) -> dict[str, float]:
        """What was spent; the next run begins with nothing."""
        spent, self._spent = dict(self._spent), defaultdict(float)
        return {name: spent.get(name, 0.0) for name in PHASES}


def measure(args: argparse.Namespace, name: str, phases: Phases) -> list[dict[str, Any]]:
    """One row for each budget."""
    blocks = Blocks()
    lower = (False, True) if args.host else (False,)
    arms = [(1.0, False), *((ratio, host) for ratio in args.budgets for host in lower)]
    seen: dict[Arm, list[dict[str, Any]]] = {arm: [] for arm in arms}
    with ExitStack() as stack:
        solvers = {
            host: stack.enter_context(
                Solver(
                    **model(args.model),
                    task=task_of(args),
                    policy=args.policy,
                    seed=args.seed,
                    threads=1,
                    host=HOST if host else None,
                    listeners=(blocks.hear,),
                    **SEARCHES[name],
                )
            )
            for host in lower
        }
        plain = solvers[False]
        for solver in solvers.values():
            solver.checkpoint = plain.checkpoint  # the weights are loaded once
        chosen = problems_of(args, plain.task, args.n + 1)
        for solver in solvers.values():
            solver.solve(chosen[0], max_tokens=args.tokens)  # warm
        for place, problem in enumerate(chosen[1:]):
            blocks.take()
            plain.solve(problem, max_tokens=args.tokens)
            whole = blocks.take()
            for ratio, host in turned(list(seen), place):
                blocks.take()
                phases.take()
                began = phases.now()
                found = solvers[host].solve(problem, budget=ratio, max_tokens=args.tokens)
                seen[ratio, host].append(
                    {
                        "seconds": phases.now() - began,
                        **phases.take(),
                        "same": blocks.take() == whole,
                        "metrics": found.metrics,
                    }
                )
    return [row(args, name, arm, runs, seen[1.0, False]) for arm, runs in seen.items()]


def model(name: str) -> dict[str, Any]:
    """A model as `Solver` takes it; each time another object, since loading changes it."""
    if name not in SIZES:
        return {"model": name}
    with Solver() as sapling:
        tokenizer = sapling.tokenizer
    return {
        "model": random_llama(name, torch.float32, len(tokenizer)),
        "tokenizer": tokenizer,
    }


def row(
    args: argparse.Namespace,
    name: str,
    arm: Arm,
    runs: list[dict[str, Any]],
    full: list[dict[str, Any]],
) -> dict[str, Any]:
    """Figures of one budget against full retention of the same problems."""

    def total(key: str, of: list[dict[str, Any]] = runs) -> float:
        return float(sum(run[key] for run in of))

    def more(*keys: str) -> float:
        return sum(total(key) - total(key, full) for key in keys) / total("seconds", full)

    metrics = [run["metrics"] for run in runs]
    times = np.array([run["seconds"] for run in runs])
    middle, low, high = interval(times / np.array([run["seconds"] for run in full]))
    steps = sum(m.steps for m in metrics) / max(1, sum(run["metrics"].steps for run in full))
    extra = {
        "rehydrate": more("rehydrate"),
        "policy": more("policy"),
        "fetch": more("fetch"),
        "lost_width": more("decode", "verify"),
    }
    extra["rest"] = more("seconds") - sum(extra.values())
    generated = sum(m.tokens_generated for m in metrics)
    moved = sum((m.tokens_stored + m.tokens_fetched) * m.bytes_per_token for m in metrics)
    return {
        "model": args.model,
        "task": args.task,
        "search": name,
        "budget": arm[0],
        "host": arm[1],
        "budget_tokens": int(np.median([m.budget_tokens for m in metrics])),
        "over_budget": sum(m.peak_tokens > m.budget_tokens for m in metrics),
        "same_tree": sum(run["same"] for run in runs),
        "seconds_median": round(float(np.median(times)), 3),
        "ratio_to_full": round(middle, 3),
        "ratio_low": round(low, 3),
        "ratio_high": round(high, 3),
        "time_ratio_of_sums": round(1 + more("seconds"), 3),
        **{f"above_full_{key}": round(value, 3) for key, value in extra.items()},
        "fetch_share": round(total("fetch") / total("seconds"), 4),
        "policy_share": round(total("policy") / total("seconds"), 4),
        "policy_us_per_event": round(
            1e6 * total("policy") / max(1, sum(m.pressure_events for m in metrics))
        ),
        "steps_ratio": round(steps, 2),
        "beyond_lost_width": round(1 + sum(extra.values()) - extra["lost_width"], 3),
        "recomputed_per_generated": round(sum(m.tokens_recomputed for m in metrics) / generated, 4),
        "fetched_per_generated": round(sum(m.tokens_fetched for m in metrics) / generated, 4),
        "bytes_moved_per_generated": round(moved / generated),
        "n": len(runs),
        "n_of": "problems",
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add_model_and_problems(parser)
    parser.add_argument("--n", type=int, default=30)
    parser.add_argument("--policy", default="reentry")
    parser.add_argument("--tokens", type=int, help="of each search, at most")
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.5, 0.25, 0.125])
    parser.add_argument("--searches", nargs="+", choices=SEARCHES, default=tuple(SEARCHES))
    parser.add_argument("--host", action="store_true", help="also with host memory below")
    add_options(parser)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    phases = Phases(on_gpu if torch.cuda.is_available() else on_cpu)
    table = ExperimentTable(args)
    with ExitStack() as stack:
        for module in (forward_pass, fetching, residency):
            stack.enter_context(mock.patch.object(module, "nvtx_range", phases.nvtx_range))
        stack.enter_context(mock.patch.object(forward_pass, "nvtx_is_on", lambda: True))
        for name in args.searches:
            for each in measure(args, name, phases):
                table.show(each)


if __name__ == "__main__":
    main()
