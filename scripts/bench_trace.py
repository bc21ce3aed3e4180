"""What a trace costs: its share of a search, its size, and reading it back.

    python scripts/bench_trace.py
    python scripts/bench_trace.py --problems 20 --nodes 200 1281 10001

One JSON document on stdout. Costs are CPU time of the thread, so that a busy machine does not
count.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from model_and_problems import add_model_and_problems, problems_of, settings_of

from arbor.events import KV, Boundary, Ended, Event, Forwarded, Header, Opened, Selected, Verified
from arbor.metrics import MetricsFold
from arbor.trace import Replay, TraceWriter, read_trace
from arbor.trace.perfetto import to_perfetto

WIDTH, STEP_TOKENS, VOCABULARY = 5, 128, 32_000
WORDS = [
    "the",
    "of",
    "so",
    "we",
    "then",
    "have",
    "that",
    "number",
    "divide",
    "subtract",
    "left",
    "right",
    "which",
    "gives",
    "total",
    "each",
]


class Timed:
    """A listener and the CPU seconds it took."""

    def __init__(self, listener: Callable[[Event], None]) -> None:
        self.listener, self.seconds, self.events = listener, 0.0, 0

    def __call__(self, event: Event) -> None:
        began = time.thread_time()
        self.listener(event)
        self.seconds += time.thread_time() - began
        self.events += 1


def share_of_a_search(asked: argparse.Namespace, suffix: str) -> dict[str, Any]:
    """The writer's part of the CPU time of whole searches, one row a problem."""
    from arbor import Solver

    shares, costs = [], []
    settings = {**settings_of(asked), "budget": asked.budget}
    with tempfile.TemporaryDirectory() as folder, Solver(**settings) as solver:
        chosen = problems_of(asked, solver.task, asked.problems + 1, "validation")
        solver.solve(chosen[0])  # loads and warms up
        for number, problem in enumerate(chosen[1:]):
            writer = TraceWriter(Path(folder, f"{number}.arbor.jsonl{suffix}"))
            timed = Timed(writer)
            solver.listeners = (timed,)
            began = time.thread_time()
            solver.solve(problem)
            spent = time.thread_time() - began
            closing = time.thread_time()
            writer.close()
            timed.seconds += time.thread_time() - closing
            shares.append(timed.seconds / spent)
            costs.append(1e6 * timed.seconds / timed.events)
    return {
        "what": f"trace{suffix or ' plain'}, share of CPU time of a search",
        "n": len(shares),
        "median_percent": round(100 * statistics.median(shares), 3),
        "most_percent": round(100 * max(shares), 3),
        "median_us_per_event": round(statistics.median(costs), 2),
    }


def made_up_run(nodes: int, seed: int = 0) -> Iterator[Event]:
    """A search of `nodes` blocks as the engine would tell it: five children an expansion, 128
    tokens a block."""
    draw = random.Random(seed)
    fold = MetricsFold()
    for event in _events(nodes, draw):
        fold(event)
        if isinstance(event, Ended):
            event = dataclasses.replace(event, metrics=fold.metrics().to_dict())
        yield event


def _events(nodes: int, draw: random.Random) -> Iterator[Event]:
    plan = {"budget_tokens": 10**9, "full_tokens": 10**9, "bytes_per_token": 1024}
    yield Header(
        *("arbor.trace/1", "0", "2026-01-01T00:00:00+00:00", "0", "made-up", "a problem", 0, None),
        *({}, {}, {}, plan),
    )
    yield Opened(0, None, 0, 0, 220, "a problem")
    held, made, depth, frontier = 220, 1, {0: 0}, [0]

    def forward(kind: Any, rows: int, steps: int) -> Forwarded:
        seconds = draw.random()
        return Forwarded(kind, rows, steps, rows * held, rows * 128, KV(held), held, seconds)

    yield forward("prefill", 220, 1)
    while made < nodes:
        leaf = frontier.pop(draw.randrange(len(frontier)))
        yield Selected(((leaf, WIDTH),))
        children = list(range(made, min(nodes, made + WIDTH)))
        for index, child in enumerate(children):
            depth[child] = depth[leaf] + 1
            yield Opened(child, leaf, index, depth[child], 0, "")
        for child in children:
            ids = tuple(draw.randrange(VOCABULARY) for _ in range(STEP_TOKENS))
            text = " ".join(draw.choice(WORDS) + str(draw.randrange(99)) for _ in range(90))
            held += STEP_TOKENS
            opinions = [draw.random() for _ in range(3)]
            yield Boundary(child, ids, text, "length", -opinions[0], opinions[1], opinions[2])
        made += len(children)
        frontier += children
        yield forward("decode", len(children) * STEP_TOKENS, STEP_TOKENS)
        yield forward("verify", len(children) * 4, 1)
        values = tuple(draw.random() for _ in children)
        yield Verified("self", tuple(children), values, len(children), draw.random())
    yield Ended("exhausted", made)


def size(nodes: int) -> dict[str, Any]:
    """Bytes of a trace, plain and compressed, and CPU seconds to read, replay and convert it."""
    run = list(made_up_run(nodes))
    row: dict[str, Any] = {"what": "size", "nodes": nodes, "events": len(run)}
    with tempfile.TemporaryDirectory() as folder:
        for name, suffix in (("plain", ""), ("gz", ".gz")):
            path = Path(folder, f"run.arbor.jsonl{suffix}")
            timed = Timed(TraceWriter(path))
            for event in run:
                timed(event)
            timed.listener.close()  # type: ignore[attr-defined]
            row[f"{name}_bytes"] = path.stat().st_size
            row[f"{name}_us_per_event"] = round(1e6 * timed.seconds / len(run), 1)
        began = time.thread_time()
        trace = read_trace(path)
        row["read_s"] = round(time.thread_time() - began, 3)
        began = time.thread_time()
        problems = Replay.of(trace).problems
        row["replay_s"] = round(time.thread_time() - began, 3)
        began = time.thread_time()
        to_perfetto(trace)
        row["convert_s"] = round(time.thread_time() - began, 3)
        assert not problems, problems[:3]
    return row


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_model_and_problems(parser)
    parser.add_argument("--problems", type=int, default=10)
    parser.add_argument("--nodes", type=int, nargs="*", default=[200, 1281, 10_001])
    parser.add_argument("--budget", default="full")
    asked = parser.parse_args()
    rows = [size(nodes) for nodes in asked.nodes]
    for suffix in ("", ".gz") if asked.problems else ():
        rows.append(share_of_a_search(asked, suffix))
    print(json.dumps({"rows": rows}, indent=2))


if __name__ == "__main__":
    main()
