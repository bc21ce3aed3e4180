"""Allowance: what the limits of a run leave for its next round."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

from arbor.controllers.base import Expansion
from arbor.events import ReachedLimit
from arbor.run.limits import SessionLimits
from arbor.tree import Node, NodeState, ThoughtTree

MOST_KEPT = 0.5  # of a limit; what is left once a path has an answer is the search's again


class Allowance:
    """What a search has spent of its limits, and which of the expansions it asks for fit the rest.

    Until a path has an answer, tokens or time to end one are kept: at most half.

    Args:
        limits: of the run.
        since_s: when its time began, in `time.monotonic`; None: with the search. What had passed
            before the search began is spent, and half of the rest is kept.

    Attributes:
        answered: a path ended with an answer, so that nothing is kept.
        narrowed: the limit that last cut what the search asked for; None where none did.
        left_out: leaves that the search last asked for and that did not grow, or had fewer
            children than it asked for.
    """

    def __init__(self, limits: SessionLimits, since_s: float | None = None) -> None:
        self._limits = limits
        self._since_s = since_s
        self._deadline: float | None = None
        self._kept_s = 0.0  # until a path has an answer
        self._expanded = 0
        self._blocks = self._tokens = 0  # closed blocks, and their tokens
        self._asked_at = 0.0  # wall seconds, when the last round began
        self._block_s = 0.0  # wall seconds of the last round over its blocks
        self.answered = False
        self.narrowed: ReachedLimit | None = None
        self.left_out: set[Node] = set()

    def start(self) -> None:
        """The search begins."""
        if self._limits.timeout is not None:
            now = time.monotonic()
            since_s = now if self._since_s is None else self._since_s
            self._deadline = since_s + self._limits.timeout
            self._kept_s = MOST_KEPT * (self._deadline - now)

    @property
    def tokens_are_spent(self) -> bool:
        """Whether the blocks that have ended have as many tokens as the limit allows."""
        most = self._limits.max_tokens
        return most is not None and self._tokens >= most

    @property
    def seconds_left(self) -> float:
        """Until the limit of time; infinite without one."""
        return math.inf if self._deadline is None else self._deadline - time.monotonic()

    def count(self, blocks: Sequence[Node]) -> None:
        """Count blocks that have ended and their sampled tokens, thoughts that were proposed not
        included."""
        sampled = [len(each.tokens) - each.given for each in blocks]
        self._blocks += sum(count > 0 for count in sampled)
        self._tokens += sum(sampled)

    def round_ended(self, expansions: Sequence[Expansion]) -> None:
        """The round of these expansions has ended, its verification included."""
        self._block_s = (time.monotonic() - self._asked_at) / sampled_by(expansions)

    def of(self, asked: list[Expansion], growing: Sequence[Expansion] = ()) -> list[Expansion]:
        """The first of these expansions, the last one perhaps narrower, that the limits allow.

        Args:
            asked: by the search.
            growing: in progress.
        """
        self._asked_at = time.monotonic()
        allowed, most = asked, self._limits.max_expansions
        if most is not None:
            allowed = self._narrower("max_expansions", allowed, asked[: most - self._expanded])
        if self._is_late(allowed):
            allowed = self._narrower("timeout", allowed, [])
        if self._limits.max_tokens is not None and self._tokens:
            within = self._within_tokens(allowed, growing, self._limits.max_tokens)
            allowed = self._narrower("max_tokens", allowed, within)
        self._expanded += len(allowed)
        self.left_out.difference_update(each.leaf for each in allowed)
        if allowed is not asked:
            self.left_out.update(each.leaf for each in asked if each not in allowed)
        return allowed

    def _narrower(
        self, limit: ReachedLimit, asked: list[Expansion], allowed: list[Expansion]
    ) -> list[Expansion]:
        """What this limit allows; notes it where that is less."""
        if allowed != asked:
            self.narrowed = limit
        return allowed

    @property
    def lacks_an_answer(self) -> bool:
        """Whether a limit has cut what the search asked for, and no path has an answer."""
        return self.narrowed is not None and not self.answered

    def one_more(self) -> bool:
        """Count a leaf that grows alone; whether `max_expansions` allows it."""
        most = self._limits.max_expansions
        if most is not None and self._expanded >= most:
            self.narrowed = "max_expansions"
            return False
        self._expanded += 1
        return True

    def _is_late(self, asked: Sequence[Expansion]) -> bool:
        """Whether this round would take of the time that is kept, if each block takes as long as
        in the last round."""
        if self._deadline is None or self.answered:
            return False
        return self.seconds_left - self._block_s * sampled_by(asked) < self._kept_s

    def _within_tokens(
        self, asked: list[Expansion], growing: Sequence[Expansion], most: int
    ) -> list[Expansion]:
        """The expansions whose sampled blocks fit the rest of the tokens, by the mean length so
        far. Kept is what the thoughts after these take if they are twice as long."""
        length = self._tokens / self._blocks
        kept = 0.0
        if asked and not self.answered:
            after = self._limits.max_depth - asked[0].leaf.depth - 1
            kept = min(most * MOST_KEPT, 2 * length * after)
        blocks = int((most - kept - self._tokens) / length) - sampled_by(growing)
        allowed = []
        for expansion in asked:
            count = min(sampled_by([expansion]), blocks)
            if count < 1:
                break
            blocks -= count
            narrower = expansion.generate == "sample" and count < expansion.width
            allowed.append(replace(expansion, width=count) if narrower else expansion)
        return allowed


def sampled_by(expansions: Sequence[Expansion]) -> int:
    """Blocks whose tokens are sampled: children, or the question for those that are proposed."""
    return sum(each.width if each.generate == "sample" else 1 for each in expansions)


def most_promising(tree: ThoughtTree, asked: Sequence[Expansion]) -> list[Node]:
    """The leaf of the greatest value, of several the deepest: of those that the search asks for,
    and all other open ones. Empty where there is none. A thought that nothing has judged counts
    as 0."""
    others = (n for n in tree.nodes[1:] if n.state is NodeState.CLOSED and not n.children)
    leaves = [*(expansion.leaf for expansion in asked), *others]
    return [max(leaves, key=lambda leaf: (leaf.value, leaf.depth))] if leaves else []
