"""``arbor calibrate queries``: average the queries that TriAttention scores with."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from arbor.cli.calibrate import Fitted, file_option, fitted_to
from arbor.cli.command import Command, WholeNumber, option
from arbor.cli.options import output_options
from arbor.cli.output import Output
from arbor.cli.output_paths import refuse_unwritable


@click.command(cls=Command)
@fitted_to("chains")
@option(
    "--seed",
    type=WholeNumber(0),
    default=0,
    metavar="N",
    heading="Search",
    help="Seed of all random streams.",
)
@file_option("for the setting queries of triattention", default="queries.npz")
@output_options
@click.pass_obj
def queries(
    output: Output,
    /,
    seed: int,
    out: Path,
    **values: Any,
) -> int:
    """Average the queries that TriAttention scores with: solve problems, with everything kept.

    A search reads the file with --policy triattention,queries=FILE.

    \b
      arbor calibrate queries
      arbor calibrate queries --task chains --n 200 --out queries.npz
      arbor calibrate queries --model ./model
      arbor calibrate queries gsm8k.jsonl --task gsm8k
    """
    refuse_unwritable("--out", out)

    from arbor.papers.related.calibrate_queries import EveryQuery, collect_queries
    from arbor.retention.allocators.pooled import Pooled
    from arbor.retention.policy import Policy

    given = Fitted.of(values)
    with given.solver(
        controller="chain",
        policy=Policy(Pooled(), EveryQuery()),
        share="off",  # the queries of tokens that prompts have in common count for each
        seed=seed,
    ) as solver:
        problems = given.problems(solver)
        output.say(f"solving {len(problems)} {given.named}, with everything kept")
        means, count = collect_queries(solver, problems)
    heads, dim, _ = means.layers[0].sizes
    figures: dict[str, Any] = {
        **given.record,
        "task": given.task,
        "seed": seed,
        "created": datetime.now(UTC).date().isoformat(),
        "problems": count,
    }
    means.save(out, **figures)
    if output.json:
        sizes = {"layers": len(means.layers), "heads": heads, "head_dim": dim}
        output.document(
            {
                "schema": "arbor.calibration/1",
                "out": str(out),
                "queries": means.queries,
                **sizes,
                **figures,
            }
        )
    else:
        output.print(str(out))
        output.say(
            f"means of {means.queries:,} queries of {count} problems, in {len(means.layers)} layers"
        )
    return 0
