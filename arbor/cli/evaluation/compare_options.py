"""Options of ``arbor compare``, as click's table and as a record."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import click

from arbor.cli.command import Integer, option, option_group
from arbor.cli.evaluation.eval_options import (
    DatasetOptions,
    dataset_options,
    on_error_option,
    sample_trace_options,
)
from arbor.cli.option_records import RunOptions, SolverOptions, TraceOptions
from arbor.cli.options import (
    config_option,
    judging_options,
    loading_options,
    model_option,
    other_limit_options,
    output_options,
    policy_option,
    retention_options,
    sampling_options,
    task_option,
)


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """Options of ``arbor compare``, named as on the command line.

    Attributes:
        arm: as in `read_arms`; the first one is what the others are compared with.
        tokens: most generated tokens of each search; every arm runs at each of them.
        seeds: number of seeds, from the solver's on.
        concurrency: samples in progress at a time.
    """

    samples: DatasetOptions
    solver: SolverOptions
    run: RunOptions
    arm: tuple[str, ...]
    tokens: tuple[int, ...]
    seeds: int
    output: Path | None
    fresh: bool
    concurrency: int
    on_error: Literal["stop", "continue"]
    csv: Path | None
    trace: Literal["on", "off"]
    trace_detail: TraceOptions


compare_options = option_group(
    option(
        "--arm",
        multiple=True,
        metavar="ARM",
        heading="Comparison",
        common=True,
        help="[LABEL=]NAME[,KEY=VALUE][;OPTION=VALUE]; repeated, the first is the baseline.",
    ),
    option(
        "--tokens",
        type=Integer(1),
        multiple=True,
        metavar="N",
        heading="Comparison",
        common=True,
        help="Most generated tokens of each search; repeated for a curve.",
    ),
    option(
        "--budget",
        default="full",
        metavar="X",
        heading="Comparison",
        common=True,
        help="KV of each search: 300tok, or a part of prompt and --tokens (0.5).",
    ),
    option(
        "--seeds",
        type=Integer(1),
        default=1,
        metavar="N",
        heading="Comparison",
        common=True,
        help="Runs of every arm; the first has --seed.",
    ),
    dataset_options,
    task_option,
    judging_options,
    policy_option,
    retention_options,
    model_option,
    loading_options,
    sampling_options,
    other_limit_options,
    option(
        "-o",
        "--output",
        type=click.Path(path_type=Path, file_okay=False),
        metavar="DIR",
        heading="Output",
        common=True,
        help="Folder, new or to resume; default: runs/{time}_compare_{dataset}_{id}.",
    ),
    option(
        "--csv",
        type=click.Path(path_type=Path, dir_okay=False),
        metavar="FILE",
        heading="Output",
        help="Write the table as CSV too.",
    ),
    option("--fresh", is_flag=True, heading="Output", help="Start over in a folder that has runs."),
    option(
        "--concurrency",
        type=Integer(1),
        default=1,
        metavar="N",
        heading="Output",
        help="Samples in progress at a time; above 1 only with the full budget, which they would share.",
    ),
    on_error_option,
    sample_trace_options,
    config_option,
    output_options,
)
