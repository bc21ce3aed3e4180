"""Replaying a trace gives the engine's own counters after every event, at every budget."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from arbor import Solver
from arbor.controllers.beam import Beam
from arbor.controllers.dpts import DPTS
from arbor.controllers.mcts import MCTS
from arbor.controllers.tot import ToT
from arbor.events import KV, Boundary, Detail, Event, Forwarded, Sampled
from arbor.metrics import Metrics, MetricsFold
from arbor.trace import Replay, read_trace
from arbor.tree import NodeState

pytestmark = pytest.mark.usefixtures("loaded_once")

CONTROLLERS = {
    "beam": Beam(beam_size=2, width=3),
    "bfs": ToT(beam=2, width=3),
    "dfs": ToT(strategy="dfs", width=3, max_visited=6),
    "mcts": MCTS(width=3, simulations=6, rollout=None),
    "dpts": DPTS(width=3, parallel=2, max_visited=6),
}


@dataclass(frozen=True)
class Seen:
    """What the engine itself counted when an event was emitted."""

    name: str
    used: int
    peak: int
    resident: dict[int, int]  # closed blocks -> tokens on the device
    metrics: dict[str, Any]


class Watch:
    """A listener that looks into the engine after every event."""

    def __init__(self, solver: Solver) -> None:
        self.solver = solver
        self.fold = MetricsFold()
        self.seen: list[Seen] = []

    def __call__(self, event: Event) -> None:
        self.fold(event)
        memory = self.solver.engine._memory
        opened = memory is not None and memory.forest.trees and event.name != "header"
        nodes = list(memory.forest) if opened else []
        self.seen.append(
            Seen(
                event.name,
                memory.used if opened else 0,
                memory.peak if opened else 0,
                {n.id: int(n.span.resident.sum()) for n in nodes if n.state is not NodeState.OPEN},
                counters(self.fold.metrics()),
            )
        )


def counters(metrics: Metrics) -> dict[str, Any]:
    """What does not depend on the clock that reads it."""
    return {k: v for k, v in metrics.to_dict().items() if k not in ("wall_s", "tok_per_s")}


@pytest.fixture(scope="module")
def solver() -> Iterator[Solver]:
    with Solver(verifier="self") as solver:
        solver.load()
        yield solver
        solver.listeners = ()


@pytest.mark.slow
@settings(max_examples=6, phases=[Phase.explicit, Phase.generate])  # to shrink takes minutes
@given(
    controller=st.sampled_from(sorted(CONTROLLERS)),
    share=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    seed=st.integers(0, 50),
    words=st.booleans(),
    level=st.sampled_from(["events", "steps", "tokens"]),
)
def test_replaying_the_trace_gives_the_engines_counters_after_every_event(
    solver: Solver,
    tmp_path_factory: pytest.TempPathFactory,
    controller: str,
    share: float,
    seed: int,
    words: bool,
    level: Detail,
) -> None:
    solver.setup = replace(solver.setup, controller=CONTROLLERS[controller])
    plan = solver.plan("4 5 6 10", budget="full")
    tokens = plan.enough_tokens + int(share * (plan.full_tokens - plan.enough_tokens))
    path = tmp_path_factory.mktemp("runs") / ("run.jsonl" if words else "run.jsonl.gz")
    watch = Watch(solver)
    solver.listeners = (watch,)

    solution = solver.solve(
        "4 5 6 10", budget=f"{tokens}tok", seed=seed, trace=path, trace_level=level
    )

    trace = read_trace(path)
    replay = Replay()
    assert [event.name for event in trace.events] == [seen.name for seen in watch.seen]
    for event, seconds, seen in zip(trace.events, trace.times, watch.seen, strict=True):
        replay.feed(event, seconds)
        assert counters(replay.metrics()) == pytest.approx(seen.metrics)
        if not isinstance(getattr(event, "kv", None), KV):
            continue  # within a transaction: the next event with counts shows how it ended
        assert replay.kv.device == seen.used
        assert replay.peak <= seen.peak
        blocks = [b for b in replay.blocks.values() if b.state is not NodeState.OPEN]
        assert {b.id: b.resident for b in blocks} == {b.id: seen.resident[b.id] for b in blocks}
    assert replay.problems == []
    assert math.isclose(replay.metrics().wall_s, solution.metrics.wall_s)
    assert replay.metrics().peak_tokens == watch.seen[-1].peak <= tokens


def test_a_finer_level_shows_the_same_run_step_by_step_and_token_by_token(
    solver: Solver, tmp_path: Path
) -> None:
    solver.setup = replace(solver.setup, controller=CONTROLLERS["dfs"])
    solver.listeners = ()
    budget = f"{solver.plan('4 5 6 10', budget='full').enough_tokens}tok"
    runs = {}
    for level in get_args(Detail):
        path = tmp_path / f"{level}.arbor.jsonl"
        solver.solve("4 5 6 10", budget=budget, trace=path, trace_level=level)
        runs[level] = read_trace(path).events
        assert Replay.of(read_trace(path)).problems == []

    blocks = [[e for e in events if isinstance(e, Boundary)] for events in runs.values()]
    assert blocks[0] == blocks[1] == blocks[2]
    counted = []
    for level, events in runs.items():
        decodes = [e for e in events if isinstance(e, Forwarded) and e.kind == "decode"]
        assert (max(e.steps for e in decodes) == 1) == (level != "events")
        counted.append([sum(getattr(e, n) for e in decodes) for n in ("rows", "steps")])
    assert counted[0] == counted[1] == counted[2]

    chosen: dict[int, list[int]] = {}
    logprob: dict[int, float] = {}
    sampled = [e for e in runs["tokens"] if isinstance(e, Sampled)]
    for event in sampled:
        for node, token, value in zip(event.nodes, event.ids, event.logprobs, strict=True):
            chosen.setdefault(node, []).append(token)
            logprob[node] = logprob.get(node, 0.0) + value
    closed = [e for e in runs["tokens"] if isinstance(e, Boundary)]
    assert {e.node: tuple(chosen[e.node]) for e in closed} == {e.node: e.ids for e in closed}
    assert logprob == pytest.approx({e.node: e.logprob for e in closed})
    assert len(sampled) == counted[0][1], "one a step"
    assert not any(isinstance(e, Sampled) for e in (*runs["events"], *runs["steps"]))
