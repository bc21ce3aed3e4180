"""Calibration of CGEE: thresholds by the paper's percentiles, and by a bound on disagreement."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np
import torch

from arbor.engine.operation import NO_LOGITS
from arbor.errors import UsageError
from arbor.events import preferred
from arbor.measure.statistics import clopper_pearson
from arbor.papers.rksc.cgee import confidences_of, leading_two, relative_gap
from arbor.papers.rksc.exit_thresholds import ExitThresholds, LayerExit, Measure
from arbor.papers.rksc.exit_watch import Exiting, ways_of
from arbor.registry import name_of
from arbor.tasks.base import Problem, Task
from arbor.tree import Node
from arbor.verifiers.base import Asker, Encoder, Verdict
from arbor.verifiers.self_eval import SelfEval

if TYPE_CHECKING:
    from arbor.solver import Solver

S = TypeVar("S")

PAPER_PROBLEMS = 30  # held-out problems of the paper's calibration
LEAST = 8  # problems of a calibration
# Candidates, fixed before anything is measured: the bounds hold for each of them.
CONFIDENCES = (0.0, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98)
GAPS = (0.0, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2)
THRESHOLDS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.1)
SETTLES = (0.005, 0.02, 0.05, 0.1, 0.3, 1.1)
PATIENCES = (1, 2)


@dataclass(frozen=True, slots=True)
class Verification:
    """One verification computed in full, with what its questions were after each layer.

    Attributes:
        problem: index of its problem.
        confidence: the largest p of its candidates.
        gap: relative gap between the two largest p; None where all candidates are one state.
        confident: place of the candidate with the largest p.
        values: of the candidates, after the last layer.
        rows: place of each candidate's question; -1: none.
        uncertainties: of each question after layers 1, 2, ..., all but the last.
        by_layer: values of the candidates had every question left after these layers.
    """

    problem: int
    confidence: float
    gap: float | None
    confident: int
    values: tuple[float, ...]
    rows: tuple[int, ...]
    uncertainties: tuple[tuple[float, ...], ...]
    by_layer: tuple[tuple[float, ...], ...]

    def leaves_at(self, rule: LayerExit) -> list[int]:
        """Layers that each question runs through under a rule."""
        ends = []
        for values in self.uncertainties:
            way = Exiting(rule)
            way.begin(len(values) + 1)
            for layers, value in enumerate(values, 1):
                if rule.checks(layers) and way.look(layers, value):
                    break
            ends.append(way.layers)
        return ends

    def valued(self, ends: Sequence[int]) -> tuple[float, ...]:
        """Values of the candidates if their questions leave after so many layers."""
        return tuple(
            value
            if row < 0 or ends[row] > len(self.by_layer)
            else self.by_layer[ends[row] - 1][place]
            for place, (value, row) in enumerate(zip(self.values, self.rows, strict=True))
        )


@dataclass(frozen=True, slots=True)
class Choice(Generic[S]):
    """A setting, and its figures on the calibration problems.

    Attributes:
        setting: None: no candidate is safe enough.
        saved: part of the verifications skipped, or of the layers.
        decided: verifications that it changed in any way: skipped, or left early.
        disagreements: verifications that prefer another candidate under it.
        n: verifications.
        bound: one-sided upper bound of the part that disagrees.
        candidates: settings among which it was chosen.
    """

    setting: S | None
    saved: float = 0.0
    decided: int = 0
    disagreements: int = 0
    n: int = 0
    bound: float = 1.0
    candidates: int = 0


@dataclass(frozen=True, slots=True)
class ExitCalibration:
    """Thresholds of both levels, by both methods.

    Attributes:
        skip: (confidence, gap), risk-controlled.
        leave: the exit rule, risk-controlled.
        paper: by the paper's percentiles.
        paper_skip, paper_leave: figures of these.
        problems: with verifications.
    """

    skip: Choice[tuple[float, float]]
    leave: Choice[LayerExit]
    paper: ExitThresholds
    paper_skip: Choice[tuple[float, float]]
    paper_leave: Choice[LayerExit]
    problems: int

    @property
    def risk(self) -> ExitThresholds:
        """The risk-controlled thresholds; where none is safe, those that change nothing."""
        safe = ExitThresholds()
        confidence, gap = self.skip.setting or (safe.confidence, safe.gap)
        return ExitThresholds(confidence, gap, self.leave.setting or safe.exit_rule)


class Recorder:
    """`SelfEval`, every question through all layers, which records what each would give.

    Args:
        measure, norm: of the uncertainties, as in `LayerExit`.

    Attributes:
        found: the verifications so far.
        solver: whose verifier it is; set before the first search.
        problem: index of the problem being solved.
    """

    needs_model = True

    def __init__(self, measure: Measure = "entropy", norm: bool = True) -> None:
        self.verifier = SelfEval()
        self.found: list[Verification] = []
        self.solver: Solver | None = None
        self.problem = 0
        self._rule = LayerExit(1, 0.0, patience=1, measure=measure, norm=norm)

    def check(self, task: Task, problem: Problem, encoder: Encoder) -> None:
        """The verifier's own check."""
        self.verifier.check(task, problem, encoder)

    def verify(
        self, task: Task, problem: Problem, candidates: Sequence[Node], engine: Asker
    ) -> Verdict:
        """The verifier's values."""
        inquiry = self.verifier.inquire(task, problem, candidates, engine)
        if not inquiry.nodes:  # nothing to compare
            return inquiry.verdict(NO_LOGITS)
        assert self.solver is not None, "it has not been given its solver"
        running = self.solver.engine
        ways = ways_of(self._rule, len(inquiry.nodes), inquiry.verdicts)
        for way in ways:
            way.keep = True
        asking = running.begin_ask(inquiry.nodes, inquiry.questions, ways)
        while not asking.done:
            running.step()
        verdict = inquiry.verdict(asking.result())
        confidences = confidences_of(candidates)
        leading = leading_two([tuple(node.thoughts) for node in candidates], confidences)
        layers = zip(*(way.kept for way in ways), strict=True)
        self.found.append(
            Verification(
                problem=self.problem,
                confidence=leading[0],
                gap=relative_gap(*leading) if len(leading) > 1 else None,
                confident=preferred(confidences),
                values=tuple(verdict.values),
                rows=tuple(inquiry.rows),
                uncertainties=tuple(tuple(way.values) for way in ways),
                by_layer=tuple(tuple(inquiry.verdict(torch.stack(each)).values) for each in layers),
            )
        )
        return verdict


def collect_verifications(solver: Solver, problems: Iterable[Problem]) -> list[Verification]:
    """Solve problems with full verification and record every verification.

    Args:
        solver: its verifier is a `Recorder`.
        problems: of the calibration split.

    Raises:
        UsageError: the solver's controller has verified nothing in `LEAST` problems.
    """
    recorder = solver.verifier
    assert isinstance(recorder, Recorder), "the solver's verifier records nothing"
    recorder.solver = solver
    for index, problem in enumerate(problems):
        recorder.problem = index
        solver.solve(problem)
        if not recorder.found and index + 1 == LEAST:
            raise UsageError(
                "calibrate-few",
                f"the controller '{name_of(solver.controller)}' verifies nothing: {LEAST} problems "
                "were solved without a verification.",
                "Take one that does, such as --controller tot.",
            )
    return list(recorder.found)


def calibrate_exit(
    found: Sequence[Verification],
    *,
    risk: float = 0.02,
    error: float = 0.05,
    measure: Measure = "entropy",
    norm: bool = True,
) -> ExitCalibration:
    """Choose the thresholds of both levels.

    The risk-controlled choice of each level is the setting that saves most among those whose upper
    bound on the part of verifications that prefer another candidate is at most `risk`. The bounds
    are Clopper and Pearson's, one-sided, at confidence 1 - error / candidates each, so that with
    probability 1 - error all of them hold (Bonferroni; Learn then Test, arXiv 2110.01052). They
    count verifications as independent, which those of one problem are not quite.

    The paper's: `confidence` is the 75th percentile of the largest p, `gap` the 25th of the
    relative gap, and the threshold the median uncertainty where it first settles, of 30 problems.

    Args:
        found: from `collect_verifications`.
        risk: largest part of verifications that may prefer another candidate.
        error: chance that the choice breaks that.
        measure, norm: as recorded.

    Raises:
        UsageError: too few problems, or a range.
    """
    known = list(dict.fromkeys(each.problem for each in found))
    if len(known) < LEAST:
        raise UsageError(
            "calibrate-few",
            f"{len(known)} verified problems are too few to calibrate.",
            f"It takes {LEAST}: raise --n.",
        )
    for name, value in (("risk", risk), ("error", error)):
        if not 0 < value < 1:
            raise UsageError("setting-range", f"{name}={value}: it must be above 0, below 1.")
    skips = list(itertools.product(CONFIDENCES, GAPS))
    rules = [
        LayerExit(2, threshold, settle, patience, 1, measure, norm)
        for threshold, settle, patience in itertools.product(THRESHOLDS, SETTLES, PATIENCES)
    ]
    paper = _paper(found, set(known[:PAPER_PROBLEMS]), measure, norm)
    return ExitCalibration(
        skip=_cheapest((_skipping(found, each) for each in skips), len(skips), risk, error),
        leave=_cheapest((_leaving(found, each) for each in rules), len(rules), risk, error),
        paper=paper,
        paper_skip=_bounded(_skipping(found, (paper.confidence, paper.gap)), 1, error),
        paper_leave=_bounded(_leaving(found, paper.exit_rule), 1, error),
        problems=len(known),
    )


def _paper(
    found: Sequence[Verification], problems: set[int], measure: Measure, norm: bool
) -> ExitThresholds:
    mine = [each for each in found if each.problem in problems]
    gaps = [each.gap for each in mine if each.gap is not None]
    rule = LayerExit(2, 0.0, patience=1, measure=measure, norm=norm)
    settled = [
        now
        for each in mine
        for values in each.uncertainties
        for before, now in itertools.islice(
            ((a, b) for a, b in itertools.pairwise(values) if abs(b - a) < rule.settle), 1
        )
    ]
    if settled:
        rule = dataclasses.replace(rule, threshold=round(statistics.median(settled), 4))
    return ExitThresholds(
        float(np.percentile([each.confidence for each in mine], 75, method="inverted_cdf")),
        float(np.percentile(gaps, 25, method="inverted_cdf")) if gaps else 1.0,
        rule,
    )


def _skipping(
    found: Sequence[Verification], setting: tuple[float, float]
) -> Choice[tuple[float, float]]:
    """The figures of level 1 with these thresholds, without a bound."""
    confidence, gap = setting
    skipped = [
        each
        for each in found
        if each.gap is not None and each.confidence >= confidence and each.gap >= gap
    ]
    wrong = sum(each.values[each.confident] < max(each.values) for each in skipped)
    return Choice(setting, len(skipped) / len(found), len(skipped), wrong, len(found))


def _leaving(found: Sequence[Verification], rule: LayerExit) -> Choice[LayerExit]:
    """The figures of level 2 under a rule, without a bound."""
    saved = total = wrong = decided = 0
    for each in found:
        depth = len(each.by_layer) + 1
        ends = each.leaves_at(rule)
        saved += sum(depth - end for end in ends)
        total += depth * len(ends)
        if any(end < depth for end in ends):
            decided += 1
            chosen = preferred(each.valued(ends))
            wrong += each.values[chosen] < max(each.values)
    return Choice(rule, saved / total if total else 0.0, decided, wrong, len(found))


def _bounded(choice: Choice[S], candidates: int, error: float) -> Choice[S]:
    """The figures with their bound, one of so many that hold together."""
    level = 1 - 2 * error / candidates  # of a two-sided interval, whose upper end this is
    bound = clopper_pearson(choice.disagreements, choice.n, level)[1]
    return dataclasses.replace(choice, bound=bound, candidates=candidates)


def _cheapest(
    choices: Iterator[Choice[S]], candidates: int, risk: float, error: float
) -> Choice[S]:
    """The setting that saves most of those whose bound is at most `risk`; the first of equal
    ones."""
    best: Choice[S] = Choice(None, candidates=candidates)
    for choice in choices:
        bounded = _bounded(choice, candidates, error)
        if bounded.bound <= risk and bounded.saved > best.saved:
            best = bounded
    return best
