"""``arbor calibrate exit``: the thresholds of CGEE for a model and a task."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from arbor import components
from arbor.cli.calibrate import Fitted, file_option, fitted_to
from arbor.cli.command import Command, Number, option
from arbor.cli.options import output_options
from arbor.cli.output import Output
from arbor.papers.rksc.exit_thresholds import (
    Chosen,
    Measure,
    save_thresholds,
    thresholds_by_task,
)

if TYPE_CHECKING:
    from arbor.papers.rksc.calibration import Choice


@click.command(name="exit", cls=Command)
@fitted_to("game24")
@option(
    "--controller",
    default="tot",
    metavar="NAME[,KEY=VALUE]",
    heading="Search",
    help="The search that verifies; as in the searches that will use the thresholds.",
)
@option(
    "--risk",
    type=Number(0, 1, min_open=True, max_open=True),
    default=0.02,
    metavar="X",
    heading="Search",
    common=True,
    help="Largest part of verifications that may prefer another thought.",
)
@option(
    "--error",
    type=Number(0, 1, min_open=True, max_open=True),
    default=0.05,
    metavar="X",
    heading="Search",
    help="Chance that the choice exceeds --risk.",
)
@option(
    "--measure",
    type=click.Choice(["entropy", "margin"]),
    default="entropy",
    heading="Search",
    help="What decides between layers, as in the setting of cgee.",
)
@option(
    "--norm/--no-norm",
    default=True,
    heading="Search",
    show_default=False,
    help="Final norm before the unembedding; default: yes, the paper: no.",
)
@file_option("to add the task to", name="exit")
@output_options
@click.pass_obj
def calibrate_exit(
    output: Output,
    /,
    controller: str,
    risk: float,
    error: float,
    measure: str,
    norm: bool,
    out: Path | None,
    **values: Any,
) -> int:
    """Choose the thresholds of CGEE: solve problems with full verification, then compare.

    The file is used by a model directory that holds it as exit.json.

    \b
      arbor calibrate exit
      arbor calibrate exit --task game24 --n 200 --risk 0.01
      arbor calibrate exit --model ./model --measure margin --out exit.json
      arbor calibrate exit gsm8k.jsonl --task gsm8k
    """
    given = Fitted.of(values)
    out = given.file("exit", out)
    thresholds_by_task(out)  # refuses a damaged file before anything is solved

    from arbor.papers.rksc.calibration import Recorder, collect_verifications
    from arbor.papers.rksc.calibration import calibrate_exit as chosen_thresholds

    chosen = cast(Measure, measure)
    with given.solver(
        controller=controller,
        verifier=Recorder(measure=chosen, norm=norm),
    ) as solver:
        name = str(components.spec_of(solver.task)["name"])
        problems = given.problems(solver)
        output.say(f"solving {len(problems)} {given.named}, every verification in full")
        found = collect_verifications(solver, problems)
        result = chosen_thresholds(found, risk=risk, error=error, measure=chosen, norm=norm)
    levels: dict[str, Choice[Any]] = {
        "skip": result.skip,
        "leave": result.leave,
        "paper_skip": result.paper_skip,
        "paper_leave": result.paper_leave,
    }
    figures: dict[str, Any] = {
        **given.record,
        "controller": controller,
        "created": datetime.now(UTC).date().isoformat(),
        "problems": result.problems,
        "verifications": len(found),
        "risk": risk,
        "error": error,
        **{
            level: {
                "saved": round(choice.saved, 4),
                "decided": choice.decided,
                "disagreements": choice.disagreements,
                "bound": round(choice.bound, 5),
                "candidates": choice.candidates,
            }
            for level, choice in levels.items()
        },
    }
    thresholds: Chosen = {"risk": result.risk, "paper": result.paper}
    save_thresholds(out, name, thresholds, **figures)
    if output.json:
        shown = {method: each.to_dict() for method, each in thresholds.items()}
        output.document(
            {"schema": "arbor.calibration/1", "out": str(out), "task": name, **shown, **figures}
        )
    else:
        output.print(str(out))
        for level, choice in levels.items():
            output.say(f"{level.replace('_', ' ')}: {_described(choice)}")
    return 0


def _described(choice: Choice[Any]) -> str:
    """A choice and its figures in words."""
    if choice.setting is None:
        return f"none of {choice.candidates} settings is safe enough on these problems"
    return (
        f"{choice.setting} saves {100 * choice.saved:.1f} %; {choice.disagreements:,} of {choice.n:,} "
        f"verifications prefer another thought, at most {100 * choice.bound:.2f} %"
    )
