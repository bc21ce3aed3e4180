"""``arbor calibrate``: fit estimates to solved problems; features add commands of their own."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from arbor.cli.command import F, Group, option, option_group
from arbor.cli.evaluation.eval import complete_dataset, task_of
from arbor.cli.evaluation.eval_dataset import is_task, name_of, read_samples
from arbor.cli.evaluation.eval_options import ColumnOptions, DatasetOptions
from arbor.cli.options import output_options
from arbor.cli.output_paths import refuse_unwritable
from arbor.cli.record_options import options_of, read_options
from arbor.errors import UsageError
from arbor.feature import features
from arbor.model.checkpoint import ModelSource
from arbor.support.setting import setting, settings_of

if TYPE_CHECKING:
    from arbor.solver import Solver
    from arbor.tasks.base import Problem


def fitted_to(task: str) -> Callable[[F], F]:
    """Options of what is calibrated, see `Fitted`; `task` by default."""
    return option_group(
        click.argument("dataset", required=False, shell_complete=complete_dataset),
        options_of(Fitted, task=task),
    )


def file_option(purpose: str, default: str | None = None, name: str = "") -> Callable[[F], F]:
    """``--out``: the file that a calibration writes.

    Args:
        purpose: of the file.
        default: the file; None: that of `Fitted.file`, named after `name`.
    """
    where = f"; default: {name}.json, or for a Hub model or GGUF file the cache" if name else ""
    return option(
        "--out",
        type=click.Path(path_type=Path, dir_okay=False),
        default=default,
        metavar="FILE",
        heading="Output",
        common=True,
        help=f"File {purpose}{where}.",
    )


@dataclass(frozen=True, kw_only=True)
class Fitted(ColumnOptions, ModelSource):
    """What is calibrated, and the problems.

    Attributes:
        dataset: a file or ``hf:OWNER/NAME:SPLIT``; None: the training split of the task's own
            problems.
        task: as `Solver` takes it.
        n: problems.
    """

    HEADING = "Search"

    dataset: str | None
    task: str = setting(
        "chains",
        "Task that reads a data set, or whose training problems are solved.",
        shown="short",
        metavar="NAME",
    )
    n: int = setting(100, "Problems to solve, the first of the split.", shown="short", least=8)

    @classmethod
    def of(cls, values: dict[str, Any]) -> Fitted:
        """The options as click gives them.

        Raises:
            UsageError: the data set and ``--task`` are two tasks.
        """
        given = read_options(cls, values)
        if given.dataset is None:
            return given
        task = task_of(click.get_current_context(), given.dataset, given.task)
        return replace(given, task=task)

    @property
    def rows(self) -> DatasetOptions | None:
        """The split ``calibration`` of a data set, which ``arbor eval --split evaluation`` leaves
        out; None: problems of the task's own."""
        if self.dataset is None or is_task(self.dataset):
            return None
        columns = {name: getattr(self, name) for name in settings_of(ColumnOptions)}
        return DatasetOptions(
            **columns, dataset=self.dataset, split="calibration", limit=str(self.n)
        )

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

    def file(self, name: str, out: Path | None) -> Path:
        """The file that a calibration will write.

        Args:
            name: of what is calibrated.
            out: ``--out``; None: in this folder for a model in a directory, else in the cache.

        Raises:
            UsageError: it cannot be written, or its folder cannot be created.
        """
        if out is None:
            out = self._default_file(name)
        refuse_unwritable("--out", out)
        return out

    def _default_file(self, name: str) -> Path:
        from arbor.model.fitted_files import file_to_fit
        from arbor.model.loading import locate_model

        source = locate_model(self.model, self.revision)
        path = file_to_fit(name, source)
        if Path(source.file).is_dir():
            return Path(path.name)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                "output-unwritable",
                f"{path.parent} cannot be created: {error.strerror}.",
                "Name another folder with ARBOR_CACHE, or a file with --out.",
                path=str(path),
            ) from error
        return path

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
    """Calibrate the estimates of policies and verifiers for a model.

    DATASET is a file or hf:OWNER/NAME:SPLIT, as for arbor eval. A fifth of its
    problems is solved; arbor eval --split evaluation takes the others.

    \b
      arbor calibrate msve --task chains --n 100
      arbor calibrate msve --model ./model --out msve.json
      arbor solve "4 5 6 10" --policy arborkv --set msve=msve.json
      arbor calibrate window --task chains
      arbor calibrate queries --task chains
      arbor calibrate thoughts --task chains
      arbor calibrate window gsm8k.jsonl --task gsm8k
    """
