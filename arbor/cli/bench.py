"""``arbor bench``: the same search under several budgets and policies in turn, timed."""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import arbor
from arbor import registry
from arbor.budget import Budget
from arbor.cli.build import build_solver
from arbor.cli.configure import all_settings
from arbor.cli.options import (
    EXIT_GATE,
    Command,
    limit_options,
    loading_options,
    model_option,
    names_of,
    option,
    retention_options,
    sampling_options,
    search_shape_options,
    voice_options,
)
from arbor.cli.solve import use_threads
from arbor.cli.voice import Voice
from arbor.errors import InputError, UsageError
from arbor.timing import FEWEST, Lap, Timing, differs, interleaved, regressed
from arbor.trace.write import finite

if TYPE_CHECKING:
    from arbor.solver import Solver

SCHEMA = "arbor.bench/1"
BUDGETS = ("full", "0.25")
POLICIES = ("reentry",)

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
    metavar="NAME",
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
@voice_options
@click.pass_obj
def bench(voice: Voice, /, **given: Any) -> int:
    """Time one search under several budgets and policies, in turn; says no more than the noise allows.

    \b
      arbor bench "4 5 6 10" --budget full --budget 0.25
      arbor bench --controller beam --policy reentry --policy lru --output-json now.json
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
    for name in given["policy"]:
        if ":" not in name:
            registry.resolve("policy", name)
    before = None if given["compare"] is None else read_timings(given["compare"])
    if given["output_json"] is not None and not given["output_json"].resolve().parent.is_dir():
        raise _unwritable(given["output_json"], "no such directory")
    found = measure(voice, given)
    if given["output_json"] is not None:
        text = json.dumps(finite(found), allow_nan=False, indent=1) + "\n"
        try:
            given["output_json"].write_text(text, encoding="utf-8")
        except OSError as error:
            raise _unwritable(given["output_json"], str(error.strerror)) from error
    slower = [] if before is None else compare(found, before, given["compare"], most)
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


def _unwritable(path: Path, why: str) -> UsageError:
    return UsageError(
        "bench-unwritable",
        f"--output-json {path} cannot be written: {why}.",
        "Name a file in a folder that exists and may be written.",
        path=str(path),
    )


# Measuring


def measure(voice: Voice, given: Mapping[str, Any]) -> dict[str, Any]:
    """Solves the problem under every policy and budget in turn."""
    policies = dict.fromkeys(given["policy"] or POLICIES)
    budgets = dict.fromkeys(given["budget"] or BUDGETS)
    solvers = {
        name: build_solver(
            {**given, "policy": name, "budget": next(iter(budgets))}, given["problem"]
        )
        for name in policies
    }
    first = next(iter(solvers.values()))
    problem = first.task.example if given["problem"] is None else given["problem"]
    for solver in solvers.values():
        for budget in budgets:
            solver.plan(problem, budget=budget)  # all of them work, or nothing is loaded
    voice.say(f"loading {given['model']} · seed {given['seed']}")
    use_threads(given["threads"], first.describe())
    contestants: dict[str, Callable[[], object]] = {}
    arms = [(policy, budget) for policy in policies for budget in budgets]
    for policy, budget in arms:
        solvers[policy].load()
        contestants[f"{policy} {budget}"] = _search(given, solvers[policy], problem, budget)
    laps: dict[str, list[Lap]] = {name: [] for name in contestants}
    for lap in interleaved(contestants, given["warmup"], given["repeat"]):
        laps[lap.name].append(lap)
        voice.say(f"{lap.name}: {lap.cpu_s:.3f} s of CPU, {lap.wall_s:.3f} s")
    rows = [
        _row(policy, budget, taken)
        for (policy, budget), taken in zip(arms, laps.values(), strict=True)
    ]
    return {
        "schema": SCHEMA,
        "arbor": arbor.__version__,
        "settings": settings_of(given, first, problem),
        "machine": machine(),
        "warmup": given["warmup"],
        "repeat": given["repeat"],
        # what a processor does says nothing of a GPU
        "clock": "cpu_s" if str(first.device) == "cpu" else "wall_s",
        "rows": rows,
    }


def _search(
    given: Mapping[str, Any], solver: Solver, problem: str, budget: str
) -> Callable[[], object]:
    def once() -> object:
        limits = {name: given[name] for name in ("timeout", "max_tokens")}
        return solver.solve(problem, budget=budget, **limits)

    return once


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


def settings_of(given: Mapping[str, Any], solver: Solver, problem: str) -> dict[str, Any]:
    """What two files of timings must have in common to be compared."""
    config = {k: v for k, v in solver.config.items() if k not in ("policy", "budget")}
    run = {name: given[name] for name in ("timeout", "max_tokens")}
    return {"problem": problem, **config, **run, "device": str(solver.device)}


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


def compare(
    found: dict[str, Any], before: Mapping[str, Any], path: Path, most: float | None
) -> list[str]:
    """Adds to each row how it did before; returns what became slower than is allowed.

    Raises:
        UsageError: the two were not measured with the same settings, or have no row in common.
    """
    mine, theirs = found["settings"], before.get("settings", {})
    keys = [k for k in {**mine, **theirs} if _plain(mine.get(k)) != _plain(theirs.get(k))]
    rows = {(row["policy"], row["budget"]): row for row in before.get("rows", [])}
    common = [row for row in found["rows"] if (row["policy"], row["budget"]) in rows]
    if keys or not common:
        what = f"other settings: {', '.join(keys)}" if keys else "other policies and budgets"
        raise UsageError(
            "bench-differs",
            f"{path} was measured with {what}.",
            "Give the same options as then.",
            path=str(path),
            keys=keys,
        )
    slower = []
    clock = found["clock"]
    for row in common:
        then = Timing(tuple(rows[row["policy"], row["budget"]][clock]["seconds"]))
        now = Timing(tuple(row[clock]["seconds"]))
        row["before"] = {"median": then.median, "differs": differs(now, then)}
        if most is not None and regressed(now, then, most):
            slower.append(
                f"{row['policy']} {row['budget']}: {now.median:.3g} s, it was {then.median:.3g} s "
                f"({100 * (now.median / then.median - 1):+.0f} %, allowed {100 * most:g} %)."
            )
    return slower


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))


# What it says


def show(voice: Voice, found: Mapping[str, Any]) -> None:
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
