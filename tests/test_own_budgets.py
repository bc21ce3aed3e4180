"""Several lossy searches in one engine: each keeps within its own budget, and finds what it finds
alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from support.models import build
from support.policies import POLICIES
from support.slow_cases import every
from support.trees import PROMPT, SAMPLED, Lab, Words
from test_batch import PROBLEMS, Together, found, solver_of
from test_deterministic import deterministic_runner

from arbor import Solver
from arbor.engine.operation import Growth
from arbor.engine.scheduler import Scheduler
from arbor.engine.step import Stepper
from arbor.engine.stop_rule import StopRule
from arbor.errors import UsageError
from arbor.events import Allocated, Event, Evicted, Pressure, Rehydrated
from arbor.model.checkpoint import Checkpoint
from arbor.retention.base import Blocks, Scorer
from arbor.retention.policy import Policy, Trigger
from arbor.run.run import _warn_of_prompt
from arbor.run.solution import Solution
from arbor.tasks.base import BlockLimits
from arbor.tree import Node, ThoughtTree

PROMPTS = (PROMPT, (9, 3, 3, 41, 6, 6, 7), (*PROMPT[:6], 60, 2, 71, 8))


def growth(length: int, seed: int) -> Growth:
    return Growth(seed, SAMPLED, StopRule(Words(), BlockLimits((), length, 8), ()))


@dataclass
class Case:
    """One search: two levels of blocks, and a question after each of the last."""

    prompt: tuple[int, ...]
    slots: int
    width: int
    length: int
    seed: int

    def steps(self, lab: Lab, tree: ThoughtTree) -> Iterator[Any]:
        """Operations, one after another; returns what was asked."""
        leaves: list[Node] = [tree.root]
        for _ in range(2):
            growing = lab.begin_grow(
                [(leaf, self.width) for leaf in leaves], growth(self.length, self.seed)
            )
            yield growing
            leaves = growing.result()
        asking = lab.begin_ask(leaves, [(7, 8)] * len(leaves))
        yield asking
        return asking.result()


def outcome(tree: ThoughtTree, events: list[Event], answers: Any) -> tuple[Any, ...]:
    """What a search has found, and what became of its KV: everything but times, clocks and the
    forwards, in which others take part."""
    reported = []
    for each in events:
        if isinstance(each, Allocated):
            signals = {name: each.signals[name] for name in each.signals if name != "last_used"}
            reported.append(replace(each, elapsed_s=0.0, signals=signals))
        elif isinstance(each, Evicted | Rehydrated):
            reported.append(replace(each, kv=replace(each.kv, pool=0)))
        elif isinstance(each, Pressure):
            reported.append(each)
    return [node.tokens for node in tree], reported, answers.tolist()


def run_together(lab: Lab, cases: list[Case], most: int | None = None) -> list[tuple[Any, ...]]:
    """The cases side by side, each step of the engine for all of them.

    Args:
        most: searches at a time: the next one is opened once one has ended and is closed. None:
            all.
    """
    pool = sum(case.slots for case in cases)
    heard: list[list[Event]] = [[] for _ in cases]
    trees = [ThoughtTree(case.prompt) for case in cases]
    going: dict[int, tuple[Any, Any]] = {}
    answers: dict[int, Any] = {}
    waiting = deque(range(len(cases)))
    while going or waiting:
        while waiting and (most is None or len(going) < most):
            place = waiting.popleft()
            case, tree = cases[place], trees[place]
            lab.open(tree, case.slots, alone=not place, pool=pool, emit=heard[place].append)
            steps = case.steps(lab, tree)
            going[place] = steps, next(steps)
        lab.step()
        for place, (steps, awaited) in list(going.items()):
            assert lab.memory.peak_of(trees[place]) <= cases[place].slots
            if awaited.done:
                try:
                    going[place] = steps, next(steps)
                except StopIteration as end:
                    answers[place] = end.value
                    del going[place]
                    if most is not None:
                        lab.close(trees[place])
    return [outcome(tree, heard[i], answers[i]) for i, tree in enumerate(trees)]


def lab_of(policy: Policy, rehydrate: Any) -> Lab:
    """An engine whose rows have the same bits whatever takes part with them."""
    lab = Lab(build("llama"), policy=policy, mode="lossy", rehydrate=rehydrate, debug=True)
    lab.runner = deterministic_runner(build("llama"))
    return lab


cases = st.lists(
    st.builds(
        Case,
        prompt=st.sampled_from(PROMPTS),
        slots=st.integers(16, 44),
        width=st.integers(1, 2),
        length=st.integers(2, 6),
        seed=st.integers(0, 3),
    ),
    min_size=2,
    max_size=4,
)


def check_together(
    cases: list[Case], policy: Policy, rehydrate: Any, most: int | None = None
) -> None:
    """Several searches in one engine against each in an engine of its own."""
    together = run_together(lab_of(policy, rehydrate), cases, most)

    lab = lab_of(policy, rehydrate)
    alone = [run_together(lab, [case])[0] for case in cases]

    for one, other in zip(together, alone, strict=True):
        assert one == other


@pytest.mark.parametrize("name", ["rkv", "lru", "pyramidkv"])
def test_two_searches_are_those_of_each_alone(name: str) -> None:
    cases = [Case(PROMPTS[1], 20, 2, 4, 1), Case(PROMPTS[0], 24, 1, 6, 0)]
    check_together(cases, replace(POLICIES[name], trigger=Trigger()), "off")


@pytest.mark.parametrize("granularity", ["token", "head"])
@pytest.mark.parametrize("name", ["h2o", "rkv", "snapkv"])
def test_a_search_that_ends_leaves_nothing_to_others(name: str, granularity: Any) -> None:
    """The first goes on while the second is closed and the third gets its rows and slots."""
    cases = [
        Case(PROMPTS[0], 24, 2, 12, 0),
        Case(PROMPTS[2], 44, 1, 3, 1),
        Case(PROMPTS[1], 16, 2, 5, 2),
    ]
    policy = replace(POLICIES[name], granularity=granularity, trigger=Trigger())
    check_together(cases, policy, "off", most=2)


def test_a_closed_search_holds_up_no_step_of_another() -> None:
    """Its last step decoded nothing, so the rows of the other are those of the step before."""
    lab = lab_of(replace(POLICIES["lru"], trigger=Trigger()), "off")
    tree, other = ThoughtTree(PROMPT), ThoughtTree(PROMPTS[1])
    lab.open(tree, 60, pool=90)
    lab.open(other, 16, alone=False, pool=90)
    growing = lab.begin_grow([(tree.root, 3)], growth(12, 0))
    lab.ask(lab.grow([(other.root, 1)], growth(2, 0)), [(7, 8)])
    lab.close(other)

    before = [len(node.tokens) for node in growing.children]
    assert lab.memory.used_by(tree) > 16  # more than the other could hold
    lab.step()

    assert 0 < max(before) < 12
    after = [count + 1 if count else 0 for count in before]  # one waits for room
    assert [len(node.tokens) for node in growing.children] == after


def test_a_failure_that_concerns_no_operation_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = lab_of(POLICIES["lru"], "off")
    tree = lab.plant(60)
    growing = lab.begin_grow([(tree.root, 1)], growth(6, 0))
    lab.step()

    def failing(self: Stepper) -> bool:
        self._serving = Scheduler(lab.state.account(tree))
        raise KeyError("of nobody")

    with monkeypatch.context() as patch:
        patch.setattr(Stepper, "_make_room", failing)
        with pytest.raises(KeyError, match="of nobody"):
            lab.step()
    while lab.busy:
        lab.step()

    assert len(growing.result()[0].tokens) == 6


# One search must not pay for another


@dataclass(frozen=True)
class Stubborn:
    """Keeps the newest tokens, and gives up nothing of one search."""

    prompt: int  # tokens of that search's prompt
    error: Exception

    def counts(self, blocks: Blocks, room: int, scorer: Scorer) -> Any:
        if blocks.depth[0] == 0 and blocks.length[0] == self.prompt:
            raise self.error
        counts = blocks.resident.copy()
        for place in np.arange(len(counts)):
            lost = min(int(counts[place] - blocks.floor[place]), max(0, int(counts.sum()) - room))
            counts[place] -= lost
        return counts


@pytest.mark.parametrize(
    ("slots", "when"), [(18, "its prompt is computed"), (30, "its blocks decode")]
)
@pytest.mark.parametrize("stubborn", [0, 1])
def test_a_policy_that_fails_for_one_search_ends_that_one_only(
    slots: int, when: str, stubborn: int
) -> None:
    prompts = [PROMPT * 2, PROMPT * 2]
    prompts[stubborn] = (*prompts[stubborn], 33)
    error = UsageError("policy", "it will not")
    policy = Policy(Stubborn(len(prompts[stubborn]), error), POLICIES["lru"].scorer)
    lab = Lab(build("llama"), policy=policy, mode="lossy", rehydrate="off", debug=True)
    trees = [ThoughtTree(prompt) for prompt in prompts]
    for place, tree in enumerate(trees):
        lab.open(tree, slots, alone=not place, pool=2 * slots)
    growing = [lab.begin_grow([(tree.root, 2)], growth(6, 1)) for tree in trees]
    while lab.busy:
        lab.step()

    with pytest.raises(UsageError, match="it will not"):
        growing[stubborn].result()
    assert len(growing[1 - stubborn].result()) == 2
    assert lab.memory.peak_of(trees[1 - stubborn]) == slots
    lab.memory.check()


# What is searched at a time


def solved(solver: Any, budgets: list[Any], concurrency: int) -> tuple[list[Any], int]:
    """Solutions in their order, and how many were in progress at a time."""
    together = Together()
    solver.listeners = (together,)
    jobs = [(problem, {"budget": each}) for problem, each in zip(PROBLEMS, budgets, strict=False)]
    results: list[Any] = [None] * len(jobs)
    for place, result in solver.as_completed(jobs, concurrency=concurrency):
        results[place] = result
    solver.listeners = ()
    return results, together.most


def numbers(solution: Solution) -> list[tuple[float, float]]:
    """Of its candidates: without native kernels their last bits depend on what else is computed."""
    return [(each.value, each.logprob) for each in solution.candidates]


def without_numbers(solution: Solution) -> tuple[Any, ...]:
    plain = [replace(each, value=0.0, logprob=0.0) for each in solution.candidates]
    return (*found(replace(solution, candidates=tuple(plain)))[:6],)


@pytest.mark.parametrize(
    ("budgets", "most"),
    every(
        4,
        [
            pytest.param(
                ["60tok", "64tok", "68tok", "60tok"], 3, id="the pool is the sum of three"
            ),
            pytest.param(["60tok", "90tok", "60tok", "120tok"], 3, id="the largest waits for room"),
            pytest.param(["60tok"] * 4, 1, id="an amount given for all is that of all"),
            pytest.param([0.9] * 4, 3, id="ratios"),
        ],
    ),
)
def test_each_search_is_held_to_its_own_budget(
    checkpoint: Checkpoint, budgets: list[Any], most: int
) -> None:
    solver = solver_of(checkpoint, mode="lossy", debug=True)
    alone = [
        solver.solve(problem, budget=each) for problem, each in zip(PROBLEMS, budgets, strict=False)
    ]

    results, at_once = solved(solver, budgets, concurrency=3)

    assert at_once == most
    for one, other in zip(results, alone, strict=True):
        assert without_numbers(one) == without_numbers(other)
        np.testing.assert_allclose(numbers(one), numbers(other), rtol=1e-4)
        assert one.metrics.budget_tokens == other.metrics.budget_tokens
        assert one.metrics.peak_tokens <= one.metrics.budget_tokens


@pytest.mark.parametrize(
    ("policy", "budget", "warned"),
    [
        ("h2o,prompt=true", 0.25, True),
        ("h2o,prompt=true", "60tok", True),
        ("h2o,prompt=true", "600tok", False),
        ("h2o,prompt=true", "full", False),
        ("h2o", 0.25, False),
    ],
)
def test_a_budget_without_room_for_a_protected_prompt_is_said(
    policy: str, budget: float | str, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = "Tom has 3 boxes of 4 pens. " * 12
    _warn_of_prompt.cache_clear()
    events: list[Event] = []
    lossy: dict[str, Any] = {"mode": "lossy", "policy": policy, "listeners": [events.append]}
    with Solver(task="reasoning", controller="chain", max_depth=2, step_tokens=16, **lossy) as s:
        s.solve(prompt, budget=budget)

    said = [each for each in caplog.messages if "protects the prompt as far as" in each]
    assert len(said) == warned
    gone = [block for each in events if isinstance(each, Evicted) for block, _ in each.nodes]
    assert (0 in gone) == (budget in (0.25, "60tok"))
