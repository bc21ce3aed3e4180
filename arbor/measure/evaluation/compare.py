"""The comparison of several arms on the same problems: success, costs and paired differences."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from arbor.measure.evaluation.results import SampleRow, cost, is_cut, is_guessed, is_right
from arbor.measure.statistics import bootstrap, clopper_pearson, paired

COMPARE_SCHEMA = "arbor.compare/1"
# costs of a sample that a comparison reports, each as its mean per search
COSTS = (
    "tokens_generated",
    "tokens_reused",
    "tokens_shared",
    "tokens_recomputed",
    "peak_tokens",
    "cpu_s",
    "wall_s",
)
# problems; with fewer, McNemar's exact p-value is above 0.05 even where all of them differ
LEAST_DECIDING = 6
_OF_ROW = ("tokens_reused", "cpu_s", "wall_s")  # the others are metrics of the search


@dataclass(frozen=True, slots=True)
class ArmRuns:
    """The runs of one arm at one number of tokens, one for each seed.

    Attributes:
        label: of the arm.
        tokens: most tokens that each search may generate; None: no limit.
        seeds: of the runs.
        folders: of the runs, relative to the comparison's.
        rows: of each run: sample id -> its line in ``samples.jsonl``.
    """

    label: str
    tokens: int | None
    seeds: tuple[int, ...]
    folders: tuple[str, ...]
    rows: tuple[Mapping[str, SampleRow], ...]

    @property
    def samples(self) -> list[str]:
        """The samples that every run has, in the order of the first."""
        first, *others = self.rows
        return [each for each in first if all(each in other for other in others)]

    def share(self, sample: str, of: Callable[[SampleRow], bool]) -> float:
        """The share of the runs whose row of a sample has a property."""
        return sum(of(rows[sample]) for rows in self.rows) / len(self.rows)

    def mean_cost(self, sample: str, name: str) -> float:
        """A cost of a sample, averaged over the runs."""
        return sum(cost_of(rows[sample], name) for rows in self.rows) / len(self.rows)


def any_right(row: SampleRow) -> bool:
    """Whether any finished path of a sample has a right answer."""
    return is_right(row) or row.get("any_correct") is True


def reached_tokens(row: SampleRow) -> bool:
    """Whether a sample's search ended at the limit on generated tokens."""
    return row.get("limit") == "max_tokens"


def cost_of(row: SampleRow, name: str) -> float:
    """One of `COSTS`; 0 for a failed sample."""
    return float(row.get(name) or 0) if name in _OF_ROW else cost(row, name)


def compare_arms(arms: Sequence[ArmRuns]) -> list[dict[str, Any]]:
    """A row for each arm at each number of tokens, in the order given.

    The unit is the problem: with several seeds its success is the share of its runs, intervals are
    of a bootstrap over problems, and there is no McNemar test; where the runs of each problem agree
    the interval of the success is exact (Clopper and Pearson).

    Args:
        arms: the first one at a number of tokens is what the others at that number are compared
            with, over the samples that both have.
    """
    first: dict[int | None, ArmRuns] = {}
    table = []
    for arm in arms:
        baseline = first.setdefault(arm.tokens, arm)
        row = _row(arm)
        row["difference"] = None if baseline is arm else _difference(arm, baseline)
        table.append(row)
    return table


def _row(arm: ArmRuns) -> dict[str, Any]:
    samples = arm.samples
    row: dict[str, Any] = {
        "arm": arm.label,
        "tokens": arm.tokens,
        "seeds": list(arm.seeds),
        "folders": list(arm.folders),
        "n": len(samples),
        "success": _share(arm, samples, is_right),
        "any_correct": _share(arm, samples, any_right),
        "reached_tokens": _mean([arm.share(each, reached_tokens) for each in samples]),
        "guessed": _mean([arm.share(each, is_guessed) for each in samples]),
        "cut": _mean([arm.share(each, is_cut) for each in samples]),
        "errors": sum(rows[each].get("error") is not None for rows in arm.rows for each in samples),
    }
    for name in COSTS:
        row[name] = _mean([arm.mean_cost(each, name) for each in samples])
    peaks = [cost_of(rows[each], "peak_tokens") for rows in arm.rows for each in samples]
    row["largest_peak_tokens"] = max(peaks, default=0.0)
    return row


def _share(arm: ArmRuns, samples: Sequence[str], of: Callable[[SampleRow], bool]) -> dict[str, Any]:
    """The share of successes with its 95 % interval."""
    shares = [arm.share(each, of) for each in samples]
    alike = len(set(shares)) <= 1  # whose resamples have no spread
    if alike or all(each in (0.0, 1.0) for each in shares):
        interval = clopper_pearson(math.fsum(shares), len(shares))
    else:
        interval = bootstrap(shares)
    return {"value": _mean(shares), "interval": list(interval)}


def _difference(arm: ArmRuns, baseline: ArmRuns) -> dict[str, Any] | None:
    """The success of an arm minus that of another, problem by problem; None without a pair."""
    known = set(baseline.samples)
    common = [each for each in arm.samples if each in known]
    if not common:
        return None
    if len(arm.rows) == len(baseline.rows) == 1:
        pair = paired(
            [is_right(arm.rows[0][each]) for each in common],
            [is_right(baseline.rows[0][each]) for each in common],
        )
        value, interval, p = pair.difference, pair.interval, pair.p
    else:
        differences = [
            arm.share(each, is_right) - baseline.share(each, is_right) for each in common
        ]
        value, interval, p = _mean(differences), bootstrap(differences), None
    return {
        "with": baseline.label,
        "n": len(common),
        "value": value,
        "interval": list(interval),
        "p": p,
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def percent_text(share: Mapping[str, Any]) -> str:
    """A share with its interval, in percent: ``42.4 (38.0 to 46.9)``."""
    low, high = share["interval"]
    return f"{100 * share['value']:.1f} ({100 * low:.1f} to {100 * high:.1f})"


def difference_text(difference: Mapping[str, Any] | None) -> str:
    """A paired difference in points, with its interval and McNemar's p where there is one.

    Of fewer than `LEAST_DECIDING` problems, and of outcomes that are all the same, it says that.
    """
    if difference is None:
        return ""
    (low, high), n = difference["interval"], difference["n"]
    if n < LEAST_DECIDING:
        what = "1 problem decides" if n == 1 else f"{n} problems decide"
        return f"{100 * difference['value']:+.1f}, {what} nothing"
    if not is_decided(difference):
        return f"+0.0, the same on all {n:,}"
    text = f"{100 * difference['value']:+.1f} ({100 * low:+.1f} to {100 * high:+.1f})"
    return text if difference["p"] is None else f"{text}, p = {difference['p']:.2g}"


def is_decided(difference: Mapping[str, Any]) -> bool:
    """Whether there are enough problems, and some whose outcomes differ."""
    return difference["n"] >= LEAST_DECIDING and any(difference["interval"])


def csv_rows(table: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """The table as rows of plain values, the columns' names first."""
    names = [
        *("arm", "tokens", "seeds", "n", "success", "success_low", "success_high"),
        *("any_correct", "any_correct_low", "any_correct_high", "reached_tokens"),
        *("guessed", "cut", "errors"),
        *COSTS,
        *("largest_peak_tokens", "difference", "difference_low", "difference_high", "p"),
    ]
    rows: list[list[Any]] = [names]
    for row in table:
        difference = row["difference"] or {"value": None, "interval": [None, None], "p": None}
        flat = {
            **row,
            "seeds": " ".join(map(str, row["seeds"])),
            "difference": difference["value"],
            "p": difference["p"],
        }
        for name, (low, high) in (
            ("success", row["success"]["interval"]),
            ("any_correct", row["any_correct"]["interval"]),
            ("difference", difference["interval"]),
        ):
            flat |= {f"{name}_low": low, f"{name}_high": high}
        for name in ("success", "any_correct"):
            flat[name] = row[name]["value"]
        rows.append(["" if flat[name] is None else flat[name] for name in names])
    return rows
