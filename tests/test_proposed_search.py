"""Searches of the built-in model that propose thoughts, from the plan to the trace and its replay.

The model was not trained to list steps, so only the form of the searches is asserted.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from support.run_cli import Arbor, in_process
from support.slow_cases import every

from arbor import Solver
from arbor.controllers.tot import ToT
from arbor.events import Event
from arbor.measure.replay import RecordedSearch, replay
from arbor.metrics import Metrics
from arbor.tasks.reasoning import Reasoning
from arbor.trace import Replay, read_trace

pytestmark = pytest.mark.usefixtures("loaded_once")

PROBLEM = "What is 2+3?"
PUZZLE = "4 5 6 10"
SHALLOW = ToT(beam=2, width=3, threshold=-1.0, generate="propose")


@dataclasses.dataclass(frozen=True)
class Lists(Reasoning):
    """Problems in words with short lists."""

    shots: int | None = 0
    max_tokens: int = 8
    max_depth: int = 3
    listed = 3


def proposing(**settings: Any) -> Solver:
    given = {"task": Lists(), "controller": SHALLOW, "verifier": "self"}
    return Solver(**given | {"deterministic": True, "device": "cpu"} | settings)


@pytest.mark.parametrize("verifier", every(2, ["self", "vote"]))
def test_the_smallest_budget_gives_the_tree_of_full_retention(
    verifier: str, tmp_path: Path
) -> None:
    found = []
    for name in ("full", "smallest"):
        path = tmp_path / f"{name}.arbor.jsonl"
        with proposing(verifier=verifier) as solver:
            plan = solver.plan(PROBLEM, budget="full")
            slots = plan.full_tokens if name == "full" else plan.enough_tokens
            solution = solver.solve(PROBLEM, budget=f"{slots}tok", trace=path)
            tree = [(n.key, n.tokens, n.given, n.state, n.value) for n in solver.engine.tree]
            assert len(solver.engine.tree) - 1 <= plan.blocks
        assert Replay.of(read_trace(path)).problems == []
        assert solution.metrics.peak_tokens <= slots
        found.append((tree, solution.answer, solution.finish_reason, solution.path))

    assert found[0] == found[1]
    tree = found[0][0]
    asked = [node for node in tree if 0 < node[2] < len(node[1])]
    assert len(asked) > 2, "it goes on after the first level"
    assert {node[3].value for node in asked} == {"pruned"}
    assert sum(node[2] == len(node[1]) for node in tree) > len(asked)


# Refusals


# The command


@pytest.fixture
def command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Arbor:
    monkeypatch.chdir(tmp_path)
    return in_process(capsys)


def test_the_command_proposes_and_its_trace_is_consistent(command: Arbor) -> None:
    controller = "tot,generate=propose,width=2,beam=1,threshold=-1"
    ran = command(
        *("solve", PUZZLE, "--controller", controller, "--verifier", "exact"),
        *("--budget", "full", "--trace", "run.arbor.jsonl", "--json"),
    )

    assert ran.code in (0, 3)  # a model that was trained for it may solve it
    metrics = ran.document["metrics"]
    assert metrics["tokens_given"] > 0 < metrics["tokens_generated"]
    assert command("trace", "check", "run.arbor.jsonl").code == 0
    config = ran.document["config"]["controller"]
    assert config["generate"] == "propose"
    given = [
        json.loads(line).get("given")
        for line in Path("run.arbor.jsonl").read_text("utf-8").splitlines()
        if '"e":"boundary"' in line
    ]
    assert all(given)
    replayed = command("replay", "run.arbor.jsonl", "--policy", "lru", "--budget", "full")
    assert replayed.code == 0, replayed.err
    planned = command("solve", PUZZLE, "--controller", controller, "--dry-run")
    assert planned.code == 0 and "+ 462 question, 3 deep" in planned.out


# Replays


def counters(metrics: Metrics) -> dict[str, float]:
    """What does not depend on the clock or on the header."""
    kept = dataclasses.asdict(metrics)
    left_out = ("budget_tokens", "bytes_per_token", "full_tokens", "smallest_tokens", "part")
    return {k: v for k, v in kept.items() if k not in left_out and not k.endswith("_s")}


def recorded(**options: Any) -> tuple[Any, Metrics, list[Event]]:
    """A tokenizer, the cost of a search, and its events."""
    events: list[Event] = []
    settings = {"task": "reasoning,shots=0", "step_tokens": 8, "max_depth": 2}
    with proposing(listeners=(events.append,), policy="lru", **settings) as solver:
        metrics = solver.solve(PROBLEM, **options).metrics
        return solver.tokenizer, metrics, events


@pytest.mark.slow
@pytest.mark.parametrize("budget", ["full", "950tok"])
def test_a_replay_has_the_counters_of_the_run(budget: str) -> None:
    tokenizer, metrics, events = recorded(budget=budget)

    again = replay(RecordedSearch.of(events), tokenizer, policy="lru", slots=metrics.budget_tokens)

    assert counters(again) == counters(metrics)
    assert again.tokens_given > 0
