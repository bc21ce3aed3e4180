"""Options of ``arbor eval``, as click's table and as a record."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import click

from arbor.cli.command import Number, option, option_group
from arbor.cli.option_records import RunOptions, SolverOptions, TraceOptions
from arbor.cli.options import (
    config_option,
    limit_options,
    loading_options,
    model_option,
    output_options,
    sampling_options,
    search_options,
    trace_detail_options,
)
from arbor.measure.workers.worker_place import WorkerPlace

AUTO_CONCURRENCY = 8  # measured: docs/experiments/server.md


class Places(click.ParamType[Any]):
    """Workers on this machine or in a cluster of Ray."""

    name = "workers"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> WorkerPlace:
        """Their number and address.

        Raises:
            UsageError: another form.
        """
        return value if isinstance(value, WorkerPlace) else WorkerPlace.parse(value)


class Concurrency(click.ParamType[Any]):
    """A number of samples at a time, or ``auto``."""

    name = "concurrency"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | None:
        """The number; None for ``auto``."""
        if value == "auto":
            return None
        try:
            number = int(value)
        except (TypeError, ValueError):
            number = 0
        if number < 1:
            self.fail(f"{value!r} is neither a number of at least 1 nor auto.", param, ctx)
        return number


@dataclass(frozen=True, kw_only=True)
class DatasetOptions:
    """Which samples are solved.

    Attributes:
        dataset: a task with problems of its own, a file, or ``-`` for stdin.
        split: of a task's problems (None: ``test``), or of a data set's (None: all).
        input_key, target_key: columns of a file; None for those that the task names.
        encoding: of the file or of stdin.
        limit: the first N samples, or A-B; None for the default number.
        sample_id: ids to select; none for all.
    """

    dataset: str
    split: str | None
    input_key: str | None
    target_key: str | None
    encoding: str
    limit: str | None
    sample_id: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class EvalOptions:
    """Options of ``arbor eval``, named as on the command line.

    Attributes:
        concurrency: samples in progress at a time; None: as many as are worth it.
        workers: engines in processes of their own; None: one, in this process.
    """

    samples: DatasetOptions
    solver: SolverOptions
    run: RunOptions
    output: Path | None
    fresh: bool
    concurrency: int | None
    on_error: Literal["stop", "continue"]
    fail_under: float | None
    compare: Path | None
    trace: Literal["on", "off"]
    trace_detail: TraceOptions
    workers: WorkerPlace | None = None


column_options = option_group(
    option(
        "--input-key",
        metavar="NAME",
        heading="Dataset",
        help="Column of the problem, in a file; default: the task's, such as problem.",
    ),
    option(
        "--target-key",
        metavar="NAME",
        heading="Dataset",
        help="Column of the answer key; default: the task's, such as answer.",
    ),
    option(
        "--encoding",
        default="utf-8",
        metavar="NAME",
        heading="Dataset",
        help="Encoding of the file or of stdin.",
    ),
)

dataset_options = option_group(
    option(
        "--split",
        metavar="NAME",
        heading="Dataset",
        help="Of a task: train, validation or test (default); of a file: calibration or evaluation.",
    ),
    column_options,
    option(
        "--limit",
        metavar="N|A-B",
        heading="Dataset",
        common=True,
        help="The first N samples, or samples A to B; default: 100 of a task, all of a file.",
    ),
    option(
        "--sample-id",
        multiple=True,
        metavar="ID",
        heading="Dataset",
        help="Solve only this sample; may be repeated.",
    ),
)

on_error_option = option(
    "--on-error",
    type=click.Choice(["stop", "continue"]),
    default="stop",
    heading="Output",
    help="At a sample that cannot be solved; continue counts it as wrong.",
)

sample_trace_options = option_group(
    option(
        "--trace",
        type=click.Choice(["on", "off"]),
        default="on",
        heading="Output",
        help="Write a trace per sample.",
    ),
    trace_detail_options,
)

eval_options = option_group(
    dataset_options,
    search_options,
    model_option,
    loading_options,
    sampling_options,
    limit_options,
    option(
        "-o",
        "--output",
        type=click.Path(path_type=Path, file_okay=False),
        metavar="DIR",
        heading="Output",
        common=True,
        help="Folder of the run, new or to resume; default: runs/{time}_{dataset}_{id}.",
    ),
    option(
        "--fresh", is_flag=True, heading="Output", help="Start over in a folder that has a run."
    ),
    option(
        "--concurrency",
        type=Concurrency(),
        default="auto",
        metavar="N|auto",
        heading="Output",
        help="Samples in progress at a time, sharing the budget; auto: 8.",
    ),
    option(
        "--workers",
        type=Places(),
        metavar="N|ray|ADDRESS",
        heading="Output",
        help="Engines in N processes, one a device; or in a Ray cluster: ray://HOST:PORT.",
    ),
    on_error_option,
    option(
        "--fail-under",
        type=Number(0, 1),
        metavar="X",
        heading="Output",
        help="Exit code 7 if the accuracy is lower, as in 0.70.",
    ),
    option(
        "--compare",
        type=click.Path(path_type=Path, file_okay=False),
        metavar="DIR",
        heading="Output",
        common=True,
        help="Compare with another run, sample by sample.",
    ),
    sample_trace_options,
    config_option,
    output_options,
)
