"""Session: the search loop of one run: ask, grow, verify, tell; in rounds or continuously."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Literal

from arbor import components
from arbor.aggregate.base import Aggregate, AnswerVotes
from arbor.aggregate.best import Best
from arbor.controllers.base import Continuous, Controller, Expansion, Foresight, Search
from arbor.engine.early_exit import Exiting
from arbor.engine.engine import Engine
from arbor.engine.step import NO_LOGITS
from arbor.engine.token_source import Growth
from arbor.errors import BudgetInfeasible, InputError, OutOfMemory, UsageError
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
from arbor.run.answers import finished_paths, ranked
from arbor.run.overlap import AnyEnded, Grown, Overlapping, due
from arbor.run.plugin_answers import (
    Answers,
    checked_search,
    checked_task,
    inquiry_of,
    is_finite,
    is_guess,
    most_blocks,
    verdict_of,
)
from arbor.run.questions import PlannedQuestions
from arbor.run.searches import Steps, completed
from arbor.tasks.base import Grade, Problem, Task
from arbor.tree import Node, NodeState, ThoughtTree, paths_of
from arbor.verifiers.base import Asker, Exits, Gate, Inquires, Inquiry, Verdict, Verifier

NO_GATE, NO_EXITS = Gate(False, ()), Exits()  # of a verifier that asks everything in full
logger = logging.getLogger(__name__)

Status = Literal["solved", "exhausted", "limit", "timeout", "interrupted"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits that end a run early.

    Attributes:
        max_depth: thoughts on one path.
        max_expansions: leaves grown in all; None: as many as the controller asks for.
        timeout_s: wall seconds, checked before each ask and each decode step; None: no limit.
    """

    max_depth: int
    max_expansions: int | None = None
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a session.

    Attributes:
        tree: every block of the search.
        status: why it ended.
        finished: terminal leaves, best first.
        best: the path of the answer that the aggregate chose; the first of `finished` without an
            answer; None if no path came to an end.
        answer: the answer of `best`.
        correct: the grade of the answer; None without an answer key.
        guessed: the answer is a guess of the task.
        votes: every answer with its paths, best first.
        grade: the grader's judgement, with its reason; None without an answer key.
    """

    tree: ThoughtTree
    status: Status
    finished: tuple[Node, ...]
    best: Node | None
    answer: str | None
    correct: bool | None
    guessed: bool = False
    votes: tuple[AnswerVotes, ...] = ()
    grade: Grade | None = None


class Session:
    """The search loop of one run, and the state it needs.

    Args:
        engine: with the model.
        task, problem: what is solved.
        controller, verifier: how.
        growth: seed, sampling and boundary of the blocks.
        limits: when to end early.
        slots: the KV budget, tokens.
        emit: called with every event.
        detail: how closely events follow decoding.
        reads: of a recorded run of the same search, for policies that need one.
        questions: checks the verifier's questions against the plan; by default the engine answers
            any.
        pool: the budget of all searches of the engine, tokens; by default `slots`.
        aggregate: chooses the answer among those of the finished paths.
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
        *,
        detail: Detail = "events",
        reads: FutureReads | None = None,
        questions: PlannedQuestions | None = None,
        pool: int | None = None,
        aggregate: Aggregate | None = None,
    ) -> None:
        self.engine = engine
        self.task = checked_task(task)
        self.problem = problem
        self.controller = controller
        self.verifier = verifier
        self.growth = growth
        self.limits = limits
        self.slots = slots
        self.emit = emit
        self.detail = detail
        self.reads = reads
        self.questions = questions
        self.pool = pool
        self.aggregate = aggregate or Best()
        self._expanded = 0
        self._running: tuple[Node, ...] = ()
        self._freed: set[int] = set()
        self._stopped: Status | None = None
        self._deadline: float | None = None
        self._search: Search | None = None
        self._round_start = 0  # blocks in the tree before the round in progress
        self._verified = False  # the round's children have their values
        self._overlapping: list[Overlapping] = []  # in progress, of a search without rounds

    def run(self, prompt: Sequence[int], text: str) -> Outcome:
        """Search until the end, alone; see `steps`."""
        return completed(self.engine, self.steps(prompt, text))

    def steps(self, prompt: Sequence[int], text: str) -> Steps[Outcome]:
        """Search from a prompt until the controller is done or a limit is reached.

        Yields what it waits for; to be resumed when that is done.

        Args:
            prompt: token ids of the root.
            text: of the prompt.

        Raises:
            BudgetInfeasible: the prompt does not fit, the policy gives up less than the search
                needs, or a question is longer than planned.
            InputError: a question is longer than planned and exceeds the model's context.
            OutOfMemory: the machine has less memory than KV and a forward pass need.
                In the middle of a search the expansions in progress are given up, the best answer
                so far is emitted, and the error's data hold it.
        """
        if self.limits.timeout_s is not None:
            self._deadline = time.monotonic() + self.limits.timeout_s
        tree = ThoughtTree(prompt, text)
        try:
            self.engine.open(
                tree,
                self.slots,
                emit=self.emit,
                detail=self.detail,
                outlook=lambda: self._outlook(tree),
                interrupted=self._over,
                reads=self.reads,
                pool=self.pool,
            )
            return (yield from self._whole(tree))
        finally:
            self.engine.finish(tree)

    def stop(self, status: Status) -> None:
        """End after the decode step or the verification in progress, with the best answer so far.

        Safe from a signal handler.
        """
        if self._stopped is None:
            self._stopped = status

    def _whole(self, tree: ThoughtTree) -> Steps[Outcome]:
        """The prompt, the search, and its end."""
        root = tree.root
        self.emit(
            Opened(node=0, parent=None, index=0, depth=0, tokens=len(root.tokens), text=root.text)
        )
        prefill = self.engine.begin_extend(root)
        yield prefill
        prefill.result()
        search = self._start(tree)
        try:
            if isinstance(search, Continuous) and search.continuous:
                yield from self._continuously(tree, search)
            else:
                yield from self._rounds(tree, search)
        except (BudgetInfeasible, InputError, OutOfMemory) as error:
            self.engine.give_up(tree, error)
            self._prune(tree)
            error.data["answer"] = self._finish(tree, search.best()).answer
            raise
        return self._finish(tree, search.best())

    def _start(self, tree: ThoughtTree) -> Search:
        depth = self.limits.max_depth
        search = Answers("controller", self.controller).of(
            "start", lambda: self.controller.start(tree, depth)
        )
        if not isinstance(search, Search):
            raise UsageError(
                "component-incomplete",
                f"the controller's search, {type(search).__name__}, lacks something: it needs ask, tell and best.",
                "docs/controller.md has an example.",
            )
        most = most_blocks(self.controller, depth)
        self._search = checked_search(self.controller, search, tree, most)
        return self._search

    def _rounds(self, tree: ThoughtTree, search: Search) -> Steps[None]:
        """Ask, grow everything, verify, tell; and again."""
        while not self._over() and (expansions := self._allowed(search.ask(self._room(tree)))):
            self._round_start, self._verified = len(tree), False
            children = yield from self._grow(tree, expansions)
            yield from self._verify(children)
            self._verified = True
            search.tell(children)
            self._prune(tree)

    # Without rounds

    def _continuously(self, tree: ThoughtTree, search: Search) -> Steps[None]:
        """Ask whenever something has ended, and tell of each expansion by itself, see
        `Continuous`."""
        overlapping = self._overlapping
        longest = tree.root.end  # of the paths that the search knows of
        now, cut = 0, False
        try:
            while True:
                if not cut and not self._over():
                    room = self.engine.room(self.growth.stop.max_tokens, tree, longest)
                    asked = search.ask(room)
                    expansions = self._within_limit(asked)
                    cut = len(expansions) < len(asked)
                    self._begin(tree, expansions, now)
                if not overlapping:
                    break
                while not (ended := due(overlapping)):
                    yield AnyEnded(overlapping)
                    for each in overlapping:
                        each.go_on()
                now = ended[0].earliest
                for each in ended:
                    overlapping.remove(each)
                children = [child for each in ended for child in each.reported]
                longest = max([longest, *(child.end for child in children)])
                search.tell(children)
                self._prune(tree)
            if cut:
                self.stop("limit")
        finally:
            for each in overlapping:
                each.close()
            overlapping.clear()

    def _begin(self, tree: ThoughtTree, expansions: Sequence[Expansion], now: int) -> None:
        """Let further leaves grow, next to those in progress."""
        if not expansions:
            return
        growing = [each.expansion.leaf for each in self._overlapping]
        self._announce(tree, expansions, growing)
        for place, expansion in enumerate(expansions):
            steps = self._expand(tree, expansion, counts=place == 0)
            self._overlapping.append(Overlapping(expansion, now, steps))

    def _expand(self, tree: ThoughtTree, expansion: Expansion, counts: bool) -> Steps[Grown]:
        """The children of one leaf, and whether their verification asked the model."""
        pair = (expansion.leaf, expansion.width)
        growing = self.engine.begin_grow([pair], self.growth, counts=counts)
        yield growing
        children = self._ended(tree, growing.result())
        asked = yield from self._verify(children)
        return children, asked

    # One round

    def _room(self, tree: ThoughtTree) -> int:
        return self.engine.room(self.growth.stop.max_tokens, tree)

    def _over(self) -> bool:
        if self._deadline is not None and time.monotonic() >= self._deadline:
            self.stop("timeout")
        return self._stopped is not None

    def _allowed(self, expansions: list[Expansion]) -> list[Expansion]:
        """The expansions of a round within the limit on all of them; none end the run."""
        allowed = self._within_limit(expansions)
        if expansions and not allowed:
            self.stop("limit")
        return allowed

    def _within_limit(self, expansions: list[Expansion]) -> list[Expansion]:
        most = self.limits.max_expansions
        if most is not None:
            expansions = expansions[: most - self._expanded]
        self._expanded += len(expansions)
        return expansions

    def _grow(self, tree: ThoughtTree, expansions: list[Expansion]) -> Steps[list[Node]]:
        """Decode the children of all chosen leaves, each to its boundary.

        Returns:
            The finished ones.
        """
        self._announce(tree, expansions)
        growing = self.engine.begin_grow([(e.leaf, e.width) for e in expansions], self.growth)
        yield growing
        return self._ended(tree, growing.result())

    def _announce(
        self, tree: ThoughtTree, expansions: Sequence[Expansion], growing: Sequence[Node] = ()
    ) -> None:
        """Emit which leaves were chosen, and which grow now.

        Args:
            tree: of the search.
            expansions: chosen.
            growing: leaves in progress.
        """
        self.emit(Selected(tuple((e.leaf.id, e.width) for e in expansions)))
        leaves = (*growing, *(expansion.leaf for expansion in expansions))
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

    def _ended(self, tree: ThoughtTree, grown: Sequence[Node]) -> list[Node]:
        """The blocks that reached their boundary, those that end a path marked as such."""
        children = [child for child in grown if child.state is NodeState.CLOSED]
        if len(children) < len(grown):  # the verification of the others needs their room
            self._prune(tree)
        for child in children:
            thoughts = child.thoughts
            if (
                child.depth >= self.limits.max_depth
                or self.growth.stop.is_eos(child.tokens[-1])
                or self.task.is_terminal(self.problem, thoughts)
            ):
                child.state = NodeState.TERMINAL
                answer = self.task.answer(self.problem, thoughts)
                self.emit(Terminal(child.id, answer, is_guess(self.task, self.problem, child)))
        return children

    def _verify(self, children: Sequence[Node]) -> Steps[bool]:
        """Value the children.

        Returns:
            whether the values depend on answers of the model.
        """
        if not children:
            return False
        began = time.perf_counter()
        verdict = yield from self._verdict(children)
        name = str(components.spec_of(self.verifier)["name"])
        values = _values(name, children, verdict)
        for child, value in zip(children, values, strict=True):
            child.value, child.valued = value, True
        self.engine.changed(children)
        gate, exits = verdict.gate or NO_GATE, verdict.exits or NO_EXITS
        self.emit(
            Verified(
                verifier=name,
                nodes=tuple(child.id for child in children),
                values=values,
                asked=verdict.asked,
                elapsed_s=time.perf_counter() - began,
                confidences=gate.confidences,
                skipped=gate.skipped,
                audited=gate.audited or exits.audited,
                exit_layer=exits.exit_layer,
                layers=exits.layers,
                entropy=exits.entropy,
            )
        )
        return bool(verdict.asked) and not gate.skipped

    def _verdict(self, children: Sequence[Node]) -> Steps[Verdict]:
        """The verifier's verdict, its questions asked as one operation where it has them ready."""
        verifier, engine = self.verifier, self.engine
        inquiry = None
        if isinstance(verifier, Inquires):
            inquiry = inquiry_of(verifier, self.task, self.problem, children, engine)
        if inquiry is None:
            asker: Asker = engine if self.questions is None else self.questions
            return verdict_of(verifier, self.task, self.problem, children, asker)
        if not inquiry.nodes:
            return inquiry.verdict(NO_LOGITS)
        with ExitStack() as within:
            if self.questions is not None:
                within.enter_context(self.questions.explaining(inquiry.nodes, inquiry.questions))
            if inquiry.exit_rule is None:
                asking = engine.begin_ask(inquiry.nodes, inquiry.questions)
            else:
                asking = engine.begin_ask(
                    inquiry.nodes,
                    inquiry.questions,
                    inquiry.exit_rule,
                    inquiry.verdicts,
                    audit=inquiry.audit_exits,
                )
            asking.counts = not inquiry.audits
            yield asking
            logits = asking.result()
        verdict = inquiry.verdict(logits)
        if inquiry.exit_rule is None:
            return verdict
        full = asking.early().full
        audited = () if full is None else tuple(inquiry.verdict(full).values)
        return replace(
            verdict, exits=exits_of(inquiry, asking.exits, engine.runner.layer_count, audited)
        )

    def _prune(self, tree: ThoughtTree) -> None:
        """Free the blocks that the search has given up."""
        pruned = [n for n in tree if n.state is NodeState.PRUNED and n.id not in self._freed]
        if pruned and self._overlapping:  # what others run on stays until they have ended
            needed = {n.id for n in paths_of(each.expansion.leaf for each in self._overlapping)}
            pruned = [node for node in pruned if node.id not in needed]
        if pruned:
            self._freed.update(node.id for node in pruned)
            self.emit(Pruned(tuple(node.id for node in pruned)))
            self.engine.forget(pruned)

    def _outlook(self, tree: ThoughtTree) -> dict[int, float]:
        """Probability that a later operation reads the path to each block, for `Reentry`.

        It is 1 for a child that waits for its verification by the model, and the controller's
        estimate for a leaf of the frontier.
        """
        if self._search is None:  # the prompt is being read
            return {}
        likely = dict(self._search.prospects()) if isinstance(self._search, Foresight) else {}
        if self.verifier.needs_model:
            waiting = [] if self._verified else tree.nodes[self._round_start :]
            if self._overlapping:
                waiting = [n for e in self._overlapping if e.end is None for n in e.children]
            likely |= {n.id: 1.0 for n in waiting if n.state is not NodeState.PRUNED}
        return likely

    # The end

    def _finish(self, tree: ThoughtTree, finished: Sequence[Node]) -> Outcome:
        paths = finished_paths(self.task, self.problem, finished)
        votes = ranked(self.aggregate, paths)
        best, answer = (finished[0] if finished else None), None
        if votes:
            best = tree[votes[0].paths[0]]
            answer = self.task.answer(self.problem, best.thoughts)
        grade = self._grade(answer)
        correct = None if grade is None else grade.correct
        guessed = (
            answer is not None and best is not None and is_guess(self.task, self.problem, best)
        )
        status: Status = self._stopped or ("solved" if answer is not None else "exhausted")
        self.emit(
            Answered(
                node=None if best is None else best.id,
                path=() if best is None else tuple(node.id for node in best.path),
                text=answer,
                score=0.0 if best is None else best.value,
                correct=correct,
                guessed=guessed,
            )
        )
        return Outcome(tree, status, tuple(finished), best, answer, correct, guessed, votes, grade)

    def _grade(self, answer: str | None) -> Grade | None:
        if self.problem.expected is None:
            return None
        return self.task.grade(self.problem, answer)


def exits_of(
    inquiry: Inquiry, ways: Sequence[Exiting], layers: int, audited: tuple[float, ...]
) -> Exits:
    """Where the questions of an inquiry left, by candidate.

    Args:
        inquiry: whose questions may leave early.
        ways: of these through the layers.
        layers: of the model.
        audited: the candidates' values after the last layer; empty without an audit.
    """
    rows = inquiry.rows or range(len(ways))
    by_layer = [way.by_layer(layers) for way in ways]
    unknown = (math.nan,) * layers
    return Exits(
        exit_layer=tuple(ways[row].layers - 1 if row >= 0 else -1 for row in rows),
        layers=layers,
        entropy=tuple(by_layer[row] if row >= 0 else unknown for row in rows),
        audited=audited,
    )


def _values(verifier: str, children: Sequence[Node], verdict: Verdict) -> tuple[float, ...]:
    """A verifier's values, refused where a search cannot order them.

    Raises:
        UsageError: not one value for each candidate, or a value that is not a finite number.
    """
    values: Sequence[object] = verdict.values
    if len(values) != len(children):
        raise UsageError(
            "verdict-count",
            f"the verifier '{verifier}' gave {len(values)} values for {len(children)} candidates.",
            "It must give one for each, in their order.",
        )
    for child, value in zip(children, values, strict=True):
        if isinstance(value, bool) or not is_finite(value):
            raise UsageError(
                "verdict-range",
                f"the verifier '{verifier}' valued block {child.id} at {value!r:.40}.",
                "Values are finite numbers, from 0 to 1 where they are probabilities.",
                node=child.id,
            )
    return tuple(map(float, verdict.values))
