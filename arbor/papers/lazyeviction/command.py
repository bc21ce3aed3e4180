"""``arbor calibrate window``: measure alpha and the window of LazyEviction on solved problems."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from arbor.cli.calibrate import Fitted, file_option, fitted_to
from arbor.cli.command import Command, Number, option
from arbor.cli.options import output_options
from arbor.cli.output import Output


@click.command(cls=Command)
@fitted_to("chains")
@option(
    "--threshold",
    type=Number(0, 1, min_open=True, max_open=True),
    metavar="X",
    heading="Search",
    common=True,
    help="Attention from which a token counts as read (alpha); default: the smallest of a few at "
    "which over 95 % of the tokens recur.",
)
@option(
    "--percentile",
    type=Number(0, 100, min_open=True),
    default=80,
    metavar="P",
    heading="Search",
    help="Percentile of the intervals that the window is.",
)
@file_option("for alpha", name="alpha")
@output_options
@click.pass_obj
def window(
    output: Output,
    /,
    threshold: float | None,
    percentile: float,
    out: Path | None,
    **values: Any,
) -> int:
    """Measure alpha and the window of LazyEviction: solve problems, see when tokens are read again.

    Prints the policy with its settings, as --policy takes it, and writes alpha to a file.
    Policies lazyeviction and raas take alpha from it where it lies in the model's
    directory or the cache, and no threshold is given; without it alpha is 0.0001.

    \b
      arbor calibrate window
      arbor calibrate window --task chains --n 200 --threshold 0.001
      arbor calibrate window --model ./model --percentile 90
      arbor calibrate window gsm8k.jsonl --task gsm8k
    """
    given = Fitted.of(values)
    out = given.file("alpha", out)

    from arbor.papers.lazyeviction.calibrate import ALPHAS, RECURRING, calibrate_window
    from arbor.retention.alpha import save_alpha

    alphas = ALPHAS if threshold is None else (threshold,)
    with given.solver(
        controller="chain",
        policy=f"lazyeviction,threshold={alphas[0]}",
    ) as solver:
        problems = given.problems(solver)
        output.say(f"solving {len(problems)} {given.named}, with everything kept")
        found = calibrate_window(solver, problems, percentile, alphas)
    width, alpha = found.window, found.alpha
    policy = f"lazyeviction,window={width},recent={width},spare={width},threshold={alpha}"
    figures = {
        **given.record,
        "task": given.task,
        **{name: getattr(found, name) for name in found.__dataclass_fields__},
    }
    save_alpha(out, alpha, figures)
    if output.json:
        output.document(
            {"schema": "arbor.calibration/1", "out": str(out), "policy": policy, **figures}
        )
        return 0
    output.print(policy)
    share = found.recurring[alpha]
    reached = "" if share > RECURRING else f" (no alpha brings {100 * RECURRING:.0f} %)"
    output.say(
        f"alpha {alpha:g}, in {out}: {100 * share:.1f} % of {found.tokens:,} tokens of "
        f"{found.problems} problems recur{reached}; longest intervals: "
        + ", ".join(f"{percent} % within {most}" for percent, most in found.intervals.items())
        + f"; a fifth of the tokens receives {100 * found.heavy:.1f} % of the attention"
    )
    return 0
