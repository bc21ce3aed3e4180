"""Results of an evaluation, and the comparison of two runs of the same samples."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from arbor.measure.statistics import bootstrap, clopper_pearson, paired

RESULTS_SCHEMA = "arbor.results/1"
COSTS = ("tokens_generated", "tokens_recomputed", "peak_tokens", "peak_bytes")

SampleRow = Mapping[str, Any]


def is_right(row: SampleRow) -> bool:
    """Whether a sample counts as solved: not with a wrong answer, no answer or an error."""
    return row.get("correct") is True


def is_invalid(row: SampleRow) -> bool:
    """Whether a sample has a text as answer in which the grader found none; it is wrong too."""
    grade = row.get("grade") or {}
    return row.get("answer") is not None and "extracted" in grade and grade["extracted"] is None


def is_guessed(row: SampleRow) -> bool:
    """Whether a sample's answer is a guess: its text marks none."""
    return row.get("guessed") is True


def is_cut(row: SampleRow) -> bool:
    """Whether a sample ended with a path that a limit had cut."""
    return row.get("finish_reason") == "cut"


def method(row: SampleRow) -> str:
    """How a sample was graded, as in ``number`` or ``timeout``; empty if not recorded."""
    return str((row.get("grade") or {}).get("method") or "")


def scores(rows: Sequence[SampleRow]) -> dict[str, float]:
    """The mean of each score that a grader gives, over all samples; one without it has 0."""
    given = [(row.get("grade") or {}).get("scores") or {} for row in rows]
    names = sorted({name for each in given for name in each})
    return {name: sum(each.get(name, 0.0) for each in given) / len(rows) for name in names}


def cost(row: SampleRow, name: str) -> float:
    """A value of a sample's metrics; 0 for a failed sample."""
    return float((row.get("metrics") or {}).get(name, 0))


def results(rows: Sequence[SampleRow]) -> dict[str, Any]:
    """Accuracy with its exact 95 % interval, and the costs of the samples.

    Args:
        rows: rows of ``samples.jsonl``; the costs are those of samples without an error.
    """
    right = sum(map(is_right, rows))
    solved = [row for row in rows if row.get("error") is None]
    failed = [row for row in rows if row.get("error") is not None]
    found: dict[str, Any] = {
        "schema": RESULTS_SCHEMA,
        "n": len(rows),
        "right": right,
        "accuracy": right / len(rows) if rows else None,
        "interval": list(clopper_pearson(right, len(rows))),
        "no_answer": sum(row.get("answer") is None for row in solved),
        "invalid": sum(map(is_invalid, solved)),
        "guessed": sum(map(is_guessed, solved)),
        "cut": sum(map(is_cut, solved)),
        "cut_paths": sum(int(row.get("cut_paths") or 0) for row in solved),
        "paths": sum(int(row.get("paths") or 0) for row in solved),
        "methods": dict(sorted(Counter(filter(None, map(method, solved))).items())),
        "scores": scores(rows),
        "errors": len(failed),
        "error_codes": dict(sorted(Counter(row["error"]["code"] for row in failed).items())),
        "first_error": failed[0]["error"] if failed else None,
        "finish_reasons": dict(sorted(Counter(str(r.get("finish_reason")) for r in rows).items())),
        "limits": dict(sorted(Counter(str(r["limit"]) for r in rows if r.get("limit")).items())),
    }
    for name in COSTS:
        found[name] = _spread([cost(row, name) for row in solved])
    found["cpu_s"] = _spread([float(row.get("cpu_s", 0)) for row in solved])
    found["wall_s"] = _spread([float(row.get("wall_s", 0)) for row in solved])
    return found


def _spread(values: Sequence[float]) -> dict[str, float]:
    """Mean, largest and sum."""
    if not values:
        return {"mean": 0.0, "max": 0.0, "total": 0.0}
    total = sum(values)
    return {"mean": total / len(values), "max": max(values), "total": total}


def compare(
    mine: Mapping[str, SampleRow], theirs: Mapping[str, SampleRow]
) -> dict[str, Any] | None:
    """Compare two runs over their common samples: paired outcomes, costs side by side.

    Args:
        mine, theirs: sample id -> row. A sample is common if id and problem agree.

    Returns:
        The fields of `arbor.measure.statistics.Paired` (the first is `mine`); for each cost the
        two means, their difference and its bootstrap 95 % interval; and as ``other_problem`` the
        number of common ids with another problem there. None without a common sample.
    """
    ids = [each for each in mine if each in theirs]
    common = [each for each in ids if mine[each].get("problem") == theirs[each].get("problem")]
    if not common:
        return None
    pair = paired([is_right(mine[i]) for i in common], [is_right(theirs[i]) for i in common])
    found = dataclasses.asdict(pair) | {"interval": list(pair.interval)}
    found["other_problem"] = len(ids) - len(common)
    for name in (*COSTS, "cpu_s"):
        first, second = (_costs((run[each] for each in common), name) for run in (mine, theirs))
        differences = [a - b for a, b in zip(first, second, strict=True)]
        found[name] = {
            "here": sum(first) / len(first),
            "there": sum(second) / len(second),
            "difference": sum(differences) / len(differences),
            "interval": list(bootstrap(differences)),
        }
    return found


def _costs(rows: Iterable[SampleRow], name: str) -> list[float]:
    return [float(row.get("cpu_s", 0)) if name == "cpu_s" else cost(row, name) for row in rows]
