"""``arbor bench``: the same search under several budgets and policies in turn, timed."""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from arbor._version import __version__
from arbor.budget import Budget
from arbor.cli.build import build_solver, known_policy
from arbor.cli.configure import all_settings
from arbor.cli.options import (
    EXIT_GATE,
    Command,
    limit_options,
    loading_options,
    model_option,
    names_of,
    option,
    output_options,
    retention_options,
    sampling_options,
    search_shape_options,
)
from arbor.cli.output import Output
from arbor.cli.output_paths import refuse_nowhere
from arbor.cli.solve import use_threads
from arbor.errors import BudgetInfeasible, InputError, UsageError
from arbor.measure.timing import FEWEST, Lap, Timing, differs, interleaved, regressed
from arbor.support.atomic_write import write_atomically
from arbor.trace.write import finite

if TYPE_CHECKING:
    from arbor.solver import Solver

SCHEMA = "arbor.bench/1"
BUDGETS = ("full", "0.25")
POLICIES = ("reentry",)
LIMITS = ("timeout", "max_tokens")

_PERCENT = re.compile(r"([0-9]+(?:\.[0-9]+)?)%")


@click.command(cls=Command)
@click.argument("problem", required=False)
@option(
    "--warmup",
    type=click.IntRange(0),
    default=2,
    metavar="N",
    heading="Timing",
    help="Rounds that are not timed.",
)
@option(
    "--repeat",
    type=click.IntRange(FEWEST),
    default=5,
    metavar="N",
    heading="Timing",
    help="Rounds that are; in each, every budget and policy solves the problem once.",
)
@option(
    "--budget",
    multiple=True,
    metavar="X",
    heading="KV budget",
    help="As for solve; may be repeated; full and 0.25 if none is given.",
)
@option(
    "--policy",
    multiple=True,
    metavar="NAME[,KEY=VALUE]",
    heading="KV budget",
    shell_complete=names_of("policy"),
    help="May be repeated, and each holds the weights once; reentry if none is given.",
)
@search_shape_options
@retention_options
@model_option
@loading_options
@sampling_options
@limit_options
@option(
    "--output-json",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    heading="Output",
    help="Write every timing, for --compare.",
)
@option(
    "--compare",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    heading="Output",
    help="Timings of an earlier --output-json with the same settings.",
)
@option(
    "--max-regress",
    metavar="P%",
    heading="Output",
    help="With --compare: exit code 7 if a median is slower by more than this and than the noise.",
)
@output_options
@click.pass_obj
def bench(voice: Output, /, **given: Any) -> int:
    """Time one search under several budgets and policies, in turn; says no more than the noise allows.

    \b
      arbor bench "4 5 6 10" --budget full --budget 0.25
      arbor bench --controller beam --policy reentry --policy lru --output-json now.json
      arbor bench --budget 0.25 --policy arborkv --policy arborkv,scorer=recency
      arbor bench --controller beam --compare before.json --max-regress 5%
    """
    most = share(given["max_regress"])
    if most is not None and given["compare"] is None:
        raise UsageError(
            "usage", "--max-regress has nothing to compare with.", "Add --compare before.json."
        )
    given["set"] = all_settings(given)
    for text in given["budget"]:
        Budget.parse(text)
    given["policy"] = tuple(known_policy(text) for text in given["policy"])
    before = None if given["compare"] is None else read_timings(given["compare"])
    refuse_nowhere("--output-json", given["output_json"])
    trial = Trial.of(voice, given)
    if before is not None:
        refuse_other(trial.settings, trial.arms, before, given["compare"])
    found = measure(voice, given, trial)
    if given["output_json"] is not None:
        text = json.dumps(finite(found), allow_nan=False, indent=1) + "\n"
        write_atomically(given["output_json"], text)
    slower = [] if before is None else compare(found, before, most)
    if voice.json:
        voice.document(found)
    else:
        show(voice, found)
    for line in slower:
        voice.warn(f"[max-regress] {line}")
    return EXIT_GATE if slower else 0


def share(text: str | None) -> float | None:
    """``5%`` as 0.05.

    Raises:
        UsageError: it is no percentage.
    """
    if text is None:
        return None
    match = _PERCENT.fullmatch(text)
    if match is None:
        raise UsageError("usage", f"--max-regress {text} is no percentage.", "Write it as in 5%.")
    return float(match[1]) / 100


# Measuring


@dataclass(frozen=True, slots=True)
class Trial:
    """What is to be timed, all of it checked and nothing loaded.

    Attributes:
        solvers: by the policy as it was asked for.
        arms: policy and budget.
        problem: what all of them solve.
        settings: what two files of timings must have in common to be compared.
    """

    solvers: Mapping[str, Solver]
    arms: Sequence[tuple[str, str]]
    problem: str
    settings: Mapping[str, Any]

    @classmethod
    def of(cls, voice: Output, given: Mapping[str, Any]) -> Trial:
        """From the options of the command line.

        Raises:
            ArborError: what cannot be meant, and a budget that was asked for and does not work.
        """
        policies = dict.fromkeys(given["policy"] or POLICIES)
        budgets = list(dict.fromkeys(given["budget"] or BUDGETS))
        solvers = {
            name: build_solver({**given, "policy": name, "budget": budgets[0]}, given["problem"])
            for name in policies
        }
        first = next(iter(solvers.values()))
        problem = first.task.example if given["problem"] is None else given["problem"]
        for budget in tuple(budgets):
            try:
                for solver in solvers.values():
                    solver.plan(problem, budget=budget)
            except BudgetInfeasible as error:
                if given["budget"]:
                    raise
                voice.warn(f"--budget {budget} is left out: {error.message}")
                budgets.remove(budget)
        arms = [(policy, budget) for policy in policies for budget in budgets]
        config = {k: v for k, v in first.config.items() if k not in ("policy", "budget")}
        run = {name: given[name] for name in LIMITS}
        settings = {"problem": problem, **config, **run, "device": str(first.device)}
        return cls(solvers, arms, problem, settings)


def measure(voice: Output, given: Mapping[str, Any], trial: Trial) -> dict[str, Any]:
    """Solves the problem under every policy and budget in turn."""
    voice.say(f"loading {given['model']} · seed {given['seed']}")
    first = next(iter(trial.solvers.values()))
    use_threads(given["threads"], first.describe())
    contestants: dict[str, Callable[[], object]] = {}
    limits = {name: given[name] for name in LIMITS}
    for policy, budget in trial.arms:
        solver = trial.solvers[policy]
        solver.load()
        contestants[f"{policy} {budget}"] = partial(
            solver.solve, trial.problem, budget=budget, **limits
        )
    laps: dict[str, list[Lap]] = {name: [] for name in contestants}
    for lap in interleaved(contestants, given["warmup"], given["repeat"]):
        laps[lap.name].append(lap)
        voice.say(f"{lap.name}: {lap.cpu_s:.3f} s of CPU, {lap.wall_s:.3f} s")
    rows = [
        _row(policy, budget, taken)
        for (policy, budget), taken in zip(trial.arms, laps.values(), strict=True)
    ]
    return {
        "schema": SCHEMA,
        "arbor": __version__,
        "settings": trial.settings,
        "machine": machine(),
        "warmup": given["warmup"],
        "repeat": given["repeat"],
        # what a processor does says nothing of a GPU
        "clock": "cpu_s" if str(first.device) == "cpu" else "wall_s",
        "rows": rows,
    }


def _row(policy: str, budget: str, laps: list[Lap]) -> dict[str, Any]:
    solution: Any = laps[-1].result
    names = ("budget_tokens", "peak_tokens", "tokens_generated", "tokens_recomputed")
    row: dict[str, Any] = {"policy": policy, "budget": budget, "answer": solution.answer}
    row |= {name: getattr(solution.metrics, name) for name in names}
    for clock in ("cpu_s", "wall_s"):
        timing = Timing(tuple(getattr(lap, clock) for lap in laps))
        low, median, high = timing.quartiles
        seconds = list(timing.seconds)
        row[clock] = {"median": median, "quartiles": [low, high], "seconds": seconds}
    return row


def machine() -> dict[str, Any]:
    """Where it was measured."""
    return {
        "system": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "processors": os.cpu_count(),
        "python": platform.python_version(),
    }


# Comparing


def read_timings(path: Path) -> dict[str, Any]:
    """What an earlier run measured.

    Raises:
        InputError: it cannot be read, or is something else.
    """
    try:
        found = json.loads(path.read_bytes())
        known = isinstance(found, dict) and found.get("schema") == SCHEMA
    except OSError as error:
        raise _no_timings(path, f"cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise _no_timings(path, "is no JSON") from error
    if not known:
        raise _no_timings(path, f"is no {SCHEMA}")
    assert isinstance(found, dict)
    return found


def _no_timings(path: Path, why: str) -> InputError:
    return InputError(
        "bench-unreadable",
        f"{path} {why}.",
        "Name a file that 'arbor bench --output-json' has written.",
        path=str(path),
    )


def refuse_other(
    settings: Mapping[str, Any],
    arms: Sequence[tuple[str, str]],
    before: Mapping[str, Any],
    path: Path,
) -> None:
    """Refuses timings that are of something else, before anything is timed.

    Raises:
        UsageError: other settings, or no policy and budget in common.
    """
    theirs = before.get("settings", {})
    keys = [k for k in {**settings, **theirs} if _plain(settings.get(k)) != _plain(theirs.get(k))]
    if keys or not _arms(before).keys() & set(arms):
        what = f"other settings: {', '.join(keys)}" if keys else "other policies and budgets"
        raise UsageError(
            "bench-differs",
            f"{path} was measured with {what}.",
            "Give the same options as then.",
            path=str(path),
            keys=keys,
        )


def compare(found: dict[str, Any], before: Mapping[str, Any], most: float | None) -> list[str]:
    """Adds to each row how it did before, where it was there; returns what became slower than is allowed."""
    slower, rows = [], _arms(before)
    clock = found["clock"]
    for row in found["rows"]:
        earlier = rows.get((row["policy"], row["budget"]))
        if earlier is None:
            continue
        then = Timing(tuple(earlier[clock]["seconds"]))
        now = Timing(tuple(row[clock]["seconds"]))
        row["before"] = {"median": then.median, "differs": differs(now, then)}
        if most is not None and regressed(now, then, most):
            slower.append(
                f"{row['policy']} {row['budget']}: {now.median:.3g} s, it was {then.median:.3g} s "
                f"({100 * (now.median / then.median - 1):+.0f} %, allowed {100 * most:g} %)."
            )
    return slower


def _arms(found: Mapping[str, Any]) -> dict[tuple[str, str], Any]:
    return {(row["policy"], row["budget"]): row for row in found.get("rows", [])}


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))


# What it says


def show(voice: Output, found: Mapping[str, Any]) -> None:
    """A row for each policy and budget, and what the noise lets one say of it."""
    from rich.table import Table

    clock = found["clock"]
    base = _timing(found["rows"][0], clock)
    compared = any("before" in row for row in found["rows"])
    table = Table(
        *("policy", "budget", "peak KV", "recomputed", "CPU s", "wall s", "against the first"),
        *(["before"] if compared else []),
        box=None,
    )
    for number, row in enumerate(found["rows"]):
        cells = [row["policy"], row["budget"], f"{row['peak_tokens']:,}"]
        cells.append(f"{row['tokens_recomputed']:,}")
        cells += [_spread(_timing(row, each)) for each in ("cpu_s", "wall_s")]
        cells.append("" if number == 0 else _against(_timing(row, clock), base))
        if "before" in row:
            told = f"{row['before']['median']:.3g}: "
            ratio = _timing(row, clock).median / row["before"]["median"]
            cells.append(told + (f"{ratio:.2f} times" if row["before"]["differs"] else "noise"))
        table.add_row(*cells)
    voice.table(table)


def _timing(row: Mapping[str, Any], clock: str) -> Timing:
    return Timing(tuple(row[clock]["seconds"]))


def _spread(timing: Timing) -> str:
    low, median, high = timing.quartiles
    return f"{median:.3g} ({low:.3g} to {high:.3g})"


def _against(one: Timing, base: Timing) -> str:
    """How many times as long; nothing where the noise is larger than the difference."""
    if not differs(one, base):
        return "no difference beyond the noise"
    return f"{one.median / base.median:.2f} times"
