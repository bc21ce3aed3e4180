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
from arbor.cli.evaluation.eval_options import ColumnOptions, DatasetOptions
from arbor.cli.options import output_options
from arbor.cli.output import Output
from arbor.cli.output_paths import refuse_unwritable
from arbor.cli.record_options import options_of
from arbor.errors import UsageError
from arbor.model.checkpoint import ModelSource
from arbor.support.cache_dir import exit_file, msve_file

if TYPE_CHECKING:
    from arbor.measure.calibrate_exit import Choice
    from arbor.solver import Solver
    from arbor.tasks.base import Problem
    from arbor.verifiers.exit_thresholds import Chosen


def fitted_to(task: str) -> Callable[[F], F]:
    """Options of what is calibrated: the model, and the problems; `task` by default."""
    return option_group(
        click.argument("dataset", required=False, shell_complete=complete_dataset),
        options_of(ModelSource),
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
        options_of(ColumnOptions),
    )


@dataclass(frozen=True, kw_only=True)
class Fitted(ModelSource):
    """What is calibrated, and the problems: the options of `fitted_to`.

    Attributes:
        task: as `Solver` takes it.
        n: problems.
        rows: the split ``calibration`` of a data set, which ``arbor eval --split evaluation``
            leaves out; None: the training split of the task's own problems.
    """

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


@click.group(cls=Group)
@output_options
def calibrate() -> None:
    """Calibrate the estimates of retention policies, and the thresholds of CGEE.

    DATASET is a file or hf:OWNER/NAME:SPLIT, as for arbor eval. A fifth of its
    problems is solved; arbor eval --split evaluation takes the others.

    \b
      arbor calibrate msve --task chains --n 100
      arbor calibrate msve --model ./model --out msve.json
      arbor solve "4 5 6 10" --policy arborkv --set msve=msve.json
      arbor calibrate exit --task game24 --n 200 --risk 0.02
      arbor calibrate window --task chains
      arbor calibrate queries --task chains
      arbor calibrate window gsm8k.jsonl --task gsm8k
    """


@calibrate.command(cls=Command)
@fitted_to("chains")
@option(
    "--top",
    type=Integer(0),
    default=0,
    metavar="K",
    heading="Search",
    help="Confidence from the K likeliest tokens, the others as one; 0: from all tokens.",
)
@option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    heading="Output",
    common=True,
    help="File for the setting msve; default: msve.json, or for a Hub model or GGUF file the cache.",
)
@output_options
@click.pass_obj
def msve(
    output: Output,
    /,
    top: int,
    out: Path | None,
    **values: Any,
) -> int:
    """Fit the block values of ArborKV (MSVE): solve problems, then drop each block in turn.

    \b
      arbor calibrate msve
      arbor calibrate msve --task chains --n 200 --out msve.json
      arbor calibrate msve --model ./model
      arbor calibrate msve gsm8k.jsonl --task gsm8k --out msve.json
    """
    refuse_unwritable("--out", out)

    from arbor.measure.calibrate import calibrate as fitted
    from arbor.measure.calibrate import collect
    from arbor.model.loading import locate_model
    from arbor.retention.msve import MSVE

    given = Fitted.of(values)
    source = locate_model(given.model, given.revision)
    out = out or _default_file("msve.json", source.place, msve_file(source.place, given.revision))
    with given.solver(
        controller="chain",
        policy="arborkv",
        msve=MSVE(top=top),  # not the values fitted before
    ) as solver:
        problems = given.problems(solver)
        output.say(f"solving {len(problems)} {given.named}, then dropping each block in turn")
        result = fitted(collect(solver, problems), top)
    figures: dict[str, Any] = {
        **given.record,
        "task": given.task,
        "created": datetime.now(UTC).date().isoformat(),
        "problems": result.problems,
        "blocks": result.blocks,
        "lost": round(result.lost, 4),
        "rank_correlation": round(result.correlation, 4),
        "default_rank_correlation": round(result.default_correlation, 4),
        "interval": [round(bound, 4) for bound in result.interval],
        "gain": [round(bound, 4) for bound in result.gain],
        "held_out": result.held_out,
    }
    result.msve.save(out, **figures)
    if output.json:
        output.document(
            {"schema": "arbor.calibration/1", "out": str(out), "msve": str(result.msve), **figures}
        )
    else:
        output.print(str(out))
        output.say(
            f"s = sigmoid({result.msve.theta[0]:.2f} v + {result.msve.theta[1]:.2f} u + "
            f"{result.msve.theta[2]:.2f} a {result.msve.bias:+.2f}) from {result.blocks} blocks of {result.problems} "
            f"right answers, {100 * result.lost:.0f} % of them needed; held-out rank correlation "
            f"{result.correlation:.2f} ({result.interval[0]:.2f} to {result.interval[1]:.2f}; the defaults: "
            f"{result.default_correlation:.2f})"
        )
    return 0


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
    out = out or _default_file(FILE, source.place, exit_file(source.place, given.revision))
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


@calibrate.command(cls=Command)
@fitted_to("chains")
@option(
    "--threshold",
    type=Number(0, 1, min_open=True),
    default=1e-4,
    metavar="X",
    heading="Search",
    common=True,
    help="Attention from which a token counts as read (alpha).",
)
@option(
    "--percentile",
    type=Number(0, 100, min_open=True),
    default=80,
    metavar="P",
    heading="Search",
    help="Percentile of the intervals that the window is.",
)
@output_options
@click.pass_obj
def window(
    output: Output,
    /,
    threshold: float,
    percentile: float,
    **values: Any,
) -> int:
    """Measure the window of LazyEviction: solve problems, see when tokens are read again.

    Prints the policy with its settings, as --policy takes it.

    \b
      arbor calibrate window
      arbor calibrate window --task chains --n 200 --threshold 0.001
      arbor calibrate window --model ./model --percentile 90
      arbor calibrate window gsm8k.jsonl --task gsm8k
    """
    from arbor.measure.calibrate_window import calibrate_window

    given = Fitted.of(values)

    with given.solver(
        controller="chain",
        policy=f"lazyeviction,threshold={threshold}",
    ) as solver:
        problems = given.problems(solver)
        output.say(f"solving {len(problems)} {given.named}, with everything kept")
        found = calibrate_window(solver, problems, percentile)
    width = found.window
    policy = f"lazyeviction,window={width},recent={width},spare={width},threshold={threshold}"
    if output.json:
        output.document(
            {
                "schema": "arbor.calibration/1",
                "policy": policy,
                **given.record,
                "task": given.task,
                "threshold": threshold,
                **{name: getattr(found, name) for name in found.__dataclass_fields__},
            }
        )
    else:
        output.print(policy)
        output.say(
            f"{100 * found.recurring:.1f} % of {found.tokens:,} tokens of {found.problems} problems "
            f"were read again; longest intervals: "
            + ", ".join(f"{percent} % within {most}" for percent, most in found.intervals.items())
            + f"; a fifth of the tokens receives {100 * found.heavy:.1f} % of the attention"
        )
    return 0


@calibrate.command(cls=Command)
@fitted_to("chains")
@option(
    "--seed",
    type=Integer(0),
    default=0,
    metavar="N",
    heading="Search",
    help="Seed of all random streams.",
)
@option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    default="queries.npz",
    metavar="FILE",
    heading="Output",
    common=True,
    help="File for the setting queries of triattention.",
)
@output_options
@click.pass_obj
def queries(
    output: Output,
    /,
    seed: int,
    out: Path,
    **values: Any,
) -> int:
    """Average the queries that TriAttention scores with: solve problems, with everything kept.

    A search reads the file with --policy triattention,queries=FILE.

    \b
      arbor calibrate queries
      arbor calibrate queries --task chains --n 200 --out queries.npz
      arbor calibrate queries --model ./model
      arbor calibrate queries gsm8k.jsonl --task gsm8k
    """
    refuse_unwritable("--out", out)

    from arbor.measure.calibrate_queries import EveryQuery, collect_queries
    from arbor.retention.allocators.pooled import Pooled
    from arbor.retention.policy import Policy

    given = Fitted.of(values)
    with given.solver(
        controller="chain",
        policy=Policy(Pooled(), EveryQuery()),
        share="off",  # the queries of tokens that prompts have in common count for each
        seed=seed,
    ) as solver:
        problems = given.problems(solver)
        output.say(f"solving {len(problems)} {given.named}, with everything kept")
        found = collect_queries(solver, problems)
    heads, dim, _ = found.means.layers[0].sizes
    figures: dict[str, Any] = {
        **given.record,
        "task": given.task,
        "seed": seed,
        "created": datetime.now(UTC).date().isoformat(),
        "problems": found.problems,
        "concentration": [round(each, 4) for each in found.concentration],
    }
    found.means.save(out, **figures)
    if output.json:
        sizes = {"layers": len(found.means.layers), "heads": heads, "head_dim": dim}
        output.document(
            {
                "schema": "arbor.calibration/1",
                "out": str(out),
                "queries": found.means.queries,
                **sizes,
                **figures,
            }
        )
    else:
        output.print(str(out))
        output.say(
            f"means of {found.means.queries:,} queries of {found.problems} problems, in "
            f"{len(found.concentration)} layers; length of the mean by mean length, by layer: "
            + ", ".join(f"{each:.2f}" for each in found.concentration)
        )
    return 0


def _described(choice: Choice[Any]) -> str:
    """A choice and its figures in words."""
    if choice.setting is None:
        return f"none of {choice.candidates} settings is safe enough on these problems"
    return (
        f"{choice.setting} saves {100 * choice.saved:.1f} %; {choice.disagreements:,} of {choice.n:,} "
        f"verifications prefer another thought, at most {100 * choice.bound:.2f} %"
    )


def _default_file(name: str, model: str, cached: Path) -> Path:
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
