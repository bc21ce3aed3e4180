"""``arbor bench``: one search under several budgets and policies in turn, timed."""

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
from arbor.cli.command import Command
from arbor.cli.options import EXIT_GATE, output_options, preset_option
from arbor.cli.output import Output
from arbor.cli.output_paths import refuse_unwritable
from arbor.cli.record_options import SolverOptions, budgets_and_policies, options_of, read_options
from arbor.errors import BudgetInfeasible, InputError, UsageError
from arbor.measure.timing import FEWEST, Lap, Timing, differs, interleaved, regressed
from arbor.run.limits import RunLimits
from arbor.support.atomic_write import write_atomically
from arbor.support.setting import setting, settings_of
from arbor.trace.write import finite

if TYPE_CHECKING:
    from arbor.run.settings import Settings
    from arbor.solver import Solver

SCHEMA = "arbor.bench/1"
BUDGETS = ("full", "0.25")
POLICIES = ("reentry",)
OF_MACHINE = ("threads", "tp", "disk_dir", "keep_kv")
CLOCKS = ("cpu_s", "wall_s")
LONGEST_S = 1e9  # of a search in a file of timings
FILE = click.Path(path_type=Path, dir_okay=False)

_PERCENTAGE = re.compile(r"([0-9]+(?:\.[0-9]+)?)%")


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Options of ``arbor bench``, named as on the command line."""

    HEADING = "Output"

    problem: str | None
    warmup: int = setting(2, "Untimed rounds.", heading="Timing", least=0)
    repeat: int = setting(
        5,
        "Timed rounds; each solves the problem once per budget and policy.",
        heading="Timing",
        shown="short",
        least=FEWEST,
    )
    policies: tuple[str, ...]
    budgets: tuple[str, ...]
    solver: SolverOptions
    run: RunLimits
    output_json: Path | None = setting(
        None, "Write all timings, for --compare.", shown="short", kind=FILE
    )
    compare: Path | None = setting(
        None,
        "Compare with timings of --output-json that have the same settings.",
        shown="short",
        kind=FILE,
    )
    max_regress: float | None = setting(
        None,
        "With --compare: exit code 7 if a median grew by more than this and than the noise.",
        shown="short",
        metavar="P%",
        kind=click.STRING,
    )


@click.command(cls=Command)
@click.argument("problem", required=False)
@budgets_and_policies(
    "As for solve; may be repeated; default full and 0.25.",
    "May be repeated; each policy loads the weights once more. Default reentry.",
)
@preset_option
@options_of(BenchOptions, without=("budget", "policy"))
@output_options
@click.pass_obj
def bench(
    output: Output, /, policy: tuple[str, ...], budget: tuple[str, ...], **values: Any
) -> int:
    """Time one search under several budgets and policies in turn; differences below the noise are
    not reported.

    \b
      arbor bench "4 5 6 10" --budget full --budget 0.25
      arbor bench --controller beam --policy lru --output-json now.json
      arbor bench --budget 0.25 --policy arborkv --policy arborkv,scorer=recency
      arbor bench --controller beam --compare before.json --max-regress 5%
    """
    for text in budget:
        Budget.parse(text)
    values |= {
        "policy": POLICIES[0],
        "policies": tuple(dict.fromkeys(map(known_policy, policy))),
        "budget": BUDGETS[0],
        "budgets": tuple(dict.fromkeys(budget)),
        "max_regress": parse_percentage(values["max_regress"]),
    }
    options = read_options(BenchOptions, values)
    if options.max_regress is not None and options.compare is None:
        raise UsageError(
            "usage", "--max-regress has nothing to compare with.", "Add --compare before.json."
        )
    before = None if options.compare is None else read_timings(options.compare)
    refuse_unwritable("--output-json", options.output_json)
    trial = Trial.of(output, options)
    if before is not None and options.compare is not None:
        refuse_other_settings(trial.settings, trial.arms, before, options.compare)
    found = measure(output, options, trial)
    if options.output_json is not None:
        text = json.dumps(finite(found), allow_nan=False, indent=1) + "\n"
        write_atomically(options.output_json, text)
    slower = [] if before is None else compare(found, before, options.max_regress)
    if output.json:
        output.document(found)
    else:
        show(output, found)
    for line in slower:
        output.warn(f"[max-regress] {line}")
    return EXIT_GATE if slower else 0


def parse_percentage(text: str | None) -> float | None:
    """``5%`` -> 0.05.

    Raises:
        UsageError: not a percentage.
    """
    if text is None:
        return None
    match = _PERCENTAGE.fullmatch(text)
    if match is None:
        raise UsageError(
            "usage", f"--max-regress {text} is not a percentage.", "Write it as in 5%."
        )
    return float(match[1]) / 100


# Measuring


@dataclass(frozen=True, slots=True)
class Trial:
    """What is timed; everything is checked and nothing loaded."""

    solvers: Mapping[str, Solver]
    arms: Sequence[tuple[str, str]]
    problem: str
    settings: Mapping[str, Any]

    @classmethod
    def of(cls, output: Output, options: BenchOptions) -> Trial:
        """From the options of the command line.

        Raises:
            ArborError: an invalid option, or a given budget that is infeasible.
        """
        policies = options.policies or POLICIES
        budgets = list(options.budgets or BUDGETS)
        solvers = {
            policy: build_solver(
                options.solver.having(policy=policy, budget=budgets[0]), options.problem
            )
            for policy in policies
        }
        first = next(iter(solvers.values()))
        problem = first.task.example if options.problem is None else options.problem
        for budget in tuple(budgets):
            try:
                for solver in solvers.values():
                    solver.plan(problem, budget=budget)
            except BudgetInfeasible as error:
                if options.budgets:
                    raise
                output.warn(f"--budget {budget} is left out: {error.message}")
                budgets.remove(budget)
        arms = [(policy, budget) for policy in policies for budget in budgets]
        config = {k: v for k, v in first.config.items() if k not in ("policy", "budget")}
        settings = {
            "problem": problem,
            **config,
            **options.run.limits,
            **of_machine(options.solver.settings),
            "device": str(first.device),
        }
        return cls(solvers, arms, problem, settings)


def of_machine(asked: Settings) -> dict[str, Any]:
    """Settings that no configuration holds and that a search's time depends on, unless default."""
    threads = asked.threads or os.environ.get("OMP_NUM_THREADS") or None
    given = asked.unrecorded | {"threads": threads and str(threads)}
    known = settings_of(type(asked))
    differing = [name for name in OF_MACHINE if given[name] != known[name].default]
    return {name: _plain(given[name]) for name in differing}


def measure(output: Output, options: BenchOptions, trial: Trial) -> dict[str, Any]:
    """Times the problem under every policy and budget in turn."""
    asked = options.solver.settings
    output.say(f"loading {asked.model} · seed {asked.seed}")
    first = next(iter(trial.solvers.values()))
    contestants: dict[str, Callable[[], object]] = {}
    for policy, budget in trial.arms:
        solver = trial.solvers[policy]
        solver.load()
        contestants[f"{policy} {budget}"] = partial(
            solver.solve,
            trial.problem,
            budget=budget,
            **options.run.limits,
        )
    laps: dict[str, list[Lap]] = {name: [] for name in contestants}
    for lap in interleaved(contestants, options.warmup, options.repeat):
        laps[lap.name].append(lap)
        output.say(f"{lap.name}: {lap.cpu_s:.3f} s of CPU, {lap.wall_s:.3f} s")
    rows = [
        _row(policy, budget, taken)
        for (policy, budget), taken in zip(trial.arms, laps.values(), strict=True)
    ]
    return {
        "schema": SCHEMA,
        "arbor": __version__,
        "settings": trial.settings,
        "machine": machine(),
        "warmup": options.warmup,
        "repeat": options.repeat,
        # CPU time does not measure a GPU
        "clock": "cpu_s" if str(first.device) == "cpu" else "wall_s",
        "rows": rows,
    }


def _row(policy: str, budget: str, laps: list[Lap]) -> dict[str, Any]:
    solution: Any = laps[-1].result
    names = ("budget_tokens", "peak_tokens", "tokens_generated", "tokens_recomputed")
    row: dict[str, Any] = {"policy": policy, "budget": budget, "answer": solution.answer}
    row |= {name: getattr(solution.metrics, name) for name in names}
    for clock in CLOCKS:
        timing = Timing(tuple(getattr(lap, clock) for lap in laps))
        low, median, high = timing.quartiles
        seconds = list(timing.seconds)
        row[clock] = {"median": median, "quartiles": [low, high], "seconds": seconds}
    return row


def machine() -> dict[str, Any]:
    """The machine of the timings."""
    return {
        "system": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "processors": os.cpu_count(),
        "python": platform.python_version(),
    }


# Comparing


def read_timings(path: Path) -> dict[str, Any]:
    """The timings of an earlier run.

    Raises:
        InputError: the file cannot be read, or holds something else than `compare` needs.
    """
    try:
        found = json.loads(path.read_bytes())
        known = isinstance(found, dict) and found.get("schema") == SCHEMA
    except OSError as error:
        raise _no_timings(path, f"cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise _no_timings(path, "is not JSON") from error
    if not known:
        raise _no_timings(path, f"is not {SCHEMA}")
    assert isinstance(found, dict)
    if not isinstance(found.get("settings"), dict):
        raise _no_timings(path, "has no table 'settings'")
    rows = found.get("rows")
    if not isinstance(rows, list) or not rows:
        raise _no_timings(path, "has no list 'rows'")
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict) or not all(
            isinstance(row.get(name), str) for name in ("policy", "budget")
        ):
            raise _no_timings(path, f"lacks policy or budget in row {number}")
        for clock in CLOCKS:
            if not _is_timing(row.get(clock)):
                raise _no_timings(
                    path,
                    f"lacks {FEWEST} or more seconds with a median above 0 in {clock} of row "
                    f"{number}",
                )
    return found


def _is_timing(found: object) -> bool:
    """Whether JSON is a timing that others can be compared with."""
    seconds = found.get("seconds") if isinstance(found, dict) else None
    if not isinstance(seconds, list) or len(seconds) < FEWEST:
        return False
    if not all(type(each) in (int, float) and 0 <= each < LONGEST_S for each in seconds):
        return False
    return Timing(tuple(seconds)).median > 0


def _no_timings(path: Path, why: str) -> InputError:
    return InputError(
        "bench-unreadable",
        f"{path} {why}.",
        "Name a file written by 'arbor bench --output-json'.",
        path=str(path),
    )


def refuse_other_settings(
    settings: Mapping[str, Any],
    arms: Sequence[tuple[str, str]],
    before: Mapping[str, Any],
    path: Path,
) -> None:
    """Refuses timings of another search, before anything is timed.

    Raises:
        UsageError: other settings, or no policy and budget in common.
    """
    theirs = before["settings"]
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


def compare(
    found: dict[str, Any], before: Mapping[str, Any], max_regress: float | None
) -> list[str]:
    """Adds the earlier timing to each row that has one.

    Returns:
        A line for each row that is slower than before by more than `max_regress` and the noise.
    """
    slower, rows = [], _arms(before)
    clock = found["clock"]
    for row in found["rows"]:
        earlier = rows.get((row["policy"], row["budget"]))
        if earlier is None:
            continue
        then = Timing(tuple(earlier[clock]["seconds"]))
        now = Timing(tuple(row[clock]["seconds"]))
        row["before"] = {"median": then.median, "differs": differs(now, then)}
        if max_regress is not None and regressed(now, then, max_regress):
            slower.append(
                f"{row['policy']} {row['budget']}: {now.median:.3g} s, it was {then.median:.3g} s "
                f"({100 * (now.median / then.median - 1):+.0f} %, allowed {100 * max_regress:g} %)."
            )
    return slower


def _arms(found: Mapping[str, Any]) -> dict[tuple[str, str], Any]:
    return {(row["policy"], row["budget"]): row for row in found["rows"]}


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))


# Printing


def show(output: Output, found: Mapping[str, Any]) -> None:
    """Prints a row for each policy and budget, with the differences beyond the noise."""
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
        cells += [_spread(_timing(row, each)) for each in CLOCKS]
        cells.append("" if number == 0 else _ratio(_timing(row, clock), base))
        if "before" in row:
            ratio = _timing(row, clock).median / row["before"]["median"]
            change = f"{ratio:.2f} times" if row["before"]["differs"] else "noise"
            cells.append(f"{row['before']['median']:.3g}: {change}")
        table.add_row(*cells)
    output.table(table)


def _timing(row: Mapping[str, Any], clock: str) -> Timing:
    return Timing(tuple(row[clock]["seconds"]))


def _spread(timing: Timing) -> str:
    low, median, high = timing.quartiles
    return f"{median:.3g} ({low:.3g} to {high:.3g})"


def _ratio(one: Timing, base: Timing) -> str:
    """The ratio of the medians, where the difference is beyond the noise."""
    if not differs(one, base):
        return "no difference beyond the noise"
    return f"{one.median / base.median:.2f} times"
