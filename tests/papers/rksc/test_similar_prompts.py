"""Similar prompts share KV in lossy mode: similarity by layers, the probe, substitution, audits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models import Words, build
from support.policies import POLICIES
from support.trees import GREEDY, Lab

from arbor import Solver
from arbor.engine.operation import Growth
from arbor.engine.stop_rule import StopRule
from arbor.events import (
    Allocated,
    Boundary,
    Compared,
    Event,
    Evicted,
    Opened,
    Pressure,
    Shared,
)
from arbor.kernels.attention.torch_cascade import TorchCascade
from arbor.metrics import MetricsFold
from arbor.model.runner import ModelRunner
from arbor.papers.rksc.similar_prompts import SimilarPrompts, differing, similarity
from arbor.retention.policy import Policy, Protect, Trigger
from arbor.tasks.base import BlockLimits
from arbor.trace import Replay, read_trace
from arbor.tree import ThoughtTree

pytestmark = pytest.mark.usefixtures("loaded_once")

HEAD = tuple(8 + (7 * i * i + 3 * i) % 80 for i in range(36))
FIRST = (*HEAD, 9, 3, 60, 61, 62)
SECOND = (*HEAD, 71, 9, 9, 61, 62)
POOL = 300
PHRASINGS = (
    "Tom has 3 apples and buys 4 more apples. How many apples has he now?",
    "Tom has 3 apples, then buys 4 more apples. How many apples does he have now?",
)
SMALL: dict[str, Any] = {
    "task": "reasoning,shots=0",
    "controller": "chain",
    "max_depth": 2,
    "step_tokens": 12,
    "mode": "lossy",
    "policy": "streaming",
    "budget": "400tok",
}


# The formula


def by_numpy(branch: np.ndarray, root: np.ndarray, alpha: float) -> float:
    """Equation 2 of the paper, term by term."""
    layers = len(branch)
    weights = [np.exp(alpha * layer / layers) for layer in range(1, layers + 1)]
    total = 0.0
    for weight, one, other in zip(weights, branch, root, strict=True):
        cosine = one @ other / (np.linalg.norm(one) * np.linalg.norm(other))
        total += weight / sum(weights) * cosine
    return total


@settings(deadline=None)
@given(
    layers=st.integers(1, 12),
    width=st.integers(1, 20),
    alpha=st.sampled_from([0.0, 0.5, 1.5, 3.0]),
    seed=st.integers(0, 1000),
)
def test_similarity_is_the_formula(layers: int, width: int, alpha: float, seed: int) -> None:
    random = np.random.default_rng(seed)
    one, other = random.normal(size=(2, layers, width))
    found = similarity(torch.from_numpy(one), torch.from_numpy(other), alpha=alpha)

    assert found == pytest.approx(by_numpy(one, other, alpha), abs=1e-9)


tokens = st.lists(st.integers(0, 2), min_size=1, max_size=8).map(np.array)


# The probe


class Comparing(Lab):
    """A lossy engine that shares similar prompts."""

    def __init__(self, threshold: float = -1.0, policy: str | Policy = "streaming") -> None:
        model = build("llama")
        super().__init__(
            model,
            policy=policy,
            mode="lossy",
            rehydrate="off",
            debug=True,
            share="similar",
            prompt_hook=SimilarPrompts(ModelRunner(model, TorchCascade()), Words(), threshold),
        )

    def compare(self, tree: ThoughtTree) -> Compared | None:
        hook = self._prompt_hook
        assert isinstance(hook, SimilarPrompts)
        found = hook.compare(self.memory, tree)
        return None if found is None else found[0]


def lab_of(threshold: float = -1.0) -> Comparing:
    return Comparing(threshold)


def opened(lab: Lab, prompt: Sequence[int], *, read: bool = False, pool: int = POOL) -> ThoughtTree:
    tree = ThoughtTree(prompt)
    lab.open(tree, pool)
    if read:
        lab.extend(tree.root)
    return tree


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (FIRST, SECOND),
        (FIRST, (*HEAD, 61, 62)),
        ((*HEAD, 61, 62), SECOND),
        (HEAD, (77, *HEAD[1:])),
        (HEAD, (77, 78, *HEAD)),
    ],
    ids=["replaced", "left out", "put in", "at the start", "before the start"],
)
def test_the_probe_gives_the_similarity_of_honest_hidden_states(
    first: Sequence[int], second: Sequence[int]
) -> None:
    lab = lab_of()
    opened(lab, first, read=True)
    found = lab.compare(opened(lab, second))

    assert found is not None
    begin, end, other_end = differing(np.array(second), np.array(first))
    if begin in (end, other_end):
        end, other_end = (end, other_end) if begin else (end + 1, other_end + 1)
        begin = max(0, begin - 1)
    model = build("llama")
    means = []
    for prompt, last in ((second, end), (first, other_end)):
        with torch.inference_mode():
            states = model(torch.tensor([prompt]), output_hidden_states=True).hidden_states
        means.append(np.stack([s[0, begin:last].double().mean(0).numpy() for s in states[1:3]]))
    assert found.layers == 2
    assert found.rows == end + other_end - 2 * begin
    assert found.similarity == pytest.approx(by_numpy(means[0], means[1], 1.5), abs=1e-5)
    assert lab.memory.used == len(first), "the probe's slots were given back"


def test_a_search_next_to_others_reads_its_own_prompt() -> None:
    lab = lab_of()
    opened(lab, FIRST, read=True)
    tree = opened(lab, SECOND)
    assert lab.other_prompt(tree, lab.listener) is not None
    lab.open(ThoughtTree(HEAD), POOL, alone=False, pool=POOL)
    assert lab.other_prompt(tree, lab.listener) is None


def test_kept_prompts_give_way_before_a_lossy_search_loses_a_token() -> None:
    lab = lab_of()
    pool = 2 * len(FIRST)
    opened(lab, FIRST, read=True, pool=pool)
    opened(lab, (*HEAD, 71, 9, 9), pool=pool)
    lab.events.clear()
    lab.extend(lab.tree.root)
    assert any(isinstance(event, Shared) for event in lab.events)
    growing = lab.begin_grow(
        [(lab.tree.root, 1)], Growth(3, GREEDY, StopRule(Words(), BlockLimits((), 60, 8), ()))
    )
    while not growing.done:
        lab.step()
    (child,) = growing.result()

    assert len(child.tokens) == 60, "more than the pool, so the prompt has lost tokens too"
    assert lab.memory.used <= pool and not lab.memory.prefixes


def searched(
    policy: Policy, *before: Sequence[int]
) -> tuple[Lab, list[Event], list[tuple[int, ...]]]:
    """Three steps from a prompt after others, under a policy that acts at its times; what it took,
    and the tokens found."""
    pool = 4 * POOL
    trigger = Trigger(every=4, above=len(FIRST) / pool)
    lab = Comparing(1.0, replace(policy, protect=Protect(sinks=0, recent=2), trigger=trigger))
    for prompt in before:
        opened(lab, prompt, read=True, pool=pool)
    leaf = opened(lab, SECOND, pool=pool).root
    lab.events.clear()
    growth = Growth(3, GREEDY, StopRule(Words(), BlockLimits((), 12, 8), ()))
    for _ in range(3):
        growing = lab.begin_grow([(leaf, 1)], growth)
        while not growing.done:
            lab.step()
            lab.memory.check()
        (leaf,) = growing.result()
    taken = [replace(event, elapsed_s=0.0) for event in of(lab.events, Allocated)]
    taken += [*of(lab.events, Pressure), *of(lab.events, Evicted)]
    return lab, taken, [tuple(node.tokens) for node in leaf.path]


def test_what_a_policy_takes_at_its_times_does_not_depend_on_kept_prompts() -> None:
    _, *alone = searched(POLICIES["streaming"])
    assert {event.cause for event in alone[0] if isinstance(event, Evicted)} == {"clock"}

    for before in ([FIRST], [(*HEAD, 71, 9, 9), FIRST]):
        lab, *found = searched(POLICIES["streaming"], *before)
        assert found == alone
        assert len(lab.memory.prefixes) == len(before), "they stay"


def test_heads_take_no_slot_of_a_kept_prompt() -> None:
    lab, taken, _ = searched(replace(POLICIES["h2o"], granularity="head"), FIRST)

    assert {event.cause for event in taken if isinstance(event, Evicted)} == {"clock"}
    assert not lab.memory.prefixes


# The search


def run(solver: Solver, problem: str, **options: Any) -> list[Event]:
    heard: list[Event] = []
    solver.listeners = [heard.append]
    solver.solve(problem, **options)
    return heard


def of(events: Sequence[Event], kind: type[Event]) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


def test_a_search_reads_the_similar_prompt_and_says_so(tmp_path: Path) -> None:
    trace = tmp_path / "run.arbor.jsonl"
    with Solver(share="similar", share_threshold=-1.0, debug=True, **SMALL) as solver:
        first = run(solver, PHRASINGS[0])
        second = run(solver, PHRASINGS[1], trace=trace)
        tree = solver.engine.tree
        exact = [bool(node.span.exact.any()) for node in tree.nodes[1:]]

    assert not of(first, Compared)
    (compared,) = of(second, Compared)
    assert compared.shared and compared.threshold == -1.0
    assert "then buys" in compared.text
    (root,) = (event for event in of(second, Opened) if event.parent is None)
    assert root.tokens == compared.other_tokens == len(tree.root.tokens)
    assert [event.nodes for event in of(second, Shared)] == [((0, root.tokens),)]
    texts = [[event.ids for event in of(events, Boundary)] for events in (first, second)]
    assert texts[0] == texts[1], "it is the earlier problem's search"
    assert tree.root.span.exact[: compared.common].all()
    assert not tree.root.span.exact[compared.common :].any() and not any(exact)
    assert Replay.of(read_trace(trace)).problems == []
    fold = MetricsFold()
    for event in second:
        fold(event)
    metrics = fold.metrics()
    assert metrics.tokens_substituted == compared.tokens - compared.common
    assert metrics.tokens_probed == compared.rows > 0
    assert metrics.probe_s == compared.elapsed_s > 0
    assert metrics.tokens_shared == root.tokens
