"""The tables of a run, in Markdown: what was measured, what was predicted, floors and ratios."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gpu_stages.predictions import RATIOS

Row = Mapping[str, Any]
TREE_NUMBERS = {"times_as_fast", "base_us", "tree_us"}  # a row of stage 8 that measured has one
NO_CLAIMS = "**No speed claims**: the engine's logits were not shown to agree with the model's own."


# name of the prediction; two cells of one model, without its name: the slower one first
COMPARISONS = (
    *(
        (f"sharing off / on, {tree}{graphs}", f"{tree} off{words}", f"{tree} on{words}")
        for tree in ("config-s 64", "config-l 256")
        for graphs, words in ((", graphs", "+graphs"), ("", ""))
    ),
    *(
        (f"without graphs / with, {tree}", f"{tree} shipped", f"{tree} shipped+graphs")
        for tree in ("config-s 64", "config-l 256")
    ),
    *(
        (f"{what}, config-s 64", f"config-s 64 {one}", f"config-s 64 {other}")
        for what, one, other in (
            ("attention statistics / none", "shipped+statistics", "shipped"),
            ("deterministic / not", "shipped+deterministic", "shipped"),
        )
    ),
    *(
        (f"{what}, config-s 64, graphs", f"config-s 64 {one}", "config-s 64 shipped+graphs")
        for what, one in (
            ("separate / fused norms and activations", "shipped+graphs+unfused"),
            ("attention statistics / none", "shipped+graphs+statistics"),
        )
    ),
    ("transformers / arbor, 8 leaves", "config-s 8 transformers", "config-s 8 shipped"),
    ("transformers / arbor, 64 leaves", "config-s 64 transformers", "config-s 64 shipped"),
    (
        "transformers / arbor with graphs, 64 leaves",
        "config-s 64 transformers",
        "config-s 64 shipped+graphs",
    ),
)


def render(rows: Sequence[Row]) -> str:
    """All tables of a run, in the order of the questions they answer."""
    parts = [machine(rows), checks(rows), failures(rows)]
    if agreed(rows):
        parts += [trees(rows), decode(rows), comparisons(rows), host(rows)]
    elif any(row["stage"] in ("decode", "host") for row in rows):
        parts.append(NO_CLAIMS)
    parts += [searches(rows), missing(rows)]
    return "\n\n".join(part for part in parts if part)


def agreed(rows: Iterable[Row]) -> bool:
    """Whether stage 4 ran and every check of it passed: without that, no speed is reported."""
    verdicts = [row["ok"] for row in rows if row["stage"] == "agreement" and "error" in row]
    failed = any(row.get("ok") is False for row in rows if row["stage"] == "agreement")
    return bool(verdicts) and not failed


def machine(rows: Sequence[Row]) -> str:
    """The machine, its versions, bandwidth and peak."""
    words = []
    for row in rows:
        if row["name"] == "versions":
            shown = ("device", "python", "torch", "cuda", "transformers", "flashinfer-python")
            words += [f"{name} {row[name]}" for name in shown if row.get(name)]
        if row["stage"] == "peaks" and "copy_tb_per_s" in row:
            words.append(f"copies {row['copy_tb_per_s']:.2f} TB/s{predicted(row, 'copy_tb_per_s')}")
            words.append(
                f"bfloat16 products {row['matmul_tflop_per_s']:.0f} TFLOP/s"
                + predicted(row, "matmul_tflop_per_s")
            )
    return "Machine: " + ", ".join(words) + "." if words else ""


def predicted(row: Row, number: str) -> str:
    """`` (predicted: …)``, if anything was."""
    found = row.get("predicted", {}).get(number)
    return f" (predicted: {found})" if found else ""


def checks(rows: Sequence[Row]) -> str:
    """Checks by stage and backend: how many, how many passed, the worst errors."""
    lines = []
    for (stage, backend), found in checked(rows, "search").items():
        worst = [
            max((row[name] for row in found if row.get(name) is not None), default=None)
            for name in ("error", "lse_error", "mass_error")
        ]
        lines.append([stage, backend, len(found), sum(bool(row["ok"]) for row in found), *worst])
    header = (
        *("stage", "backend", "checks", "passed", "largest error", "of a logsumexp"),
        "of attention mass",
    )
    return table(header, lines)


def checked(rows: Sequence[Row], *others: str) -> dict[tuple[str, str], list[Row]]:
    """The rows that check results, by stage and backend, without those of some stages."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if "backend" in row and "ok" in row and row["stage"] not in others:
            groups.setdefault((row["stage"], row["backend"]), []).append(row)
    return groups


def failures(rows: Sequence[Row]) -> str:
    """What failed, one line each."""
    lines = [
        f"- failed: {row['stage']} {row['part']}, {row['name']}: {row.get('reason', figures(row))}"
        for row in rows
        if row.get("ok") is False
    ]
    return "\n".join(lines)


def figures(row: Row) -> str:
    """The numbers of a row that failed without an exception."""
    numbers = {name: value for name, value in row.items() if isinstance(value, int | float)}
    return ", ".join(f"{name} {value}" for name, value in numbers.items() if name != "ok")


def decode(rows: Sequence[Row]) -> str:
    """Steps: measured, predicted, floor, ratio."""
    lines = []
    for row in rows:
        if row["stage"] == "decode" and "wall_ms" in row:
            lines.append(
                [
                    row["name"],
                    row.get("backend"),
                    row["wall_ms"],
                    row.get("predicted", {}).get("wall_ms"),
                    row["floor_ms"],
                    row["of_floor"],
                    row.get("predicted", {}).get("of_floor"),
                    row.get("busy_ms"),
                    row.get("predicted", {}).get("busy_ms"),
                    row.get("launches"),
                    row.get("peak_gib"),
                ]
            )
    header = (
        *("decode step", "backend", "measured, ms", "predicted", "floor, ms", "ratio"),
        *("predicted", "kernels, ms", "predicted", "launches", "peak, GiB"),
    )
    return table(header, lines)


def trees(rows: Sequence[Row]) -> str:
    """Attention of one layer over trees: FlashInfer's, in two launches, floor, ratio."""
    names = (
        *("base_us", "tree_us", "decode_us", "tree_floor_us", "times_as_fast"),
        *("base_plan_ms", "tree_plan_ms"),
    )
    lines = [
        [
            row["name"],
            *(row.get(name) for name in names),
            row.get("predicted", {}).get("times_as_fast"),
        ]
        for row in rows
        if row["stage"] == "trees" and not TREE_NUMBERS.isdisjoint(row)
    ]
    header = (
        *("tree, heads", "level by level, us", "two launches, us"),
        *("last level by the decode kernel, us", "floor, us", "times as fast"),
        *("planning, ms", "planning, ms, two launches", "predicted"),
    )
    return table(header, lines)


def comparisons(rows: Sequence[Row]) -> str:
    """Ratios of cells, measured and predicted."""
    cells = {row["name"]: row for row in rows if row["stage"] == "decode" and "wall_ms" in row}
    lines = []
    for model in dict.fromkeys(name.split()[0] for name in cells):
        for name, *pair in COMPARISONS:
            slow, fast = (cells.get(f"{model} {rest}", {}).get("wall_ms") for rest in pair)
            if slow and fast:
                expected = RATIOS.get(name)
                lines.append([model, name, slow / fast, str(expected) if expected else None])
    return table(("model", "ratio of", "measured", "predicted"), lines)


def host(rows: Sequence[Row]) -> str:
    """Parts of a step on the host, measured and predicted."""
    lines = []
    for row in rows:
        if row["stage"] == "host" and "wall_ms" in row:
            for name, value in row.items():
                if name.endswith("_ms"):
                    expected = row.get("predicted", {}).get(name)
                    part = name.removesuffix("_ms").replace("_", " ")
                    lines.append([row["name"], part, value, expected])
    return table(("host work of a step", "part", "measured, ms", "predicted"), lines)


def searches(rows: Sequence[Row]) -> str:
    """Answers of the built-in model."""
    lines = [
        [
            row["name"],
            row["backend"],
            row["n"],
            row["same_answers"],
            row["solved"],
            row["over_budget"],
            row["recomputed"],
        ]
        for row in rows
        if row["stage"] == "search" and "same_answers" in row
    ]
    header = (
        *("search", "backend", "n", "answers as on the CPU", "solved", "over budget"),
        "recomputed tokens",
    )
    return table(header, lines)


def missing(rows: Sequence[Row]) -> str:
    """What was not measured and why, and what arbor warned about."""
    lines = [
        f"- {row['status']}: {row['stage']} {row['part']}, {row['name']}: {row['reason']}"
        for row in rows
        if "status" in row
    ]
    return "\n".join(lines)


def table(header: Sequence[str], lines: Sequence[Sequence[Any]]) -> str:
    """A Markdown table; columns without any value are left out, empty without lines."""
    if not lines:
        return ""
    kept = [i for i in range(len(header)) if any(line[i] is not None for line in lines)]
    out = [[header[i] for i in kept], ["---"] * len(kept)]
    out += [[cell(line[i]) for i in kept] for line in lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in out)


def cell(value: Any) -> str:
    """A value of a table."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    return str(value)
