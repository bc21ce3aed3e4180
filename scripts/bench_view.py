"""How fast the HTML view opens and seeks: synthetic traces of several sizes in headless Chromium.

Traces are simulated: blocks of 40 to 128 tokens below a prompt of 220, grown a few leaves at a time
with jumps between branches, within a quarter of the slots that all blocks need, so that KV is
evicted and rehydrated all the time. Needs the `test` extra and Chromium.

    python scripts/bench_view.py --nodes 193 1281 10001 --loads 5 --seeks 200

Every load is in a new tab of a running browser. `ready` is the time from the start of the
navigation to the end of the first drawing, `ready_cpu` the processor time of the page's main thread
until the next frame; `seek` is the time of one jump to a random event with its drawing, `frame` the
time until the next frame is shown. `empty` is `ready` of an empty page.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections import OrderedDict
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

from arbor.events import (
    KV,
    Answered,
    Boundary,
    Ended,
    Event,
    Evicted,
    Forwarded,
    Header,
    Opened,
    Pressure,
    Pruned,
    Rehydrated,
    Selected,
    Terminal,
    Transition,
    Verified,
)
from arbor.trace import TraceWriter
from arbor.view import read_page_trace, write_page

# the browser's driver is shared with the tests
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.chromium import Page, chromium

PROMPT, SHORTEST, LONGEST, WIDTH, DEPTH, LEAVES = 220, 40, 128, 5, 6, 2
SHARE = 0.25
WORDS = [
    "the",
    "sum",
    "of",
    "both",
    "is",
    "then",
    "half",
    "of",
    "what",
    "remains",
    "so",
    "we",
    "try",
    "the",
    "next",
    "factor",
    "and",
    "check",
    "it",
    "again",
]


class Simulation:
    """A simulated search whose KV keeps its budget; `events` yields its trace."""

    def __init__(self, nodes: int, seed: int) -> None:
        self.nodes = nodes
        self.draw = random.Random(seed)
        mean = (SHORTEST + LONGEST) // 2
        self.full = PROMPT + nodes * mean
        # running paths and their children must fit
        path = PROMPT + DEPTH * LONGEST
        self.budget = max(int(SHARE * self.full), LEAVES * (path + WIDTH * LONGEST))
        self.tokens = [PROMPT]
        self.parent = [-1]
        self.depth = [0]
        self.held = [PROMPT]
        self.recent: OrderedDict[int, None] = OrderedDict()
        self.device = PROMPT
        self.peak = PROMPT

    def events(self) -> Iterator[Event]:
        yield Header(
            schema="arbor.trace/1",
            run="0" * 16,
            created="2026-01-01T00:00:00+00:00",
            arbor="0",
            task="synthetic",
            problem=f"a synthetic search of {self.nodes:,} blocks",
            seed=0,
            expected=None,
            model={"id": "none", "layers": 28},
            device={"name": "none"},
            config={"controller": {"name": "simulated"}, "budget": str(SHARE)},
            kv={
                "budget_tokens": self.budget,
                "full_tokens": self.full,
                "smallest_tokens": PROMPT + DEPTH * LONGEST,
                "bytes_per_token": 131072,
            },
        )
        yield Opened(0, None, 0, 0, PROMPT, "A problem. " * 40)
        yield self._forward("prefill", PROMPT)
        running: tuple[int, ...] = ()
        open_leaves = [0]
        while len(self.tokens) < self.nodes:
            if not open_leaves:
                open_leaves = [n for n, depth in enumerate(self.depth) if depth < DEPTH]
            # mostly go on below what was grown last, sometimes jump back
            low = max(0, len(open_leaves) - 12) if self.draw.random() < 0.7 else 0
            leaves = sorted({self.draw.randrange(low, len(open_leaves)) for _ in range(LEAVES)})
            chosen = tuple(open_leaves[i] for i in leaves)
            yield Selected(tuple((leaf, WIDTH) for leaf in chosen))
            yield Transition(chosen, running, len(chosen))
            running = chosen
            yield from self._make_room(chosen)
            children = yield from self._grow(chosen)
            for i in reversed(leaves):
                open_leaves.pop(i)
            values = tuple(self.draw.random() for _ in children)
            yield Verified("simulated", tuple(children), values, len(children), 0.01)
            for child, value in zip(children, values, strict=True):
                if self.depth[child] >= DEPTH:
                    yield Terminal(child, str(self.draw.randrange(100)))
                elif value > 0.25 or not open_leaves:
                    open_leaves.append(child)
                else:
                    yield Pruned((child,))
        best = len(self.tokens) - 1
        yield Answered(best, tuple(reversed(self._path(best))), "42", 0.9, True)
        yield Ended("solved", len(self.tokens), {"wall_s": 1.0, "blocks": len(self.tokens) - 1})

    def _path(self, node: int) -> list[int]:
        path = []
        while node >= 0:
            path.append(node)
            node = self.parent[node]
        return path

    def _make_room(self, leaves: tuple[int, ...]) -> Iterator[Event]:
        pinned = {node for leaf in leaves for node in self._path(leaf)}
        missing = [(n, self.tokens[n] - self.held[n]) for n in sorted(pinned)]
        missing = [(node, count) for node, count in missing if count]
        needed = sum(count for _, count in missing) + len(leaves) * WIDTH * LONGEST
        if needed > self.budget - self.device:
            yield Pressure(needed, self.budget - self.device, self.budget)
            lost = []
            for node in list(self.recent):
                if needed <= self.budget - self.device:
                    break
                if node in pinned:
                    continue
                count = min(self.held[node], needed - (self.budget - self.device))
                lost.append((node, count))
                self._hold(node, self.held[node] - count)
            yield Evicted("pressure", tuple(sorted(lost)), KV(self.device))
        if missing:
            for node, count in missing:
                self._hold(node, self.held[node] + count)
            yield Rehydrated(tuple(missing), "recompute", KV(self.device))

    def _hold(self, node: int, count: int) -> None:
        self.device += count - self.held[node]
        self.held[node] = count
        self.recent.pop(node, None)
        if count:
            self.recent[node] = None

    def _grow(self, leaves: tuple[int, ...]) -> Generator[Event, None, list[int]]:
        children: list[int] = []
        for leaf in leaves:
            for index in range(WIDTH):
                if len(self.tokens) >= self.nodes:
                    break
                children.append(len(self.tokens))
                self.tokens.append(0)
                self.held.append(0)
                self.parent.append(leaf)
                self.depth.append(self.depth[leaf] + 1)
                yield Opened(children[-1], leaf, index, self.depth[leaf] + 1, 0, "")
        for child in children:
            count = self.draw.randint(SHORTEST, LONGEST)
            self.tokens[child] = count
            self._hold(child, count)
            text = " ".join(self.draw.choices(WORDS, k=count * 3 // 4))
            yield Boundary(child, (1,) * count, f"{text}.\n", "step", -count / 9, 0.9, 0.8)
        yield self._forward("decode", len(children))
        yield self._forward("verify", len(children))
        return children

    def _forward(self, kind: Any, rows: int) -> Forwarded:
        self.peak = max(self.peak, self.device)
        return Forwarded(kind, rows, 1, rows * 500, rows * 300, KV(self.device), self.peak, 0.02)


def write_trace(path: Path, nodes: int, seed: int = 0) -> Path:
    """A synthetic trace of `nodes` blocks, the root included."""
    ticks = iter(range(10**9))
    with TraceWriter(path, clock=lambda: next(ticks) / 1000) as writer:
        for event in Simulation(nodes, seed).events():
            writer(event)
    return path


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


SEEK = """(async (count, seed) => {
  const seeks = [], frames = [], last = arbor.current.run.events - 1;
  let state = seed;
  const draw = () => (state = (state * 1103515245 + 12345) % 2147483648) / 2147483648;
  const frame = () => new Promise((done) => requestAnimationFrame(done));
  for (let i = 0; i < count; i++) {
    await frame();
    const start = performance.now();
    arbor.seek(Math.floor(draw() * last));
    arbor.draw();
    seeks.push(performance.now() - start);
    await frame();
    frames.push(performance.now() - start);
  }
  return {seeks, frames};
})"""


# an empty page: the time of the browser itself for a tab and a file
EMPTY = """<!doctype html><title>empty</title>
<script>document.documentElement.dataset.ready = Math.round(performance.now())</script>"""


def ready_ms(page: Page) -> float:
    return float(page.evaluate("Number(document.documentElement.dataset.ready)"))


def measure(page: Page, html: Path, seeks: int) -> dict[str, Any]:
    page.send("Performance.enable", timeDomain="threadTicks")
    page.open(html)
    page.settle()
    metrics = {m["name"]: m["value"] for m in page.send("Performance.getMetrics")["metrics"]}
    done = page.evaluate(f"{SEEK}({seeks}, 7)")
    return {
        "ready_ms": ready_ms(page),
        "ready_cpu_ms": 1000 * metrics["TaskDuration"],
        "heap_mb": page.evaluate("performance.memory.usedJSHeapSize / 1e6"),
        **done,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[193, 1281, 10001])
    parser.add_argument("--loads", type=int, default=5)
    parser.add_argument("--seeks", type=int, default=200)
    parser.add_argument("--keep", type=Path, help="folder for traces and pages")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.keep or Path(scratch)
        empty = folder / "empty.html"
        empty.write_text(EMPTY, encoding="utf-8")
        for nodes in given.nodes:
            trace = write_trace(folder / f"synthetic-{nodes}.arbor.jsonl", nodes)
            began = time.perf_counter()
            recording = read_page_trace(trace)
            html = write_page(trace.with_suffix(".html"), recording)
            built = time.perf_counter() - began
            loads, empties = [], []
            with chromium("--enable-precise-memory-info") as browser:
                browser.page().open(empty)  # warm the browser up
                for _ in range(given.loads):
                    empties.append(ready_ms(browser.page().open(empty)))
                    page = browser.page()
                    loads.append(measure(page, html, given.seeks))
                    assert not page.errors, page.errors
            seeks = [each for load in loads for each in load["seeks"]]
            frames = [each for load in loads for each in load["frames"]]
            row = {
                "nodes": nodes,
                "events": len(recording.records),
                "html_bytes": html.stat().st_size,
                "build_s": round(built, 2),
                "empty_ms": sorted(empties),
                "ready_ms": sorted(load["ready_ms"] for load in loads),
                "ready_cpu_ms": sorted(round(load["ready_cpu_ms"]) for load in loads),
                "seek_p50_ms": round(statistics.median(seeks), 1),
                "seek_p95_ms": round(quantile(seeks, 0.95), 1),
                "frame_p95_ms": round(quantile(frames, 0.95), 1),
                "heap_mb": round(statistics.median(load["heap_mb"] for load in loads), 1),
                "n_loads": len(loads),
                "n_seeks": len(seeks),
            }
            rows.append(row)
            print(json.dumps(row), flush=True)
    report = {
        "machine": platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "rows": rows,
    }
    if given.json:
        given.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
