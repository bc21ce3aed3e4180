"""Rows of docs/experiments/gpu.csv: one measured number each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from gpu_stages.report import TREE_NUMBERS, Row, agreed, checked

DECODE = (
    *("wall_ms", "wall_ms_median", "wall_ms_p90", "busy_ms", "kernels", "launches"),
    *("floor_ms", "of_floor", "peak_gib", "graphs"),
)
PEAKS = ("copy_tb_per_s", "matmul_tflop_per_s")
SEARCHES = ("same_answers", "solved", "over_budget", "recomputed")
ERRORS = ("error", "lse_error", "mass_error", "gap")
TREES = (
    *("times_as_fast", "base_us", "tree_us", "decode_us", "tree_floor_us"),
    *("base_plan_ms", "tree_plan_ms"),
)
HOST_STEPS = 20
REPEATS = 15  # calls of a tree


def numbers(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """What a run measured, without times where the engine's logits were not shown to be right."""
    yield from checks(rows)
    for row in rows:
        stage, found = row["stage"], {}
        n, n_of = 1, "runs"
        if stage == "peaks":
            found = {name: row[name] for name in PEAKS if name in row}
        elif stage == "search" and "same_answers" in row:
            found = {name: row[name] for name in SEARCHES}
            n, n_of = row["n"], "problems"
        elif stage == "trees" and not TREE_NUMBERS.isdisjoint(row) and agreed(rows):
            found = {name: row[name] for name in TREES if name in row}
            n, n_of = row.get("n", REPEATS), "trees" if "n" in row else "calls"
        elif stage == "decode" and "wall_ms" in row and agreed(rows):
            found = {name: row[name] for name in DECODE if row.get(name) is not None}
            n, n_of = row.get("steps", 1), "steps"
        elif stage == "host" and "wall_ms" in row and agreed(rows):
            found = {name: value for name, value in row.items() if name.endswith("_ms")}
            n, n_of = HOST_STEPS, "steps"
        for name, value in found.items():
            expected = row.get("predicted", {}).get(name)
            yield number(stage, row["name"], row.get("backend"), name, value, expected, n, n_of)


def checks(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Of each stage and backend: how many checks passed, and the largest errors."""
    for (stage, backend), group in checked(rows, "search", "host").items():
        passed = sum(bool(row["ok"]) for row in group)
        found: dict[str, Any] = {"passed": passed}
        for name in ERRORS:
            errors = [row[name] for row in group if row.get(name) is not None]
            if errors:
                found[f"largest_{name}"] = max(errors)
        for name, value in found.items():
            yield number(stage, "all", backend, name, value, None, len(group), "checks")


def number(
    stage: str,
    cell: str,
    backend: str | None,
    name: str,
    value: float,
    predicted: str | None,
    n: int,
    n_of: str,
) -> dict[str, Any]:
    return {
        "stage": stage,
        "cell": cell,
        "backend": backend or "",
        "number": name,
        "value": value,
        "predicted": predicted or "",
        "n": n,
        "n_of": n_of,
    }
