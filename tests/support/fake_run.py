"""Fake runs: random, consistent sequences of events for the tests of trace and metrics."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

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
from arbor.metrics import MetricsFold

BUDGET = 200


def header(**changes: object) -> Header:
    """A header with defaults."""
    fields: dict[str, object] = {
        "schema": "arbor.trace/1",
        "run": "01J",
        "created": "2026-01-02T03:04:05Z",
        "arbor": "0.1.0",
        "task": "game24",
        "problem": "4 5 6 10",
        "seed": 0,
        "expected": None,
        "model": {"id": "builtin:sapling", "layers": 4},
        "device": {"name": "cpu"},
        "config": {"controller": {"name": "tot"}},
        "kv": {
            "budget_tokens": BUDGET,
            "full_tokens": 1000,
            "smallest_tokens": 50,
            "bytes_per_token": 64,
        },
    }
    return Header(**(fields | changes))


def tick() -> Callable[[], float]:
    """A clock that advances by a millisecond at each reading."""
    now = iter(range(10**9))
    return lambda: next(now) / 1000


def fake_run(seed: int, rounds: int = 6) -> Iterator[Event]:
    """The events of a search within its budget; the last one carries the metrics of the others."""
    fold = MetricsFold(clock=tick())
    for event in _events(random.Random(seed), rounds):
        fold(event)
        if isinstance(event, Ended):
            event = Ended(event.status, event.nodes, fold.metrics().to_dict())
            fold(event)
        yield event


def _events(draw: random.Random, rounds: int) -> Iterator[Event]:
    prompt = draw.randint(5, 20)
    tokens = {0: prompt}
    resident = {0: prompt}
    depth = {0: 0}
    children = {0: 0}
    running: tuple[int, ...] = (0,)
    peak = prompt

    def kv(extra: int = 0) -> KV:
        return KV(device=sum(resident.values()) + extra)

    def forward(kind: str, rows: int, steps: int, extra: int = 0) -> Forwarded:
        nonlocal peak
        peak = max(peak, kv(extra).device)
        return Forwarded(
            kind=kind,
            rows=rows,
            steps=steps,
            read_tokens=rows * 30,
            unique_read_tokens=rows * 20,
            kv=kv(extra),
            peak=peak,
            elapsed_s=draw.random(),
        )

    yield header()
    yield Opened(node=0, parent=None, index=0, depth=0, tokens=prompt, text="Use 4 5 6 10\n")
    yield forward("prefill", prompt, 1)
    for _ in range(rounds):
        leaf = draw.choice(sorted(tokens))
        width = draw.randint(1, 3)
        grown = [draw.randint(1, 12) for _ in range(width)]
        yield Selected(leaves=((leaf, width),))
        yield Transition(leaves=(leaf,), previous=running, distance=draw.randint(0, 4))
        running = (leaf,)
        missing = tokens[leaf] - resident[leaf]
        needed = sum(grown) + missing
        free = BUDGET - kv().device
        if needed > free:
            yield Pressure(needed=needed, free=free, limit=BUDGET)
            lost = []
            for node in sorted(tokens):
                if node != leaf and resident[node] and needed > BUDGET - kv().device:
                    lost.append((node, resident[node]))
                    resident[node] = 0
            yield Evicted(cause="pressure", nodes=tuple(lost), kv=kv())
        if missing:
            resident[leaf] = tokens[leaf]
            mode = draw.choice(("recompute", "fetch"))
            yield Rehydrated(nodes=((leaf, missing),), mode=mode, kv=kv())
        fresh = []
        for count in grown:
            node = len(tokens)
            fresh.append(node)
            tokens[node], resident[node] = count, 0
            depth[node], children[node] = depth[leaf] + 1, 0
            yield Opened(
                node=node,
                parent=leaf,
                index=children[leaf],
                depth=depth[node],
                tokens=0,
                text="",
            )
            children[leaf] += 1
        for node, count in zip(fresh, grown, strict=True):
            resident[node] = count
            yield Boundary(
                node=node,
                ids=tuple(range(count)),
                text=f"thought {node}\n",
                stop="step",
                logprob=-draw.random(),
                confidence=draw.random(),
                top1=draw.random(),
            )
        yield forward("decode", sum(grown), max(grown))
        question = min(3, BUDGET - kv().device)
        yield forward("verify", question, 1, extra=question)
        yield Verified(
            verifier="self",
            nodes=tuple(fresh),
            values=tuple(draw.random() for _ in fresh),
            asked=len(fresh),
            elapsed_s=draw.random(),
        )
        if draw.random() < 0.3:
            yield Pruned(nodes=(fresh[-1],))
    last = len(tokens) - 1
    yield Terminal(node=last, answer="(10 - 4) * 5 - 6")
    yield Answered(
        node=last,
        path=(0, last),
        text="(10 - 4) * 5 - 6",
        score=0.75,
        correct=draw.choice((True, None)),
    )
    yield Ended(status="solved", nodes=len(tokens))
