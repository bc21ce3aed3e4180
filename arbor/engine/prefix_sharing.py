"""PrefixSharing: prompts that begin with the same tokens use the same slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from arbor.engine.forest_state import ForestState
from arbor.events import Shared
from arbor.tree import NO_SLOT, Node

Offsets = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Follower:
    """Tokens of a prompt that the next forward computes for another prompt.

    Attributes:
        leader: the root that computes them.
        root: the root that uses them as well.
        offsets: int64 [m], which tokens.
    """

    leader: Node
    root: Node
    offsets: Offsets


class PrefixSharing:
    """Finds the tokens of a prompt whose K/V another prompt has, or is about to have.

    K/V depend on the tokens before only, so equal beginnings of prompts (a system prompt, few-shot
    examples) have equal K/V. They are found whatever the order of arrival: among open trees, among
    prompts computed in the same forward, and among those of finished problems that are still kept.
    Beginnings shorter than `arbor.forest.LEAST_COMMON` are not shared.

    Args:
        state: of the open trees.
    """

    def __init__(self, state: ForestState) -> None:
        self._state = state
        self._memory = state.memory

    def reuse(self, path: Sequence[Node]) -> None:
        """Give the roots among these blocks what the device holds of equal beginnings."""
        if not self._state.shares_prompts or self._state.hidden:
            return
        for root in [node for node in path if node.parent is None]:
            missing = np.flatnonzero(root.span.slot == NO_SLOT)
            if len(missing) == 0:
                continue
            count = self._from_others(root) + self._memory.restore(root)
            if count:
                self._state.sharing_changed()
                self._report(root, count)
            if count == len(missing):
                self._state.mark_computed([root])

    def _from_others(self, root: Node) -> int:
        """Share what other open trees hold; returns how many tokens."""
        count = 0
        for other, common in self._alike(root):
            span = other.span
            there = (span.slot[:common] != NO_SLOT) & span.exact[:common]
            offsets = np.flatnonzero(there & (root.span.slot[:common] == NO_SLOT))
            if len(offsets):
                self._memory.share(other, root, offsets)
                self._cut(other, root, common)
                count += len(offsets)
        return count

    def followers(self, absent: dict[int, Offsets]) -> list[Follower]:
        """The prompts that need what another one computes in the same forward.

        Args:
            absent: offsets of the tokens to compute, by row, in the order in which they are placed;
                those of a follower are taken out.
        """
        found: list[Follower] = []
        if not self._state.shares_prompts or self._state.hidden or len(self._state.trees) < 2:
            return found
        leaders: dict[int, Node] = {}
        for row in [row for row in absent if self._state.forest[row].parent is None]:
            root = self._state.forest[row]
            for leader, common in self._alike(root):
                if leader.row not in leaders:
                    continue
                both = np.intersect1d(absent[row], absent[leader.row], assume_unique=True)
                both = both[both < common]
                if len(both):
                    absent[row] = np.setdiff1d(absent[row], both, assume_unique=True)
                    found.append(Follower(leader, root, both))
            leaders[row] = root
        return found

    def follow(self, follower: Follower) -> None:
        """Let a prompt use tokens that have slots by now."""
        leader, root = follower.leader, follower.root
        self._memory.share(leader, root, follower.offsets, pending=True)
        self._cut(leader, root, self._state.forest.common(leader.tree, root.tree))
        self._state.sharing_changed()
        self._report(root, len(follower.offsets))

    def _alike(self, root: Node) -> list[tuple[Node, int]]:
        """Roots of other trees that begin alike, and with how many tokens."""
        forest = self._state.forest
        others = [tree.root for tree in forest.trees if tree is not root.tree]
        alike = [(other, forest.common(root.tree, other.tree)) for other in others]
        return [(other, common) for other, common in alike if common]

    def _cut(self, one: Node, other: Node, common: int) -> None:
        """Let pieces of context end where the two prompts, and those that share with them, part."""
        forest = self._state.forest
        for root in (one, other, *(root for root, count in self._alike(one) if count >= common)):
            forest.cut(root, common)

    def _report(self, root: Node, count: int) -> None:
        opened = self._state.of(root)
        opened.emit(Shared(nodes=((root.id, count),), kv=opened.kv))
