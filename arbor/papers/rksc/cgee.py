"""The verifier that skips verifications which the generation's confidence decides (CGEE)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from arbor.errors import UsageError, check_settings
from arbor.model.fitted_files import found_file
from arbor.model.loading import ModelLocation
from arbor.papers.rksc.exit_thresholds import (
    DECIMALS,
    ExitThresholds,
    LayerExit,
    Method,
    load_thresholds,
)
from arbor.tasks.base import BlockLimits, Problem, Task
from arbor.tree import Node
from arbor.verifiers.base import (
    Asker,
    ChecksQuestions,
    Compares,
    Encoder,
    Gate,
    Inquires,
    Inquiry,
    OwnsModel,
    PlansQuestions,
    Verdict,
    Verifier,
    parts_of,
)
from arbor.verifiers.self_eval import CERTAIN, SelfEval

if TYPE_CHECKING:
    from torch import Tensor

Rule = Literal["and", "release"]
SkippedValues = Literal["confidence", "inherited"]
Levels = Literal["skip", "exit", "both"]

# thresholds of the absolute and the relative gap where neither the user nor a calibration sets them
CONFIDENCE, GAP = 0.70, 0.08
CALIBRATED = SelfEval()  # the verifier that ``arbor calibrate exit`` asks
# the released gate: (confidence, absolute gap) or (confidence, relative gap)
RELEASE_ABSOLUTE, RELEASE_RELATIVE = (0.70, 0.06), (0.63, 0.08)


@dataclass(frozen=True)
class CGEE:
    """Skips the verification where the generation's confidence is decisive; else asks a verifier.

    Confidence-gated early exit (RKSC, arXiv 2606.09937, section 2.3). Level 1, Eq. 4:

        max_b p(b) >= confidence   and   (p1 - p2) / p1 >= gap

    p(b) is the mean top-1 probability of the tokens of a candidate (`Node.top1`), p1 and p2 are
    the largest and the second largest p of the candidates of one verification: all blocks of a
    round, or the children of one expansion in a search without rounds. Equal states are one
    candidate. A single state has no competitor, so its verification is never skipped. p is
    compared to `DECIMALS` decimals.

    Level 2 lets the questions of the verifier leave the model early, see `LayerExit`. They run in
    full where `verify` is called, as nothing but a search gives the engine all questions at once.

    A skipped verification values each candidate at p(b), below 1, which is a proof. That orders the
    candidates of one verification as the paper does; searches that compare values of different
    verifications (best-first, MCTS) compare p with the verifier's values then, on another scale.
    `values=inherited` keeps that scale: the value of the nearest valued ancestor times p(b) / p1,
    and p(b) where there is none.

    Args:
        verifier: what is asked where the gate does not decide.
        confidence: least p1, in [0, 1]; None: calibrated for the model and the task, where the
            verifier is `CALIBRATED`, else `CONFIDENCE`.
        gap: least relative gap, in [0, 1]; None: likewise, else `GAP`.
        rule: ``and`` as published; ``release``: (p1 >= 0.70 and p1 - p2 >= 0.06) or (p1 >= 0.63
            and (p1 - p2) / p1 >= 0.08), as the released code decides, without `confidence` and
            `gap`.
        values: of a skipped verification, see above.
        levels: ``skip``: the above; ``exit``: level 2 alone, `exit_rule` for every question;
            ``both``.
        exit_rule: when a question leaves before the last layer; None: likewise, else `LayerExit()`.
        calibration: which of the calibrated thresholds: ``risk``, those with a bound on
            disagreement, or ``paper``, by its percentiles.
        audit: compute in full what is skipped or left early, and report those values; what the
            search sees does not change.

    Differs from the paper: a tree search verifies more than once a problem, and p(b) is the
    block's, not the path's. The released code values a skipped branch at p(b) ** 1.5.
    """

    verifier: Verifier = field(default_factory=SelfEval)
    confidence: float | None = None
    gap: float | None = None
    rule: Rule = "and"
    values: SkippedValues = "confidence"
    levels: Levels = "skip"
    exit_rule: LayerExit | None = None
    calibration: Method = "risk"
    audit: bool = False

    def __post_init__(self) -> None:
        if any(isinstance(part, OwnsModel) for part in parts_of(self.verifier)):
            raise UsageError(
                "exit-verifier",
                "cgee wraps a verifier that asks the search's model, and not a reward model.",
                "To use both, combine them: parts=cgee,prm.",
            )
        if self.levels != "skip" and not isinstance(self.verifier, Inquires):
            raise UsageError(
                "exit-verifier",
                f"levels={self.levels}: questions leave early only where a verifier gives all of "
                "them at once (inquire), and this one does not.",
                "Use levels=skip, or a verifier such as self.",
            )
        check_settings(
            self,
            confidence=(self.confidence is None or 0 <= self.confidence <= 1, "from 0 to 1"),
            gap=(self.gap is None or 0 <= self.gap <= 1, "from 0 to 1"),
        )

    @property
    def needs_model(self) -> bool:
        return self.verifier.needs_model

    @property
    def compares(self) -> bool:
        """The gate does, and the verifier may."""
        own = isinstance(self.verifier, Compares) and self.verifier.compares
        return own or self.levels != "exit"

    @property
    def may_leave(self) -> bool:
        """Questions may, by level 2."""
        return self.levels != "skip"

    def calibrated(self, source: ModelLocation, task: str) -> CGEE:
        """With the thresholds calibrated for a model and a task, where it takes any: they bound how
        often the verifier `CALIBRATED` would prefer another candidate, and hold for no other."""
        given = None not in (self.confidence, self.gap, self.exit_rule)
        if given or self.verifier != CALIBRATED or (path := found_file("exit", source)) is None:
            return self
        found = load_thresholds(path, task, self.calibration)
        return self if found is None else self.with_thresholds(found)

    def with_thresholds(self, given: ExitThresholds) -> CGEE:
        """These thresholds where none were set."""
        return replace(
            self,
            confidence=given.confidence if self.confidence is None else self.confidence,
            gap=given.gap if self.gap is None else self.gap,
            exit_rule=self.exit_rule or given.exit_rule,
        )

    def verify(
        self, task: Task, problem: Problem, candidates: Sequence[Node], engine: Asker
    ) -> Verdict:
        """Values of the candidates, by p or by the verifier, whose questions run in full."""
        gate = self._gate(candidates)
        if gate.skipped and not self.audit:
            return self._skipped(candidates, gate)
        return self._judged(
            candidates, gate, self.verifier.verify(task, problem, candidates, engine)
        )

    def inquire(
        self, task: Task, problem: Problem, candidates: Sequence[Node], encoder: Encoder
    ) -> Inquiry | None:
        """The verifier's questions, none where the verification is skipped; None if the verifier
        asks in `verify`."""
        gate = self._gate(candidates)
        if gate.skipped and not self.audit:
            return Inquiry((), (), lambda _: self._skipped(candidates, gate))
        if not isinstance(self.verifier, Inquires):
            return None
        asked = self.verifier.inquire(task, problem, candidates, encoder)
        if asked is None:
            return None
        judge = asked.verdict
        if self.levels == "skip" or gate.skipped or not asked.nodes:
            return replace(
                asked,
                verdict=lambda logits: self._judged(candidates, gate, judge(logits)),
                audits=asked.audits or gate.skipped,
            )
        import torch

        from arbor.papers.rksc.exit_watch import exits_of, ways_of

        rule = self.exit_rule or LayerExit()
        ways = ways_of(rule, len(asked.nodes), asked.verdicts, audit=self.audit)

        def verdict(logits: Tensor) -> Verdict:
            found = self._judged(candidates, gate, judge(logits))
            full = [way.full for way in ways if way.full is not None]
            audited = judge(torch.stack(full)).values if full else ()
            return replace(found, exits=exits_of(ways, asked.rows, audited))

        return replace(asked, verdict=verdict, ways=ways)

    def check(self, task: Task, problem: Problem, encoder: Encoder) -> None:
        """The verifier's own check."""
        if isinstance(self.verifier, ChecksQuestions):
            self.verifier.check(task, problem, encoder)

    def most_question_tokens(
        self, task: Task, problem: Problem, boundary: BlockLimits, encoder: Encoder
    ) -> int | None:
        """The verifier's own bound; None if its questions are the task's."""
        if isinstance(self.verifier, PlansQuestions):
            return self.verifier.most_question_tokens(task, problem, boundary, encoder)
        return None

    def _gate(self, candidates: Sequence[Node]) -> Gate:
        return Gate(False, ()) if self.levels == "exit" else self.decide(candidates)

    def decide(self, candidates: Sequence[Node]) -> Gate:
        """Whether the confidences of the candidates are decisive."""
        confidences = confidences_of(candidates)
        leading = leading_two([tuple(node.thoughts) for node in candidates], confidences)
        return Gate(len(leading) > 1 and self._is_decisive(*leading), confidences)

    def _is_decisive(self, first: float, second: float) -> bool:
        absolute, relative = round(first - second, DECIMALS), relative_gap(first, second)
        if self.rule == "release":
            least, gap = RELEASE_ABSOLUTE
            lower, share = RELEASE_RELATIVE
            return (first >= least and absolute >= gap) or (first >= lower and relative >= share)
        confidence = CONFIDENCE if self.confidence is None else self.confidence
        gap = GAP if self.gap is None else self.gap
        return first >= confidence and relative >= gap

    def _skipped(
        self, candidates: Sequence[Node], gate: Gate, audited: Verdict | None = None
    ) -> Verdict:
        """The verdict of a skipped verification."""
        most = max(gate.confidences, default=0.0) or 1.0
        values = []
        for node, confidence in zip(candidates, gate.confidences, strict=True):
            value = confidence
            if self.values == "inherited" and (above := _inherited(node)) is not None:
                value = above * confidence / most
            values.append(min(max(value, 0.0), CERTAIN))
        if audited is None:
            return Verdict(tuple(values), 0, gate=gate)
        gate = replace(gate, audited=audited.values, audit_asked=audited.asked)
        return Verdict(tuple(values), audited.asked, gate=gate)

    def _judged(self, candidates: Sequence[Node], gate: Gate, found: Verdict) -> Verdict:
        """The verifier's verdict; under an audit of a skipped verification that of the gate."""
        if gate.skipped:
            return self._skipped(candidates, gate, found)
        return replace(found, gate=gate)


def confidences_of(candidates: Sequence[Node]) -> tuple[float, ...]:
    """p of each candidate, to `DECIMALS` decimals."""
    return tuple(round(node.top1, DECIMALS) for node in candidates)


def leading_two(texts: Sequence[Hashable], confidences: Sequence[float]) -> tuple[float, ...]:
    """The two largest confidences of different texts; of one text one."""
    best: dict[Hashable, float] = {}
    for text, confidence in zip(texts, confidences, strict=True):
        best[text] = max(best.get(text, 0.0), confidence)
    return tuple(sorted(best.values(), reverse=True)[:2])


def relative_gap(first: float, second: float) -> float:
    """(p1 - p2) / p1, to `DECIMALS` decimals: 0.9 - 0.72 over 0.9 is not 0.2 in binary."""
    return round((first - second) / first, DECIMALS) if first else 0.0


def _inherited(node: Node) -> float | None:
    """The value of the nearest valued ancestor."""
    return next((each.value for each in reversed(node.path[:-1]) if each.valued), None)
