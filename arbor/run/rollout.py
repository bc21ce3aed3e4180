"""Rollout: a finished tree as arrays for training, each token once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from arbor.errors import UsageError
from arbor.events import Boundary, Event, Opened, Pruned, Sampled, Terminal, Verified
from arbor.run.setup import Setup
from arbor.run.solution import Solution, import_pandas
from arbor.tasks.base import Problem, Task

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Rollout:
    """A finished tree of thoughts: the tokens of n in b blocks, with l finished paths.

    Blocks lie one after another, parents first; the first is the prompt. A token that paths share
    is there once: a thought inside which paths part is several blocks.

    Attributes:
        problem: what was searched.
        solution: the result of the search, with its seed and its settings.
        tokens: int64 [n], token ids.
        positions: int64 [n], of each token on its path.
        sampled: bool [n], whether the model drew the token; it did not draw the prompt, nor what
            was given.
        logprobs: float64 [n], natural logarithms of the tokens' probabilities in the model's own
            distribution; 0 where they were not sampled.
        drawn: float64 [n], the same in the distribution that the token was drawn from, after
            temperature and cut-offs.
        starts: int64 [b + 1], where each block begins in these arrays, and the end of the last.
        parents: int64 [b], the place of each block's parent; -1 for the prompt.
        nodes: int64 [b], the number of each block in the search.
        values: float64 [b], the verifier's last values in [0, 1], of a thought at its last block;
            NaN where there is none.
        leaves: int64 [l], the last block of each finished path, ascending.
        answers: of each finished path; None where it gave none.
        rewards: float64 [l], 1 where the task's grader calls the answer correct, else 0; NaN
            without an answer key.
    """

    problem: Problem
    solution: Solution
    tokens: NDArray[np.int64]
    positions: NDArray[np.int64]
    sampled: NDArray[np.bool_]
    logprobs: NDArray[np.float64]
    drawn: NDArray[np.float64]
    starts: NDArray[np.int64]
    parents: NDArray[np.int64]
    nodes: NDArray[np.int64]
    values: NDArray[np.float64]
    leaves: NDArray[np.int64]
    answers: tuple[str | None, ...]
    rewards: NDArray[np.float64]

    @property
    def blocks(self) -> NDArray[np.int64]:
        """The block of each token, int64 [n]."""
        return np.repeat(np.arange(len(self.parents)), np.diff(self.starts))

    def path(self, block: int) -> NDArray[np.int64]:
        """Places of the tokens from the prompt's first to a block's last: indices of the arrays."""
        pieces = []
        while block >= 0:
            pieces.append(np.arange(self.starts[block], self.starts[block + 1]))
            block = int(self.parents[block])
        return np.concatenate(pieces[::-1])

    def mask(self) -> NDArray[np.bool_]:
        """Whether a token (row) attends to a token (column), bool [n, n]: to itself and to what
        comes before it on its path. With `positions`, one forward computes the whole tree."""
        above = np.eye(len(self.parents), dtype=np.bool_)
        for block, parent in enumerate(self.parents):
            if parent >= 0:
                above[block] |= above[parent]
        blocks = self.blocks
        return np.tril(above[np.ix_(blocks, blocks)])

    @property
    def paths(self) -> NDArray[np.int64]:
        """How many finished paths go through each block, int64 [b]."""
        return self._below(np.ones(len(self.leaves))).astype(np.int64)

    def advantages(self) -> NDArray[np.float64]:
        """How much better the finished paths through each block did than others, float64 [b].

        The mean, over these paths, of a path's reward less the mean reward of all other paths of
        the tree; 0 where no path goes through a block. For chains these are the leave-one-out
        advantages of RLOO (Ahmadian et al., ACL 2024, arXiv 2402.14740).

        Differs from TreeRL (Hou et al., arXiv 2506.11902), which adds the difference from the
        parent's mean, and divides by the square root of the number of paths. A tree that branches
        before improbable tokens compares these alone with their siblings: where no path succeeds,
        only probable tokens are then worse than the tree, and training makes them less probable.
        """
        count = len(self.leaves)
        above_mean = self.rewards - self.rewards.sum() / max(1, count)
        return self._below(above_mean) / np.maximum(self.paths, 1) * count / max(1, count - 1)

    def _below(self, each: NDArray[np.float64]) -> NDArray[np.float64]:
        """The sum of a number of each finished path over those through each block."""
        total = np.zeros(len(self.parents))
        total[self.leaves] = each
        for block in range(len(self.parents) - 1, 0, -1):
            total[self.parents[block]] += total[block]
        return total

    def to_pandas(self) -> pandas.DataFrame:
        """The finished paths as a table, a row for each with all of its tokens.

        Returns:
            With the columns ``problem``, ``seed``, ``leaf`` (the path's last block in the search),
            ``ids``, ``sampled``, ``logprobs`` and ``drawn`` (arrays, of its tokens), ``boundaries``
            (where its blocks begin after the prompt, and the end), ``values`` of these blocks,
            ``answer`` and ``reward``; values and rewards are NaN where there is none.

        Raises:
            UsageError: pandas is not installed.
        """
        pandas = import_pandas()
        paths = [self.path(int(leaf)) for leaf in self.leaves]
        blocks = [np.unique(self.blocks[at]) for at in paths]
        lengths = np.diff(self.starts)
        return pandas.DataFrame(
            {
                "problem": self.problem.text,
                "seed": self.solution.seed,
                "leaf": self.nodes[self.leaves],
                "ids": [self.tokens[at] for at in paths],
                "sampled": [self.sampled[at] for at in paths],
                "logprobs": [self.logprobs[at] for at in paths],
                "drawn": [self.drawn[at] for at in paths],
                "boundaries": [np.cumsum(lengths[each]) for each in blocks],
                "values": [self.values[each[1:]] for each in blocks],
                "answer": pandas.array(self.answers, dtype="string"),
                "reward": self.rewards,
            }
        )


class RolloutFold:
    """A listener that folds the events of one search, in detail ``tokens``, into its `Rollout`."""

    def __init__(self) -> None:
        self._parent: dict[int, int] = {}
        self._begin: dict[int, tuple[int, int]] = {}  # of blocks that begin with another's tokens
        self._ids: dict[int, tuple[int, ...]] = {}  # of blocks that have closed
        self._given: dict[int, int] = {}
        self._logprobs: dict[int, list[tuple[float, float]]] = {}
        self._values: dict[int, float] = {}
        self._answers: dict[int, str | None] = {}

    def __call__(self, event: Event) -> None:
        """Fold an event."""
        match event:
            case Opened(node=node, parent=int(parent), begin=begin):
                self._parent[node] = parent
                if begin is not None:
                    self._begin[node] = begin
            case Sampled(nodes=nodes, logprobs=logprobs, drawn=drawn):
                for node, *both in zip(nodes, logprobs, drawn, strict=True):
                    self._logprobs.setdefault(node, []).append((both[0], both[1]))
            case Boundary(node=node, ids=ids, given=given):
                self._ids[node], self._given[node] = ids, given
            case Verified(nodes=nodes, values=values):
                self._values.update(zip(nodes, values, strict=True))
            case Terminal(node=node, answer=answer):
                self._answers[node] = answer
            case Pruned(nodes=nodes):  # a path that had not ended when a limit was reached
                for node in nodes:
                    self._answers.pop(node, None)
            case _:
                pass

    def rollout(
        self, task: Task, problem: Problem, prompt: Sequence[int], solution: Solution
    ) -> Rollout:
        """The search so far.

        Args:
            task: grades the answers.
            problem, prompt: what was searched, and its token ids.
            solution: what came of it.
        """
        pieces = self._pieces()
        place = {(piece.node, piece.end): at for at, piece in enumerate(pieces, 1)}
        last = {piece.node: at for at, piece in enumerate(pieces, 1)} | {0: 0}
        texts = [prompt, *(self._ids[each.node][each.begin : each.end] for each in pieces)]
        starts = np.cumsum([0, *map(len, texts)])
        tokens = np.array([token for text in texts for token in text], np.int64)
        positions = np.zeros(len(tokens), np.int64)
        sampled = np.zeros(len(tokens), np.bool_)
        both = np.zeros((len(tokens), 2))
        parents, ends = [-1], [len(prompt)]
        positions[: len(prompt)] = np.arange(len(prompt))
        for at, piece in enumerate(pieces, 1):
            above = (piece.above, piece.begin)
            parent = place[above] if piece.begin else last[self._parent[piece.node]]
            begin, end = starts[at], starts[at + 1]
            parents.append(parent)
            ends.append(ends[parent] + end - begin)
            positions[begin:end] = np.arange(ends[parent], ends[at])
            given = self._given[piece.node]
            first = begin + max(0, given - piece.begin)
            if first < end:
                drawn = self._logprobs[piece.node][max(0, piece.begin - given) :]
                both[first:end] = drawn[: end - first]
            sampled[first:end] = True
        nodes = [0, *(piece.node for piece in pieces)]
        answers = dict(sorted(self._answers.items()))  # they end in an order that the budget sets
        whole = [last[node] == at for at, node in enumerate(nodes)]
        return Rollout(
            problem=problem,
            solution=solution,
            tokens=tokens,
            positions=positions,
            sampled=sampled,
            logprobs=both[:, 0],
            drawn=both[:, 1],
            starts=starts,
            parents=np.array(parents, np.int64),
            nodes=np.array(nodes, np.int64),
            values=np.array(
                [
                    self._values.get(node, math.nan) if ends else math.nan
                    for node, ends in zip(nodes, whole, strict=True)
                ]
            ),
            leaves=np.array([last[node] for node in answers], np.int64),
            answers=tuple(answers.values()),
            rewards=np.array([_reward(task, problem, each) for each in answers.values()]),
        )

    def _pieces(self) -> list[_Piece]:
        """The closed blocks with tokens, cut where others part from them; parents first."""
        owner: dict[int, tuple[int, int]] = {}  # of blocks whose first tokens are another's
        begins = {node: self._begin.get(node, (0, 0)) for node in sorted(self._ids)}
        cuts = {node: {len(self._ids[node])} for node in begins}
        cuts = {node: ends for node, ends in cuts.items() if max(ends) > begins[node][1]}
        for node in cuts:
            above, count = begins[node]
            while above in owner and count <= owner[above][1]:
                above = owner[above][0]
            if count:
                owner[node] = above, count
                cuts[above].add(count)
        pieces = []
        for node in cuts:
            above, begin = owner.get(node, (node, 0))
            for end in sorted(cuts[node]):
                pieces.append(_Piece(node, begin, end, above))
                above, begin = node, end
        return pieces


@dataclass(frozen=True, slots=True)
class _Piece:
    """The tokens of a block from `begin` to `end`; those before `begin` are of the block `above`,
    which is the same one where they are its own."""

    node: int
    begin: int
    end: int
    above: int


def refuse_rollouts(setup: Setup) -> None:
    """Refuse a search whose tokens are not drawn from the model's own distribution.

    Raises:
        UsageError: in lossy mode, or with a format that the text has to match.
    """
    if setup.mode != "lossless":
        raise UsageError(
            "rollouts-lossy",
            "rollouts need log probabilities of whole paths, and in lossy mode paths have gaps.",
            "Use mode='lossless'.",
        )
    if setup.boundary.form is not None:
        raise UsageError(
            "rollouts-format",
            "rollouts need the model's own distribution, and a format leaves tokens out of it.",
            "Use step_format=None.",
        )


def _reward(task: Task, problem: Problem, answer: str | None) -> float:
    if problem.expected is None:
        return math.nan
    return float(task.grade(problem, answer).correct)
