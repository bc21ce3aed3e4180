"""``arbor calibrate thoughts``: find the types of thoughts that ThinKV tells apart."""

from __future__ import annotations

from typing import Any

import click

from arbor.cli.calibrate import Fitted, fitted_to
from arbor.cli.command import Command
from arbor.cli.options import output_options
from arbor.cli.output import Output


@click.command(cls=Command)
@fitted_to("chains")
@output_options
@click.pass_obj
def thoughts(output: Output, /, **values: Any) -> int:
    """Find the types of thoughts for ThinKV: solve problems, compare the sparsity of attention.

    Prints the policy with its settings, as --policy takes it; without types where
    no layer has three modes.

    \b
      arbor calibrate thoughts
      arbor calibrate thoughts --model ./model --n 200
      arbor calibrate thoughts gsm8k.jsonl --task gsm8k
    """
    from arbor.papers.related.calibrate_thoughts import MODES, EveryLayer, calibrate_thoughts
    from arbor.retention.allocators.pooled import Pooled
    from arbor.retention.policy import Policy

    given = Fitted.of(values)
    with given.solver(
        controller="chain",
        policy=Policy(Pooled(), EveryLayer()),
        share="off",  # the queries of tokens that prompts have in common are kept for each
    ) as solver:
        problems = given.problems(solver)
        output.say(f"solving {len(problems)} {given.named}, with everything kept")
        found = calibrate_thoughts(solver, problems)
    if output.json:
        output.document(
            {
                "schema": "arbor.calibration/1",
                "policy": found.settings,
                **given.record,
                "task": given.task,
                **{name: getattr(found, name) for name in found.__dataclass_fields__},
            }
        )
    else:
        output.print(found.settings)
        low, high = found.range
        layers = len(found.modes)
        output.say(
            f"{found.segments:,} segments of {found.problems} problems, nine in ten with a sparsity of "
            f"{low:.3f} to {high:.3f}; {found.modes.count(MODES)} of {layers} layers have three modes, "
            f"{found.narrow_modes.count(MODES)} with kernels of half the width; the position explains "
            f"{100 * found.by_position:.0f} % of the sparsity"
            + ("" if found.valleys else "; without such a layer all thoughts are of one type")
        )
    return 0
