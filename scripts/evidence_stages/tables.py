"""The tables of a model: rows of records, one CSV file for each question."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from eval_policies import ratio_of
from experiment_table import ExperimentTable

from arbor.errors import ArborError
from arbor.measure.statistics import bootstrap, clopper_pearson, paired
from arbor.papers.rksc.calibration import Choice, calibrate_exit

from .arms import Arm, reference
from .measuring import GATES, Record, Records, verifications_of

Row = dict[str, Any]
NOT_SAFE = "none is safe"
DIFFERENCE = ("difference_points", "difference_low_points", "difference_high_points")


@dataclass(frozen=True)
class Measured:
    """All that the tables are made of.

    Attributes:
        records: of every arm.
        samples: ids, in the dataset's order.
        device: of the model: times are processor time on a CPU, and wall time elsewhere.
        model, dataset: as the rows name them.
    """

    records: Records
    samples: Sequence[str]
    device: str
    model: str
    dataset: str

    def of(self, arm: Arm) -> list[Record]:
        """An arm's records, with those that ended with an error."""
        found = (self.records.get(sample, arm.key) for sample in self.samples)
        return [record for record in found if record is not None]

    def both(self, arm: Arm, other: Arm) -> list[tuple[Record, Record]]:
        """The records of two arms on the problems that both have."""
        found = (
            (self.records.get(sample, arm.key), self.records.get(sample, other.key))
            for sample in self.samples
        )
        return [(a, b) for a, b in found if a is not None and b is not None]

    def pairs(self, arm: Arm, other: Arm) -> list[tuple[Record, Record]]:
        """The same, without problems on which either ended with an error."""
        return [(a, b) for a, b in self.both(arm, other) if not a["error"] and not b["error"]]

    def seconds(self, record: Record) -> float:
        """The time of a search."""
        return float(record["cpu_s" if self.device == "cpu" else "wall_s"])

    @property
    def named(self) -> Row:
        """The first columns of every row."""
        return {"model": self.model, "dataset": self.dataset}


def ratio_of_sums(pairs: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """The ratio of two sums, with its bootstrap 95 % interval over problems."""
    top, bottom = np.array(pairs, float).T
    found = ratio_of(top, bottom)
    return found["ratio"], found["low"], found["high"]


def solved(measured: Measured, arm: Arm, full: Arm) -> Row:
    """Right answers of an arm, next to those of full retention; an error counts as wrong."""
    both = [(bool(a.get("correct")), bool(b.get("correct"))) for a, b in measured.both(arm, full)]
    right = [one for one, _ in both]
    low, high = clopper_pearson(sum(right), len(right))
    against = paired(right, [other for _, other in both])
    lost = clopper_pearson(against.only_second, len(right))[1]
    return {
        "solved_percent": percent(sum(right) / len(right)),
        "solved_low_percent": percent(low),
        "solved_high_percent": percent(high),
        "difference_points": percent(against.difference),
        "difference_low_points": percent(against.interval[0]),
        "difference_high_points": percent(against.interval[1]),
        "p": float(f"{against.p:.3g}"),
        "only_full": against.only_second,
        "lost_at_most_percent": percent(lost),  # of problems, exact 95 % interval
    }


def percent(share: float) -> float:
    """A share in percent, one digit."""
    return round(100 * share, 1)


def lossless_rows(measured: Measured, arms: Sequence[Arm]) -> Iterable[Row]:
    """Time, recomputed and fetched tokens of each budget, against full retention."""
    for arm in arms:
        pairs = measured.pairs(arm, Arm(arm.question, arm.search, "full"))
        if not pairs:
            continue
        ratios = [measured.seconds(a) / max(measured.seconds(b), 1e-9) for a, b in pairs]
        low, high = bootstrap(ratios, "median")
        tokens = [(a["recomputed"], a["generated"]) for a, _ in pairs]
        again, again_low, again_high = ratio_of_sums(tokens)
        fetched, *_ = ratio_of_sums([(a["fetched"], a["generated"]) for a, _ in pairs])
        held, *_ = ratio_of_sums([(a["peak"], b["peak"]) for a, b in pairs])
        yield {
            **measured.named,
            "search": arm.search,
            "arm": arm.name,
            "budget_fraction": arm.part,
            "held_fraction": round(held, 3),
            "time_ratio": round(float(np.median(ratios)), 3),
            "time_ratio_low": round(low, 3),
            "time_ratio_high": round(high, 3),
            "recomputed_per_generated": round(again, 4),
            "recomputed_low": round(again_low, 4),
            "recomputed_high": round(again_high, 4),
            "fetched_per_generated": round(fetched, 4),
            "same_tree": sum(a["tree"] == b["tree"] for a, b in pairs),
            "same_answer": sum(a["answer"] == b["answer"] for a, b in pairs),
            "over_budget": sum(a["over"] for a, _ in pairs),
            "at_smallest_budget": sum(a["smallest"] for a, _ in pairs),
            "errors": len(measured.of(arm)) - len(pairs),
            "n": len(pairs),
            "n_of": "problems",
        }


def replayed_rows(measured: Measured, arms: Sequence[Arm]) -> Iterable[Row]:
    """Recomputed tokens by policy, of the same recorded searches."""
    for search in dict.fromkeys(arm.search for arm in arms):
        whole = [each for each in measured.of(reference(search)) if each.get("replayed")]
        kinds = dict.fromkeys(
            (one["part"], one["policy"]) for each in whole for one in each["replayed"]
        )
        for part, policy in kinds:
            mine = [
                (one, each)
                for each in whole
                for one in each["replayed"]
                if (one["part"], one["policy"]) == (part, policy)
            ]
            tokens = [(one["recomputed"], each["generated"]) for one, each in mine]
            ratio, low, high = ratio_of_sums(tokens)
            yield {
                **measured.named,
                "search": search,
                "policy": policy,
                "budget_fraction": part,
                "recomputed_per_generated": round(ratio, 4),
                "interval_low": round(low, 4),
                "interval_high": round(high, 4),
                "at_smallest_budget": sum(not one["fits"] for one, _ in mine),
                "n": len(mine),
                "n_of": "problems",
            }


def solved_rows(measured: Measured, arms: Sequence[Arm]) -> Iterable[Row]:
    """Answers of arms that lose KV or bits of it, and of full retention."""
    searches = list(dict.fromkeys(arm.search for arm in arms))
    for arm in [*map(reference, searches), *arms]:
        records = measured.of(arm)
        if not records:
            continue
        pairs = measured.pairs(arm, reference(arm.search))
        held, *_ = ratio_of_sums([(a["peak"], b["peak"]) for a, b in pairs]) if pairs else (0.0,)
        generated = sum(a["generated"] for a, _ in pairs)
        yield {
            **measured.named,
            "search": arm.search,
            "policy": arm.name,
            "rehydrate": arm.settings.get("rehydrate", ""),
            "budget_fraction": arm.part,
            "held_fraction": round(held, 3),
            **solved(measured, arm, reference(arm.search)),
            "other_trees_percent": percent(
                sum(a["tree"] != b["tree"] for a, b in pairs) / max(1, len(pairs))
            ),
            "recomputed_per_generated": round(
                sum(a["recomputed"] for a, _ in pairs) / max(1, generated), 4
            ),
            "kv_bytes_per_token": max((a["bytes_per_token"] for a, _ in pairs), default=0),
            "over_budget": sum(a["over"] for a, _ in pairs),
            "errors": len(records) - len(pairs),
            "n": len(records),
            "n_of": "problems",
        }


def gates_rows(measured: Measured, arms: Sequence[Arm]) -> Iterable[Row]:
    """What skipping or shortening verifications saves, and how many decide otherwise.

    Raises:
        ArborError: too few problems, or none with verifications.
    """
    records = [measured.records.get(sample, GATES) for sample in measured.samples]
    found = [
        each
        for place, record in enumerate(records)
        if record is not None
        for each in verifications_of(record, place)
    ]
    result = calibrate_exit(found)
    choices: tuple[tuple[str, str, Choice[Any]], ...] = (
        ("skip", "the paper's percentiles", result.paper_skip),
        ("layer exit", "the paper's percentiles", result.paper_leave),
        ("skip", "at most 2 % disagree", result.skip),
        ("layer exit", "at most 2 % disagree", result.leave),
    )
    for level, thresholds, choice in choices:
        yield {
            **measured.named,
            "level": level,
            "thresholds": thresholds,
            "setting": NOT_SAFE if choice.setting is None else str(choice.setting),
            "saved_percent": percent(choice.saved),
            "decided": choice.decided,
            "disagreements": choice.disagreements,
            "disagree_percent": percent(choice.disagreements / len(found)),
            "bound_percent": "" if choice.setting is None else percent(choice.bound),
            "problems": result.problems,
            "n": len(found),
            "n_of": "verifications",
        }


def controllers_rows(measured: Measured, folder: Path) -> Iterable[Row]:
    """The rows of `arbor compare`, in the columns of docs/experiments/controllers.csv."""
    found = json.loads((folder / "compare.json").read_text(encoding="utf-8"))
    budgets = dict(found["budgets"])
    for row in found["table"]:
        difference = row["difference"]
        against: Row = dict.fromkeys(DIFFERENCE, "")
        if difference is not None:
            points = (difference["value"], *difference["interval"])
            against = dict(zip(DIFFERENCE, map(percent, points), strict=True))
        low, high = row["success"]["interval"]
        yield {
            **measured.named,
            "arm": row["arm"],
            "tokens": row["tokens"],
            "kv_tokens": budgets[row["tokens"]].removesuffix("tok"),
            "success_percent": percent(row["success"]["value"]),
            "success_low_percent": percent(low),
            "success_high_percent": percent(high),
            **against,
            "p": "" if difference is None else float(f"{difference['p']:.3g}"),
            "any_right_percent": percent(row["any_correct"]["value"]),
            "ended_by_tokens_percent": percent(row["reached_tokens"]),
            "generated": round(row["tokens_generated"]),
            "reused": round(row["tokens_reused"]),
            "recomputed": round(row["tokens_recomputed"]),
            "peak_kv_tokens": round(row["peak_tokens"]),
            "cpu_s": round(row["cpu_s"], 3),
            "errors": row["errors"],
            "n": row["n"],
            "n_of": "problems",
        }


TABLES: Mapping[str, tuple[str, Callable[[Measured, Sequence[Arm]], Iterable[Row]]]] = {
    "lossless": ("lossless", lossless_rows),
    "policies": ("lossless", replayed_rows),
    "lossy": ("lossy", solved_rows),
    "bits": ("bits", solved_rows),
    "gates": ("gates", gates_rows),
}


def write_tables(
    folder: Path,
    measured: Measured,
    arms: Sequence[Arm],
    questions: Sequence[str],
    given: argparse.Namespace,
    command: str,
) -> tuple[dict[str, list[Row]], list[str]]:
    """One CSV file for each table, written anew.

    Args:
        folder: for the files.
        arms: that were measured.
        questions: of the run.
        given: the script's options, for what the rows record of the run.
        command: of the rows, without paths.

    Returns:
        Rows by table, and what could not be measured.
    """
    found: dict[str, list[Row]] = {}
    notes: list[str] = []
    if "controllers" in questions:
        found["controllers"] = list(controllers_rows(measured, folder / "controllers"))
    for name, (question, rows_of) in TABLES.items():
        if question not in questions:
            continue
        try:
            found[name] = list(rows_of(measured, [a for a in arms if a.question == question]))
        except ArborError as error:
            notes.append(f"{name}: {error.message}")
    for name, rows in found.items():
        path = folder / f"{name}.csv"
        path.unlink(missing_ok=True)
        given.csv = path
        table = ExperimentTable(given, command)
        for row in rows:
            table.add(row)
    failed: dict[str, list[str]] = {}
    for arm in arms:
        for record in measured.of(arm):
            if record["error"]:
                failed.setdefault(f"{record['error']}: {record['message']}", []).append(arm.key)
    notes += [
        f"{text} ({len(keys)} searches: {', '.join(dict.fromkeys(keys))})"
        for text, keys in failed.items()
    ]
    return found, notes
