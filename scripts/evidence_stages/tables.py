"""The tables of a model: rows of records, one or more CSV files for each experiment."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from eval_attention import THRESHOLDS, row_of
from eval_policies import ratio_of
from eval_rksc import layer_rows, share_rows
from experiment_table import ExperimentTable
from similar_pairs import Pair

from arbor.errors import ArborError
from arbor.measure.statistics import bootstrap, bootstrap_groups, clopper_pearson, paired
from arbor.papers.arborkv.calibrate import Example, calibrate
from arbor.papers.arborkv.msve import MSVE, rank_correlation
from arbor.papers.rksc.calibration import Choice, Verification, calibrate_exit

from .arms import Arm, reference
from .measuring import Record, Records
from .recording import examples_of, reads_of, verifications_of

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
        fitted: files of MSVE weights that are tried too.
    """

    records: Records
    samples: Sequence[str]
    device: str
    model: str
    dataset: str
    fitted: Sequence[Path] = ()

    def recorded(self, experiment: str) -> list[tuple[int, Record]]:
        """Place and record of every problem of an experiment without arms, but errors."""
        found = (self.records.get(sample, experiment) for sample in self.samples)
        return [(at, each) for at, each in enumerate(found) if each and not each["error"]]

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
    """Time, recomputed and fetched tokens of each budget, against full retention; and whether trees
    are those of the same settings with room for everything."""
    roomy = {(arm.search, arm.name): arm for arm in arms if arm.part == 1}
    for arm in arms:
        full = Arm(arm.question, arm.search, "full")
        alike = measured.pairs(arm, roomy.get((arm.search, arm.name), full))
        pairs = measured.pairs(arm, full)
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
            "same_tree": sum(a["tree"] == b["tree"] for a, b in alike),
            "same_answer": sum(a["answer"] == b["answer"] for a, b in alike),
            "over_budget": sum(a["over"] for a, _ in pairs),
            "at_smallest_budget": sum(a["smallest"] for a, _ in pairs),
            "errors": len(measured.of(arm)) - len(pairs),
            "n": len(pairs),
            "n_of": "problems",
        }


def replayed_rows(measured: Measured, arms: Sequence[Arm]) -> Iterable[Row]:
    """Recomputed tokens by policy, of the same recorded searches."""
    for search in dict.fromkeys(arm.search for arm in arms):
        full = Arm("lossless", search, "full")
        whole = [each for each in measured.of(full) if each.get("replayed")]
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
            "evicted_per_generated": round(
                sum(a["evicted"] for a, _ in pairs) / max(1, generated), 4
            ),
            "kv_bytes_per_token": max((a["bytes_per_token"] for a, _ in pairs), default=0),
            "over_budget": sum(a["over"] for a, _ in pairs),
            "errors": len(records) - len(pairs),
            "n": len(records),
            "n_of": "problems",
        }


def verified(measured: Measured) -> list[Verification]:
    """The verifications of all problems."""
    every = measured.recorded("gates")
    return [one for place, record in every for one in verifications_of(record, place)]


def gates_rows(measured: Measured, arms: Sequence[Arm]) -> Iterable[Row]:
    """What skipping or shortening verifications saves, and how many decide otherwise.

    Raises:
        ArborError: too few problems, or none with verifications.
    """
    found = verified(measured)
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


def layers_rows(measured: Measured, arms: Sequence[Arm]) -> Iterable[Row]:
    """Decisions had all questions left after a layer, and under the paper's rule; thresholds and
    figures are of the same problems.

    Raises:
        ArborError: too few problems.
    """
    found = verified(measured)
    rule = calibrate_exit(found).paper.exit_rule
    for row in layer_rows(found, rule, len(measured.recorded("gates"))):
        yield {**measured.named, **row}


def times_rows(measured: Measured, arms: Sequence[Arm]) -> Iterable[Row]:
    """Time and answers of a search whose verifications are skipped or shortened, against full
    verification."""
    full = next((arm for arm in arms if arm.name == "full"), None)
    for arm in arms if full is not None else ():
        assert full is not None
        pairs = measured.pairs(arm, full)
        if not pairs:
            continue
        ratios = [measured.seconds(a) / max(measured.seconds(b), 1e-9) for a, b in pairs]
        low, high = bootstrap(ratios, "median")
        yield {
            **measured.named,
            "search": arm.search,
            "verification": arm.name,
            "time_ratio": round(float(np.median(ratios)), 3),
            "time_ratio_low": round(low, 3),
            "time_ratio_high": round(high, 3),
            **solved(measured, arm, full),
            "same_tree": sum(a["tree"] == b["tree"] for a, b in pairs),
            "errors": len(measured.of(arm)) - len(pairs),
            "n": len(pairs),
            "n_of": "problems",
        }


def attention_rows(measured: Measured, arms: Sequence[Arm]) -> Iterable[Row]:
    """How tokens of chains are read again, at each threshold."""
    every = [reads_of(record) for _, record in measured.recorded("attention")]
    every = [each for each in every if len(each[0].mass) > each[0].prompt]
    for place, threshold in enumerate(THRESHOLDS) if every else ():
        row = row_of("", threshold, [each[place] for each in every])
        del row["task"]
        yield {**measured.named, **row}


def sharing_rows(measured: Measured, arms: Sequence[Arm]) -> Iterable[Row]:
    """The part of pairs of prompts that share at each threshold of similarity."""
    found: dict[tuple[str, str], list[Pair]] = {}
    for _, record in measured.recorded("sharing"):
        for each in record["pairs"]:
            facts = {name: each[name] for name in each if name not in ("kind", "reading")}
            found.setdefault((each["reading"], each["kind"]), []).append(Pair(**facts))
    for row in share_rows(found):
        yield {**measured.named, **row}


def weights_rows(measured: Measured, arms: Sequence[Arm]) -> Iterable[Row]:
    """MSVE's weights, and the rank correlation of scores and losses: fitted to these problems and
    judged on held-out ones of them; the defaults, and weights fitted elsewhere, on all.

    Raises:
        ArborError: too few right chains, or no block whose loss cost an answer.
    """
    examples = [
        one for place, record in measured.recorded("weights") for one in examples_of(record, place)
    ]
    result = calibrate(examples)
    tried = [("the defaults", MSVE())]
    tried += [(path.parent.name or str(path), MSVE.load(path)) for path in measured.fitted]
    rows = [("these problems, held-out ones", result.msve, result.correlation, result.interval)]
    rows += [(name, msve, *correlated(msve, examples)) for name, msve in tried]
    for name, msve, correlation, (low, high) in rows:
        value, confidence, attention = msve.theta
        yield {
            **measured.named,
            "fitted_to": name,
            "value": round(value, 3),
            "confidence": round(confidence, 3),
            "attention": round(attention, 3),
            "bias": round(msve.bias, 3),
            "rank_correlation": round(correlation, 3),
            "correlation_low": round(low, 3),
            "correlation_high": round(high, 3),
            "needed_percent": percent(result.lost),
            "blocks": result.held_out if msve is result.msve else len(examples),
            "n": result.problems,
            "n_of": "right answers",
        }


def correlated(msve: MSVE, examples: Sequence[Example]) -> tuple[float, tuple[float, float]]:
    """Rank correlation of scores and losses, with its bootstrap interval over problems."""
    columns = (
        np.array([getattr(each, name) for each in examples])
        for name in ("value", "confidence", "attention")
    )
    scores, drops = msve.scores(*columns), np.array([each.drop for each in examples])
    groups = np.array([each.problem for each in examples])
    interval = bootstrap_groups(groups, lambda at: rank_correlation(scores[at], drops[at]))
    return rank_correlation(scores, drops), interval


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


FIT = "msve.json"  # weights fitted to these problems

# name of the table -> its experiment, and its rows
TABLES: Mapping[str, tuple[str, Callable[[Measured, Sequence[Arm]], Iterable[Row]]]] = {
    "paths": ("paths", solved_rows),
    "lossless": ("lossless", lossless_rows),
    "policies": ("lossless", replayed_rows),
    "attention": ("attention", attention_rows),
    "gates": ("gates", gates_rows),
    "layers": ("gates", layers_rows),
    "times": ("gates", times_rows),
    "sharing": ("sharing", sharing_rows),
    "hierarchy": ("hierarchy", solved_rows),
    "bits": ("bits", solved_rows),
    "weights": ("weights", weights_rows),
    "trees": ("trees", solved_rows),
}


def write_tables(
    folder: Path,
    measured: Measured,
    arms: Sequence[Arm],
    experiments: Sequence[str],
    given: argparse.Namespace,
    command: str,
) -> tuple[dict[str, list[Row]], list[str]]:
    """One CSV file for each table, written anew, and the weights fitted to these problems.

    Args:
        folder: for the files.
        arms: that were measured.
        experiments: of the run, by name.
        given: the script's options, for what the rows record of the run.
        command: of the rows, without paths.

    Returns:
        Rows by table, and what could not be measured.
    """
    found: dict[str, list[Row]] = {}
    notes: list[str] = []
    if "controllers" in experiments:
        found["controllers"] = list(controllers_rows(measured, folder / "controllers"))
    for name, (experiment, rows_of) in TABLES.items():
        if experiment not in experiments:
            continue
        try:
            found[name] = list(rows_of(measured, [a for a in arms if a.question == experiment]))
        except ArborError as error:
            notes.append(f"{name}: {error.message}")
    for name, rows in found.items():
        path = folder / f"{name}.csv"
        path.unlink(missing_ok=True)
        given.csv = path
        table = ExperimentTable(given, command)
        for row in rows:
            table.add(row)
    if found.get("weights"):
        fit = found["weights"][0]
        theta = (fit["value"], fit["confidence"], fit["attention"])
        MSVE(theta, fit["bias"]).save(folder / FIT, **measured.named)
    failed: dict[str, list[str]] = {}
    for arm in arms:
        for record in measured.of(arm):
            if record["error"]:
                failed.setdefault(f"{record['error']}: {record['message']}", []).append(arm.key)
    for experiment in experiments:
        for sample in measured.samples:
            recorded = measured.records.get(sample, experiment)
            if recorded is not None and recorded["error"]:
                text = f"{recorded['error']}: {recorded['message']}"
                failed.setdefault(text, []).append(experiment)
    notes += [
        f"{text} ({len(keys)} searches: {', '.join(dict.fromkeys(keys))})"
        for text, keys in failed.items()
    ]
    return found, notes
