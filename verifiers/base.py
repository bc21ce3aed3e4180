"""Verifiers: the value of a thought, judged without the answer key."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from arbor.budget import Budget, Plan
from arbor.events import Listener
from arbor.tasks.base import BlockLimits, Problem, Task
from arbor.tree import Node

if TYPE_CHECKING:
    from torch import Tensor

    from arbor.engine.engine import Companion
    from arbor.engine.hooks import Way
    from arbor.model.loading import ModelLocation
    from arbor.model.model_info import ModelInfo


@dataclass(frozen=True, slots=True)
class Gate:
    """A gate's decision about one verification.

    Attributes:
        skipped: the candidates are valued without the verification.
        confidences: of each candidate, in [0, 1], as the gate compared them.
        audited: values of the verification that was computed although it is skipped; empty without
            an audit.
        audit_asked: questions of that verification.
    """

    skipped: bool
    confidences: tuple[float, ...]
    audited: tuple[float, ...] = ()
    audit_asked: int = 0


@dataclass(frozen=True, slots=True)
class Exits:
    """Where the questions of one verification left the model's layers.

    Attributes:
        exit_layer: of each candidate, the layer its question left after, from 0; -1: no question.
        layers: of the model.
        entropy: of each candidate, the uncertainty after each layer; nan where not looked at.
        audited: values after the last layer; empty without an audit.
    """

    exit_layer: tuple[int, ...] = ()
    layers: int = 0
    entropy: tuple[tuple[float, ...], ...] = ()
    audited: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """Values of a batch of candidates.

    Attributes:
        values: one per candidate in [0, 1], in the order given.
        asked: questions put to the search's model (0 for verifiers that need no model, or have one
            of their own).
        gate: of a verifier that may skip verifications.
        exits: of questions that may leave early.
        scores: of each candidate's last step alone, where the values are of whole paths; empty
            where they are the values.
    """

    values: tuple[float, ...]
    asked: int
    gate: Gate | None = field(default=None, kw_only=True)
    exits: Exits | None = field(default=None, kw_only=True)
    scores: tuple[float, ...] = field(default=(), kw_only=True)


class Encoder(Protocol):
    """Token ids of texts."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a continuation (no special tokens)."""
        ...


@runtime_checkable
class TakesTurns(Protocol):
    """The part of an encoder that knows how its model is asked in a turn of a conversation."""

    def turn(self, message: str, answer: str = "") -> list[int] | None:
        """Token ids of the end of the assistant's turn, a user's turn, and the head of an answer.

        Args:
            message: of the user.
            answer: the beginning of the assistant's answer.

        Returns:
            The first one ends the assistant's turn. None: this model is asked in the text that it
            continues.
        """
        ...


@runtime_checkable
class Asker(Encoder, Protocol):
    """The part of the engine a verifier may use; questions run within the KV budget."""

    def ask(self, nodes: Sequence[Node], questions: Sequence[Sequence[int]]) -> Tensor:
        """The model's next-token logits after `path of node + question`, for each pair.

        The tree does not change.

        Returns:
            [len(nodes), V] float32.
        """
        ...


@runtime_checkable
class Verifier(Protocol):
    """A judge and its settings: a frozen dataclass."""

    @property
    def needs_model(self) -> bool:
        """Whether it asks the model (then one path's budget includes the question)."""
        ...

    def verify(
        self, task: Task, problem: Problem, candidates: Sequence[Node], engine: Asker
    ) -> Verdict:
        """Values of closed or terminal blocks."""
        ...


@dataclass(frozen=True, slots=True)
class Inquiry:
    """The questions a verifier has about a batch of candidates, and how it judges by the answers.

    Attributes:
        nodes: the block each question follows.
        questions: token ids, at least one each.
        verdict: called with the next-token logits after the questions, [len(nodes), V] float32.
        rows: per candidate, the place of its question; -1: none. Empty: not known.
        verdicts: per question, the token ids that `verdict` reads; empty: not known.
        ways: of each question through the layers, where they may leave before the last one; empty:
            none does.
        audits: the answers are compared with values that are known already; the order of a search
            does not wait for them.
    """

    nodes: Sequence[Node]
    questions: Sequence[Sequence[int]]
    verdict: Callable[[Tensor], Verdict]
    rows: Sequence[int] = ()
    verdicts: Sequence[Sequence[int]] = ()
    ways: Sequence[Way] = ()
    audits: bool = False


@runtime_checkable
class Inquires(Protocol):
    """The part of a verifier that asks all of its questions at once.

    The engine then answers them together with the work of other searches. A verifier without it
    asks in `verify`, and holds up the other searches of its process meanwhile.
    """

    def inquire(
        self, task: Task, problem: Problem, candidates: Sequence[Node], encoder: Encoder
    ) -> Inquiry | None:
        """The questions about closed or terminal blocks; None: `verify` is called instead."""
        ...


@runtime_checkable
class ChecksQuestions(Protocol):
    """The part of a verifier that checks a task's questions before the weights load."""

    def check(self, task: Task, problem: Problem, encoder: Encoder) -> None:
        """Refuse questions that this model's tokenizer makes unanswerable.

        Raises:
            UsageError: names what is wrong, and what works.
        """
        ...


@runtime_checkable
class PlansQuestions(Protocol):
    """The part of a verifier whose questions are its own, not the task's: a bound for the plan."""

    def most_question_tokens(
        self, task: Task, problem: Problem, boundary: BlockLimits, encoder: Encoder
    ) -> int | None:
        """The most tokens of a question in a search with these limits; None: the task's."""
        ...


@runtime_checkable
class Compares(Protocol):
    """The part of a verifier whose values depend on which candidates it judges together.

    Without it a search may have a part of a round judged, where nothing reads the other values.
    """

    @property
    def compares(self) -> bool:
        """Whether they do."""
        ...


@runtime_checkable
class TakesCalibration(Protocol):
    """The part of a verifier that takes what was calibrated for the model and the task."""

    def calibrated(self, source: ModelLocation, task: str) -> Verifier:
        """The verifier with what was; itself where nothing was.

        Args:
            source: the model.
            task: its name.
        """
        ...


# Verifiers with a model of their own


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the model of a verifier runs: as the solver's.

    Attributes:
        device, backend, deterministic, debug: see `Solver`.
    """

    device: str = "auto"
    backend: str = "auto"
    deterministic: bool = False
    debug: bool = False


@dataclass(frozen=True, slots=True)
class SearchShape:
    """A search, as the plan of a verifier's model needs it.

    Attributes:
        task, problem: what is solved.
        boundary: the longest step, in tokens of the search's model, and the most steps of a path.
        blocks: most blocks of the search.
        prompt_tokens: length of the prompt in tokens of the search's model.
    """

    task: Task
    problem: Problem
    boundary: BlockLimits
    blocks: int
    prompt_tokens: int


@runtime_checkable
class OwnsModel(Protocol):
    """The part of a verifier that runs a model of its own, next to the search's.

    Its solver keeps the model, loads it with its own and closes it; its searches share it, each
    with its own `VerifierSearch`.
    """

    def own_model(self, placement: Placement) -> VerifierModel:
        """The model, located and not loaded.

        Raises:
            UsageError, ModelError: invalid settings, or no such model.
        """
        ...


@runtime_checkable
class MayLeave(Protocol):
    """The part of a verifier whose questions may leave the search's model between its layers.

    Attributes:
        may_leave: whether any of them may, with these settings.
    """

    @property
    def may_leave(self) -> bool: ...


@runtime_checkable
class VerifierModel(Protocol):
    """The model of a verifier, with an engine of its own.

    Attributes:
        budget: of its KV.
    """

    budget: Budget

    def plan(self, search: SearchShape) -> Plan:
        """The memory of a search in this model; reads config and tokenizer.

        Raises:
            ArborError: not a model for this, or the search does not fit.
        """
        ...

    def describe(self) -> ModelInfo:
        """The sizes of the model, from its config alone."""
        ...

    def load(self) -> Companion:
        """The engine of the model, which the search's engine steps along; loads the weights."""
        ...

    def open(self, search: SearchShape, plan: Plan, pool: int, emit: Listener) -> VerifierSearch:
        """Begin a search, next to those in progress.

        Args:
            search: as planned.
            plan: the plan.
            pool: the budget of all searches in progress, tokens.
            emit: called with the events of the search.
        """
        ...

    def close(self) -> None:
        """Free the weights and the KV."""
        ...


class VerifierSearch(Protocol):
    """One search, as the model of its verifier sees it."""

    def begin(self, candidates: Sequence[Node]) -> Judging:
        """Begin to judge closed or terminal blocks; at least one."""
        ...

    def forget(self, nodes: Sequence[Node]) -> None:
        """Free what is held for blocks that the search has given up."""
        ...

    def close(self) -> None:
        """End the search and free what is held for it."""
        ...


class Judging(Protocol):
    """A verdict in progress; steps of the engine of `VerifierModel.load` bring it forward."""

    @property
    def done(self) -> bool:
        """Whether the verdict is ready."""
        ...

    def verdict(self) -> Verdict:
        """The verdict, once it is ready.

        Raises:
            Exception: what ended it.
        """
        ...


@runtime_checkable
class Combines(Protocol):
    """The part of a verifier that combines the verdicts of others."""

    @property
    def parts(self) -> Sequence[Verifier]:
        """The others."""
        ...

    def combined(self, verdicts: Sequence[Verdict]) -> Verdict:
        """One verdict from those of the parts, in their order, on the same candidates."""
        ...


def parts_of(verifier: Verifier) -> list[Verifier]:
    """The verifiers that judge: itself, or those that it combines, however deep."""
    if isinstance(verifier, Combines):
        return [each for part in verifier.parts for each in parts_of(part)]
    return [verifier]
