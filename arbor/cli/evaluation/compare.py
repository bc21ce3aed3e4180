"""``arbor compare``: several arms on the same problems, at matched tokens and matched KV."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from arbor import registry
from arbor.cli.build import build_solver
from arbor.cli.command import Command
from arbor.cli.evaluation.arms import Arm, read_arms
from arbor.cli.evaluation.compare_report import table_lines, write_comparison
from arbor.cli.evaluation.eval import (
    Evaluated,
    absolute_path,
    check_folder,
    complete_dataset,
    evaluate,
    new_folder,
    task_of,
)
from arbor.cli.evaluation.eval_dataset import read_samples
from arbor.cli.evaluation.eval_options import EvalOptions, SampleOptions
from arbor.cli.options import config_option, output_options
from arbor.cli.output import Output
from arbor.cli.record_options import options_of, read_options
from arbor.cli.signals import EXIT_SIGNAL, StopSignals
from arbor.errors import ArborError, BudgetInfeasible, UsageError
from arbor.measure.evaluation.compare import ArmRuns
from arbor.measure.evaluation.folder import file_name, refuse_other_files
from arbor.run.config import config_text
from arbor.support.atomic_write import write_atomically
from arbor.support.setting import setting

if TYPE_CHECKING:
    from arbor.measure.evaluation.dataset import Sample


@dataclass(frozen=True, kw_only=True)
class CompareOptions(SampleOptions):
    """Options of ``arbor compare``, named as on the command line."""

    HEADING = "Comparison"

    arm: tuple[str, ...] = setting(
        (),
        "[LABEL=]NAME[,KEY=VALUE][;OPTION=VALUE]; repeated, the first is the baseline.",
        shown="short",
        metavar="ARM",
    )
    tokens: tuple[int, ...] = setting(
        (),
        "Most generated tokens of each search; repeated for a curve.",
        shown="short",
        metavar="N",
        least=1,
    )
    seeds: int = setting(1, "Runs of every arm; the first has --seed.", shown="short", least=1)
    output: Path | None = setting(
        None,
        "Folder, new or to resume; default: runs/{time}_compare_{dataset}_{id}.",
        heading="Output",
        shown="short",
        metavar="DIR",
        also=("-o",),
        kind=click.Path(path_type=Path, file_okay=False),
    )
    concurrency: int = setting(
        1,
        "Samples in progress at a time; above 1 only with the full budget, which they would share.",
        heading="Output",
        least=1,
    )


SETTINGS = "compare.toml"  # every option, as --config reads it
RUNS = "arms"
LEAST_ARMS = 2


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """One run of a comparison."""

    arm: Arm
    tokens: int | None
    seed: int
    folder: str
    options: EvalOptions


@click.command(cls=Command)
@click.argument("dataset", shell_complete=complete_dataset)
@options_of(CompareOptions, without=("controller", "max_tokens"))
@config_option
@output_options
@click.pass_context
def compare(ctx: click.Context, /, **values: Any) -> int:
    """Compare controllers on the same problems; the same command with the same --output resumes.

    DATASET is that of 'arbor eval'.

    \b
      arbor compare game24 --arm dpts --arm mcts --tokens 400 --output runs/two
      arbor compare game24 --arm 'greedy=chain;temperature=0' --arm tot
      arbor compare game24 --arm tot --arm 'lru=tot;policy=lru' --budget 300tok
    """
    output = ctx.ensure_object(Output)
    values["task"] = task_of(ctx, values["dataset"], values["task"])
    arms = read_arms(values["arm"], ctx)
    if len(arms) < LEAST_ARMS:
        raise UsageError(
            "usage",
            f"a comparison needs {LEAST_ARMS} arms, not {len(arms)}.",
            "As in --arm dpts --arm mcts.",
        )
    values |= {"controller": arms[0].controller, "max_tokens": None}
    options = read_options(CompareOptions, values)
    options = dataclasses.replace(options, tokens=tuple(dict.fromkeys(options.tokens)))
    task = arms[0].solver_options(options.solver).settings.task
    samples = read_samples(options.samples, task, options.on_error == "stop")
    for arm in arms:  # before any of them solves a problem
        build_solver(arm.solver_options(options.solver), searches=False).close()
    budgets = matched_budgets(options, arms, samples)
    settings = settings_of(options)
    path = options.output or new_folder(options.samples.dataset, settings, "compare_")
    refuse_other_files(path, "comparison", SETTINGS)
    planned = plan_runs(options, arms, budgets, path)
    for run in planned:  # a refused comparison leaves the one in the folder as it is
        check_folder(run.options, path / run.folder, task)
    path.mkdir(parents=True, exist_ok=True)
    write_atomically(path / SETTINGS, config_text(settings))
    resume = resume_command(options, path)
    done: list[tuple[PlannedRun, Evaluated]] = []

    def write() -> dict[str, Any]:
        runs = arm_runs(done, samples)
        return write_comparison(path, options.samples.dataset, budgets, samples, runs)

    with StopSignals() as signals:
        try:
            for number, run in enumerate(planned, 1):
                output.say(f"{number} of {len(planned)}: {run.folder}")
                ended = evaluate(output, run.options, task, samples, signals, resume=resume)
                done.append((run, ended))
                if signals.received is not None:
                    break
        except (ArborError, KeyboardInterrupt):
            with contextlib.suppress(UsageError):  # on a full disk the first error says enough
                if done:
                    write()
            raise
        found = write()
    if output.json:
        output.document(found)
    else:
        for line in table_lines(found):
            output.print(line)
    if signals.received is not None:
        output.warn(f"interrupted; to resume: {resume}")
        return EXIT_SIGNAL + signals.received
    return 0


def matched_budgets(
    options: CompareOptions, arms: Sequence[Arm], samples: Sequence[Sample]
) -> dict[int | None, str]:
    """The KV budget of a search at each number of tokens, the same for every arm.

    A ratio is of what full retention of each search holds; an amount is that of each search.

    Raises:
        UsageError: an amount that several searches would share.
        BudgetInfeasible: an amount too small for an arm.
    """
    levels: tuple[int | None, ...] = options.tokens or (None,)
    budget = options.solver.settings.budget
    if budget.unit == "ratio":
        return dict.fromkeys(levels, str(budget))
    if options.concurrency > 1:
        raise UsageError(
            "usage",
            f"--budget {budget} with --concurrency {options.concurrency}: "
            "the searches in progress would share it.",
            "Leave --concurrency out.",
        )
    smallest, bytes_per_token = _sizes(options, arms, samples)
    slots = budget.tokens(2**62, bytes_per_token)
    for label, least in smallest.items():
        if least > slots:
            hint = f"Smallest workable for it: --budget {least}tok, or a ratio as in 0.25."
            raise BudgetInfeasible(least, slots, f"the arm '{label}'", hint)
    return dict.fromkeys(levels, f"{slots}tok")


def _sizes(
    options: CompareOptions, arms: Sequence[Arm], samples: Sequence[Sample]
) -> tuple[dict[str, int], int]:
    """The smallest workable amount of each arm for the longest prompt, and the bytes of a token's
    KV.

    Raises:
        ArborError: an arm cannot be built, or a problem is too long for the model.
    """
    problems = [sample.problem for sample in samples if sample.problem is not None]
    smallest, size = {}, 1
    for place, arm in enumerate(arms):
        shared = options.solver.having(budget="full")
        with build_solver(arm.solver_options(shared), searches=False) as solver:
            if not place:
                plans = [solver.plan(problem) for problem in problems]
                prompts = [plan.prompt_tokens for plan in plans]
                size = plans[0].bytes_per_token if plans else 1
                problems = [problems[prompts.index(max(prompts))]] if plans else []
            smallest[arm.label] = max(
                (solver.plan(problem).smallest_tokens for problem in problems), default=0
            )
    return smallest, size


def plan_runs(
    options: CompareOptions, arms: Sequence[Arm], budgets: dict[int | None, str], path: Path
) -> list[PlannedRun]:
    """Every run of the comparison, the arms next to each other at each seed."""
    planned = []
    for tokens, budget in budgets.items():
        first = options.solver.settings.seed
        for seed in range(first, first + options.seeds):
            for arm in arms:
                level = "unlimited" if tokens is None else f"{tokens}-tokens"
                folder = f"{RUNS}/{file_name(arm.label, 'arm')}/{level}-seed-{seed}"
                shared = options.solver.having(budget=budget, seed=seed)
                run = EvalOptions(
                    samples=options.samples,
                    solver=arm.solver_options(shared),
                    run=arm.run_options(options.run, tokens),
                    output=path / folder,
                    fresh=options.fresh,
                    concurrency=options.concurrency,
                    on_error=options.on_error,
                    trace=options.trace,
                    trace_detail=options.trace_detail,
                )
                planned.append(PlannedRun(arm, tokens, seed, folder, run))
    return planned


def arm_runs(
    done: Sequence[tuple[PlannedRun, Evaluated]], samples: Sequence[Sample]
) -> list[ArmRuns]:
    """The runs by arm and number of tokens, with the rows of these samples only."""
    grouped: dict[tuple[str, int | None], list[tuple[PlannedRun, Evaluated]]] = {}
    for run, ended in done:
        grouped.setdefault((run.arm.label, run.tokens), []).append((run, ended))
    known = [sample.id for sample in samples]
    return [
        ArmRuns(
            label,
            tokens,
            tuple(run.seed for run, _ in runs),
            tuple(run.folder for run, _ in runs),
            tuple({each: e.rows[each] for each in known if each in e.rows} for _, e in runs),
        )
        for (label, tokens), runs in grouped.items()
    ]


def settings_of(options: CompareOptions) -> dict[str, Any]:
    """The options that repeat the comparison, as ``--config`` reads them."""
    skipped = ("controller", "trust_remote_code", "max_tokens")
    flat: dict[str, Any] = {
        **dataclasses.asdict(options.samples),
        **options.solver.given,
        "set": options.solver.set,
        **options.run.limits,
        **dataclasses.asdict(options.trace_detail),
        **{name: getattr(options, name) for name in ("arm", "tokens", "seeds", "concurrency")},
        **{name: getattr(options, name) for name in ("on_error", "trace")},
    }
    flat["dataset"] = absolute_path(options.samples.dataset)
    return {
        name: _from_root(value)
        for name, value in flat.items()
        if name not in skipped and value is not None and value != ()
    }


def _from_root(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_from_root(each) for each in value]
    return registry.from_root(value) if isinstance(value, str) else value


def resume_command(options: CompareOptions, path: Path) -> str:
    """The command that resumes a comparison."""
    words = ["arbor", "compare", "--config", str(path / SETTINGS), "--output", str(path)]
    if options.solver.settings.trust_remote_code:
        words.append("--trust-remote-code")
    return shlex.join(words)
