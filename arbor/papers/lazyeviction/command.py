"""``arbor calibrate window``: measure the window of LazyEviction on solved problems."""

from __future__ import annotations

from typing import Any

import click

from arbor.cli.calibrate import Fitted, fitted_to
from arbor.cli.command import Command, Number, option
from arbor.cli.options import output_options
from arbor.cli.output import Output


@click.command(cls=Command)
@fitted_to("chains")
@option(
    "--threshold",
    type=Number(0, 1, min_open=True),
    default=1e-4,
    metavar="X",
    heading="Search",
    common=True,
    help="Attention from which a token counts as read (alpha).",
)
@option(
    "--percentile",
    type=Number(0, 100, min_open=True),
    default=80,
    metavar="P",
    heading="Search",
    help="Percentile of the intervals that the window is.",
)
@output_options
@click.pass_obj
def window(
    output: Output,
    /,
    threshold: float,
    percentile: float,
    **values: Any,
) -> int:
    """Measure the window of LazyEviction: solve problems, see when tokens are read again.

    Prints the policy with its settings, as --policy takes it.

    \b
      arbor calibrate window
      arbor calibrate window --task chains --n 200 --threshold 0.001
      arbor calibrate window --model ./model --percentile 90
      arbor calibrate window gsm8k.jsonl --task gsm8k
    """
    from arbor.papers.lazyeviction.calibrate import calibrate_window

    given = Fitted.of(values)

    with given.solver(
        controller="chain",
        policy=f"lazyeviction,threshold={threshold}",
    ) as solver:
        problems = given.problems(solver)
        output.say(f"solving {len(problems)} {given.named}, with everything kept")
        found = calibrate_window(solver, problems, percentile)
    width = found.window
    policy = f"lazyeviction,window={width},recent={width},spare={width},threshold={threshold}"
    if output.json:
        output.document(
            {
                "schema": "arbor.calibration/1",
                "policy": policy,
                **given.record,
                "task": given.task,
                "threshold": threshold,
                **{name: getattr(found, name) for name in found.__dataclass_fields__},
            }
        )
    else:
        output.print(policy)
        output.say(
            f"{100 * found.recurring:.1f} % of {found.tokens:,} tokens of {found.problems} problems "
            f"were read again; longest intervals: "
            + ", ".join(f"{percent} % within {most}" for percent, most in found.intervals.items())
            + f"; a fifth of the tokens receives {100 * found.heavy:.1f} % of the attention"
        )
    return 0
