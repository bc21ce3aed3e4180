"""Wall time of many problems by the number of workers, each with one thread.

    python scripts/bench_workers.py --problems 48 --rounds 7 --csv rows.csv
    python scripts/bench_workers.py --workers 1 2 4 --at-a-time 1

Full retention. All workers are begun before the first measurement and wait between their own; the
numbers of workers take turns within a round, beginning with another one each time. Times are wall
time from the first problem to the last solution, since that is what several processes shorten:
other work on the cores counts. A row of the CSV is one measurement; `agree` is whether all
solutions are those of the first measurement. The table gives the median of the throughputs,
relative to the first number of workers in the same round, with their range.

Needs ``arbor-search[ray]``.
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import ExitStack
from typing import Any

import ray
from experiment_table import ExperimentTable, add_options
from model_and_problems import add_model_and_problems, problems_of, settings_of

from arbor import Solution, Solver, Workers


def found(solution: Solution) -> tuple[Any, ...]:
    """What a search finds, without its costs."""
    return solution.problem, solution.answer, solution.text, solution.path, solution.candidates


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--problems", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--at-a-time", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--controller", default="tot")
    add_model_and_problems(parser)
    add_options(parser)
    given = parser.parse_args()
    table = ExperimentTable(given)
    settings = {
        **settings_of(given),
        "controller": given.controller,
        "threads": 1,
        "record_bytes": 0,
    }
    with Solver(**settings) as solver:
        problems = problems_of(given, solver.task, given.problems)

    for at_a_time in given.at_a_time:
        ray.init(num_cpus=sum(given.workers), include_dashboard=False, log_to_driver=False)
        with ExitStack() as stack:
            contestants = {}
            for number in given.workers:
                workers = Workers(settings, number, concurrency=at_a_time)
                contestants[number] = stack.enter_context(workers)
                began = time.perf_counter()
                warm = list(workers.imap(problems[: 2 * number * at_a_time]))
                print(f"{number} workers, first {len(warm)}: {time.perf_counter() - began:.1f} s")
            measure(given, table, contestants, problems, at_a_time)
        ray.shutdown()


def measure(
    given: argparse.Namespace,
    table: ExperimentTable,
    contestants: dict[int, Workers],
    problems: list[Any],
    at_a_time: int,
) -> None:
    """Time every number of workers in every round."""
    first: list[Any] | None = None
    ratios: dict[int, list[float]] = {number: [] for number in contestants}
    for turn in range(given.rounds):
        numbers = list(contestants)
        numbers = numbers[turn % len(numbers) :] + numbers[: turn % len(numbers)]
        seconds: dict[int, float] = {}
        for number in numbers:
            began = time.perf_counter()
            solutions = [found(each) for each in contestants[number].imap(problems)]
            seconds[number] = time.perf_counter() - began
            first = solutions if first is None else first
            row = {
                "workers": number,
                "at_a_time": at_a_time,
                "round": turn,
                "wall_s": round(seconds[number], 3),
                "agree": solutions == first,
                "n": len(problems),
                "n_of": "problems",
            }
            table.add(row)
        base = seconds[min(contestants)]
        for number in contestants:
            ratios[number].append(base / seconds[number])
    for number, each in ratios.items():
        print(
            f"{at_a_time} at a time, {number} workers: {statistics.median(each):.3f} times "
            f"({min(each):.3f} to {max(each):.3f}), {len(each)} rounds of {len(problems)} problems"
        )


if __name__ == "__main__":
    main()
