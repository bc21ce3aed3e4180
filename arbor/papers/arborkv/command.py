"""``arbor calibrate msve``: fit the block values of ArborKV to solved problems."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from arbor.cli.calibrate import Fitted, file_option, fitted_to
from arbor.cli.command import Command, WholeNumber, option
from arbor.cli.options import output_options
from arbor.cli.output import Output
from arbor.papers.arborkv.msve import MSVE


@click.command(cls=Command)
@fitted_to("chains")
@option(
    "--top",
    type=WholeNumber(0),
    default=0,
    metavar="K",
    heading="Search",
    help="Confidence from the K likeliest tokens, the others as one; 0: from all tokens.",
)
@file_option("for the setting msve", name="msve")
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
    given = Fitted.of(values)
    out = given.file("msve", out)

    from arbor.papers.arborkv.calibrate import calibrate as fitted
    from arbor.papers.arborkv.calibrate import collect

    with given.solver(
        controller="chain",
        policy="arborkv",
        mode="lossy",  # values every block; with room for all of them nothing is lost
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
