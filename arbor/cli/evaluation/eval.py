"""``arbor eval``: many problems into one folder; an interrupted run can be resumed."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from arbor import registry
from arbor._version import __version__
from arbor.cli.build import build_solver, import_engine, warn_of_misfit
from arbor.cli.command import Command
from arbor.cli.evaluation.eval_dataset import STDIN, is_task, name_of, read_samples
from arbor.cli.evaluation.eval_options import EvalOptions
from arbor.cli.evaluation.eval_report import OtherRun, result_lines, write_results
from arbor.cli.evaluation.eval_run import solve_all
from arbor.cli.options import EXIT_GATE, config_option, output_options, preset_option
from arbor.cli.output import Output
from arbor.cli.record_options import SolverOptions, options_of, read_options
from arbor.cli.signals import EXIT_SIGNAL, StopSignals
from arbor.errors import ArborError, SearchBug, UsageError
from arbor.measure.cluster import check_workers
from arbor.measure.evaluation.folder import (
    CONFIG,
    WEIGHTS,
    RunFolder,
    digest,
    refuse_other_settings,
    refuse_taken,
    requested_config,
)
from arbor.measure.evaluation.rows import HUB
from arbor.model.fitted_files import found_file
from arbor.model.loading import ModelLocation, locate_model
from arbor.model.model_identity import model_identity
from arbor.run.settings import Settings
from arbor.support.cache_dir import FITTED
from arbor.tasks.base import Converses, Task, Versioned

if TYPE_CHECKING:
    from arbor.measure.evaluation.dataset import Sample
    from arbor.solver import Solver


def complete_dataset(
    ctx: click.Context, parameter: click.Parameter, begun: str
) -> list[CompletionItem]:
    """Tasks, then files."""
    tasks = [CompletionItem(name) for name in registry.names("task") if name.startswith(begun)]
    return [*tasks, CompletionItem(begun, type="file")]


@click.command("eval", cls=Command)
@click.argument("dataset", shell_complete=complete_dataset)
@preset_option
@options_of(EvalOptions)
@config_option
@output_options
@click.pass_context
def eval_(ctx: click.Context, /, **values: Any) -> int:
    """Solve many problems; the same command with the same --output resumes.

    DATASET is a task with problems (chains, countdown, game24, recall, or
    mine.py:Mine), a file (.jsonl, .json, .csv, .tsv, .parquet), '-' (stdin),
    or hf:OWNER/NAME:SPLIT.

    \b
      arbor eval game24 --limit 50 --budget 0.25 --output runs/quarter
      arbor eval problems.jsonl --on-error continue
      arbor eval game24 --limit 50 --output runs/full --compare runs/baseline
      arbor eval game24 --limit 50 --workers 2
    """
    output = ctx.ensure_object(Output)
    values["task"] = task_of(ctx, values["dataset"], values["task"])
    options = read_options(EvalOptions, values)
    task = options.solver.settings.task
    samples = read_samples(options.samples, task, options.on_error == "stop")
    other = None if options.compare is None else OtherRun.read(options.compare, samples)
    with StopSignals() as signals:
        run = evaluate(output, options, task, samples, signals, other)
    code = _show(output, options, run.results)
    bugs = [name for name, row in run.rows.items() if (row.get("error") or {}).get("code") == "bug"]
    if bugs:
        named = ", ".join(bugs[:3]) + (" …" if len(bugs) > 3 else "")
        output.warn(
            f"[bug] an internal error ended {len(bugs):,} sample(s): {named}; "
            "samples.jsonl has the tracebacks."
        )
        code = SearchBug.exit_code
    if signals.received is not None:
        output.warn(f"interrupted; to resume: {resume_command(options, run.folder)}")
        return EXIT_SIGNAL + signals.received
    return code


@dataclass(frozen=True, slots=True)
class Evaluated:
    """A run in its folder, finished or interrupted."""

    folder: Path
    results: dict[str, Any]
    rows: dict[str, dict[str, Any]]


def evaluate(
    output: Output,
    options: EvalOptions,
    task: Task,
    samples: list[Sample],
    signals: StopSignals,
    other: OtherRun | None = None,
    resume: str = "",
) -> Evaluated:
    """Solve the samples that the run's folder lacks, and write its results.

    Returns early on a signal; a finished run builds no solver. `resume` is the command of the
    comparison that the run is of, which counts these samples alone; a run by itself has its own.

    Raises:
        ArborError: an invalid setting, a folder that holds something else, or, with
            ``--on-error stop``, a sample that cannot be solved.
    """
    request = request_digest(options, task)
    finished = _finished_folder(options, request, samples)
    if finished is not None:
        if not resume:
            _warn_of_others(output, finished, samples)
        with contextlib.closing(finished):
            found = write_results(finished, options.samples.dataset, samples, other)
        return Evaluated(finished.path, found, finished.rows)
    with build_solver(described(options), searches=False) as solver:
        warn_of_misfit(output, options.solver, solver)
        config = run_config(options, solver, task)
        path = options.output or new_folder(options.samples.dataset, config)
        if options.on_error == "stop" and samples[0].problem is not None:
            solver.plan(samples[0].problem)  # an infeasible run leaves no folder behind
        folder = RunFolder(path, config, options.fresh, request)
        if not resume:
            _warn_of_others(output, folder, samples)
            resume = resume_command(options, path)
        if options.workers is None and not all(map(folder.finished, samples)):
            import_engine()
        try:
            solve_all(output, options, solver, folder, samples, signals)
            found = write_results(folder, options.samples.dataset, samples, other)
        except KeyboardInterrupt:
            output.warn(f"to resume: {resume}")
            raise
        except ArborError:
            with contextlib.suppress(UsageError):  # on a full disk the first error says enough
                write_results(folder, options.samples.dataset, samples, other)
            output.warn(f"{len(folder.rows):,} finished sample(s) kept; to resume: {resume}")
            raise
        finally:
            folder.close()
    return Evaluated(path, found, folder.rows)


def _warn_of_others(output: Output, folder: RunFolder, samples: list[Sample]) -> None:
    """Say which samples of a folder count though they are not among those asked for."""
    others = len(folder.rows.keys() - {sample.id for sample in samples})
    if others:
        output.warn(
            f"warning: {others:,} sample(s) of {folder.path} are not among those asked for, and "
            "count too; --fresh leaves them out"
        )


def described(options: EvalOptions) -> SolverOptions:
    """The options of this process's solver; with ``--workers`` it only describes theirs, and the
    GPU is not looked for here.

    Raises:
        UsageError: settings that mean nothing, or something else, with several engines; or Ray is
            not installed.
    """
    if options.workers is None:
        return options.solver
    settings = options.solver.settings
    check_workers(settings.share, settings.device, settings.tp)
    registry.part("cluster", "ray").check_installed()
    return options.solver.having(device="auto")


def _finished_folder(options: EvalOptions, request: str, samples: list[Sample]) -> RunFolder | None:
    """The folder of a run that these options have finished; no solver is built for it."""
    if options.output is None or options.fresh or not request:
        return None
    config = requested_config(options.output, request)
    if config is None:
        return None
    folder = RunFolder(options.output, config, request=request)
    if all(map(folder.finished, samples)):
        return folder
    folder.close()
    return None


def check_folder(options: EvalOptions, path: Path, task: Task) -> None:
    """Refuse a run that its folder would refuse, before anything is written.

    Raises:
        UsageError: the folder holds something else, a run with other settings, or one in progress.
    """
    refuse_taken(path)
    started = (path / CONFIG).exists() and not options.fresh
    if started and requested_config(path, request_digest(options, task)) is None:
        with build_solver(described(options), searches=False) as solver:
            refuse_other_settings(path, run_config(options, solver, task))


def request_digest(options: EvalOptions, task: Task) -> str:
    """A digest of everything a configuration is resolved from; empty for a model of the Hub.

    That is the options, the version, plug-ins, what was fitted to the model, and how its directory
    says to sample.
    """
    solver = options.solver.settings
    source = _located(solver)
    folder = Path(source.path)
    if not folder.is_dir():  # its files may change with the cache
        return ""
    facts = dataclasses.asdict(options)
    for each in ("output", "fresh", "fail_under", "compare", "concurrency", "workers"):
        del facts[each]
    facts["arbor"] = __version__
    facts["task"] = versions(task)
    facts["plugins"] = {kind: registry.plugins(kind) for kind in registry.KINDS}
    facts["msve"] = str(solver.msve)
    facts[WEIGHTS] = content_of(solver)
    files = [folder / "generation_config.json", *(found_file(name, source) for name in FITTED)]
    facts["files"] = [
        None if path is None or not path.is_file() else path.read_bytes().hex() for path in files
    ]
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode("utf-8", "backslashreplace"), digest_size=8).hexdigest()


def _show(output: Output, options: EvalOptions, found: Mapping[str, Any]) -> int:
    """Prints the results; the exit code says whether they pass ``--fail-under``."""
    if output.json:
        output.document(found)
    else:
        for line in result_lines(found):
            output.print(line)
    gate, accuracy = options.fail_under, found["accuracy"]
    if gate is not None and accuracy is not None and accuracy < gate:
        output.warn(f"[fail-under] the accuracy is {accuracy:.4g}, below {gate:g}.")
        return EXIT_GATE
    return 0


def versions(task: Task) -> dict[str, str]:
    """Versions of a task's grader and of its prompt, where it has them.

    Samples that other rules graded, or that another prompt answered, are not of one run.
    """
    found = {}
    if isinstance(task, Versioned):
        found["grader_version"] = task.grading
    if isinstance(task, Converses):
        found["prompt_version"] = task.prompt_version
    return found


def run_config(options: EvalOptions, solver: Solver, task: Task) -> dict[str, Any]:
    """The configuration that repeats the run, as ``--config`` reads it."""
    samples = options.samples
    if is_task(samples.dataset):
        source: dict[str, Any] = {"split": samples.split or "test"}
    else:
        source = {
            **({} if samples.split is None else {"split": samples.split}),
            "input_key": samples.input_key,
            "target_key": samples.target_key,
            "encoding": samples.encoding,
        }
    return {
        "arbor": __version__,
        "dataset": absolute_path(samples.dataset),
        **source,
        "limit": samples.limit,
        "on_error": options.on_error,
        "trace": options.trace,
        "trace_level": options.trace_detail.trace_level,
        "trace_text": options.trace_detail.trace_text,
        **({"sample_id": samples.sample_id} if samples.sample_id else {}),
        **versions(task),
        **options.run.limits,
        **solver.config,
        WEIGHTS: content_of(options.solver.settings),
    }


def content_of(settings: Settings) -> str | None:
    """Which weights and settings the models have; None: nothing identifies them."""
    found = model_identity(_located(settings))
    if found is None:
        return None
    return hashlib.blake2b(found.encode(), digest_size=16).hexdigest()


def _located(settings: Settings) -> ModelLocation:
    return locate_model(
        settings.model, settings.revision, settings.trust_remote_code, settings.adapter
    )


def absolute_path(dataset: str) -> str:
    """The absolute path of a file, also of a task's, so that a configuration works from any folder;
    others as they are."""
    if dataset == STDIN or dataset.startswith(HUB):
        return dataset
    if is_task(dataset):
        return registry.name_of(registry.resolve("task", dataset)) if ":" in dataset else dataset
    return str(Path(dataset).absolute())


def resume_command(options: EvalOptions, path: Path) -> str:
    """The command that resumes a run: its configuration, and flags a configuration cannot hold."""
    words = ["arbor", "eval", "--config", str(path / CONFIG), "--output", str(path)]
    settings = options.solver.settings
    if settings.device != "auto":
        words += ["--device", settings.device]
    if settings.trust_remote_code:
        words.append("--trust-remote-code")
    if settings.tp > 1:
        words += ["--tp", str(settings.tp)]
    if options.workers is not None:
        words += ["--workers", str(options.workers)]
    return shlex.join(words)


def task_of(ctx: click.Context, dataset: str, task: str) -> str:
    """The task that reads the dataset: the dataset itself where it is a task.

    Raises:
        UsageError: ``--task`` names another one.
    """
    if not is_task(dataset):
        return task
    given = ctx.get_parameter_source("task") is not click.core.ParameterSource.DEFAULT
    named = absolute_path(dataset)
    if given and task not in (dataset, named):
        raise UsageError(
            "usage",
            f"the problems of {dataset} are not read by --task {task}.",
            "Leave --task out; it is for files.",
        )
    return named


def new_folder(dataset: str, config: Mapping[str, Any], kind: str = "") -> Path:
    """``runs/{time}_{kind}{dataset}_{id}``."""
    now = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    name = re.sub(r"[^\w.-]+", "-", dataset.removeprefix(HUB))
    name = name if dataset.startswith(HUB) else Path(name_of(dataset)).stem
    return Path("runs") / f"{now}_{kind}{name}_{digest(config)[:6]}"
