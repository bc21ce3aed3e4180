"""Random searches under every policy, step by step, against the model's own forward over whole
paths."""

from __future__ import annotations

import functools
from collections import Counter
from contextlib import suppress
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from numpy.typing import NDArray
from support.models import build, path_keys, path_logits
from support.policies import POLICIES
from support.trees import LENGTH, PROMPT, Lab, path_ids, relative_error

from arbor.engine.mode import Mode
from arbor.events import Evicted, Rehydrated
from arbor.memory.slots import SlotTable
from arbor.model.runner import ModelRunner
from arbor.retention.policy import Protect
from arbor.tree import Node, NodeState, ThoughtTree

WORKING = sorted(set(POLICIES) - {"full"})
LOSSLESS = [name for name in WORKING if not POLICIES[name].by_head]
DEPTH = 3
SMALLEST = len(PROMPT) + DEPTH * LENGTH + 3
PROTECTED = Protect().sinks + Protect().recent


class Failure(RuntimeError):
    """Stands for whatever stops a forward."""


@functools.cache
def oracle() -> Any:
    """The model as Hugging Face runs it: no cache, no sharing, no budget."""
    return build("llama")


class Ledger:
    """What a slot table claims and releases, entered as it happens and added up without it.

    Attributes:
        held: references by slot.
        most: slots held at one instant.
    """

    def __init__(self, table: SlotTable) -> None:
        self.held: Counter[int] = Counter()
        self.most = 0
        claim, retain, release = table._claim, table.retain, table.release

        def claimed(slots: NDArray[np.int32], trees: Any) -> NDArray[np.int32]:
            assert not self.held.keys() & set(slots.tolist()), "a slot in use was claimed"
            self.enter(slots, 1)
            return claim(slots, trees)

        def retained(slots: NDArray[np.int32], *trees: Any) -> None:
            self.enter(slots, 1)
            retain(slots, *trees)

        def released(slots: NDArray[np.int32], *trees: Any) -> NDArray[np.int32]:
            self.enter(slots, -1)
            return release(slots, *trees)

        table._claim, table.retain, table.release = claimed, retained, released

    def enter(self, slots: NDArray[np.int32], references: int) -> None:
        for slot in slots.tolist():
            self.held[slot] += references
            if self.held[slot] == 0:
                del self.held[slot]
        self.most = max(self.most, len(self.held))


class Searches(RuleBasedStateMachine):
    """Grow, ask in vain and give up blocks in any order, in either mode."""

    def begin(self, slots: int, policy: str, mode: Mode, rehydrate: Any) -> None:
        self.lab = Lab(build("llama"), policy=policy, mode=mode, rehydrate=rehydrate, debug=True)
        self.slots = slots
        self.left = -1  # steps until an interruption; below 0: none comes
        self.tree = ThoughtTree(PROMPT)
        self.lab.open(self.tree, slots, interrupted=self.interrupted)
        self.ledger = Ledger(self.lab.memory.table)
        self.lab.extend(self.tree.root)

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
        node, heard = alive[place % len(alive)], len(self.lab.events)
        with (
            patch.object(ModelRunner, "forward", side_effect=Failure),
            suppress(Failure),
        ):
            self.lab.ask([node] * questions, [(7, 8, 9)] * questions)
        back = sum(sum(dict(e.nodes).values()) for e in self.since(heard, Rehydrated))
        left = sum(sum(dict(e.nodes).values()) for e in self.since(heard, Evicted))
        assert left >= back

    def since(self, heard: int, kind: type[Any]) -> list[Any]:
        return [event for event in self.lab.events[heard:] if isinstance(event, kind)]

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
            assert self.ledger.most <= self.slots
            assert self.lab.memory.peak == self.ledger.most
            assert self.lab.memory.used == len(self.ledger.held)
            self.lab.memory.check()
            table = self.lab.state.table
            table.refresh()
            for node in self.tree:
                assert table.resident[node.id] == node.span.resident.sum()


class LosslessSearches(Searches):
    """In a budget that holds a path: the logits are those of whole paths."""

    @initialize(
        policy=st.sampled_from(LOSSLESS),
        rehydrate=st.sampled_from(("selective", "span")),
        spare=st.integers(0, 25),
    )
    def open(self, policy: str, rehydrate: Any, spare: int) -> None:
        self.begin(SMALLEST + spare, policy, "lossless", rehydrate)

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


class LossySearches(Searches):
    """In budgets below a path too, reversible or not."""

    @initialize(
        policy=st.sampled_from(WORKING),
        rehydrate=st.sampled_from(("off", "selective", "span")),
        slots=st.integers(PROTECTED + LENGTH + 3, SMALLEST + 10),
    )
    def open(self, policy: str, rehydrate: Any, slots: int) -> None:
        self.rehydrate = rehydrate
        self.begin(slots, policy, "lossy", rehydrate)

    @rule(places=st.lists(st.integers(0, 100), min_size=1, max_size=4))
    def ask(self, places: list[int]) -> None:
        alive = self.alive()
        nodes = [alive[place % len(alive)] for place in places]
        assert self.lab.ask(nodes, [(7, 8, 9)] * len(nodes)).isfinite().all()

    @invariant()
    def what_cannot_come_back_does_not(self) -> None:
        if getattr(self, "rehydrate", "") == "off":
            assert not self.since(0, Rehydrated)

    def teardown(self) -> None:
        """What is taken for exact is the model's own, whatever left and came back before."""
        for node in self.alive() if hasattr(self, "lab") else ():
            here = node.span.resident & node.span.exact
            if here.any():
                held = self.lab.memory.pool.k[-1][torch.from_numpy(node.span.slot[here]).long()]
                own = path_keys(oracle(), path_ids(node))[node.start :][torch.from_numpy(here)]
                assert relative_error(held, own) < 1e-4


for each in (LosslessSearches, LossySearches):
    each.TestCase.settings = settings(max_examples=12, stateful_step_count=12, deadline=None)
TestLossless = LosslessSearches.TestCase
TestLossy = LossySearches.TestCase
