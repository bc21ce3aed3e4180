"""Verification: which blocks are valued, their values, and questions asked early."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from arbor.aggregate.base import Aggregate, Confident, PathValues, ReadsPaths
from arbor.controllers.base import ReadsValues, Search
from arbor.engine.engine import Engine
from arbor.engine.operation import NO_LOGITS, Growing
from arbor.errors import UsageError
from arbor.events import Event, Verified
from arbor.registry import name_of
from arbor.run.limits import SessionLimits
from arbor.run.plugin_answers import inquiry_of, is_finite, verdict_of
from arbor.run.questions import PlannedQuestions
from arbor.run.searches import Steps
from arbor.tasks.base import Problem, Task
from arbor.tree import Node, NodeState, ThoughtTree
from arbor.verifiers.base import (
    Asker,
    Combines,
    Compares,
    Exits,
    Gate,
    Inquires,
    Inquiry,
    OwnsModel,
    Verdict,
    Verifier,
    VerifierSearch,
    parts_of,
)

if TYPE_CHECKING:
    from torch import Tensor

    from arbor.engine.engine import Engine
    from arbor.engine.operation import Asking, Growing


@dataclass(frozen=True, slots=True)
class Judged:
    """The readers of a search's values, next to the search itself.

    Attributes:
        verifier: judges.
        aggregate: chooses among finished paths; with one path there is no choice.
        limits: some end the search by the value of a path.
        by_policy: whether what KV stays, and so the tree, depends on values.
    """

    verifier: Verifier
    aggregate: Aggregate
    limits: SessionLimits
    by_policy: bool = False

    def of(self, search: Search, tree: ThoughtTree, children: Sequence[Node]) -> list[Node]:
        """Those of the children that are to be valued before they are reported to the search.

        A verifier that compares candidates gets all of them or none.
        """
        steering = search.reads(children) if isinstance(search, ReadsValues) else children
        read = {child.id for child in (children if self.by_policy else steering)}
        if len(read) < len(children) and (paths := self._read_of_paths) != "none":
            ending = [child for child in children if _may_rank(child, paths)]
            if self._limit_reads or any(_has_rival(tree, child) for child in ending):
                read |= {child.id for child in ending}
        if isinstance(self.verifier, Compares) and self.verifier.compares and read:
            return list(children)
        return [child for child in children if child.id in read]

    @property
    def _read_of_paths(self) -> PathValues:
        """What is read of the values of a finished path."""
        own = self.aggregate.reads if isinstance(self.aggregate, ReadsPaths) else "all"
        return "last" if own == "none" and self._limit_reads else own

    @property
    def _limit_reads(self) -> bool:
        """Whether the search may end by the value of a single path."""
        by_score = self.limits.confidence is not None and not isinstance(self.aggregate, Confident)
        return self.limits.first == "verified" or by_score


def _may_rank(child: Node, paths: PathValues) -> bool:
    """Whether the block's value is, or may become, one of those read of a finished path."""
    return paths == "all" or child.state is NodeState.TERMINAL


def _has_rival(tree: ThoughtTree, child: Node) -> bool:
    """Whether the tree has another path that has ended, or may."""
    others = sum(node.state is not NodeState.PRUNED for node in tree)
    return others > len(child.path)


NO_GATE, NO_EXITS = Gate(False, ()), Exits()  # of a verifier that asks everything in full


class Valuation:
    """Has candidates valued, and reports the values."""

    def __init__(
        self,
        engine: Engine,
        task: Task,
        problem: Problem,
        verifier: Verifier,
        questions: PlannedQuestions | None,
        opened: Mapping[Verifier, VerifierSearch],
        emit: Callable[[Event], None],
    ) -> None:
        self._engine = engine
        self._task = task
        self._problem = problem
        self._verifier = verifier
        self._questions = questions
        self._opened = opened
        self._emit = emit
        self._early = EarlyQuestions(engine)
        self._foreseen = [
            part
            for part in parts_of(verifier)
            if isinstance(part, Inquires)
            and not isinstance(part, OwnsModel)
            and not (isinstance(part, Compares) and part.compares)
        ]

    @property
    def foresees(self) -> bool:
        """Whether questions about a block depend on no other, so that they may be asked early."""
        return bool(self._foreseen) and self._engine.mode == "lossless"

    def foresee(self, children: Sequence[Node], growing: Growing) -> None:
        """Ask early about children that are to be valued with others, which still grow."""
        for part in self._foreseen if children else ():
            inquiry = self._inquiry(part, children)
            if inquiry is not None and inquiry.nodes and not inquiry.ways:
                with self._explaining(inquiry):
                    self._early.ask(inquiry.nodes, inquiry.questions, growing)

    def is_foreseen(self, child: Node) -> bool:
        """Whether a block needs its KV no longer to be valued, because it was asked about."""
        return self._early.answered(child)

    def steps(self, children: Sequence[Node]) -> Steps[bool]:
        """Value the children.

        Returns:
            whether the values depend on answers of the model.
        """
        yield from self._early.waiting  # what it is about may be given up afterwards
        if not children:
            self._early.clear()
            return False
        began = time.perf_counter()
        found = yield from self._verdict(self._verifier, list(children))  # it may change its own
        verdict = _checked(self._verifier, children, found)
        for child, value in zip(children, verdict.values, strict=True):
            child.value, child.valued = value, True
        if verdict.scores:
            for child, score in zip(children, verdict.scores, strict=True):
                child.score = score
        self._early.clear()
        self._engine.changed(children)
        gate, exits = verdict.gate or NO_GATE, verdict.exits or NO_EXITS
        self._emit(
            Verified(
                verifier=name_of(self._verifier),
                nodes=tuple(child.id for child in children),
                values=verdict.values,
                asked=verdict.asked,
                elapsed_s=time.perf_counter() - began,
                scores=verdict.scores,
                confidences=gate.confidences,
                skipped=gate.skipped,
                audited=gate.audited or exits.audited,
                exit_layer=exits.exit_layer,
                layers=exits.layers,
                entropy=exits.entropy,
            )
        )
        return verdict.asked > gate.audit_asked

    def _verdict(
        self, verifier: Verifier, children: Sequence[Node], counts: bool = True
    ) -> Steps[Verdict]:
        """A verifier's verdict: part by part where it combines others, by its own model where it
        has one, and its questions asked as one operation where it has them ready.

        Args:
            verifier: judges.
            children: the candidates.
            counts: whether its questions count as an operation of their own; one of a verification
                does, see `FutureReads`.
        """
        if isinstance(verifier, Combines):
            verdicts: list[Verdict] = []
            for part in verifier.parts:
                first = counts and not any(verdict.asked for verdict in verdicts)
                verdict = yield from self._verdict(part, children, first)
                verdicts.append(_checked(part, children, verdict))
            return verifier.combined(verdicts)
        if isinstance(verifier, OwnsModel):
            judging = self._opened[verifier].begin(children)
            yield judging
            return judging.verdict()
        inquiry = self._inquiry(verifier, children) if isinstance(verifier, Inquires) else None
        if inquiry is None:
            return verdict_of(verifier, self._task, self._problem, children, self._asker)
        if not inquiry.nodes:
            return inquiry.verdict(NO_LOGITS)
        with self._explaining(inquiry):
            logits = yield from self._answers(inquiry, counts)
        return inquiry.verdict(logits)

    def _answers(self, inquiry: Inquiry, counts: bool) -> Steps[Tensor]:
        """The logits after the questions of an inquiry, [n, V] float32: those that were asked
        early, and the others."""
        engine, nodes, questions = self._engine, inquiry.nodes, inquiry.questions
        known = {} if inquiry.ways else self._early.take(nodes, questions)
        missing = [at for at in range(len(nodes)) if at not in known]
        if not missing:
            if counts:
                engine.count_operation(nodes[0].tree)
            return torch.stack([known[at] for at in range(len(nodes))])
        asking = engine.begin_ask(
            [nodes[at] for at in missing],
            [questions[at] for at in missing],
            ways=inquiry.ways,
            counts=counts,
        )
        asking.counts = not inquiry.audits
        yield asking
        logits = asking.result()
        if not known:
            return logits
        known |= dict(zip(missing, logits, strict=True))
        return torch.stack([known[at] for at in range(len(nodes))])

    def _inquiry(self, verifier: Inquires, children: Sequence[Node]) -> Inquiry | None:
        return inquiry_of(verifier, self._task, self._problem, children, self._asker)

    @property
    def _asker(self) -> Asker:
        return self._engine if self._questions is None else self._questions

    def _explaining(self, inquiry: Inquiry) -> AbstractContextManager[None]:
        """Within, the questions of an inquiry are asked."""
        if self._questions is None:
            return nullcontext()
        return self._questions.explaining(inquiry.nodes, inquiry.questions)

    def forget(self, nodes: Sequence[Node]) -> None:
        """Free what the models of verifiers hold for blocks that the search has given up."""
        for each in self._opened.values():
            each.forget(nodes)


def _checked(verifier: Verifier, children: Sequence[Node], verdict: Verdict) -> Verdict:
    """A verifier's verdict, refused where a search cannot order its values.

    Raises:
        UsageError: not one value for each candidate, or a value that is not a finite number; the
            same of scores.
    """
    name = name_of(verifier)
    every: list[Sequence[object]] = [verdict.values]
    if verdict.scores:
        every.append(verdict.scores)
    for values in every:
        if len(values) != len(children):
            raise UsageError(
                "verdict-count",
                f"the verifier '{name}' gave {len(values)} values for {len(children)} candidates.",
                "It must give one for each, in their order.",
            )
        for child, value in zip(children, values, strict=True):
            if isinstance(value, bool) or not is_finite(value):
                raise UsageError(
                    "verdict-range",
                    f"the verifier '{name}' valued block {child.id} at {value!r:.40}.",
                    "Values are finite numbers, from 0 to 1 where they are probabilities.",
                    node=child.id,
                )
    scores = tuple(map(float, verdict.scores))
    return replace(verdict, values=tuple(map(float, verdict.values)), scores=scores)


class SomeEnded:
    """Wait until some blocks have ended while others still wait for room, or until all have."""

    def __init__(self, growing: Growing) -> None:
        self._growing = growing
        self._left = growing.left
        self._taken: set[Node] = set()
        self._ended: list[Node] = []

    @property
    def done(self) -> bool:
        """Whether there is something to take, or nothing to come."""
        growing = self._growing
        if growing.divided and growing.left != self._left:
            self._left = growing.left
            self._ended = [
                child
                for child in growing.children
                if child.state is NodeState.CLOSED and child not in self._taken
            ]
        return growing.done or bool(self._ended)

    def take(self) -> list[Node]:
        """The blocks that have ended since the last call."""
        ended, self._ended = self._ended, []
        self._taken.update(ended)
        return ended


class EarlyQuestions:
    """Questions that are asked as soon as they can be, and their answers.

    Where the blocks of a round do not all fit at once, the first of them have left the device when
    the last have ended, and would be computed again to be judged. An answer depends on the path and
    the question alone, so that it may as well be asked for before.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._asking: list[Asking] = []
        self._places: dict[_Asked, tuple[Asking, int]] = {}
        self._about: dict[Node, list[Asking]] = {}

    def ask(
        self, nodes: Sequence[Node], questions: Sequence[Sequence[int]], growing: Growing
    ) -> None:
        """Ask, ahead of the blocks of an operation that wait; what was asked before is not asked
        again."""
        asked = [_asked(node, question) for node, question in zip(nodes, questions, strict=True)]
        fresh = {each: at for at, each in enumerate(asked) if each not in self._places}
        if not fresh:
            return
        asking = self._engine.begin_ask(
            [nodes[at] for at in fresh.values()],
            [questions[at] for at in fresh.values()],
            counts=False,
            ahead_of=growing,
        )
        self._asking.append(asking)
        self._places |= {each: (asking, place) for place, each in enumerate(fresh)}
        for at in fresh.values():
            self._about.setdefault(nodes[at], []).append(asking)

    @property
    def waiting(self) -> list[Asking]:
        """What is not answered yet."""
        return [each for each in self._asking if not each.done]

    def answered(self, node: Node) -> bool:
        """Whether all that was asked about a block is answered."""
        about = self._about.get(node, ())
        return bool(about) and all(asking.done for asking in about)

    def take(self, nodes: Sequence[Node], questions: Sequence[Sequence[int]]) -> dict[int, Tensor]:
        """The answers there are, [V] float32, by the place of the question."""
        found = {}
        for at, (node, question) in enumerate(zip(nodes, questions, strict=True)):
            asking, place = self._places.get(_asked(node, question), (None, 0))
            if asking is not None and asking.done and asking.error is None:
                found[at] = asking.answers[place]
        return found

    def clear(self) -> None:
        """Forget all."""
        self._asking.clear()
        self._places.clear()
        self._about.clear()


# a block's parent and tokens, which siblings may have in common; and the question's tokens
_Asked = tuple[Node | None, tuple[int, ...], tuple[int, ...]]


def _asked(node: Node, question: Sequence[int]) -> _Asked:
    return node.parent, tuple(node.tokens), tuple(question)
