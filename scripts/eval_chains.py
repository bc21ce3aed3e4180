"""Word problems: greedy accuracy by number of steps and by recall distance, as figures and as a
picture.

    python scripts/eval_chains.py --model arbor/sapling --n 170 --json chains.json --svg
    docs/experiments/chains.svg

The recall distance of a problem is the largest number of lines between a line and the one whose
result it needs as its second number (``as many as X and Y together``); 0 where no line needs one.
Problems are of the test split, one stream per number of steps; the model decodes greedily, batched,
by Hugging Face. Intervals: Clopper-Pearson, 95 %.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from eval_sapling import SAPLING, Reasoner, next_split, share

from arbor.tasks.base import Problem
from arbor.tasks.chains import Chains, chain_to

STEPS = (2, 16)  # fewest and most
RANGES = (
    *(("2-6", 2, 6), ("7-9", 7, 9), ("10-12", 10, 12), ("13-16", 13, 16)),
    *(("17-20", 17, 20), ("21-24", 21, 24), ("25-28", 25, 28), ("29-32", 29, 32)),
)
WIDTH, HEIGHT, LEFT, TOP, GAP = 300, 180, 44, 34, 40  # of one panel, pixels


def recall_distance(task: Chains, problem: Problem) -> int:
    """Lines back to the farthest second number."""
    place: dict[str, int] = {}
    farthest = 0
    for line, fact in enumerate(chain_to(task.facts(problem), problem.data["asked"])):
        if fact.kind == "sum":
            farthest = max(farthest, line - place[fact.needs[1]])
        place[fact.who] = line
    return farthest


def evaluate(reasoner: Reasoner, n: int, ends: tuple[int, int]) -> list[tuple[int, int, bool]]:
    """(steps, recall distance, right) of n problems for each number of steps, from the first of
    `ends` to the second."""
    task = Chains(most=ends[1])
    results = []
    for steps in range(ends[0], ends[1] + 1):
        stream = random.Random(f"evaluate {steps}")
        chosen: list[Problem] = []
        while len(chosen) < n:
            problem = task.draw(stream, steps)
            if next_split(problem) == "test":
                chosen.append(problem)
        paths = reasoner.complete([task.prompt(p) for p in chosen], steps + 2, 24 * (steps + 2))
        for problem, path in zip(chosen, paths, strict=True):
            right = task.grade(problem, task.answer(problem, path)).correct
            results.append((steps, recall_distance(task, problem), right))
        rights = [right for s, _, right in results if s == steps]
        print(steps, json.dumps(share(rights)), flush=True)
    return results


def grouped(results: Sequence[tuple[int, int, bool]], column: int) -> dict[int, dict[str, Any]]:
    """Shares by the first or the second number of each result."""
    keys = sorted({result[column] for result in results})
    return {key: share([r[2] for r in results if r[column] == key]) for key in keys}


def panel(title: str, axis: str, rows: dict[int, dict[str, Any]], at: int) -> str:
    """One chart: shares with their intervals."""
    x0, y0 = LEFT + at * (WIDTH + GAP + LEFT), TOP
    step = WIDTH / max(1, len(rows))

    def y(value: float) -> float:
        return y0 + HEIGHT * (1 - value)

    parts = [f'<text x="{x0}" y="{y0 - 14}" class="t">{title}</text>']
    for tick in (0, 0.25, 0.5, 0.75, 1):
        parts.append(
            f'<line x1="{x0}" y1="{y(tick):.1f}" x2="{x0 + WIDTH}" y2="{y(tick):.1f}" class="g"/>'
        )
        parts.append(
            f'<text x="{x0 - 6}" y="{y(tick) + 4:.1f}" class="e">{100 * tick:.0f} %</text>'
        )
    points = []
    for index, (key, row) in enumerate(rows.items()):
        x = x0 + step * (index + 0.5)
        low, high = row["interval"]
        points.append(f"{x:.1f},{y(row['share']):.1f}")
        parts.append(
            f'<line x1="{x:.1f}" y1="{y(low):.1f}" x2="{x:.1f}" y2="{y(high):.1f}" class="i"/>'
        )
        parts.append(f'<circle cx="{x:.1f}" cy="{y(row["share"]):.1f}" r="3.2" class="p"/>')
        parts.append(f'<text x="{x:.1f}" y="{y0 + HEIGHT + 15}" class="m">{key}</text>')
    parts.append(f'<polyline points="{" ".join(points)}" class="l"/>')
    parts.append(f'<text x="{x0 + WIDTH / 2}" y="{y0 + HEIGHT + 32}" class="m">{axis}</text>')
    return "\n".join(parts)


def picture(by_steps: dict[int, dict[str, Any]], by_distance: dict[int, dict[str, Any]]) -> str:
    """Both charts as one SVG, readable on light and dark."""
    width, height = 2 * (LEFT + WIDTH) + GAP + 20, TOP + HEIGHT + 44
    style = (
        "text{font:11px system-ui,sans-serif;fill:#666}.t{font-weight:600;font-size:12px}.m{text-anchor:middle}"
        ".e{text-anchor:end}.g{stroke:#8884;stroke-width:1}.i{stroke:#2b7bba;stroke-width:1.5}"
        ".p{fill:#2b7bba}.l{fill:none;stroke:#2b7bba;stroke-width:1.5}"
    )
    title = "Greedy accuracy of Sapling on chains, with 95 % intervals"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">\n'
        f"<title>{title}</title><style>{style}</style>\n"
        + panel("right answers by number of steps", "steps", by_steps, 0)
        + "\n"
        + panel("by recall distance (lines back)", "recall distance", by_distance, 1)
        + "\n</svg>\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default=SAPLING)
    parser.add_argument("--n", type=int, default=170, help="problems for each number of steps")
    parser.add_argument(
        "--steps", type=int, nargs=2, default=STEPS, help="fewest and most steps of a problem"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--svg", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = evaluate(Reasoner.load(args.model), args.n, tuple(args.steps))
    by_steps, by_distance = grouped(results, 0), grouped(results, 1)
    ranges = {
        name: share([right for steps, _, right in results if low <= steps <= high])
        for name, low, high in RANGES
        if any(low <= steps <= high for steps, _, _ in results)
    }
    report = {"steps": by_steps, "ranges": ranges, "recall_distance": by_distance}
    print(json.dumps(report["ranges"], indent=1))
    print(json.dumps(by_distance, indent=1))
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    if args.svg:
        args.svg.write_text(picture(by_steps, by_distance), encoding="utf-8")


if __name__ == "__main__":
    main()
