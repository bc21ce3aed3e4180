"""Calibration: the cost of losing a block, and a fit of MSVE to it (ArborKV section 4.1)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from arbor.engine.operation import Growth
from arbor.engine.stop_rule import StopRule
from arbor.errors import UsageError
from arbor.measure.statistics import bootstrap_groups
from arbor.model.sampling_params import Sampling
from arbor.papers.arborkv.msve import MSVE, fit, rank_correlation
from arbor.solver import Solver
from arbor.tasks.base import Problem
from arbor.tree import Node

GREEDY = Sampling(temperature=0.0)
HELD_OUT = 0.3  # part of the problems on which the fit is judged
LEAST = 8  # problems of a calibration


@dataclass(frozen=True, slots=True)
class Example:
    """A masked block.

    Attributes:
        problem: index of its problem.
        value, confidence, attention: MSVE's v, u, a.
        drop: accuracy lost by masking it, from a greedy continuation with it to one without:
            1 = the right answer became wrong, 0 = no change, -1 = a wrong answer became right.
    """

    problem: int
    value: float
    confidence: float
    attention: float
    drop: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """A fit, and its quality on held-out problems.

    Attributes:
        msve: the fit.
        problems, blocks: numbers used, held-out ones included.
        lost: share of masked blocks that cost the right answer.
        correlation: Spearman's rank correlation of score and drop on held-out problems; 0 if either
            never varies.
        default_correlation: the same for the default weights, which are a guess.
        interval: of `correlation`, 95 %, bootstrap over the held-out problems.
        gain: of `correlation` over `default_correlation` on the same problems, 95 %.
        held_out: blocks of the held-out problems.
    """

    msve: MSVE
    problems: int
    blocks: int
    lost: float
    correlation: float
    default_correlation: float
    interval: tuple[float, float]
    gain: tuple[float, float]
    held_out: int


def collect(solver: Solver, problems: Iterable[Problem]) -> list[Example]:
    """Solve problems at full retention, then mask each closed block and check the answer.

    A block is masked after the next one; the rest of the path is then decoded again, greedily, with
    the block (a greedy path is that already) and without. So the last two blocks are left out:
    nothing is decoded after them. Only right paths are used: a wrong one has no accuracy to lose.

    Args:
        solver: a full budget, and a policy that observes attention and reads values, in lossy
            mode: in lossless mode a block is valued only where the search reads its value.
        problems: with answer keys.

    Raises:
        UsageError: the blocks were not valued.

    Differs from the paper: blocks are masked rather than zeroed (a zero key still takes attention),
    and the drop is in the answer of this path rather than an average over unstated repetitions.
    """
    examples: list[Example] = []
    for index, problem in enumerate(problems):
        solution = solver.solve(problem)
        if solution.correct:
            path = [solver.engine.tree[node_id] for node_id in solution.path]
            if not all(block.valued for block in path[1:-2]):
                raise UsageError(
                    "calibrate-values",
                    "the blocks of this search were not valued.",
                    "Take mode='lossy'.",
                )
            examples += _losses(solver, problem, path, index)
    return examples


def _losses(solver: Solver, problem: Problem, path: Sequence[Node], index: int) -> list[Example]:
    """Every block of a path but the prompt and the last two, masked in turn."""
    engine = solver.engine
    growth = Growth(0, GREEDY, StopRule(engine.tokenizer, solver.boundary, solver.eos))
    places = range(1, len(path) - 2)
    greedy = solver.sampling.temperature == 0
    # as of the search, before the experiment adds queries of its own
    rows = np.array([path[i].row for i in places], int)
    attended = engine.state.statistics.block_attention(rows)
    found = []
    for place, attention in zip(places, attended.tolist(), strict=True):
        lost, leaf = path[place], path[place + 1]
        whole = greedy or _continues(solver, problem, leaf, growth)
        with engine.hiding([lost]):
            right = _continues(solver, problem, leaf, growth)
        drop = float(whole) - float(right)
        found.append(Example(index, lost.value, lost.confidence, attention, drop))
    return found


def _continues(solver: Solver, problem: Problem, leaf: Node, growth: Growth) -> bool:
    """Whether a greedy continuation of a path gives the right answer; its blocks are forgotten."""
    task, engine = solver.task, solver.engine
    grown: list[Node] = []
    node = leaf
    while not task.is_terminal(problem, node.thoughts) and node.depth < solver.boundary.max_depth:
        (node,) = engine.grow([(node, 1)], growth)
        grown.append(node)
        if growth.stop.is_eos(node.tokens[-1]):
            break
    answer = task.answer(problem, node.thoughts)
    engine.forget(grown)
    return bool(task.grade(problem, answer).correct)


def calibrate(examples: Sequence[Example], top: int = 0) -> Calibration:
    """Fit MSVE on most of the problems and evaluate it on the others.

    Args:
        examples: from `collect`.
        top: of the solver that collected them, see `MSVE`.

    Raises:
        UsageError: too few problems, or masking never lost an answer.
    """
    known = list(dict.fromkeys(example.problem for example in examples))
    if len(known) < LEAST:
        raise UsageError(
            "calibrate-few",
            f"{len(known)} solved problems are too few to calibrate.",
            f"It takes {LEAST}: raise --n, or choose a task the model solves.",
        )
    kept = set(known[: len(known) - max(1, round(HELD_OUT * len(known)))])
    train = [example for example in examples if example.problem in kept]
    test = [example for example in examples if example.problem not in kept]
    if not any(example.drop > 0 for example in train):
        raise UsageError(
            "calibrate-flat",
            "losing a block never cost the answer, so nothing can be fitted.",
            "Choose a task with longer paths, such as chains.",
        )
    msve = replace(fit([_features(e) for e in train], [e.drop for e in train]), top=top)
    scores = np.array([_scores(each, test) for each in (msve, MSVE())])
    drops = np.array([example.drop for example in test])
    problem = np.array([example.problem for example in test])
    correlation, by_guess = _correlations(scores, drops)

    def fitted(at: NDArray[np.int64]) -> float:
        return rank_correlation(scores[0, at], drops[at])

    def gained(at: NDArray[np.int64]) -> float:
        mine, guess = _correlations(scores[:, at], drops[at])
        return mine - guess

    return Calibration(
        msve=msve,
        problems=len(known),
        blocks=len(examples),
        lost=float(np.mean([example.drop > 0 for example in examples])),
        correlation=correlation,
        default_correlation=by_guess,
        interval=bootstrap_groups(problem, fitted),
        gain=bootstrap_groups(problem, gained),
        held_out=len(test),
    )


def _correlations(scores: NDArray[np.float64], drops: NDArray[np.float64]) -> list[float]:
    return [rank_correlation(each, drops) for each in scores]


def _features(example: Example) -> tuple[float, float, float]:
    return example.value, example.confidence, example.attention


def _scores(msve: MSVE, examples: Sequence[Example]) -> list[float]:
    value, confidence, attention = (
        np.array(column) for column in zip(*map(_features, examples), strict=True)
    )
    scores: list[float] = msve.scores(value, confidence, attention).tolist()
    return scores
