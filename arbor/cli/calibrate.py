"""`arbor calibrate`: fit what policies believe to what happens."""

from __future__ import annotations

import itertools
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from arbor.cli.options import (
    Command,
    Group,
    option,
    output_options,
    revision_option,
    trust_option,
)
from arbor.cli.output import Output
from arbor.cli.output_paths import refuse_nowhere
from arbor.errors import UsageError
from arbor.support.cache_dir import msve_file


@click.group(cls=Group)
def calibrate() -> None:
    """Fit what retention policies believe to what happens.

    \b
      arbor calibrate msve --task chains --n 100
      arbor calibrate msve --model ./model --out msve.json
      arbor solve "4 5 6 10" --policy arborkv --msve msve.json
    """


@calibrate.command(cls=Command)
@option(
    "--model", default="builtin:sapling", metavar="NAME|DIR", heading="Model", help="Whose values."
)
@revision_option
@trust_option
@option("--task", default="chains", metavar="NAME", heading="Search", help="Its training problems.")
@option(
    "--n",
    type=click.IntRange(8),
    default=100,
    metavar="N",
    heading="Search",
    help="Problems to solve.",
)
@option(
    "--top",
    type=click.IntRange(0),
    default=0,
    metavar="K",
    heading="Search",
    help="Confidence is of the K likeliest tokens and of the others as one; 0: of all.",
)
@option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    heading="Output",
    help="What --msve reads; msve.json, or for a Hub model where solve finds it.",
)
@output_options
@click.pass_obj
def msve(
    voice: Output,
    /,
    model: str,
    revision: str | None,
    trust_remote_code: bool,
    task: str,
    n: int,
    top: int,
    out: Path | None,
) -> int:
    """Solve problems with everything kept, lose each block in turn, fit the block values (ArborKV's MSVE).

    \b
      arbor calibrate msve
      arbor calibrate msve --task chains --n 200 --out msve.json
      arbor calibrate msve --model ./model
    """
    refuse_nowhere("--out", out)

    from arbor.measure.calibrate import calibrate as fitted
    from arbor.measure.calibrate import collect
    from arbor.model.loading import locate_model
    from arbor.retention.msve import MSVE
    from arbor.solver import Solver

    source = locate_model(model, revision)
    out = out or _place(source.path, revision)
    with Solver(
        model,
        revision=revision,
        trust_remote_code=trust_remote_code,
        task=task,
        controller="chain",
        policy="arborkv",
        msve=MSVE(top=top),  # what was fitted before has no say
    ) as solver:
        problems = list(itertools.islice(solver.task.problems("train"), n))
        voice.say(f"solving {len(problems)} problems of {task}, then losing each block in turn")
        result = fitted(collect(solver, problems), top)
    figures: dict[str, Any] = {
        "model": model,
        "revision": revision,
        "task": task,
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
    if voice.json:
        voice.document(
            {"schema": "arbor.calibration/1", "out": str(out), "msve": str(result.msve), **figures}
        )
    else:
        voice.print(str(out))
        voice.say(
            f"s = sigmoid({result.msve.theta[0]:.2f} v + {result.msve.theta[1]:.2f} u + "
            f"{result.msve.theta[2]:.2f} a {result.msve.bias:+.2f}) from {result.blocks} blocks of {result.problems} "
            f"right answers, {100 * result.lost:.0f} % of them needed; held-out rank correlation "
            f"{result.correlation:.2f} ({result.interval[0]:.2f} to {result.interval[1]:.2f}; the guess: "
            f"{result.default_correlation:.2f})"
        )
    return 0


def _place(model: str, revision: str | None) -> Path:
    """Where the values go that nobody named a file for.

    Raises:
        UsageError: the folder for what is kept cannot be made.
    """
    if Path(model).is_dir():
        return Path("msve.json")
    file = msve_file(model, revision)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            "output-unwritable",
            f"{file.parent} cannot be made: {error.strerror}.",
            "Name another folder with ARBOR_CACHE, or a file with --out.",
            path=str(file),
        ) from error
    return file
