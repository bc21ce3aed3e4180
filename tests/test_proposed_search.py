"""Searches of the built-in model that propose thoughts, from the plan to the trace and its replay.

The model was not trained to list steps, so only the form of the searches is asserted.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.run_cli import Arbor, in_process

from arbor import Solution, Solver
from arbor.controllers.tot import ToT
from arbor.errors import BudgetInfeasible, TraceError, UsageError
from arbor.events import Event
from arbor.measure.replay import Recording, replay
from arbor.metrics import Metrics
from arbor.tasks.base import Problem, Proposal
from arbor.tasks.reasoning import Reasoning
from arbor.tasks.recall import Recall
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


@pytest.mark.parametrize("verifier", ["self", "vote"])
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


def test_searches_next_to_each_other_find_what_each_finds_alone() -> None:
    problems = [PROBLEM, "What is 7 times 8?", "Tom has 3 apples and eats one. How many?"]

    def found(solution: Solution) -> tuple[Any, ...]:
        cost = solution.metrics
        return solution.path, solution.candidates, cost.nodes, cost.tokens_given

    with proposing() as solver:
        alone = [found(solver.solve(each, budget="full")) for each in problems]
        together = list(solver.imap(problems, concurrency=3, budget=0.5))

    assert [found(each) for each in together] == alone


@pytest.mark.parametrize("tiers", [{"host": "200tok"}, {"host": "60tok", "disk": "300tok"}])
def test_lower_tiers_hold_what_proposals_evict(tiers: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "run.arbor.jsonl"
    wide = dataclasses.replace(SHALLOW, beam=4, width=4)  # one question at a time fits
    with proposing(
        controller=wide, policy="random", max_depth=4, fetch="always", debug=True, **tiers
    ) as solver:
        smallest = solver.plan(PROBLEM, budget="full").enough_tokens
        solution = solver.solve(PROBLEM, budget=f"{smallest}tok", trace=path)

    assert Replay.of(read_trace(path)).problems == []
    metrics = solution.metrics
    assert metrics.tokens_given > 0
    assert metrics.tokens_stored > 0 and metrics.tokens_fetched > 0


@dataclasses.dataclass(frozen=True)
class Several(Lists):
    """Several thoughts are read from any completion."""

    def proposals(self, problem: Problem, thoughts: Sequence[str], text: str) -> Sequence[str]:
        return [f"{place} {text.strip()[:place]}" for place in range(1, 5)]


def test_what_attention_reads_in_host_memory_gives_the_tree_of_full_retention() -> None:
    wide = dataclasses.replace(SHALLOW, beam=4, width=4)
    tiers = {"host": "9999tok", "staging": "12tok", "fetch": "always"}
    found, streamed = [], []
    for given, more in (({}, None), (tiers, None), (tiers, 0), (tiers, 20)):
        with proposing(task=Several(), controller=wide, debug=True, **given) as solver:
            plan = solver.plan(PROBLEM, budget="full")
            budget = "full" if more is None else f"{plan.enough_tokens + more}tok"
            solution = solver.solve(PROBLEM, budget=budget)
            tree = [(n.key, n.tokens, n.given, n.state, n.value) for n in solver.engine.tree]
        found.append((tree, solution.answer, solution.finish_reason, solution.path))
        streamed.append(solution.metrics.streamed_bytes > 0)

    plain, *staged = found
    assert [each[:4] for each in plain[0]] == [each[:4] for each in staged[0][0]]
    assert all(each == staged[0] for each in staged)
    assert streamed == [False, False, True, True]
    asked = [node for node in plain[0] if 0 < node[2] < len(node[1])]
    assert len(asked) == 1 + 4 + 4, "several at a time"


def test_the_plan_counts_the_questions_and_their_completions() -> None:
    with proposing() as solver:
        plan = solver.plan(PROBLEM)
        first = Lists().proposal(Lists().parse(PROBLEM), ())
        tokens = len(solver.tokenizer.encode(first.text, add_special_tokens=False))
    with proposing(controller=dataclasses.replace(SHALLOW, generate="sample")) as solver:
        sampling = solver.plan(PROBLEM)

    assert plan.question_tokens == tokens + first.max_tokens == tokens + 3 * 8
    assert (plan.proposals, sampling.proposals) == (2, 0)
    assert plan.enough_tokens == plan.prompt_tokens + 3 * 8 + plan.question_tokens
    assert plan.full_tokens == plan.prompt_tokens + plan.blocks * 8 + 2 * plan.question_tokens
    assert plan.to_dict()["proposals"] == 2 and "proposals" not in sampling.to_dict()
    with proposing() as solver, pytest.raises(BudgetInfeasible):
        solver.solve(PROBLEM, budget=f"{plan.smallest_tokens - 1}tok")


@dataclasses.dataclass(frozen=True)
class Brief(Lists):
    """A list shorter than the verifier's question."""

    def proposal(self, problem: Problem, thoughts: Sequence[str]) -> Proposal:
        return Proposal("\n", 2)


def test_the_plan_counts_the_longer_of_the_two_questions() -> None:
    with proposing(task=Brief()) as solver:
        judged = solver.plan(PROBLEM).question_tokens
    sampling = dataclasses.replace(SHALLOW, generate="sample")
    with proposing(task=Brief(), controller=sampling) as solver:
        assert judged == solver.plan(PROBLEM).question_tokens > 3


def test_a_policy_that_evicts_nothing_has_room_for_every_question() -> None:
    with proposing(policy="full", budget="full") as solver:
        solution = solver.solve(PROBLEM)

    assert (solution.metrics.pressure_events, solution.metrics.tokens_recomputed) == (0, 0)
    assert solution.metrics.tokens_given > 0


# Refusals


@pytest.mark.parametrize("task", ["recall", "chains"])
def test_a_task_without_such_a_question_is_refused_before_anything_loads(task: str) -> None:
    with pytest.raises(UsageError, match=f"the task '{task}' has no question") as caught:
        Solver("no/such-model", task=task, controller="tot,generate=propose")
    assert caught.value.code == "generate"
    Solver("no/such-model", task=task, controller="tot")


def test_a_step_format_is_refused() -> None:
    with pytest.raises(UsageError, match="step format") as caught:
        proposing(step_format="regex:a+")
    assert caught.value.code == "generate"


def test_the_command_refuses_with_exit_code_two(command: Arbor) -> None:
    problem = Recall().example
    ran = command("solve", problem, "--task", "recall", "--controller", "tot,generate=propose")

    assert (ran.code, ran.out) == (2, "")
    assert "[generate] the task 'recall'" in ran.err


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
@pytest.mark.parametrize("budget", ["full", "700tok"])
def test_a_replay_has_the_counters_of_the_run(budget: str) -> None:
    tokenizer, metrics, events = recorded(budget=budget)

    again = replay(Recording.of(events), tokenizer, policy="lru", slots=metrics.budget_tokens)

    assert counters(again) == counters(metrics)
    assert again.tokens_given > 0


@pytest.mark.slow
def test_a_run_that_was_cut_short_is_not_replayed() -> None:
    _, _, events = recorded(max_tokens=30)

    with pytest.raises(TraceError, match="cut short") as caught:
        Recording.of(events)
    assert caught.value.code == "trace-replay"
