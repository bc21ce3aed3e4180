"""What the native kernels save in a whole search, what a second thread saves in decoding, and what
has changed since another checkout.

    python scripts/bench_native.py search --n 30 --rounds 7 --csv ../docs/experiments/native_use.csv
    python scripts/bench_native.py threads --threads 1 2 --rounds 7
    # arbor of the commit before the native kernels
    git worktree add --detach ../before f3a8eca
    python scripts/bench_native.py checkout --other ../before --n 15 --rounds 7

`search`: problems (by default of game24) solved at full retention with the native kernels and
without them, in turn; one thread, thread CPU time. Without them torch computes what they do,
with weights packed for MKL or oneDNN.

`threads`: tree decode of a random Llama by numbers of threads, in turn, by the wall clock, so that
nothing else may run on the machine.

`checkout`: the puzzles of `search`, by this checkout and by another one, each in a process of its
own, in turn; one thread, thread CPU time.

Ratios are per round, their medians with bootstrap 95 % intervals.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

# As `import arbor` does where torch is not imported first.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch
from bench_decode import SHAPES, Arbor, generated, interval
from experiment_table import ExperimentTable, add_options, commit
from model_and_problems import SAPLING, add_model_and_problems, problems_of, settings_of
from random_llama import random_llama

from arbor import Solver
from arbor.kernels.native import native_library, native_state, without_native


def puzzles_row(
    given: argparse.Namespace, controller: str, mine: list[float], others: list[float]
) -> dict[str, Any]:
    """What two contestants took for the puzzles, round by round in seconds, as a row."""
    ratio, low, high = interval(np.array(others) / np.array(mine))
    return {
        "model": "Sapling" if given.model == SAPLING else Path(given.model).name,
        "dtype": "auto",
        "case": f"{settings_of(given)['task']}, {controller}",
        "clock": "thread CPU",
        "seconds": round(float(np.median(mine)) / given.n, 4),
        "other_seconds": round(float(np.median(others)) / given.n, 4),
        "seconds_of": "puzzle",
        "ratio": round(ratio, 3),
        "ratio_low": round(low, 3),
        "ratio_high": round(high, 3),
        "n": given.rounds,
        "n_of": "rounds",
    }


def search(given: argparse.Namespace, table: ExperimentTable) -> None:
    """Time of puzzles with and without native kernels."""
    torch.set_num_threads(1)
    for controller in given.controllers:
        with ExitStack() as stack:
            solvers: dict[str, Solver] = {}
            for arm in ("native", "torch"):
                with nullcontext() if arm == "native" else without_native():
                    settings = settings_of(given)
                    made = Solver(**settings, controller=controller, budget="full", threads=1)
                    solvers[arm] = stack.enter_context(made)
                    puzzles = problems_of(given, made.task, given.n)
                    made.solve(puzzles[0])  # loads the model, and warms up
            seconds: dict[str, list[float]] = {arm: [] for arm in solvers}
            same = 0
            for at in range(given.rounds):
                paths: dict[str, list[Any]] = {}
                for arm in list(solvers)[:: 1 if at % 2 == 0 else -1]:
                    with nullcontext() if arm == "native" else without_native():
                        began = time.thread_time()
                        found = [solvers[arm].solve(puzzle) for puzzle in puzzles]
                        seconds[arm].append(time.thread_time() - began)
                    paths[arm] = [(each.text, each.metrics.tokens_generated) for each in found]
                same = sum(a == b for a, b in zip(paths["native"], paths["torch"], strict=True))
        row = puzzles_row(given, controller, seconds["native"], seconds["torch"]) | {
            "question": "search",
            "against": "arbor without native kernels",
            "same_answers": same,
        }
        print(row, flush=True)
        table.add(row, native_state())


# Solves the puzzles once for every line that it reads, with the arbor of the folder it runs in.
SOLVES = """
import json, sys, time
import arbor, torch
torch.set_num_threads(1)
solver = arbor.Solver(**json.loads(sys.argv[1]), budget="full")
puzzles = json.loads(sys.argv[2])
solver.solve(puzzles[0])  # loads the model, and warms up
for _ in sys.stdin:
    began = time.thread_time()
    found = [solver.solve(puzzle) for puzzle in puzzles]
    taken = time.thread_time() - began
    paths = [(each.text, each.metrics.tokens_generated) for each in found]
    print(json.dumps([arbor.__file__, taken, paths]), flush=True)
"""


def checkout(given: argparse.Namespace, table: ExperimentTable) -> None:
    """Time of puzzles by this checkout and by another one.

    Raises:
        SystemExit: the other checkout has no arbor that runs.
    """
    folders = {"this": Path(__file__).resolve().parents[1], "other": given.other.resolve()}
    with Solver(**settings_of(given)) as solver:
        puzzles = [each.text for each in problems_of(given, solver.task, given.n)]
    for controller in given.controllers:
        settings = settings_of(given) | {"controller": controller}
        with ExitStack() as stack:
            workers = {
                arm: stack.enter_context(
                    subprocess.Popen(
                        [sys.executable, "-c", SOLVES, json.dumps(settings), json.dumps(puzzles)],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        text=True,
                        cwd=folder,  # first on the path of a command
                    )
                )
                for arm, folder in folders.items()
            }
            seconds: dict[str, list[float]] = {arm: [] for arm in workers}
            paths: dict[str, list[Any]] = {}
            for at in range(given.rounds):
                for arm in list(workers)[:: 1 if at % 2 == 0 else -1]:
                    place, taken, paths[arm] = _solved(workers[arm])
                    if not Path(place).is_relative_to(folders[arm]):
                        raise SystemExit(f"{folders[arm]} has no arbor; {place} was imported")
                    seconds[arm].append(taken)
        same = sum(a == b for a, b in zip(paths["this"], paths["other"], strict=True))
        row = puzzles_row(given, controller, seconds["this"], seconds["other"]) | {
            "question": "checkout",
            "against": f"arbor at {commit(folders['other'])}",
            "same_answers": same,
        }
        print(row, flush=True)
        table.add(row, native_state())


def _solved(worker: subprocess.Popen[str]) -> Any:
    """Has a process solve its puzzles: where its arbor lies, the seconds, and each path's text and
    tokens."""
    assert worker.stdin is not None and worker.stdout is not None
    try:
        worker.stdin.write("again\n")
        worker.stdin.flush()
        answer = worker.stdout.readline()
    except BrokenPipeError:
        answer = ""
    if not answer:
        raise SystemExit("a checkout's process has ended; its messages are above")
    return json.loads(answer)


def threads(given: argparse.Namespace, table: ExperimentTable) -> None:
    """Time of decoding by number of threads."""
    first, *others = given.threads
    for dtype in given.dtypes:
        for shape in given.shapes:
            model = random_llama(given.size, getattr(torch, dtype))
            contestant = Arbor(model, shape, model.config.vocab_size)
            seconds: dict[int, list[float]] = {count: [] for count in given.threads}
            for at in range(given.rounds + 1):  # the first one warms up
                for count in given.threads[:: 1 if at % 2 == 0 else -1]:
                    torch.set_num_threads(count)
                    contestant.prepare()
                    began = time.perf_counter()
                    contestant.run()
                    if at:
                        seconds[count].append(time.perf_counter() - began)
            for count in others:
                ratio, low, high = interval(np.array(seconds[first]) / np.array(seconds[count]))
                row = {
                    "question": "threads",
                    "model": f"{given.size} Llama",
                    "dtype": dtype,
                    "case": f"{shape}, {count} threads",
                    "against": f"{first} thread" + "s" * (first > 1),
                    "clock": "wall",
                    "seconds": round(float(np.median(seconds[count])), 4),
                    "other_seconds": round(float(np.median(seconds[first])), 4),
                    "seconds_of": f"decode of {generated(shape)} tokens",
                    "ratio": round(ratio, 3),
                    "ratio_low": round(low, 3),
                    "ratio_high": round(high, 3),
                    "same_answers": "",
                    "n": given.rounds,
                    "n_of": "rounds",
                }
                print(row, flush=True)
                table.add(row, native_state())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("question", choices=("search", "threads", "checkout"))
    add_model_and_problems(parser)
    parser.add_argument("--other", type=Path, help="another checkout; of checkout")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--n", type=int, default=30, help="puzzles; of search and checkout")
    parser.add_argument(
        "--controllers",
        nargs="+",
        default=["tot", "tot,strategy=dfs"],
        help="of search and checkout",
    )
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="of threads")
    parser.add_argument("--size", default="100m", choices=["5m", "100m"], help="of threads")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], help="of threads")
    parser.add_argument(
        "--shapes",
        nargs="+",
        default=["F8", "F32x48", "T4"],
        choices=list(SHAPES),
        help="of threads",
    )
    add_options(parser)
    given = parser.parse_args()
    if native_library() is None:
        raise SystemExit(f"no native kernels: {native_state()}")
    if given.question == "checkout" and given.other is None:
        parser.error("checkout needs --other DIRECTORY")
    table = ExperimentTable(given)
    {"search": search, "threads": threads, "checkout": checkout}[given.question](given, table)


if __name__ == "__main__":
    main()
