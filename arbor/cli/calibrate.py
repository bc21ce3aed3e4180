"""`arbor calibrate`: fit what policies believe to what happens."""

from __future__ import annotations

import itertools
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from arbor.cli.options import Command, Group, option, voice_options
from arbor.cli.voice import Voice
from arbor.errors import UsageError


@click.group(cls=Group)
def calibrate() -> None:
    """Fit what retention policies believe to what happens.

    \b
      arbor calibrate msve --task chains --n 100
      arbor calibrate msve --model ./model --task game24 --out msve.json
      arbor solve "4 5 6 10" --policy arborkv --msve msve.json
    """


@calibrate.command(cls=Command)
@option(
    "--model", default="builtin:sapling", metavar="NAME|DIR", heading="Model", help="Whose values."
)
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
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("msve.json"),
    metavar="FILE",
    heading="Output",
    help="What --msve reads.",
)
@voice_options
@click.pass_obj
def msve(voice: Voice, /, model: str, task: str, n: int, out: Path) -> int:
    """Solve problems with everything kept, lose each block in turn, fit the block values (ArborKV's MSVE).

    \b
      arbor calibrate msve
      arbor calibrate msve --task chains --n 200 --out msve.json
      arbor calibrate msve --model ./model --task reasoning
    """
    from arbor.calibrate import calibrate as fitted
    from arbor.calibrate import collect
    from arbor.solver import Solver

    if not out.resolve().parent.is_dir():
        raise UsageError(
            "usage", f"{out} cannot be written: no such directory.", "Name one that is."
        )
    with Solver(model, task=task, controller="chain", policy="arborkv") as solver:
        problems = list(itertools.islice(solver.task.problems("train"), n))
        voice.say(f"solving {len(problems)} problems of {task}, then losing each block in turn")
        result = fitted(collect(solver, problems))
    figures: dict[str, Any] = {
        "model": model,
        "task": task,
        "created": datetime.now(UTC).date().isoformat(),
        "problems": result.problems,
        "blocks": result.blocks,
        "lost": round(result.lost, 4),
        "rank_correlation": round(result.correlation, 4),
        "default_rank_correlation": round(result.default_correlation, 4),
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
            f"{result.correlation:.2f} (the guess: {result.default_correlation:.2f})"
        )
    return 0
