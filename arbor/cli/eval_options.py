"""Options of ``arbor eval``, as click's table and as a record."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import click

from arbor.cli.command import option, option_group
from arbor.cli.option_records import RunOptions, SolverOptions, TraceOptions
from arbor.cli.options import (
    config_option,
    limit_options,
    model_option,
    output_options,
    sampling_options,
    search_options,
    trace_detail_options,
)


@dataclass(frozen=True, kw_only=True)
class DatasetOptions:
    """Which samples are solved.

    Attributes:
        dataset: a task with problems of its own, a file, or ``-`` for stdin.
        split: of a task's problems.
        input_key, target_key: columns of a file; None for the default answer column.
        encoding: of the file or of stdin.
        limit: the first N samples, or A-B; None for the default number.
        sample_id: ids to select; none for all.
    """

    dataset: str
    split: str
    input_key: str
    target_key: str | None
    encoding: str
    limit: str | None
    sample_id: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class EvalOptions:
    """Options of ``arbor eval``, named as on the command line."""

    samples: DatasetOptions
    solver: SolverOptions
    run: RunOptions
    output: Path | None
    fresh: bool
    on_error: Literal["stop", "continue"]
    fail_under: float | None
    compare: Path | None
    trace: Literal["on", "off"]
    trace_detail: TraceOptions


eval_options = option_group(
    option(
        "--split",
        default="test",
        metavar="NAME",
        heading="Dataset",
        help="Of a task's problems: train, validation, test.",
    ),
    option(
        "--input-key",
        default="problem",
        metavar="NAME",
        heading="Dataset",
        help="Column of a file that holds the problem.",
    ),
    option(
        "--target-key",
        metavar="NAME",
        heading="Dataset",
        help="Column that holds the answer key; 'answer' where there is one.",
    ),
    option(
        "--encoding",
        default="utf-8",
        metavar="NAME",
        heading="Dataset",
        help="Of the file or of stdin.",
    ),
    option(
        "--limit",
        metavar="N|A-B",
        heading="Dataset",
        help="The first N samples, or those from A to B; a task's first 100, all of a file.",
    ),
    option(
        "--sample-id",
        multiple=True,
        metavar="ID",
        heading="Dataset",
        help="Only this sample; may be repeated.",
    ),
    search_options,
    model_option,
    sampling_options,
    limit_options,
    option(
        "--output",
        type=click.Path(path_type=Path, file_okay=False),
        metavar="DIR",
        heading="Output",
        help="The run's folder, or one to go on with; runs/{time}_{dataset}_{id} if none is given.",
    ),
    option(
        "--fresh", is_flag=True, heading="Output", help="Start over in a folder that has a run."
    ),
    option(
        "--on-error",
        type=click.Choice(["stop", "continue"]),
        default="stop",
        heading="Output",
        help="After a sample that cannot be solved; continue counts it as wrong.",
    ),
    option(
        "--fail-under",
        type=click.FloatRange(0, 1),
        metavar="X",
        heading="Output",
        help="Exit code 7 if the accuracy is lower, as in 0.70.",
    ),
    option(
        "--compare",
        type=click.Path(path_type=Path, file_okay=False),
        metavar="DIR",
        heading="Output",
        help="Pair the samples with those of another run.",
    ),
    option(
        "--trace",
        type=click.Choice(["on", "off"]),
        default="on",
        heading="Output",
        help="A trace per sample, in DIR/traces.",
    ),
    trace_detail_options,
    config_option,
    output_options,
)
