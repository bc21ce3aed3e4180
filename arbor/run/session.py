"""One problem's run: ask, grow, verify, tell."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from arbor import registry
from arbor.controllers.base import Controller, Expansion, Foresight, Search
from arbor.engine.engine import Engine
from arbor.engine.token_source import Growth
from arbor.errors import BudgetInfeasible, OutOfMemory, UsageError
from arbor.events import (
    Answered,
    Detail,
    Event,
    Opened,
    Pruned,
    Selected,
    Terminal,
    Transition,
    Verified,
)
from arbor.retention.future_reads import FutureReads
from arbor.tasks.base import Problem, Task
from arbor.tree import Node, NodeState, ThoughtTree
from arbor.verifiers.base import Verifier

logger = logging.getLogger(__name__)

Status = Literal["solved", "exhausted", "limit", "timeout", "interrupted"]


@dataclass(frozen=True, slots=True)
class Limits:
    """When a run ends though the search would go on.

    Attributes:
        max_depth: thoughts on one path.
        max_expansions: leaves grown in all; None = as many as the controller asks for.
        timeout_s: wall seconds, looked at before each round and each decode step; None = none.
    """

    max_depth: int
    max_expansions: int | None = None
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended.

    Attributes:
        tree: everything the search grew.
        status: see `Status`.
        finished: terminal leaves, best first.
        best: the first of them that gives an answer, or the first; None if no path came to an end.
        answer: what `best` answers.
        correct: what the task's grader says of it; None where the task cannot tell.
    """

    tree: ThoughtTree
    status: Status
    finished: tuple[Node, ...]
    best: Node | None
    answer: str | None
    correct: bool | None


class Session:
    """Everything one run holds together; `run` is the whole story.

    Args:
        engine: with the model.
        task, problem: what is solved.
        controller, verifier: how.
        growth: seed, sampling and boundary of the blocks.
        limits: when to stop.
        slots: the KV budget, tokens.
        emit: listener for everything that happens.
        uses: of a recorded run of the same search, for the clairvoyant policy.
        detail: how finely decoding is reported.
    """

    def __init__(
        self,
        engine: Engine,
        task: Task,
        problem: Problem,
        controller: Controller,
        verifier: Verifier,
        growth: Growth,
        limits: Limits,
        slots: int,
        emit: Callable[[Event], None],
        uses: FutureReads | None = None,
        detail: Detail = "events",
    ) -> None:
        self.engine = engine
        self.task = task
        self.problem = problem
        self.controller = controller
        self.verifier = verifier
        self.growth = growth
        self.limits = limits
        self.slots = slots
        self.emit = emit
        self.uses = uses
        self.detail: Detail = detail
        self._expanded = 0
        self._running: tuple[Node, ...] = ()
        self._freed: dict[int, None] = {}
        self._stopped: Status | None = None
        self._deadline: float | None = None
        self._search: Search | None = None
        self._new = 0  # blocks there were before the round in progress
        self._asked = False  # the round's children have been verified

    def run(self, prompt: Sequence[int], text: str) -> Outcome:
        """Search from a prompt until the controller is done or a limit is reached.

        Args:
            prompt: token ids of the root.
            text: the same as text.

        Raises:
            BudgetInfeasible: the prompt does not fit, or the policy gives up less than the search needs.
            OutOfMemory: the machine holds less than KV and forward need.
                In the middle of a search the round in progress is given up, the best so far is told as the answer, and the
                error's data hold it.
        """
        if self.limits.timeout_s is not None:
            self._deadline = time.monotonic() + self.limits.timeout_s
        tree = ThoughtTree(prompt, text)
        self.engine.open(
            tree,
            self.slots,
            emit=self.emit,
            detail=self.detail,
            outlook=lambda: self._outlook(tree),
            interrupted=self._over,
            reads=self.uses,
        )
        self.emit(Opened(node=0, parent=None, index=0, depth=0, tokens=len(prompt), text=text))
        self.engine.extend(tree.root)
        search = self.controller.start(tree, self.limits.max_depth)
        if not isinstance(search, Search):
            raise UsageError(
                "component-incomplete",
                f"the controller's search, {type(search).__name__}, lacks something: it needs ask, tell and best.",
                "docs/controller.md has an example.",
            )
        self._search = search
        try:
            while not self._over() and (expansions := self._allowed(search.ask(self._room()))):
                self._new, self._asked = len(tree), False
                children = self._grow(tree, expansions)
                self._verify(children)
                self._asked = True
                search.tell(children)
                self._prune(tree)
        except (BudgetInfeasible, OutOfMemory) as error:
            self._prune(tree)
            error.data["answer"] = self._finish(tree, search.best()).answer
            raise
        return self._finish(tree, search.best())

    def stop(self, status: Status) -> None:
        """End after the decode step or the verification in progress; the best so far is the answer. Safe from a signal
        handler."""
        if self._stopped is None:
            self._stopped = status

    # One round

    def _room(self) -> int:
        return self.engine.room(self.growth.stop.max_tokens)

    def _over(self) -> bool:
        if self._deadline is not None and time.monotonic() >= self._deadline:
            self.stop("timeout")
        return self._stopped is not None

    def _allowed(self, expansions: list[Expansion]) -> list[Expansion]:
        """What the limit on expansions leaves of a round."""
        most = self.limits.max_expansions
        if most is not None and expansions and self._expanded + len(expansions) > most:
            expansions = expansions[: most - self._expanded]
            if not expansions:
                self.stop("limit")
        self._expanded += len(expansions)
        return expansions

    def _grow(self, tree: ThoughtTree, expansions: list[Expansion]) -> list[Node]:
        """Decode the children of every chosen leaf together, each to its boundary; returns the finished ones."""
        leaves = tuple(expansion.leaf for expansion in expansions)
        self.emit(Selected(tuple((e.leaf.id, e.width) for e in expansions)))
        logger.debug("%d blocks, %d leaves grow", len(tree), len(leaves))
        if leaves != self._running:
            distance = tree.distances(self._running) if self._running else None
            self.emit(
                Transition(
                    leaves=tuple(leaf.id for leaf in leaves),
                    previous=tuple(leaf.id for leaf in self._running),
                    distance=0 if distance is None else sum(int(distance[n.id]) for n in leaves),
                )
            )
            self._running = leaves
        grown = self.engine.grow([(e.leaf, e.width) for e in expansions], self.growth)
        children = [child for child in grown if child.state is NodeState.CLOSED]
        if len(children) < len(grown):  # cut short: their room is needed to judge the others
            self._prune(tree)
        for child in children:
            thoughts = child.thoughts
            if (
                child.depth >= self.limits.max_depth
                or self.growth.stop.is_eos(child.tokens[-1])
                or self.task.is_terminal(self.problem, thoughts)
            ):
                child.state = NodeState.TERMINAL
                self.emit(Terminal(child.id, self.task.answer(self.problem, thoughts)))
        return children

    def _verify(self, children: Sequence[Node]) -> None:
        if not children:
            return
        began = time.perf_counter()
        verdict = self.verifier.verify(self.task, self.problem, children, self.engine)
        name = str(registry.spec_of(self.verifier)["name"])
        _check(name, children, verdict.values)
        for child, value in zip(children, verdict.values, strict=True):
            child.value, child.valued = value, True
        self.engine.changed(children)
        self.emit(
            Verified(
                verifier=name,
                nodes=tuple(child.id for child in children),
                values=verdict.values,
                asked=verdict.asked,
                elapsed_s=time.perf_counter() - began,
            )
        )

    def _prune(self, tree: ThoughtTree) -> None:
        """Free what the search has given up."""
        pruned = [n for n in tree if n.state is NodeState.PRUNED and n.id not in self._freed]
        if pruned:
            self._freed.update(dict.fromkeys(n.id for n in pruned))
            self.emit(Pruned(tuple(node.id for node in pruned)))
            self.engine.forget(pruned)

    def _outlook(self, tree: ThoughtTree) -> dict[int, float]:
        """How likely the path to each block is read by a later operation: what `Reentry` weighs.

        A child of this round is read for certain while it waits for its verification by the model; a leaf of the
        frontier as likely as the controller says it will be grown.
        """
        if self._search is None:  # the prompt is being read
            return {}
        likely = dict(self._search.prospects()) if isinstance(self._search, Foresight) else {}
        if self.verifier.needs_model and not self._asked:
            for node in tree.nodes[self._new :]:
                if node.state is not NodeState.PRUNED:
                    likely[node.id] = 1.0
        return likely

    # The end

    def _finish(self, tree: ThoughtTree, finished: Sequence[Node]) -> Outcome:
        answers = [self.task.answer(self.problem, leaf.thoughts) for leaf in finished]
        first = next((i for i, answer in enumerate(answers) if answer is not None), None)
        best = finished[first or 0] if finished else None
        answer = None if first is None else answers[first]
        correct = self._grade(answer)
        status: Status = self._stopped or ("solved" if answer is not None else "exhausted")
        self.emit(
            Answered(
                node=None if best is None else best.id,
                path=() if best is None else tuple(node.id for node in best.path),
                text=answer,
                score=0.0 if best is None else best.value,
                correct=correct,
            )
        )
        return Outcome(tree, status, tuple(finished), best, answer, correct)

    def _grade(self, answer: str | None) -> bool | None:
        if self.problem.expected is None:
            return None
        return self.task.grade(self.problem, answer).correct


def _check(verifier: str, children: Sequence[Node], values: Sequence[float]) -> None:
    """Refuse verdicts that no search can order.

    Raises:
        UsageError: not one finite number for each candidate.
    """
    if len(values) != len(children):
        raise UsageError(
            "verdict-count",
            f"the verifier '{verifier}' gave {len(values)} values for {len(children)} candidates.",
            "It gives one for each, in their order.",
        )
    for child, value in zip(children, values, strict=True):
        if not math.isfinite(value):
            raise UsageError(
                "verdict-range",
                f"the verifier '{verifier}' valued block {child.id} at {value}.",
                "Values are finite numbers, from 0 to 1 where they are probabilities.",
                node=child.id,
            )
