"""Options of ``arbor compare``, as click's table and as a record."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from arbor.cli.evaluation.eval_options import SampleOptions
from arbor.support.setting import setting


@dataclass(frozen=True, kw_only=True)
class CompareOptions(SampleOptions):
    """Options of ``arbor compare``, named as on the command line.

    Attributes:
        arm: as in `read_arms`; the first one is what the others are compared with.
        tokens: most generated tokens of each search; every arm runs at each of them.
        seeds: number of seeds, from the solver's on.
        concurrency: samples in progress at a time.
    """

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
    csv: Path | None = setting(
        None,
        "Write the table as CSV too.",
        heading="Output",
        kind=click.Path(path_type=Path, dir_okay=False),
    )
    concurrency: int = setting(
        1,
        "Samples in progress at a time; above 1 only with the full budget, which they would share.",
        heading="Output",
        least=1,
    )
