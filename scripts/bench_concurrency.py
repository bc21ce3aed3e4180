"""Time of many problems in one engine, by how many are in progress at a time.

    python scripts/bench_concurrency.py --problems 24 --rounds 3 --csv rows.csv
    python scripts/bench_concurrency.py --only forks --rounds 3
    python scripts/bench_concurrency.py --only trees --problems 500 --csv trees.csv

`searches`: problems (by default of game24), under full retention and in a quarter of what such
searches hold. `lossy`: greedy chains that lose tokens for good. `forks`: a random Llama of 100
million parameters; each problem is a prompt of 512 tokens from which 8 branches of 32 tokens grow
(F8); once with prompts that differ from the first token on, and once with prompts of which only the
last token differs. `trees`: how many trees and answers of game24 differ between one and eight at a
time, as it is by default and with `deterministic`.

The numbers of problems at a time take turns within a round; times are CPU time of the thread, one
thread, and with a GPU wall time. A row of the CSV is one measurement. The table gives, for each,
the median of the ratios to the first of them in the same round.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from experiment_table import ExperimentTable, add_options
from model_and_problems import (
    add_model_and_problems,
    problems_of,
    settings_of,
    tree_of,
    verifier_of_chains,
)
from random_llama import NoText, fixed_length, fused_runner, prefix, random_llama

from arbor import Solver
from arbor.engine.engine import Engine
from arbor.engine.operation import Growth
from arbor.model.sampling_params import Sampling
from arbor.retention.policy import POLICIES
from arbor.run.searches import Steps, as_completed
from arbor.tree import ThoughtTree

AT_A_TIME = (1, 2, 4, 8, 16)
PROMPT, BRANCHES, TOKENS = 512, 8, 32  # F8


def searches(
    given: argparse.Namespace, controller: str, budget: str
) -> Callable[[int], dict[str, Any]]:
    """Problems, solved `concurrency` at a time."""
    solver = Solver(**settings_of(given), controller=controller, budget=budget, threads=1)
    solver.load()
    every = problems_of(given, solver.task, given.problems)
    solver.solve(every[0])

    def run(concurrency: int) -> dict[str, Any]:
        solutions = solver.solve_batch(every, concurrency=concurrency)
        return {
            "tokens": sum(each.metrics.tokens_generated for each in solutions),
            "recomputed": sum(each.metrics.tokens_recomputed for each in solutions),
            "solved": sum(bool(each.correct) for each in solutions),
        }

    return run


def lossy(given: argparse.Namespace, policy: str) -> Callable[[int], dict[str, Any]]:
    """Greedy chains that lose tokens for good, each within its own budget, solved `concurrency` at
    a time; by default of word problems of 4 to 6 steps."""
    own = given.dataset is None and given.task is None
    settings = settings_of(given) | ({"task": "chains,fewest=4,most=6"} if own else {})
    solver = Solver(
        **settings,
        controller="chain",
        verifier=verifier_of_chains(settings["task"]),
        sampling={"temperature": 0.0},
        mode="lossy",
        policy=policy,
        threads=1,
    )
    solver.load()
    every = problems_of(given, solver.task, given.problems)
    least = [100] * len(every) if own else [solver.plan(each).smallest_tokens for each in every]

    def run(concurrency: int) -> dict[str, Any]:
        jobs = (
            (problem, {"budget": f"{least[place] + place % 20}tok"})
            for place, problem in enumerate(every)
        )
        solutions = [each for _, each in solver.as_completed(jobs, concurrency=concurrency)]
        return {
            "tokens": sum(each.metrics.tokens_generated for each in solutions),
            "recomputed": 0,
            "solved": sum(bool(each.correct) for each in solutions),
        }

    return run


def forks(problems: int, *, alike: bool) -> Callable[[int], dict[str, Any]]:
    """Eight branches of each prompt, by a model that is read from memory at each step.

    Args:
        problems: how many.
        alike: the prompts have all but the last token in common.
    """
    runner = fused_runner(random_llama("100m", torch.float32))
    engine = Engine(runner, NoText(), policy=POLICIES["lru"])
    vocabulary = engine.runner.config.vocab_size
    growth = Growth(0, Sampling(temperature=0), fixed_length(TOKENS))
    slots = PROMPT + BRANCHES * TOKENS

    def search(place: int, pool: int) -> Steps[int]:
        prompt = prefix(PROMPT, vocabulary)
        own = place + 1
        tree = ThoughtTree([*prompt[:-1], own] if alike else [own, *prompt[1:]])
        engine.open(tree, slots, pool=pool)
        prefill = engine.begin_extend(tree.root)
        yield prefill
        prefill.result()
        growing = engine.begin_grow([(tree.root, BRANCHES)], growth)
        yield growing
        tokens = sum(len(child.tokens) for child in growing.result())
        engine.finish(tree)
        return tokens

    return runs(engine, search, slots, problems)


def runs(
    engine: Engine, search: Callable[[int, int], Steps[int]], slots: int, problems: int
) -> Callable[[int], dict[str, Any]]:
    """Searches of so many problems, each with slots of its own.

    Args:
        engine: runs them.
        search: of a problem's number, in a pool of so many slots; gives the tokens it generated.
        slots: of one search.
        problems: how many.
    """

    def run(concurrency: int) -> dict[str, Any]:
        def begin(place: int) -> Callable[[bool], Steps[int]]:
            return lambda idle: search(place, concurrency * slots)

        done = list(as_completed(engine, map(begin, range(problems)), concurrency))
        assert not any(each.error for each in done), [each.error for each in done]
        engine.memory.free_kept_prompts(engine.memory.slots)  # the next one computes its prompts
        return {"tokens": sum(each.result or 0 for each in done), "recomputed": 0, "solved": ""}

    return run


def cases(given: argparse.Namespace) -> Iterator[tuple[str, Callable[[int], dict[str, Any]]]]:
    only = given.only
    if only in (None, "searches"):
        # beam search has no path as short as a quarter
        for controller, part in (("tot", "0.25"), ("beam", "0.4")):
            for budget in ("full", part):
                yield f"{controller}, {budget}", searches(given, controller, budget)
    if only in (None, "lossy"):
        for policy in ("lru", "snapkv"):
            own = given.dataset is None and given.task is None
            task = "chains" if own else settings_of(given)["task"]
            yield f"{task}, lossy, {policy}", lossy(given, policy)
    if only in (None, "forks"):
        yield "F8, 100M", forks(8, alike=False)
        yield "F8, 100M, prompts alike", forks(8, alike=True)


def trees(given: argparse.Namespace, deterministic: bool) -> dict[str, Any]:
    """How many trees and answers differ between one and eight at a time."""
    found = []
    for concurrency in (1, 8):
        settings = settings_of(given) | {"controller": "tot", "budget": "0.25", "threads": 1}
        solver = Solver(**settings, deterministic=deterministic)
        every = problems_of(given, solver.task, given.problems)
        solutions = solver.solve_batch(every, concurrency=concurrency)
        found.append([(tree_of(each), each.answer) for each in solutions])
        solver.close()
    pairs = list(zip(*found, strict=True))
    return {
        "trees_differ": sum(one[0] != other[0] for one, other in pairs),
        "answers_differ": sum(one[1] != other[1] for one, other in pairs),
        "n": len(pairs),
    }


def clock() -> tuple[str, Callable[[], float]]:
    """What is measured: a thread's time does not count what it waits for on a GPU."""
    if torch.cuda.is_available():
        return "wall_s", time.perf_counter
    return "cpu_s", time.thread_time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=["searches", "lossy", "forks", "trees"])
    parser.add_argument("--problems", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--deterministic",
        nargs="+",
        type=lambda text: text == "yes",
        default=(True, False),
        metavar="yes|no",
        help="of the trees",
    )
    parser.add_argument("--at-a-time", type=int, nargs="+", default=AT_A_TIME)
    add_model_and_problems(parser)
    add_options(parser)
    given = parser.parse_args()
    torch.set_num_threads(1)
    table = ExperimentTable(given)
    measured, now = clock()
    if given.only == "trees":
        for deterministic in given.deterministic:
            found = trees(given, deterministic)
            print(f"deterministic {deterministic}: {found}", flush=True)
            case = "tot, 0.25, one and eight at a time"
            table.add({"case": case, "deterministic": deterministic, **found, "n_of": "problems"})
        return
    for name, run in cases(given):
        run(8)  # warm
        seconds: dict[int, list[float]] = defaultdict(list)
        for index in range(given.rounds):
            order = given.at_a_time[:: 1 if index % 2 == 0 else -1]
            for concurrency in order:
                began = now()
                found = run(concurrency)
                seconds[concurrency].append(now() - began)
                row = {
                    "case": name,
                    "at_a_time": concurrency,
                    "round": index,
                    measured: round(seconds[concurrency][-1], 3),
                    **found,
                    "n": 1,
                    "n_of": "runs",
                }
                table.add(row)
        for concurrency in given.at_a_time:
            alone = seconds.get(given.at_a_time[0], [])
            ratios = [b / a for a, b in zip(alone, seconds[concurrency], strict=True)]
            print(
                f"{name}: {concurrency:>2} at a time: {statistics.median(seconds[concurrency]):.2f} s, "
                f"{statistics.median(ratios):.2f} of {given.at_a_time[0]} at a time "
                f"({min(ratios):.2f} to {max(ratios):.2f})",
                flush=True,
            )


if __name__ == "__main__":
    main()
