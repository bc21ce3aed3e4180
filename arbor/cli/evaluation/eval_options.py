"""Options of ``arbor eval``, as click's table and as a record."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import click

from arbor.cli.record_options import SolverOptions
from arbor.cli.solve import TraceOptions
from arbor.measure.cluster import WorkerPlace
from arbor.run.limits import RunLimits
from arbor.support.setting import setting


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


def samples_at_a_time(value: Any) -> int | None:
    """A number of samples; None for ``auto``."""
    if value == "auto":
        return None
    if not str(value).isdecimal() or int(value) < 1:
        raise click.BadParameter(f"{value!r} is neither a number of at least 1 nor auto.")
    return int(value)


@dataclass(frozen=True, kw_only=True)
class ColumnOptions:
    """How a file is read."""

    HEADING = "Dataset"

    input_key: str | None = setting(
        None,
        "Column of the problem, in a file; default: the task's, such as problem.",
        metavar="NAME",
    )
    target_key: str | None = setting(
        None, "Column of the answer key; default: the task's, such as answer.", metavar="NAME"
    )
    encoding: str = setting("utf-8", "Encoding of the file or of stdin.", metavar="NAME")


@dataclass(frozen=True, kw_only=True)
class DatasetOptions(ColumnOptions):
    """Which samples are solved."""

    HEADING = "Dataset"

    dataset: str
    split: str | None = setting(
        None,
        "Of a task: train, validation or test (default); of a file: calibration or evaluation.",
        metavar="NAME",
    )
    limit: str | None = setting(
        None,
        "The first N rows, or rows A to B; default: 100 of a task, all of a file.",
        shown="short",
        metavar="N|A-B",
    )
    sample_id: tuple[str, ...] = setting(
        (), "Solve only this sample; may be repeated.", metavar="ID"
    )


@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """What becomes of the samples of a run."""

    HEADING = "Output"

    samples: DatasetOptions
    solver: SolverOptions
    run: RunLimits
    fresh: bool = setting(False, "Start over in a folder that has a run.")
    on_error: Literal["stop", "continue"] = setting(
        "stop", "At a sample that cannot be solved; continue counts it as wrong."
    )
    trace: Literal["on", "off"] = setting("on", "Write a trace per sample.")
    trace_detail: TraceOptions


@dataclass(frozen=True, kw_only=True)
class EvalOptions(SampleOptions):
    """Options of ``arbor eval``, named as on the command line."""

    HEADING = "Output"

    output: Path | None = setting(
        None,
        "Folder of the run, new or to resume; default: runs/{time}_{dataset}_{id}.",
        shown="short",
        metavar="DIR",
        also=("-o",),
        kind=click.Path(path_type=Path, file_okay=False),
    )
    concurrency: int | None = setting(
        "auto",
        "Samples in progress at a time, sharing the budget; auto: 8.",
        metavar="N|auto",
        kind=samples_at_a_time,
    )
    workers: WorkerPlace | None = setting(
        None,
        "Engines in N processes, one a device; or in a Ray cluster: ray://HOST:PORT.",
        metavar="N|ray|ADDRESS",
        kind=Places(),
    )
    fail_under: float | None = setting(
        None, "Exit code 7 if the accuracy is lower, as in 0.70.", least=0, most=1
    )
    compare: Path | None = setting(
        None,
        "Compare with another run, sample by sample.",
        shown="short",
        metavar="DIR",
        kind=click.Path(path_type=Path, file_okay=False),
    )
