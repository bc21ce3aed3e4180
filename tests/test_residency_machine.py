"""Random searches under every policy, step by step, against the model's own forward over whole paths."""

from __future__ import annotations

import functools
from contextlib import suppress
from typing import Any
from unittest.mock import patch

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from models import build, path_logits
from trees import LENGTH, PROMPT, Lab, path_ids, relative_error

from arbor.engine.runner import ModelRunner
from arbor.events import Evicted, Rehydrated
from arbor.retention.policy import POLICIES
from arbor.tree import Node, NodeState

WORKING = sorted(set(POLICIES) - {"full"})
DEPTH = 3
SMALLEST = len(PROMPT) + DEPTH * LENGTH + 3


class Failure(RuntimeError):
    """Stands for whatever stops a forward."""


@functools.cache
def oracle() -> Any:
    """The model as Hugging Face runs it: no cache, no sharing, no budget."""
    return build("llama")


class Searches(RuleBasedStateMachine):
    """Grow, ask, come back to and give up blocks in any order, in lossless mode and in a budget that holds a path."""

    @initialize(
        policy=st.sampled_from(WORKING),
        rehydrate=st.sampled_from(("selective", "span")),
        spare=st.integers(0, 25),
    )
    def open(self, policy: str, rehydrate: Any, spare: int) -> None:
        self.lab = Lab(build("llama"), policy=policy, rehydrate=rehydrate, debug=True)
        self.slots = SMALLEST + spare
        self.left = -1  # steps until an interruption; below 0: none comes
        self.tree = self.lab.plant(self.slots, interrupted=self.interrupted)

    def interrupted(self) -> bool:
        self.left -= 1
        return self.left == 0

    def alive(self) -> list[Node]:
        return [node for node in self.tree if node.state is NodeState.CLOSED]

    @precondition(lambda self: len(self.tree) < 14)
    @rule(place=st.integers(0, 100), width=st.integers(1, 3), seed=st.integers(0, 9))
    def grow(self, place: int, width: int, seed: int) -> None:
        able = [node for node in self.alive() if node.depth < DEPTH]
        leaf = able[place % len(able)]
        for child in self.lab.sprout([(leaf, width)], seed=seed):
            assert len(child.tokens) == LENGTH

    @precondition(lambda self: len(self.tree) < 14)
    @rule(place=st.integers(0, 100), width=st.integers(1, 3), steps=st.integers(1, 6))
    def grow_until_interrupted(self, place: int, width: int, steps: int) -> None:
        able = [node for node in self.alive() if node.depth < DEPTH]
        self.left = steps
        grown = self.lab.sprout([(able[place % len(able)], width)])
        self.left = -1
        assert all(node.state in (NodeState.CLOSED, NodeState.PRUNED) for node in grown)

    @rule(place=st.integers(0, 100), questions=st.integers(1, 3))
    def ask_in_vain(self, place: int, questions: int) -> None:
        """The model fails in the middle; the next time it works."""
        alive = self.alive()
        node, told = alive[place % len(alive)], len(self.lab.events)
        with (
            patch.object(ModelRunner, "forward", side_effect=Failure),
            suppress(Failure),
        ):
            self.lab.ask([node] * questions, [(7, 8, 9)] * questions)
        back = sum(sum(dict(e.nodes).values()) for e in self.since(told, Rehydrated))
        left = sum(sum(dict(e.nodes).values()) for e in self.since(told, Evicted))
        assert left >= back

    def since(self, told: int, kind: type[Any]) -> list[Any]:
        return [event for event in self.lab.events[told:] if isinstance(event, kind)]

    @rule(places=st.lists(st.integers(0, 100), min_size=1, max_size=4))
    def ask(self, places: list[int]) -> None:
        alive = self.alive()
        nodes = [alive[place % len(alive)] for place in places]
        answers = self.lab.ask(nodes, [(7, 8, 9)] * len(nodes))
        for node, answer in zip(nodes, answers, strict=True):
            want = path_logits(oracle(), [*path_ids(node), 7, 8, 9])[-1]
            assert relative_error(answer, want) < 1e-4

    @rule(place=st.integers(0, 100))
    def come_back(self, place: int) -> None:
        alive = self.alive()
        node = alive[place % len(alive)]
        self.lab.extend(node)
        assert all(block.span.exact.all() for block in node.path)

    @rule(place=st.integers(0, 100))
    def give_up(self, place: int) -> None:
        leaves = [node for node in self.alive() if node.parent is not None and not node.children]
        if leaves:
            leaf = leaves[place % len(leaves)]
            leaf.state = NodeState.PRUNED
            self.lab.forget([leaf])
            assert not leaf.span.resident.any()

    @invariant()
    def the_budget_holds_and_the_account_is_right(self) -> None:
        if hasattr(self, "lab"):
            assert self.lab.memory.peak <= self.slots
            self.lab.memory.check()
            table = self.lab.residency.table
            table.refresh()
            for node in self.tree:
                assert table.resident[node.id] == node.span.resident.sum()


Searches.TestCase.settings = settings(max_examples=25, stateful_step_count=12, deadline=None)
TestSearches = Searches.TestCase
