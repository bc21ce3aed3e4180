"""An operation that is cut off anywhere leaves no token that claims KV it never got; the search
goes on after it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.models import Words, build, path_keys, path_logits
from support.policies import POLICIES
from support.slow_cases import every
from support.trees import GREEDY, LENGTH, PROMPT, QUESTIONS, Lab, path_ids, relative_error

from arbor.engine.mode import Mode, Rehydrate
from arbor.engine.operation import Growth
from arbor.engine.stop_rule import StopRule
from arbor.events import Event
from arbor.memory import KVMemory
from arbor.memory.slots import SlotTable
from arbor.model.runner import ModelRunner
from arbor.retention.policy import Protect
from arbor.tasks.base import BlockLimits
from arbor.tree import Node, NodeState, ThoughtTree

SMALLEST = len(PROMPT) + 3 * LENGTH + 3
GROWTH = Growth(0, GREEDY, StopRule(Words(), BlockLimits((), LENGTH, 8), ()))


class Search:
    """A search of fixed shape, each step of which is tried until it is not cut off."""

    def __init__(self, lab: Lab, slots: int) -> None:
        self.lab = lab
        self.cuts = 0
        self.tree = ThoughtTree(PROMPT)
        lab.open(self.tree, slots, emit=lab.listener, detail="tokens")
        self.answers: list[torch.Tensor] = []

    def run(self) -> Search:
        self.tried(lambda: self.lab.extend(self.tree.root))
        first, second, third = self.grown(self.tree.root, (9, 30, 71))
        (deep,) = self.grown(second, (40,))
        self.ask([first, deep, third])
        pair = self.grown(deep, (12, 66))
        (last,) = self.grown(first, (25,))
        self.ask([deep, last, *pair])
        self.tried(lambda: self.lab.extend(third))
        return self

    def tried(self, step: Callable[[], Any]) -> Any:
        try:
            return step()
        except ZeroDivisionError:
            self.cuts += 1
            self.check()
        return step()

    def grown(self, leaf: Node, firsts: Sequence[int]) -> list[Node]:
        def step() -> list[Node]:
            unfinished = [child for child in leaf.children if child.state is NodeState.OPEN]
            for child in unfinished:
                child.state = NodeState.PRUNED
            self.lab.forget(unfinished)
            children = [self.tree.fork(leaf) for _ in firsts]
            for child, token in zip(children, firsts, strict=True):
                self.tree.append(child, token)
            self.lab.decode(children, GROWTH)
            return children

        children: list[Node] = self.tried(step)
        return children

    def ask(self, nodes: Sequence[Node]) -> None:
        asked = [(node, question) for node in nodes for question in QUESTIONS]
        answers = self.tried(lambda: self.lab.ask([n for n, _ in asked], [q for _, q in asked]))
        self.answers.append(answers)

    def check(self) -> None:
        """What claims to be exact is the model's own, and no slot is lost."""
        memory = self.lab.memory
        memory.check()
        assert memory.used == sum(int(node.span.resident.sum()) for node in self.tree)
        for node in self.tree:
            exact = node.span.exact
            if exact.any():
                held = memory.pool.k[-1][torch.from_numpy(node.span.slot[exact]).long()]
                own = keys(tuple(path_ids(node)))[node.start :][torch.from_numpy(exact)]
                assert relative_error(held, own) < 1e-4

    @property
    def paths(self) -> list[list[int]]:
        """Tokens of each whole block with those before it; once, where a finished block was grown
        again."""
        whole = {tuple(path_ids(node)) for node in self.tree if node.state is NodeState.CLOSED}
        return sorted(list(path) for path in whole)


@functools.cache
def oracle() -> Any:
    return build("llama")


@functools.cache
def keys(ids: tuple[int, ...]) -> torch.Tensor:
    return path_keys(oracle(), ids)


@functools.cache
def undisturbed() -> Search:
    """Under full retention."""
    return Search(Lab(build("llama"), debug=True), 4096).run()


def lab_of(mode: Mode, rehydrate: Rehydrate) -> Lab:
    policy = "lru" if mode == "lossless" else "h2o"
    return Lab(build("llama"), policy=policy, mode=mode, rehydrate=rehydrate, debug=True)


def same(search: Search) -> None:
    """It found what an undisturbed search finds."""
    search.check()
    assert search.paths == undisturbed().paths
    for got, want in zip(search.answers, undisturbed().answers, strict=True):
        assert relative_error(got, want) < 1e-4


class RaisesOnce:
    """A listener that raises at one event, after the lab has kept it."""

    def __init__(self, lab: Lab, at: int) -> None:
        self.lab = lab
        self.at = at

    def __call__(self, event: Event) -> None:
        self.lab.events.append(event)
        if len(self.lab.events) - 1 == self.at:
            raise ZeroDivisionError


@functools.cache
def moments(mode: Mode, rehydrate: Rehydrate, slots: int) -> list[tuple[str, int]]:
    """(event, place in the run): the first and the last of each kind in an undisturbed run."""
    lab = lab_of(mode, rehydrate)
    Search(lab, slots).run()
    names = [event.name + getattr(event, "kind", "") for event in lab.events]
    chosen = []
    for name in dict.fromkeys(names):
        places = [place for place, each in enumerate(names) if each == name]
        chosen += [(name, place) for place in sorted({places[0], places[-1]})]
    return chosen


ARMS: tuple[tuple[Mode, Rehydrate, int], ...] = (
    ("lossless", "selective", SMALLEST),
    ("lossless", "span", SMALLEST),
    ("lossy", "selective", 4096),
    ("lossy", "off", 4096),
)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "rehydrate", "slots"), ARMS)
def test_a_search_goes_on_after_a_listener_has_raised_at_any_kind_of_event(
    mode: Mode, rehydrate: Rehydrate, slots: int
) -> None:
    kinds = set()
    for name, place in moments(mode, rehydrate, slots):
        lab = lab_of(mode, rehydrate)
        lab.listener = RaisesOnce(lab, place)
        search = Search(lab, slots).run()
        assert search.cuts == 1, f"nothing was cut off at {name}"
        same(search)
        kinds.add(name)
    common = {"forwardprefill", "forwarddecode", "forwardverify", "sample", "boundary"}
    tight = {"pressure", "allocate", "evict", "rehydrate", "forwardrehydrate"}
    assert kinds >= (common | tight if slots == SMALLEST else common)


class FailsOnce:
    """A method that fails after its nth call has done its work."""

    def __init__(self, method: Callable[..., Any], nth: int) -> None:
        self.method = method
        self.left = nth

    def __get__(self, owner: Any, kind: type) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            result = self.method(owner, *args, **kwargs)
            self.left -= 1
            if self.left == 0:
                raise ZeroDivisionError
            return result

        return called


@pytest.mark.parametrize("nth", every(3, [1, 2, 5, 9]))
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (KVMemory, "place"),
        (KVMemory, "append"),
        (KVMemory, "borrow"),
        (KVMemory, "evict_blocks"),
        (SlotTable, "take"),
        (SlotTable, "take_each"),
        (ModelRunner, "forward"),
    ],
)
def test_a_search_goes_on_after_a_failure_between_allocation_and_forward(
    monkeypatch: pytest.MonkeyPatch, kind: type, name: str, nth: int
) -> None:
    lab = lab_of("lossless", "selective")
    monkeypatch.setattr(kind, name, FailsOnce(getattr(kind, name), nth))
    search = Search(lab, SMALLEST).run()

    assert search.cuts == 1
    same(search)


def test_tokens_written_over_a_gap_are_rewritten_after_a_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy = POLICIES["random"]
    lab = Lab(build("llama"), policy=policy, mode="lossy", debug=True)
    lab.policy = replace(policy, protect=Protect(sinks=4, recent=0, tail=0, floor=0))
    tree = lab.plant(4096)
    (first,) = lab.sprout([(tree.root, 1)], GREEDY)
    lab.memory.evict(tree.root, np.array([5]))
    lab.state.changed([tree.root])
    first.span.exact[:] = False  # as if it had been written over that gap
    monkeypatch.setattr(KVMemory, "rewrite", FailsOnce(KVMemory.rewrite, 1))

    with pytest.raises(ZeroDivisionError):
        lab.extend(first)
    assert not first.span.exact.any()
    assert not tree.root.span.exact[5]
    lab.memory.check()
    lab.extend(first)

    assert first.span.exact.all() and tree.root.span.exact.all()
    got = lab.ask([first], [(7, 8)])[0]
    assert relative_error(got, path_logits(oracle(), [*path_ids(first), 7, 8])[-1]) < 1e-5


def test_a_long_prompt_whose_later_piece_is_cut_off_begins_again() -> None:
    prompt = tuple(range(3, 83))
    lab = Lab(build("llama"), policy="streaming", mode="lossy", rehydrate="off", debug=True)
    tree = ThoughtTree(prompt)
    lab.listener = RaisesOnce(lab, 5)
    lab.open(tree, 30)
    with pytest.raises(ZeroDivisionError):
        lab.extend(tree.root)
    lab.extend(tree.root)

    assert tree.root.span.resident[-1]
    lab.memory.check()
