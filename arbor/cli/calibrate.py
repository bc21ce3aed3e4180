"""``arbor calibrate``: fit the estimates of policies to solved problems."""

from __future__ import annotations

import itertools
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from arbor.cli.command import Command, Group, Integer, option
from arbor.cli.options import output_options, revision_option, trust_option
from arbor.cli.output import Output
from arbor.cli.output_paths import refuse_unwritable
from arbor.errors import UsageError
from arbor.support.cache_dir import msve_file


@click.group(cls=Group)
@output_options
def calibrate() -> None:
    """Calibrate the estimates of retention policies.

    \b
      arbor calibrate msve --task chains --n 100
      arbor calibrate msve --model ./model --out msve.json
      arbor solve "4 5 6 10" --policy arborkv --msve msve.json
    """


@calibrate.command(cls=Command)
@option(
    "--model",
    default="builtin:sapling",
    metavar="NAME|DIR",
    heading="Model",
    common=True,
    help="Model to calibrate.",
)
@revision_option
@trust_option
@option(
    "--task",
    default="chains",
    metavar="NAME",
    heading="Search",
    common=True,
    help="Task whose training problems are solved.",
)
@option(
    "--n",
    type=Integer(8),
    default=100,
    metavar="N",
    heading="Search",
    common=True,
    help="Problems to solve.",
)
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
    help="File for --msve; default: msve.json, or for a Hub model the cache.",
)
@output_options
@click.pass_obj
def msve(
    output: Output,
    /,
    model: str,
    revision: str | None,
    trust_remote_code: bool,
    task: str,
    n: int,
    top: int,
    out: Path | None,
) -> int:
    """Fit the block values of ArborKV (MSVE): solve problems, then drop each block in turn.

    \b
      arbor calibrate msve
      arbor calibrate msve --task chains --n 200 --out msve.json
      arbor calibrate msve --model ./model
    """
    refuse_unwritable("--out", out)

    from arbor.measure.calibrate import calibrate as fitted
    from arbor.measure.calibrate import collect
    from arbor.model.loading import locate_model
    from arbor.retention.msve import MSVE
    from arbor.solver import Solver

    source = locate_model(model, revision)
    out = out or _default_file(source.path, revision)
    with Solver(
        model,
        revision=revision,
        trust_remote_code=trust_remote_code,
        task=task,
        controller="chain",
        policy="arborkv",
        msve=MSVE(top=top),  # not the values fitted before
    ) as solver:
        problems = list(itertools.islice(solver.task.problems("train"), n))
        output.say(f"solving {len(problems)} problems of {task}, then dropping each block in turn")
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


def _default_file(model: str, revision: str | None) -> Path:
    """The file for the values, without ``--out``.

    Raises:
        UsageError: its folder cannot be created.
    """
    if Path(model).is_dir():
        return Path("msve.json")
    file = msve_file(model, revision)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            "output-unwritable",
            f"{file.parent} cannot be created: {error.strerror}.",
            "Name another folder with ARBOR_CACHE, or a file with --out.",
            path=str(file),
        ) from error
    return file
