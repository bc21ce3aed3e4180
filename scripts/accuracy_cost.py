"""Accuracy and cost of arbor's searches and of llama.cpp's majority, a row for each arm.

    python scripts/accuracy_cost.py --peers majority.csv --arbor runs/full runs/quarter \\
        --csv docs/experiments/accuracy_cost.csv

`--peers` are tables of `bench_majority.py`, `--arbor` folders of `arbor compare`, with one number
of tokens and one seed. Only the problems that every arm has count; costs are means of a problem.
An arm of chains is called `greedy` or `majority-8`, by its chains; every other one is a tree.
"""

from __future__ import annotations

import argparse
import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench_majority import PEER, known_rows
from experiment_table import ExperimentTable, add_options

from arbor.measure.evaluation.compare import cost_of
from arbor.measure.evaluation.folder import read_rows
from arbor.measure.evaluation.results import is_right
from arbor.measure.statistics import clopper_pearson

ARBOR = "arbor"
CHAINS = re.compile(r"greedy|majority-(\d+)")
COSTS = ("cpu_s", "wall_s", "generated", "peak_kv_tokens")
Solved = Mapping[str, float]  # `right` and the costs of one problem


@dataclass(frozen=True)
class Arm:
    """One way in which the problems were solved, as a row names it."""

    model: str
    dataset: str
    by: str
    label: str
    budget: str

    @property
    def chains(self) -> int | None:
        """How many chains vote; None of a tree."""
        found = CHAINS.fullmatch(self.label)
        return None if found is None else int(found[1] or 1)


def of_peers(paths: Iterable[Path]) -> Iterator[tuple[Arm, str, Solved]]:
    """Every row of tables of `bench_majority.py`, with the id of its problem."""
    for path in paths:
        for row in known_rows(path):
            count = int(row["samples"])
            label = "greedy" if count == 1 else f"majority-{count}"
            facts = {name: float(row[name]) for name in ("right", *COSTS)}
            yield Arm(row["model"], row["dataset"], PEER, label, "full"), row["sample"], facts


def of_arbor(folders: Iterable[Path]) -> Iterator[tuple[Arm, str, Solved]]:
    """Every sample of the arms of comparisons, with its id.

    Raises:
        SystemExit: an arm has several seeds or numbers of tokens.
    """
    for folder in folders:
        settings = tomllib.loads((folder / "compare.toml").read_text(encoding="utf-8"))
        found = json.loads((folder / "compare.json").read_text(encoding="utf-8"))
        model, dataset = Path(settings["model"]).stem, Path(settings["dataset"]).stem
        if len(found["budgets"]) > 1 or any(len(row["folders"]) > 1 for row in found["table"]):
            raise SystemExit(f"{folder}: give 'arbor compare' one --tokens at most and one seed")
        ((_, budget),) = found["budgets"]
        for row in found["table"]:
            arm = Arm(model, dataset, ARBOR, row["arm"], budget)
            for sample, each in read_rows(folder / row["folders"][0])[0].items():
                yield (
                    arm,
                    sample,
                    {
                        "right": float(is_right(each)),
                        "cpu_s": cost_of(each, "cpu_s"),
                        "wall_s": cost_of(each, "wall_s"),
                        "generated": cost_of(each, "tokens_generated"),
                        "peak_kv_tokens": cost_of(each, "peak_tokens"),
                    },
                )


def arm_rows(solved: Iterable[tuple[Arm, str, Solved]]) -> list[dict[str, Any]]:
    """A row for each arm, over the problems that every arm has.

    Raises:
        SystemExit: there is no such problem, or an arm has one twice.
    """
    found: dict[Arm, dict[str, Solved]] = {}
    for arm, sample, facts in solved:
        mine = found.setdefault(arm, {})
        if sample in mine:
            raise SystemExit(f"{arm.by}, {arm.label}, {arm.budget}: {sample} is there twice")
        mine[sample] = facts
    every = set.intersection(*map(set, found.values())) if found else set()
    if not every:
        raise SystemExit("no problem was solved by every arm")
    rows = []
    for arm, mine in found.items():
        both = [mine[sample] for sample in sorted(every)]
        right, n = round(sum(each["right"] for each in both)), len(both)
        low, high = clopper_pearson(right, n)
        mean = {name: sum(each[name] for each in both) / n for name in COSTS}
        rows.append(
            {
                "model": arm.model,
                "dataset": arm.dataset,
                "by": arm.by,
                "arm": arm.label,
                "budget": arm.budget,
                "chains": "" if arm.chains is None else arm.chains,
                "solved_percent": round(100 * right / n, 1),
                "solved_low_percent": round(100 * low, 1),
                "solved_high_percent": round(100 * high, 1),
                "cpu_s": round(mean["cpu_s"], 2),
                "wall_s": round(mean["wall_s"], 2),
                "generated": round(mean["generated"]),
                "peak_kv_tokens": round(mean["peak_kv_tokens"]),
                "n": n,
                "n_of": "problems",
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--peers", type=Path, nargs="+", default=[], metavar="FILE")
    parser.add_argument("--arbor", type=Path, nargs="+", default=[], metavar="FOLDER")
    add_options(parser)
    given = parser.parse_args()
    rows = arm_rows([*of_peers(given.peers), *of_arbor(given.arbor)])
    table = ExperimentTable(given)
    for row in rows:
        table.show(row)


if __name__ == "__main__":
    main()
