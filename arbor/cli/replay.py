"""`arbor replay`: what other policies and budgets would have cost, from a trace, without running the model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from arbor import registry
from arbor.budget import Budget
from arbor.cli.build import known_policy
from arbor.cli.options import TRACE_PATH, Command, names_of, option, output_options, trust_option
from arbor.cli.output import Output

if TYPE_CHECKING:
    from arbor.measure.replay import Recording


@click.command(cls=Command)
@click.argument("trace", type=TRACE_PATH)
@option(
    "--policy",
    multiple=True,
    metavar="NAME[,KEY=VALUE]",
    heading="KV budget",
    shell_complete=names_of("policy"),
    help="May be repeated; lru, arborkv, reentry and belady if none is given.",
)
@option(
    "--budget",
    multiple=True,
    metavar="X",
    heading="KV budget",
    help="Part of full retention's peak, or 512tok; may be repeated; 0.5, 0.25 and 0.125 if none is given.",
)
@option(
    "--rehydrate",
    type=click.Choice(["selective", "span"]),
    default="selective",
    heading="KV budget",
    help="What comes back: missing tokens, or whole blocks.",
)
@option(
    "--model",
    metavar="NAME|DIR",
    heading="Model",
    help="Whose tokenizer it was, where that is elsewhere now; by default as the trace says.",
)
@trust_option
@output_options
@click.pass_obj
def replay(
    voice: Output,
    /,
    trace: Path,
    policy: tuple[str, ...],
    budget: tuple[str, ...],
    rehydrate: Any,
    model: str | None,
    trust_remote_code: bool,
) -> int:
    """What other policies and budgets would have cost, from a trace, without running the model.

    \b
      arbor replay run.arbor.jsonl
      arbor replay run.arbor.jsonl --policy lru --policy reentry --budget 0.25
      arbor replay run.arbor.jsonl --policy arborkv --policy arborkv,scorer=recency
      arbor replay run.arbor.jsonl --rehydrate span --json
    """
    chosen = policy or ("lru", "arborkv", "reentry", "belady")
    policies = tuple(dict.fromkeys(map(known_policy, chosen)))
    for name in policies:
        registry.build("policy", name)  # its settings are what they should be
    parts = [Budget.parse(text) for text in budget or ("0.5", "0.25", "0.125")]

    from arbor.measure.replay import Recording
    from arbor.model.loading import load_tokenizer, locate_model
    from arbor.trace.read import read_trace

    read = read_trace(trace)
    record = Recording.of(read.events)
    config = record.header.config
    revision = config.get("revision") if model is None else None
    source = locate_model(config["model"] if model is None else model, revision, trust_remote_code)
    rows = list(_rows(record, load_tokenizer(source), policies, parts, rehydrate))
    if voice.json:
        voice.document({"schema": "arbor.replay/1", "trace": str(trace), "rows": rows})
        return 0
    from rich.table import Table

    table = Table(
        "policy", "budget", "tokens", "recomputed", "per generated", "evictions", box=None
    )
    for row in rows:
        table.add_row(
            row["policy"],
            row["budget"],
            f"{row['budget_tokens']:,}",
            *(
                (f"{row['recomputed']:,}", f"{row['per_generated']:.3f}", str(row["evictions"]))
                if "recomputed" in row
                else (f"needs {row['needs']:,}", "", "")
            ),
        )
    voice.table(table)
    return 0


def _rows(
    record: Recording,
    tokenizer: Any,
    policies: tuple[str, ...],
    budgets: list[Budget],
    rehydrate: Any,
) -> Iterator[dict[str, Any]]:
    """One row for each budget and policy; a budget that does not work says which would."""
    from arbor.measure.replay import replay as again
    from arbor.measure.replay import replay_smallest

    tree = sum(len(block.ids) for block in record.blocks.values()) + record.prompt
    room = tree * 2 + int(record.header.kv.get("full_tokens", 0))  # more than it can need
    peak = again(record, tokenizer, policy="lru", slots=room).peak_tokens
    for budget in budgets:
        slots = budget.tokens(peak, int(record.header.kv.get("bytes_per_token", 1)))
        for policy in policies:
            row: dict[str, Any] = {"policy": policy, "budget": str(budget), "budget_tokens": slots}
            needed, cost = replay_smallest(
                record, tokenizer, slots=slots, policy=policy, rehydrate=rehydrate
            )
            if needed > slots:
                yield row | {"needs": needed}
                continue
            yield row | {
                "recomputed": cost.tokens_recomputed,
                "per_generated": cost.tokens_recomputed / max(1, cost.tokens_generated),
                "evictions": cost.evictions,
                "peak_tokens": cost.peak_tokens,
            }
