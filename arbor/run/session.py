"""Session: the search loop of one run: ask, grow, verify, tell; in rounds or continuously."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal

from arbor.aggregate.base import Aggregate, AnswerVotes
from arbor.aggregate.best import Best
from arbor.controllers.base import Continuous, Controller, Expansion, Foresight, Scores, Search
from arbor.engine.engine import Engine
from arbor.engine.hooks import OtherPrompt
from arbor.engine.operation import GivenBlock, Growing, Growth
from arbor.errors import ArborError, BudgetInfeasible, InputError, OutOfMemory, UsageError
from arbor.events import (
    Answered,
    Event,
    Opened,
    Pruned,
    ReachedLimit,
    Selected,
    Terminal,
    Transition,
)
from arbor.registry import name_of
from arbor.run.allowance import Allowance, most_promising
from arbor.run.answers import AnswerGroups, compares_answers, confidence, ranked
from arbor.run.expansions import AnyEnded, Grown, Overlapping, Proposals, due
from arbor.run.limits import SessionLimits
from arbor.run.plugin_answers import (
    PluginCalls,
    checked_search,
    checked_task,
    most_blocks,
    most_proposals,
    path_answer,
    proposing,
)
from arbor.run.questions import PlannedQuestions
from arbor.run.searches import Steps, completed
from arbor.run.verification import Judged, SomeEnded, Valuation
from arbor.tasks.base import Grade, Problem, Task
from arbor.tree import Node, NodeState, ThoughtTree, paths_of
from arbor.verifiers.base import (
    Verifier,
    VerifierSearch,
)

logger = logging.getLogger(__name__)

Status = Literal["solved", "exhausted", "cut", "limit", "timeout", "interrupted"]
BY_ITSELF: tuple[Status, ...] = ("solved", "exhausted", "cut")  # no limit of the search ended it


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
        limit: the limit that ended it, by the name of its setting.
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
    limit: ReachedLimit | None = None


class Session:
    """The search loop of one run, and the state it needs.

    Args:
        growth: seed, sampling and boundary of the blocks.
        limits: when to end early.
        slots: the KV budget, tokens.
        emit: called with every event.
        aggregate: chooses the answer among those of the finished paths.
        judged: which blocks are valued; by default those whose values are read.
        by_policy: the policy reads values too, see `Judged`.
        questions: checks the verifier's questions against the plan; by default the engine answers
            any.
        opened: this search in the models of verifiers that have their own.
        compares: the prompt is compared with earlier ones where the engine shares similar ones.
        since_s: when the time of `limits` began, see `Allowance`.
        opening: how the tree is opened, see `Engine.open`.
    """

    def __init__(
        self,
        engine: Engine,
        task: Task,
        problem: Problem,
        controller: Controller,
        verifier: Verifier,
        growth: Growth,
        limits: SessionLimits,
        slots: int,
        emit: Callable[[Event], None],
        *,
        aggregate: Aggregate | None = None,
        judged: Callable[[Search, ThoughtTree, Sequence[Node]], list[Node]] | None = None,
        by_policy: bool = False,
        questions: PlannedQuestions | None = None,
        opened: Mapping[Verifier, VerifierSearch] | None = None,
        compares: bool = True,
        since_s: float | None = None,
        **opening: Any,
    ) -> None:
        self.engine = engine
        self.task = checked_task(task)
        self.problem = problem
        self.controller = controller
        self.verifier = verifier
        self.growth = growth
        self.limits = limits
        self.emit = emit
        self.aggregate = aggregate or Best()
        self._groups = AnswerGroups(self.task, problem, compares=compares_answers(self.aggregate))
        self.judged = judged or Judged(verifier, self.aggregate, limits, by_policy).of
        self.verification = Valuation(
            engine, self.task, problem, verifier, questions, opened or {}, emit
        )
        self.compares = compares
        able = proposing(task)
        self.proposals = None if able is None else Proposals(engine, able, problem, growth)
        self.substituted: OtherPrompt | None = None  # that was read instead
        self._opening = {"slots": slots, **opening}
        self._allowance = Allowance(limits, since_s)
        self._alone: list[Node] = []  # leaves that ended with what was kept for that
        self._went_on: dict[int, Node] = {}  # of each leaf that went on alone, the child
        self._running: tuple[Node, ...] = ()
        self._freed: set[int] = set()
        self._stopped: Status | None = None
        self._reached: ReachedLimit | None = None  # which limit stopped it
        self._search: Search | None = None
        self._round_start = 0  # blocks in the tree before the round in progress
        self._verified = False  # the round's children have their values
        self._answered: set[int] = set()  # blocks that end a path with an answer
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
        self._allowance.start()
        tree = ThoughtTree(prompt, text)
        try:
            self._open(tree)
            if self.compares and (other := self.engine.other_prompt(tree, self.emit)) is not None:
                self.engine.close(tree)
                tree = ThoughtTree(other.tokens, text)
                self._open(tree)
                self.substituted = other
            return (yield from self._whole(tree))
        finally:
            self.engine.finish(tree)

    def _open(self, tree: ThoughtTree) -> None:
        self.engine.open(
            tree,
            emit=self.emit,
            outlook=lambda: self._outlook(tree),
            scores=self._scores,
            interrupted=self._over,
            **self._opening,
        )

    def stop(self, status: Status, limit: ReachedLimit | None = None) -> None:
        """End after the decode step or the verification in progress, with the best answer so far.

        Safe from a signal handler.
        """
        if self._stopped is None:
            self._stopped, self._reached = status, limit

    def _whole(self, tree: ThoughtTree) -> Steps[Outcome]:
        """The prompt, the search, and its end."""
        root = tree.root
        self.emit(
            Opened(node=0, parent=None, index=0, depth=0, tokens=len(root.tokens), text=root.text)
        )
        prefill = self.engine.begin_extend(root)
        yield prefill
        prefill.result()
        if self.substituted is not None:
            self.engine.inexact(root, self.substituted.begin)
        search = self._start(tree)
        try:
            if isinstance(search, Continuous) and search.continuous:
                yield from self._continuously(tree, search)
            else:
                yield from self._rounds(tree, search)
        except (BudgetInfeasible, InputError, OutOfMemory) as error:
            self.engine.give_up(tree, error)
            self._prune(tree)
            error.data["answer"] = self._finish(tree, self._best(search)).answer
            raise
        except GeneratorExit:  # what its unfinished blocks have generated counts
            self.engine.give_up(tree, ArborError("interrupted", "the search was given up."))
            raise
        return self._finish(tree, self._best(search))

    def _start(self, tree: ThoughtTree) -> Search:
        depth = self.limits.max_depth
        search = PluginCalls("controller", self.controller).of(
            "start", lambda: self.controller.start(tree, depth)
        )
        if not isinstance(search, Search):
            raise UsageError(
                "component-incomplete",
                f"the controller's search, {type(search).__name__}, lacks something: it needs ask, tell and best.",
                "docs/controller.md has an example.",
            )
        most = most_blocks(self.controller, depth)
        proposals = most_proposals(self.controller, depth)
        self._search = checked_search(self.controller, search, tree, most, proposals)
        return self._search

    def _rounds(self, tree: ThoughtTree, search: Search) -> Steps[None]:
        """Ask, grow everything, verify, tell; and again."""
        room = partial(self.engine.room, self.growth.stop.max_tokens, tree)
        while not self._over():
            known, asked = self._already_grown(search.ask(room()))
            expansions = self._allowance.of(asked)
            if not expansions and not known:
                cut = asked or self._allowance.lacks_an_answer
                if cut and (yield from self._goes_on(tree, search, asked)):
                    continue
                break
            self._round_start, self._verified = len(tree), False
            children = (yield from self._grow(tree, expansions)) if expansions else []
            self._count(children)
            unjudged = [child for child in known if child.state is not NodeState.TERMINAL]
            yield from self.verification.steps(self.judged(search, tree, [*unjudged, *children]))
            self._verified = True
            search.tell([*known, *children])
            self._prune(tree)
            self._check_limits(search, [*known, *children])
            if expansions:
                self._allowance.round_ended(expansions)

    def _already_grown(self, asked: list[Expansion]) -> tuple[list[Node], list[Expansion]]:
        """The only children that a search asks for and that went on alone, and what else it asks
        for. A leaf has its child once: asked for again, it gets another."""
        known, rest = [], []
        for each in asked:
            only = each.width == 1 and each.generate == "sample" and each.begin is None
            child = self._went_on.pop(each.leaf.id, None) if only else None
            if child is None:
                rest.append(each)
            else:
                known.append(child)
        return known, rest

    # Without rounds

    def _continuously(self, tree: ThoughtTree, search: Search) -> Steps[None]:
        """Ask whenever something has ended, and report each expansion by itself, see
        `Continuous`."""
        overlapping = self._overlapping
        longest = tree.root.end  # of the paths that the search knows of
        now = 0
        waiting: list[Expansion] = []  # asked for, and not within the limits so far
        try:
            while True:
                if not self._over():
                    room = self.engine.room(self.growth.stop.max_tokens, tree, longest)
                    asked = waiting or search.ask(room)
                    expansions = self._allowance.of(asked, [e.expansion for e in overlapping])
                    waiting = asked[len(expansions) :]
                    self._begin(tree, search, expansions, now)
                if not overlapping:
                    cut = (waiting or self._allowance.lacks_an_answer) and not self._over()
                    if cut and (yield from self._goes_on(tree, search, waiting)):
                        continue
                    break
                while not (ended := due(overlapping)):
                    yield AnyEnded(overlapping)
                    for each in overlapping:
                        each.go_on()
                now = ended[0].earliest
                for each in ended:
                    overlapping.remove(each)
                children = [child for each in ended for child in each.reported]
                self._count([*children, *(each.question for each in ended if each.question)])
                longest = max([longest, *(child.end for child in children)])
                search.tell(children)
                self._prune(tree)
                self._check_limits(search, children)
                if self._stopped == "limit":
                    yield from self._give_up(tree)
                    break
        finally:
            for each in overlapping:
                each.close()
            overlapping.clear()

    def _give_up(self, tree: ThoughtTree) -> Steps[None]:
        """End the expansions that had not ended when a limit was reached.

        Which of them have been computed by then depends on the KV budget, so that none counts.
        """
        for each in self._overlapping:
            if each.awaited is not None and not each.awaited.done:  # it is interrupted
                yield each.awaited
            each.close()
            for block in each.blocks:
                block.state = NodeState.PRUNED
        self._overlapping.clear()
        self._prune(tree)

    def _begin(
        self, tree: ThoughtTree, search: Search, expansions: Sequence[Expansion], now: int
    ) -> None:
        """Let further leaves grow, next to those in progress."""
        if not expansions:
            return
        growing = [each.expansion.leaf for each in self._overlapping]
        self._announce(tree, expansions, growing)
        for place, expansion in enumerate(expansions):
            steps = self._expand(tree, search, expansion, counts=place == 0)
            self._overlapping.append(Overlapping(expansion, now, steps))

    def _expand(
        self, tree: ThoughtTree, search: Search, expansion: Expansion, counts: bool
    ) -> Steps[Grown]:
        """The children of one leaf, and whether their verification asked the model."""
        grown, _ = yield from self._new_blocks(tree, [expansion], counts)
        children = self._ended(tree, grown)
        asked = yield from self.verification.steps(self.judged(search, tree, children))
        return children, asked

    # One round

    def _over(self) -> bool:
        if self.limits.timeout is not None and self._allowance.seconds_left <= 0:
            self.stop("timeout", "timeout")
        return self._stopped is not None

    def _goes_on(
        self, tree: ThoughtTree, search: Search, asked: Sequence[Expansion]
    ) -> Steps[bool]:
        """Whether a search goes on, of which the limits allow no further round as it is, or which
        has nothing left to ask for after they cut a round.

        Where no path has an answer, the most promising leaf goes on alone until its path ends, with
        the tokens or the time kept for that: not the one that the search would grow first, which
        may be to explore. The search has what is left of them, and is told of a block of that path
        when it asks for one child of the block before.
        """
        allowance = self._allowance
        growing = [] if allowance.answered else most_promising(tree, asked)
        while growing and not self._over() and allowance.one_more():
            self._round_start, self._verified = len(tree), False
            leaf = growing[0]
            growing = yield from self._grow(tree, [Expansion(leaf, 1)])
            self._count(growing)
            if growing:
                self._went_on[leaf.id] = growing[0]
            if growing and growing[0].state is NodeState.TERMINAL:
                self._alone += growing
                yield from self.verification.steps(self.judged(search, tree, growing))
                self._verified = True
                self._check_limits(search, growing)
                return True
            if allowance.tokens_are_spent:
                break
        narrowed = allowance.narrowed
        self.stop("timeout" if narrowed == "timeout" else "limit", narrowed)
        return False

    def _best(self, search: Search) -> list[Node]:
        """The finished leaves that the search was told of, best first, and those that went on
        alone."""
        growing = {block.id for each in self._overlapping for block in each.blocks}
        found = [leaf for leaf in search.best() if leaf.id not in growing]
        known = {leaf.id for leaf in found}
        return [*found, *(leaf for leaf in self._alone if leaf.id not in known)]

    def _check_limits(self, search: Search, children: Sequence[Node]) -> None:
        """Ends the run where one of these blocks finishes the path that a limit waits for, or where
        no tokens are left."""
        self._check_answers(search, children)
        if self._allowance.tokens_are_spent:
            self.stop("limit", "max_tokens")

    def _check_answers(self, search: Search, children: Sequence[Node]) -> None:
        limits = self.limits
        if limits.first is None and limits.confidence is None:
            return
        ended = {child.id for child in children if child.state is NodeState.TERMINAL}
        if not ended:
            return
        finished = self._best(search)
        for leaf in finished:
            if leaf.id in ended and limits.reached_by(leaf.value):
                answer, _ = path_answer(self.task, self.problem, leaf)
                if answer is not None:
                    self.stop("limit", "first")
                    return
        if limits.confidence is not None:
            votes = ranked(
                self.aggregate, self._groups.paths(finished, self._allowance.seconds_left)
            )
            if votes and confidence(self.aggregate, votes) >= limits.confidence:
                self.stop("limit", "confidence")

    def _grow(self, tree: ThoughtTree, expansions: list[Expansion]) -> Steps[list[Node]]:
        """Decode the children of all chosen leaves, each to its boundary, if nothing interrupts."""
        self._announce(tree, expansions)
        grown, questions = yield from self._new_blocks(
            tree, expansions, meanwhile=self._asking_early
        )
        self._count(questions)
        return self._ended(tree, grown)

    def _count(self, blocks: Sequence[Node]) -> None:
        """Count blocks that the search is told of, and whether one of them has an answer."""
        self._allowance.count(blocks)
        self._allowance.answered |= any(block.id in self._answered for block in blocks)

    def _new_blocks(
        self,
        tree: ThoughtTree,
        expansions: Sequence[Expansion],
        counts: bool = True,
        meanwhile: Callable[[ThoughtTree, Growing], Steps[None]] | None = None,
    ) -> Steps[tuple[list[Node], list[Node]]]:
        """The children of leaves, sampled or proposed, those that an interruption gave up included;
        and the questions for proposals, which are given up when their thoughts grow.

        Args:
            counts: as for `Engine.begin_grow`.
            meanwhile: what is done while sampled children grow.
        """
        sampled = [each for each in expansions if each.generate == "sample"]
        asking = [each for each in expansions if each.generate == "propose"]
        at_leaves = [(each.leaf, each.width) for each in sampled if each.begin is None]
        inside = [block for each in sampled for block in _inside(each, self.growth)]
        operations: list[Growing] = []
        if at_leaves:
            operations.append(self.engine.begin_grow(at_leaves, self.growth, counts=counts))
        if inside:
            operations.append(self.engine.begin_given(inside, counts=counts and not operations))
        growing = list(operations)
        if asking:
            leaves = [each.leaf for each in asking]
            operations.append(self._able.begin(leaves, counts=counts and not operations))
        if at_leaves and meanwhile is not None:
            yield from meanwhile(tree, operations[0])
        yield from operations
        grown = [child for each in growing for child in each.result()]
        questions = operations[-1].result() if asking else []
        listed = []
        for question, each in zip(questions, asking, strict=True):
            if question.state is NodeState.CLOSED and not self._over():
                listed += self._able.read(question, each.width)
            question.state = NodeState.PRUNED
        if questions:
            self._prune(tree)
        if listed:
            given = self.engine.begin_given(listed, counts=False)
            yield given
            grown = [*grown, *given.result()]
        return grown, questions

    def _asking_early(self, tree: ThoughtTree, growing: Growing) -> Steps[None]:
        """Wait for blocks that grow; where they do not all fit at once, ask about each as soon as
        it has ended, while its KV is there."""
        assert self._search is not None, "a search has asked for them"
        some = SomeEnded(growing)
        while self.verification.foresees and not growing.done:
            yield some
            if not growing.done and not self._over():
                children = self._ended(tree, some.take())
                self.verification.foresee(self.judged(self._search, tree, children), growing)

    @property
    def _able(self) -> Proposals:
        assert self.proposals is not None, "checked when the solver was made"
        return self.proposals

    def _announce(
        self, tree: ThoughtTree, expansions: Sequence[Expansion], growing: Sequence[Node] = ()
    ) -> None:
        """Emit which leaves were chosen, and which grow now."""
        self.emit(Selected(tuple((e.leaf.id, e.width) for e in expansions)))
        leaves = (*growing, *dict.fromkeys(expansion.leaf for expansion in expansions))
        logger.debug("%d blocks, %d leaves grow", len(tree), len(leaves))
        if self.growth.sampling.temperature == 0:
            most = max((e.width for e in expansions if e.generate == "sample"), default=1)
            if most > 1:
                _warn_of_equals(name_of(self.controller))
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
        over = (NodeState.CLOSED, NodeState.TERMINAL)
        children = [child for child in grown if child.state in over]
        if len(children) < len(grown):  # the verification of the others needs their room
            self._prune(tree)
        for child in children:
            if child.state is NodeState.TERMINAL:  # was among the first that ended
                continue
            ended = self.growth.stop.is_eos(child.tokens[-1])
            ended = ended or self.task.is_terminal(self.problem, child.thoughts)
            if ended or self._is_longest(child):
                child.state = NodeState.TERMINAL
                child.cut = not ended
                answer, guessed = path_answer(self.task, self.problem, child)
                if answer is not None:
                    self._answered.add(child.id)
                elif child.shortened:  # perhaps no step for that reason alone
                    child.cut = True
                self.emit(Terminal(child.id, answer, guessed, child.cut))
        return children

    def _is_longest(self, node: Node) -> bool:
        """Whether a path has reached a limit of paths."""
        most = self.growth.stop.path_tokens
        return node.depth >= self.limits.max_depth or (most is not None and node.reasoned >= most)

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
            self.verification.forget(pruned)

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
            likely |= {n.id: 1.0 for n in waiting if self._is_candidate(n)}
        return likely

    def _scores(self) -> dict[int, float]:
        """The figures by which the controller chooses, where these are not the values of blocks."""
        return dict(self._search.scores()) if isinstance(self._search, Scores) else {}

    def _is_candidate(self, node: Node) -> bool:
        """Whether a block of the round is still to be verified: not a question, nor given up, nor
        asked about before."""
        asks = self.proposals is not None and self.proposals.is_question(node)
        foreseen = self.verification.is_foreseen(node)
        return node.state is not NodeState.PRUNED and not asks and not foreseen

    # The end

    def _finish(self, tree: ThoughtTree, finished: Sequence[Node]) -> Outcome:
        paths = self._groups.paths(finished, self._allowance.seconds_left)
        votes = ranked(self.aggregate, paths)
        best, answer, guessed = (finished[0] if finished else None), None, False
        if votes:
            best = tree[votes[0].paths[0]]
            answer, guessed = path_answer(self.task, self.problem, best)
        known = self.problem.expected is not None
        grade = self.task.grade(self.problem, answer) if known else None
        correct = None if grade is None else grade.correct
        # without an answer, the paths that were cut may have been on their way to one
        cut = [path.cut for path in ([best] if best is not None and votes else finished)]
        found: Status = "cut" if any(cut) else "exhausted" if answer is None else "solved"
        # what a limit left out, and the search no longer asks for, might have had another answer
        left_out = any(leaf.state is not NodeState.PRUNED for leaf in self._allowance.left_out)
        if left_out or found == "exhausted":
            narrowed = self._allowance.narrowed
            if narrowed is not None:
                self.stop("timeout" if narrowed == "timeout" else "limit", narrowed)
        status: Status = self._stopped or found
        self.emit(
            Answered(
                node=None if best is None else best.id,
                path=() if best is None else tuple(node.id for node in best.path),
                text=answer,
                score=None if best is None else best.judged,
                correct=correct,
                guessed=guessed,
            )
        )
        return Outcome(
            tree=tree,
            status=status,
            finished=tuple(finished),
            best=best,
            answer=answer,
            correct=correct,
            guessed=guessed,
            votes=votes,
            grade=grade,
            limit=self._reached,
        )


@cache
def _warn_of_equals(controller: str) -> None:
    """Say once in a process that all thoughts of a leaf are the same."""
    logger.warning(
        "at temperature 0 all thoughts that '%s' samples after one path are equal, and each of "
        "them is decoded; give a temperature above 0, or take the controller 'chain'",
        controller,
    )


def _inside(expansion: Expansion, growth: Growth) -> list[GivenBlock]:
    """The children of an expansion that begin with an earlier child's tokens."""
    if expansion.begin is None:
        return []
    child, count = expansion.begin
    block = GivenBlock(expansion.leaf, child.tokens[:count], growth, of=child)
    return [block] * expansion.width
