"""``arbor calibrate``: fit the estimates of policies to solved problems."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from arbor import components
from arbor.cli.command import Command, F, Group, Integer, Number, option, option_group
from arbor.cli.evaluation.eval import complete_dataset, task_of
from arbor.cli.evaluation.eval_dataset import is_task, name_of, read_samples
from arbor.cli.evaluation.eval_options import DatasetOptions, column_options
from arbor.cli.options import output_options, revision_option, trust_option
from arbor.cli.output import Output
from arbor.cli.output_paths import refuse_unwritable
from arbor.errors import UsageError
from arbor.feature import features
from arbor.support.cache_dir import exit_file

if TYPE_CHECKING:
    from arbor.measure.calibrate_exit import Choice
    from arbor.solver import Solver
    from arbor.tasks.base import Problem
    from arbor.verifiers.exit_thresholds import Chosen


def fitted_to(task: str) -> Callable[[F], F]:
    """Options of what is calibrated: the model, and the problems; `task` by default."""
    return option_group(
        click.argument("dataset", required=False, shell_complete=complete_dataset),
        option(
            "--model",
            default="builtin:sapling",
            metavar="NAME|DIR",
            heading="Model",
            common=True,
            help="Model to calibrate.",
        ),
        revision_option,
        trust_option,
        option(
            "--task",
            default=task,
            metavar="NAME",
            heading="Search",
            common=True,
            help="Task that reads a data set, or whose training problems are solved.",
        ),
        option(
            "--n",
            type=Integer(8),
            default=100,
            metavar="N",
            heading="Search",
            common=True,
            help="Problems to solve, the first of the split.",
        ),
        column_options,
    )


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """What is calibrated, and the problems: the options of `fitted_to`.

    Attributes:
        model, revision, trust_remote_code, task: as `Solver` takes them.
        n: problems.
        rows: the split ``calibration`` of a data set, which ``arbor eval --split evaluation``
            leaves out; None: the training split of the task's own problems.
    """

    model: str
    revision: str | None
    trust_remote_code: bool
    task: str
    n: int
    rows: DatasetOptions | None

    @classmethod
    def of(cls, values: dict[str, Any]) -> Fitted:
        """The options as click gives them.

        Raises:
            UsageError: the data set and ``--task`` are two tasks.
        """
        dataset, task, rows = values["dataset"], values["task"], None
        if dataset is not None:
            task = task_of(click.get_current_context(), dataset, task)
            if not is_task(dataset):
                rows = DatasetOptions(
                    dataset=dataset,
                    split="calibration",
                    input_key=values["input_key"],
                    target_key=values["target_key"],
                    encoding=values["encoding"],
                    limit=str(values["n"]),
                    sample_id=(),
                )
        same = ("model", "revision", "trust_remote_code", "n")
        return cls(**{name: values[name] for name in same}, task=task, rows=rows)

    def solver(self, **settings: Any) -> Solver:
        """A solver of the model and the task."""
        from arbor.solver import Solver

        return Solver(
            self.model,
            revision=self.revision,
            trust_remote_code=self.trust_remote_code,
            task=self.task,
            **settings,
        )

    def problems(self, solver: Solver) -> list[Problem]:
        """The problems, as the solver's task reads them.

        Raises:
            UsageError, InputError: there are none, or one is invalid.
        """
        if self.rows is not None:
            samples = read_samples(self.rows, solver.task, stop_on_error=True)
            return [each.problem for each in samples if each.problem is not None]
        try:
            return list(itertools.islice(solver.task.problems("train"), self.n))
        except UsageError as error:
            if error.code != "no-problems":
                raise
            command = click.get_current_context().command_path
            hint = f"Give a file: {command} problems.jsonl --task {solver.task.name}"
            raise UsageError(error.code, error.message, hint) from error

    @property
    def named(self) -> str:
        """The problems in words."""
        if self.rows is None:
            return f"problems of {self.task}"
        return f"problems of {name_of(self.rows.dataset)} (split calibration)"

    @property
    def record(self) -> dict[str, Any]:
        """The origin of a result besides the task, for its file."""
        data = {} if self.rows is None else {"dataset": name_of(self.rows.dataset)}
        return {"model": self.model, "revision": self.revision, **data}


@click.group(
    cls=Group,
    lazy={name: command for each in features() for name, command in each.calibrations.items()},
)
@output_options
def calibrate() -> None:
    """Calibrate the estimates of retention policies, and the thresholds of CGEE.

    DATASET is a file or hf:OWNER/NAME:SPLIT, as for arbor eval. A fifth of its
    problems is solved; arbor eval --split evaluation takes the others.

    \b
      arbor calibrate msve --task chains --n 100
      arbor calibrate msve --model ./model --out msve.json
      arbor solve "4 5 6 10" --policy arborkv --msve msve.json
      arbor calibrate exit --task game24 --n 200 --risk 0.02
      arbor calibrate window --task chains
      arbor calibrate queries --task chains
      arbor calibrate window gsm8k.jsonl --task gsm8k
    """


@calibrate.command(name="exit", cls=Command)
@fitted_to("game24")
@option(
    "--controller",
    default="tot",
    metavar="NAME[,KEY=VALUE]",
    heading="Search",
    help="The search that verifies; as in the searches that will use the thresholds.",
)
@option(
    "--risk",
    type=Number(0, 1, min_open=True),
    default=0.02,
    metavar="X",
    heading="Search",
    common=True,
    help="Largest part of verifications that may prefer another thought.",
)
@option(
    "--error",
    type=Number(0, 1, min_open=True),
    default=0.05,
    metavar="X",
    heading="Search",
    help="Chance that the choice exceeds --risk.",
)
@option(
    "--measure",
    type=click.Choice(["entropy", "margin"]),
    default="entropy",
    heading="Search",
    help="What decides between layers, as in the setting of cgee.",
)
@option(
    "--norm/--no-norm",
    default=True,
    heading="Search",
    show_default=False,
    help="Final norm before the unembedding; default: yes, the paper: no.",
)
@option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    heading="Output",
    common=True,
    help="File to add the task to; default: exit.json, or for a Hub model or GGUF file the cache.",
)
@output_options
@click.pass_obj
def exit_thresholds(
    output: Output,
    /,
    controller: str,
    risk: float,
    error: float,
    measure: str,
    norm: bool,
    out: Path | None,
    **values: Any,
) -> int:
    """Choose the thresholds of CGEE: solve problems with full verification, then compare.

    The file is used by a model directory that holds it as exit.json.

    \b
      arbor calibrate exit
      arbor calibrate exit --task game24 --n 200 --risk 0.01
      arbor calibrate exit --model ./model --measure margin --out exit.json
      arbor calibrate exit gsm8k.jsonl --task gsm8k
    """
    refuse_unwritable("--out", out)

    from arbor.engine.early_exit import Measure
    from arbor.measure.calibrate_exit import Recorder, calibrate_exit, collect_verifications
    from arbor.model.loading import locate_model
    from arbor.verifiers.exit_thresholds import FILE, save_thresholds

    given = Fitted.of(values)
    source = locate_model(given.model, given.revision)
    out = out or default_file(FILE, source.place, exit_file(source.place, given.revision))
    chosen = cast(Measure, measure)
    with given.solver(
        controller=controller,
        verifier=Recorder(measure=chosen, norm=norm),
    ) as solver:
        name = str(components.spec_of(solver.task)["name"])
        problems = given.problems(solver)
        output.say(f"solving {len(problems)} {given.named}, every verification in full")
        found = collect_verifications(solver, problems)
        result = calibrate_exit(found, risk=risk, error=error, measure=chosen, norm=norm)
    levels: dict[str, Choice[Any]] = {
        "skip": result.skip,
        "leave": result.leave,
        "paper_skip": result.paper_skip,
        "paper_leave": result.paper_leave,
    }
    figures: dict[str, Any] = {
        **given.record,
        "controller": controller,
        "created": datetime.now(UTC).date().isoformat(),
        "problems": result.problems,
        "verifications": len(found),
        "risk": risk,
        "error": error,
        **{
            level: {
                "saved": round(choice.saved, 4),
                "decided": choice.decided,
                "disagreements": choice.disagreements,
                "bound": round(choice.bound, 5),
                "candidates": choice.candidates,
            }
            for level, choice in levels.items()
        },
    }
    thresholds: Chosen = {"risk": result.risk, "paper": result.paper}
    save_thresholds(out, name, thresholds, **figures)
    if output.json:
        shown = {method: each.to_dict() for method, each in thresholds.items()}
        output.document(
            {"schema": "arbor.calibration/1", "out": str(out), "task": name, **shown, **figures}
        )
    else:
        output.print(str(out))
        for level, choice in levels.items():
            output.say(f"{level.replace('_', ' ')}: {_described(choice)}")
    return 0


def _described(choice: Choice[Any]) -> str:
    """A choice and its figures in words."""
    if choice.setting is None:
        return f"none of {choice.candidates} settings is safe enough on these problems"
    return (
        f"{choice.setting} saves {100 * choice.saved:.1f} %; {choice.disagreements:,} of {choice.n:,} "
        f"verifications prefer another thought, at most {100 * choice.bound:.2f} %"
    )


def default_file(name: str, model: str, cached: Path) -> Path:
    """The file for what was calibrated, without ``--out``.

    Args:
        name: of the file, for a model in a directory.
        model: the directory, or an id on the Hub.
        cached: the file for a model of the Hub.

    Raises:
        UsageError: its folder cannot be created.
    """
    if Path(model).is_dir():
        return Path(name)
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            "output-unwritable",
            f"{cached.parent} cannot be created: {error.strerror}.",
            "Name another folder with ARBOR_CACHE, or a file with --out.",
            path=str(cached),
        ) from error
    return cached
