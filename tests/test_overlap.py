"""Searches without rounds: reported in the order of a logical clock, whatever the engine does."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.fakes import FakeTask, Key, Script, hashed
from torch import Tensor

from arbor.controllers.base import Expansion
from arbor.controllers.search import finished, give_up
from arbor.engine.operation import Growth
from arbor.engine.stop_rule import StopRule
from arbor.errors import BudgetInfeasible, UsageError
from arbor.events import Answered, Event, Selected, Verified
from arbor.model.sampling_params import Sampling
from arbor.run.limits import SessionLimits
from arbor.run.session import Outcome, Session
from arbor.tree import Node, NodeState, ThoughtTree
from arbor.verifiers.base import Inquiry, Verdict

DEPTH = 4
END = 1  # the token that ends a sequence


class FakeOperation:
    """An operation that is done when the engine says so."""

    def __init__(self, children: Sequence[Node] = (), answers: int = 0) -> None:
        self.children = list(children)
        self.answers = answers
        self.done = False
        self.error: Exception | None = None

    def result(self) -> Any:
        if self.error is not None:
            raise self.error
        return torch.zeros(self.answers, 2) if self.answers else self.children


@dataclass
class FakeEngine:
    """An engine whose steps serve some of the operations only, at random.

    Attributes:
        script: the blocks.
        everything: each step serves all of them, as with room for everything.
        infeasible: the expansion that does not fit, counted from 0.
    """

    script: Script
    seed: int = 0
    everything: bool = False
    infeasible: int | None = None
    steps: int = 0
    begun: list[FakeOperation] = field(default_factory=list)

    def open(self, tree: ThoughtTree, slots: int, **hooks: Any) -> None:
        self.tree, self.hooks = tree, hooks
        self.draw = random.Random(self.seed)
        self.open_operations: deque[FakeOperation] = deque()

    def finish(self, tree: ThoughtTree) -> None:
        self.open_operations.clear()

    def give_up(self, tree: ThoughtTree, error: BaseException) -> None:
        for operation in self.open_operations:
            for child in operation.children:
                child.state = NodeState.PRUNED
        self.open_operations.clear()

    def other_prompt(self, tree: ThoughtTree, emit: Any) -> None:
        """No earlier prompt is kept."""

    def begin_extend(self, node: Node) -> FakeOperation:
        done = FakeOperation()
        done.done = True
        return done

    def room(self, tokens: int, tree: ThoughtTree, longest: int | None = None) -> int:
        assert longest is not None, "what is run through the model depends on the steps"
        return max(1, (100 - longest) // tokens)

    def begin_grow(
        self, leaves: Sequence[tuple[Node, int]], growth: Growth, *, counts: bool = True
    ) -> FakeOperation:
        children = [self.tree.fork(leaf) for leaf, width in leaves for _ in range(width)]
        operation = FakeOperation(children)
        self.begun.append(operation)
        self.open_operations.append(operation)
        return operation

    def begin_ask(
        self,
        nodes: Sequence[Node],
        questions: Sequence[Sequence[int]],
        ways: Sequence[Any] = (),
        *,
        counts: bool = True,
    ) -> FakeOperation:
        operation = FakeOperation(answers=len(nodes))
        self.open_operations.append(operation)
        return operation

    def encode(self, text: str) -> list[int]:
        return [7]

    def ask(self, nodes: Sequence[Node], questions: Sequence[Sequence[int]]) -> Tensor:
        self.step()
        return torch.zeros(len(nodes), 2)

    def changed(self, nodes: Sequence[Node]) -> None:
        """Nothing."""

    def forget(self, nodes: Sequence[Node]) -> None:
        """Nothing that runs may be freed."""
        running = [c for o in self.open_operations for c in o.children]
        assert not {n.id for child in running for n in child.path[:-1]} & {n.id for n in nodes}

    def step(self) -> None:
        self.steps += 1
        if not self.open_operations:
            return
        oldest, *others = list(self.open_operations)
        for operation in (oldest, *others):
            served = self.everything or operation is oldest or self.draw.random() < 0.5
            if served:
                self._serve(operation, every=self.everything)
        for operation in list(self.open_operations):
            if operation.children and self.hooks["interrupted"]():
                for child in operation.children:
                    if child.state is NodeState.OPEN:
                        child.state = NodeState.PRUNED
                operation.done = True
            if operation.done:
                self.open_operations.remove(operation)

    def _serve(self, operation: FakeOperation, every: bool) -> None:
        if operation.answers:
            operation.done = True
            return
        waiting = [child for child in operation.children if child.state is NodeState.OPEN]
        for child in waiting:
            if every or child is waiting[0] or self.draw.random() < 0.5:
                self._decode(child)
        operation.done = all(c.state is not NodeState.OPEN for c in operation.children)
        if operation.done and self.begun.index(operation) == self.infeasible:
            operation.error = BudgetInfeasible(9, 8, "the longest path")
            for child in operation.children:
                child.state = NodeState.PRUNED

    def _decode(self, child: Node) -> None:
        """One forward: it runs the last token, and chooses the next one if the block goes on."""
        thought = self.script(child.key)
        length = 1 + sum(map(ord, thought.text)) % 7

        def choose() -> None:
            last = len(child.tokens) + 1 == length
            self.tree.append(child, END if last and thought.terminal else 2)

        if not child.tokens:  # after its path
            choose()
        if len(child.tokens) < length:
            choose()
        else:
            child.text = thought.text + "!" * thought.terminal
            child.logprob, child.state = thought.logprob, NodeState.CLOSED


@dataclass(frozen=True)
class Scripted:
    """A verifier with the script's values: at once, in one operation, or in `verify`."""

    script: Any
    kind: str = "exact"

    @property
    def needs_model(self) -> bool:
        return self.kind != "exact"

    def verify(self, task: Any, problem: Any, candidates: Sequence[Node], engine: Any) -> Verdict:
        if self.needs_model:
            engine.ask(candidates, [[7]] * len(candidates))
        return self._verdict(candidates)

    def _verdict(self, candidates: Sequence[Node]) -> Verdict:
        values = tuple(self.script(node.key).value for node in candidates)
        return Verdict(values, len(candidates) if self.needs_model else 0)


class Inquiring(Scripted):
    """The same, with all questions at once."""

    def inquire(self, task: Any, problem: Any, candidates: Sequence[Node], encoder: Any) -> Inquiry:
        asked = [n for n in candidates if self.script(n.key).value > 0.2]  # some ask nothing

        def verdict(logits: Tensor) -> Verdict:
            values = tuple(self.script(node.key).value for node in candidates)
            return Verdict(values, len(asked))

        return Inquiry(asked, [[7]] * len(asked), verdict)


VERIFIERS: dict[str, Callable[[Script], Any]] = {
    "exact": Scripted,
    "two-phase": lambda script: Inquiring(script, "model"),
    "one-phase": lambda script: Scripted(script, "model"),
}


@dataclass(frozen=True)
class Greedy:
    """Grows the best known leaves, `most` at a time, and prunes what is below `threshold`."""

    most: int = 3
    width: int = 2
    threshold: float = 0.2

    def max_blocks(self, max_depth: int) -> int:
        return 1000

    def start(self, tree: ThoughtTree, max_depth: int) -> GreedySearch:
        return GreedySearch(self, tree, max_depth)


class GreedySearch:
    continuous = True

    def __init__(self, settings: Greedy, tree: ThoughtTree, max_depth: int) -> None:
        self.settings, self.tree, self.max_depth = settings, tree, max_depth
        self.frontier = [tree.root]
        self.growing: list[Node] = []
        self.heard: list[list[Key]] = []
        self.asked: list[list[Key]] = []
        self.rooms: list[int] = []

    def ask(self, room: int) -> list[Expansion]:
        self.rooms.append(room)
        free = self.settings.most - len(self.growing)
        best = sorted(self.frontier, key=lambda node: (-node.value, node.key))[: max(0, free)]
        for node in best:
            self.frontier.remove(node)
        self.growing += best
        self.asked.append([node.key for node in best])
        return [Expansion(node, self.settings.width) for node in best]

    def tell(self, children: Sequence[Node]) -> None:
        self.heard.append([child.key for child in children])
        ended = {child.parent for child in children}
        self.growing = [node for node in self.growing if node not in ended]
        for child in children:
            if child.state is NodeState.CLOSED and child.depth < self.max_depth:
                if child.value >= self.settings.threshold:
                    self.frontier.append(child)
                else:
                    give_up([child])

    def best(self) -> list[Node]:
        return finished(self.tree)

    def prospects(self) -> Mapping[int, float]:
        return {node.id: 0.5 for node in self.frontier}


class Run:
    """A session on the fake engine.

    Attributes:
        outcome: of the session; None after an error.
        search: of the controller.
        events: everything that happened.
    """

    def __init__(
        self,
        engine: FakeEngine,
        verifier: str = "exact",
        controller: Any = None,
        limits: SessionLimits | None = None,
        listen: Callable[[Session, Event], None] = lambda session, event: None,
    ) -> None:
        self.engine = engine
        self.events: list[Event] = []
        task = FakeTask()
        boundary = task.boundary
        rule: Any = StopRule(None, boundary, frozenset([END]))

        def emit(event: Event) -> None:
            self.events.append(event)
            listen(self.session, event)

        made: Any = engine
        self.session = Session(
            made,
            task,
            task.parse("p"),
            controller or Greedy(),
            VERIFIERS[verifier](engine.script),
            Growth(0, Sampling(), rule),
            limits or SessionLimits(DEPTH),
            100,
            emit,
        )
        self.outcome: Outcome | None = None

    def go(self) -> Run:
        self.outcome = self.session.run([1, 2, 3], "p")
        return self

    @property
    def search(self) -> GreedySearch:
        checked: Any = self.session._search
        search: GreedySearch = checked._search
        return search

    @property
    def whole(self) -> tuple[Any, ...]:
        """What must not depend on the engine's steps."""
        assert self.outcome is not None
        blocks = [
            (n.id, n.key, tuple(n.tokens), n.state, n.value, n.valued) for n in self.outcome.tree
        ]
        search = self.search
        return blocks, search.asked, search.heard, search.rooms, self.outcome.status

    def ends(self, ticks: Callable[[list[Node]], int]) -> Iterator[tuple[int, list[Key]]]:
        """The times of all expansions by the definition of the logical clock, and their children.

        Args:
            ticks: of the verification of some blocks.
        """
        assert self.outcome is not None
        tree = self.outcome.tree
        by_key = {node.key: node for node in tree}
        start: dict[Key, int] = dict.fromkeys(self.search.asked[0], 0)
        ended: dict[Key, int] = {}
        for heard, asked in zip(self.search.heard, self.search.asked[1:], strict=False):
            for parent in dict.fromkeys(by_key[key].parent for key in heard):
                assert parent is not None
                longest = max(len(child.tokens) for child in parent.children)
                ended[parent.key] = start[parent.key] + longest + ticks(parent.children)
            now = ended[heard[0][:-1]]
            assert {ended[key[:-1]] for key in heard} == {now}
            yield now, heard
            start |= dict.fromkeys(asked, now)


scripts = st.builds(
    hashed,
    st.integers(0, 10**6),
    words=st.just(1000),
    terminal=st.sampled_from([0.0, 0.2]),
    values=st.sampled_from([2, 8]),
)
verifiers = st.sampled_from(sorted(VERIFIERS))


@given(scripts, verifiers, st.lists(st.integers(0, 99), min_size=2, max_size=4))
def test_the_search_is_the_same_whatever_the_engine_serves_first(
    script: Script, verifier: str, seeds: list[int]
) -> None:
    full = Run(FakeEngine(script, everything=True), verifier).go()

    for seed in seeds:
        assert Run(FakeEngine(script, seed), verifier).go().whole == full.whole


@given(scripts, verifiers, st.integers(0, 99))
def test_expansions_are_reported_in_order_of_the_logical_clock(
    script: Script, verifier: str, seed: int
) -> None:
    run = Run(FakeEngine(script, seed), verifier).go()

    def ticks(children: list[Node]) -> int:
        asked = [c for c in children if verifier == "one-phase" or script(c.key).value > 0.2]
        return int(verifier != "exact" and bool(asked))

    times = [now for now, _ in run.ends(ticks)]

    assert times == sorted(set(times))
    assert len(times) == len(run.search.heard)


@given(scripts, verifiers, st.integers(0, 99), st.integers(0, 8))
def test_a_limit_on_expansions_cuts_the_same_search(
    script: Script, verifier: str, seed: int, most: int
) -> None:
    limits = SessionLimits(DEPTH, most)
    whole = Run(FakeEngine(script, everything=True), verifier).go()
    full = Run(FakeEngine(script, everything=True), verifier, limits=limits).go()
    slow = Run(FakeEngine(script, seed), verifier, limits=limits).go()

    assert slow.whole == full.whole
    expanded = sum(len(asked) for asked in whole.search.asked)
    grown = [e for e in full.events if isinstance(e, Selected)]
    assert sum(len(event.leaves) for event in grown) == min(most, expanded)
    assert full.outcome is not None
    assert (full.outcome.status == "limit") == (most < expanded)
    groups = [set(heard) for heard in whole.search.heard]
    assert all(any(set(heard) <= group for group in groups) for heard in full.search.heard)


@given(scripts, verifiers, st.integers(0, 99), st.integers(0, 60))
def test_an_interruption_reports_what_has_ended_and_asks_no_more(
    script: Script, verifier: str, seed: int, at: int
) -> None:
    left = [at]
    stopped: list[int] = []

    def stop(session: Session, event: Event) -> None:
        left[0] -= 1
        if left[0] == 0:
            session.stop("interrupted")
            stopped.append(len(run.events))

    run = Run(FakeEngine(script, seed), verifier, listen=stop)
    run.go()

    assert run.outcome is not None
    if stopped:
        assert run.outcome.status == "interrupted"
        assert not any(isinstance(event, Selected) for event in run.events[stopped[0] + 1 :])
    assert all(node.state is not NodeState.OPEN for node in run.outcome.tree)
    ended = [n.key for n in run.outcome.tree.nodes[1:] if n.valued]
    assert sorted(ended) == sorted(key for heard in run.search.heard for key in heard)
    assert isinstance(run.events[-1], Answered)


@dataclass(frozen=True)
class Peeking(Greedy):
    """Asks for a block that was not reported to it."""

    def start(self, tree: ThoughtTree, max_depth: int) -> GreedySearch:
        return PeekingSearch(self, tree, max_depth)


class PeekingSearch(GreedySearch):
    def ask(self, room: int) -> list[Expansion]:
        ahead = [
            node
            for leaf in self.growing
            for node in leaf.children
            if node.state is NodeState.CLOSED
        ]
        return [Expansion(ahead[0], 1)] if ahead else super().ask(room)


class Growing(Greedy):
    def max_blocks(self, max_depth: int) -> int:
        return 5


def test_a_search_that_grows_more_blocks_than_it_named_is_refused() -> None:
    run = Run(FakeEngine(hashed(2, terminal=0.0), 1), controller=Growing(threshold=0.0))

    with pytest.raises(UsageError, match="5 blocks in all") as caught:
        run.go()

    assert caught.value.code == "controller-answer"


def test_a_search_that_looks_ahead_of_the_clock_is_refused() -> None:
    run = Run(FakeEngine(hashed(2, terminal=0.0), 1), controller=Peeking())

    with pytest.raises(UsageError, match="answered 'ask'") as caught:
        run.go()

    assert caught.value.code == "controller-answer"


@pytest.mark.parametrize("verifier", ["one-phase", "two-phase"])
def test_the_outlook_is_what_waits_for_the_model_and_the_controller_s_own(verifier: str) -> None:
    seen = []

    def look(session: Session, event: Event) -> None:
        if isinstance(event, Verified):
            growing = [e for e in session._overlapping if e.end is None]
            waiting = {c.id for e in growing for c in e.children}
            seen.append((dict(engine.hooks["outlook"]()), waiting, dict(run.search.prospects())))

    engine = FakeEngine(hashed(3, terminal=0.0), 1)
    run = Run(engine, verifier, listen=look)
    run.go()

    assert len(seen) > 3
    for outlook, waiting, later in seen:
        assert outlook == later | dict.fromkeys(waiting, 1.0)
    assert any(waiting for _, waiting, _ in seen)
