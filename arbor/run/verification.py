"""Verification: values of candidates, from one verifier or several."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from arbor.engine.engine import Engine
from arbor.engine.operation import Growing
from arbor.engine.step import NO_LOGITS
from arbor.errors import UsageError
from arbor.events import Event, Verified
from arbor.registry import name_of
from arbor.run.early_questions import EarlyQuestions
from arbor.run.plugin_answers import inquiry_of, is_finite, verdict_of
from arbor.run.questions import PlannedQuestions
from arbor.run.searches import Steps
from arbor.tasks.base import Problem, Task
from arbor.tree import Node
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

NO_GATE, NO_EXITS = Gate(False, ()), Exits()  # of a verifier that asks everything in full


class Verification:
    """Has candidates valued, and reports the values.

    Args:
        engine: with the search's model.
        task, problem: what is solved.
        verifier: judges.
        questions: checks the verifier's questions against the plan; None: the engine answers any.
        opened: the search in the models of verifiers that have their own.
        emit: called with what happens.
    """

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
        """Ask early about children that are to be valued with others, which still grow.

        Args:
            children: that have ended.
            growing: the operation of the others.
        """
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
        found = yield from self._verdict(self._verifier, children)
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
