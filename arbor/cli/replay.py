"""``arbor replay``: cost of a recorded search under other policies and budgets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from arbor import components, registry
from arbor.budget import Budget
from arbor.cli.build import known_policy
from arbor.cli.command import Command, option
from arbor.cli.options import TRACE_PATH, output_options
from arbor.cli.output import Output
from arbor.cli.record_options import budgets_and_policies, option_for
from arbor.model.checkpoint import ModelSource
from arbor.support.garbage import no_collection

if TYPE_CHECKING:
    from arbor.measure.replay import RecordedSearch

DEFAULT = ("lru", "arborkv", "reentry", "belady")


@click.command(cls=Command)
@click.argument("trace", type=TRACE_PATH)
@budgets_and_policies(
    "Part of this run's own peak, or 512tok; may be repeated; default: 0.5, 0.25 and 0.125.",
    "May be repeated; default: lru, arborkv, reentry and belady.",
)
@option(
    "--rehydrate",
    type=click.Choice(["selective", "span"]),
    default="selective",
    heading="KV budget",
    common=True,
    help="Recompute missing tokens (selective) or whole blocks (span).",
)
@option(
    "--model",
    metavar="NAME|DIR",
    heading="Model",
    common=True,
    help="Model whose tokenizer the run used; default: the one in the trace.",
)
@option_for(ModelSource, "trust_remote_code")
@output_options
@click.pass_obj
def replay(
    output: Output,
    /,
    trace: Path,
    policy: tuple[str, ...],
    budget: tuple[str, ...],
    rehydrate: Literal["selective", "span"],
    model: str | None,
    trust_remote_code: bool,
) -> int:
    """Compare policies and budgets on a recorded search, without running the model.

    \b
      arbor replay run.arbor.jsonl
      arbor replay run.arbor.jsonl --policy lru --policy reentry --budget 0.25
      arbor replay run.arbor.jsonl --policy kkt --policy kkt,scorer=recency
      arbor replay run.arbor.jsonl --rehydrate span --json
    """
    known = registry.names("policy")
    chosen = policy or [name for name in DEFAULT if name in known]
    policies = tuple(dict.fromkeys(map(known_policy, chosen)))
    for name in policies:
        components.build("policy", name)  # checks the settings
    parts = [Budget.parse(text) for text in budget or ("0.5", "0.25", "0.125")]

    with no_collection():  # torch comes with it
        from arbor.measure.replay import RecordedSearch
    from arbor.model.description_cache import light_tokenizer
    from arbor.model.loading import locate_model
    from arbor.trace.read import read_trace

    read = read_trace(trace)
    record = RecordedSearch.of(read.events)
    config = record.header.config
    revision = config.get("revision") if model is None else None
    source = locate_model(config["model"] if model is None else model, revision, trust_remote_code)
    rows = list(_rows(record, light_tokenizer(source), policies, parts, rehydrate))
    if output.json:
        output.document({"schema": "arbor.replay/1", "trace": str(trace), "rows": rows})
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
    output.table(table)
    return 0


def _rows(
    record: RecordedSearch,
    tokenizer: Any,
    policies: tuple[str, ...],
    budgets: list[Budget],
    rehydrate: Literal["selective", "span"],
) -> Iterator[dict[str, Any]]:
    """A row for each budget and policy; for an infeasible budget, the smallest feasible one."""
    from arbor.measure.replay import replay as replay_trace
    from arbor.measure.replay import replay_smallest

    tree = sum(len(block.ids) for block in record.blocks.values()) + record.prompt
    worst_case = int(record.header.kv.get("full_tokens", 0))
    slots_of_all = tree * 2 + worst_case  # more than enough
    peak = replay_trace(record, tokenizer, policy="lru", slots=slots_of_all).peak_tokens
    slots_at_most = max(worst_case, peak)
    bytes_per_token = int(record.header.kv.get("bytes_per_token", 1))
    for budget in budgets:
        whole = peak if budget.unit == "ratio" else slots_at_most
        slots = budget.tokens(whole, bytes_per_token)
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
