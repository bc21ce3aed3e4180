"""PrefixSharing: blocks that begin with the same tokens after the same path use the same slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from arbor.engine.forest_state import ForestState
from arbor.events import Merged, Shared
from arbor.forest import by_tree
from arbor.tree import NO_RECORD, NO_SLOT, Node, NodeState

Offsets = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Follower:
    """Tokens of a block that are computed in the next forward, or fetched, for another one.

    Attributes:
        leader: the block whose tokens they are.
        node: the block that uses them as well.
        offsets: int64 [m], which tokens.
    """

    leader: Node
    node: Node
    offsets: Offsets


class PrefixSharing:
    """Finds the tokens of a block whose K/V another block has, or is about to have.

    K/V depend on the tokens before only, so the first tokens that two prompts (a system prompt,
    few-shot examples) or two siblings have in common have equal K/V. They are found whatever the
    order of arrival: among open trees, among blocks computed in the same forward, among prompts of
    finished problems that are still kept, and for siblings when the later one closes. Beginnings
    shorter than `arbor.forest.LEAST_COMMON`, or `LEAST_SIBLING`, are not shared.

    The K/V of two siblings were computed in different rows, so they may differ in their last bits
    where the model depends on the batch; the earlier block's stay.
    """

    def __init__(self, state: ForestState) -> None:
        self._state = state
        self._memory = state.memory

    def merge(self, nodes: Sequence[Node]) -> None:
        """Give back the slots of blocks that have just closed where siblings hold the same."""
        state, memory = self._state, self._memory
        if not state.shares_siblings or state.hidden:
            return
        merged: dict[Node, tuple[Node, int]] = {}
        for node in nodes:
            if node.state is not NodeState.CLOSED:
                continue
            state.forest.close(node)
            if not state.forest.may_share(node):
                continue
            for other, common in state.forest.alike(node):
                offsets = _exact(other, common)
                offsets = offsets[node.span.exact[offsets]]
                offsets = offsets[~memory.is_shared(node.span.slot[offsets])]
                if len(offsets):
                    memory.merge(other, node, offsets)
                    self._cut(other, node, common)
                    source, count = merged.get(node, (other, 0))
                    merged[node] = source, count + len(offsets)
        if merged:
            state.sharing_changed()
            for tree, group in by_tree(merged).items():
                opened = state.trees[tree]
                rows = tuple((node.id, merged[node][0].id, merged[node][1]) for node in group)
                opened.emit(Merged(nodes=rows, kv=opened.kv))

    def reuse(self, path: Sequence[Node]) -> None:
        """Give these blocks what the device holds of equal beginnings.

        What a lossy search has lost of its prompt stays lost, though an earlier one was kept.
        """
        state = self._state
        if state.hidden:
            return
        for node in path:
            alone = len(state.trees) == 1
            comes_back = state.shares_prompts or node.row not in state.computed
            restores = node.parent is None and state.keeps_prompts and comes_back
            if not self._shares(node) and not (restores and alone):
                continue
            missing = np.flatnonzero(node.span.slot == NO_SLOT)
            if len(missing) == 0:
                continue
            count = self._from_others(node) if self._shares(node) else 0
            if restores:
                count += self._memory.restore(node)
            if count:
                self._state.sharing_changed()
                self._report(node, count)
            if count == len(missing):
                self._state.mark_computed([node])

    def _from_others(self, node: Node) -> int:
        """Share what other blocks hold; returns how many tokens."""
        count = 0
        for other, common in self._state.forest.alike(node):
            offsets = _exact(other, common)
            offsets = offsets[node.span.slot[offsets] == NO_SLOT]
            if len(offsets):
                self._memory.share(other, node, offsets)
                self._cut(other, node, common)
                count += len(offsets)
        return count

    def stored(self, node: Node, missing: Offsets) -> list[Follower]:
        """Which of a block's missing tokens lower tiers hold as other blocks' equal ones."""
        found: list[Follower] = []
        if self._state.hidden or not self._shares(node):
            return found
        for other, common in self._state.forest.alike(node):
            offsets = missing[missing < common]
            offsets = offsets[other.span.record[offsets] != NO_RECORD]
            if len(offsets):
                found.append(Follower(other, node, offsets))
                missing = np.setdiff1d(missing, offsets, assume_unique=True)
        return found

    def take(self, follower: Follower) -> Offsets:
        """Let a block use tokens that were fetched for it; returns those that were not there."""
        leader, node, offsets = follower.leader, follower.node, follower.offsets
        here = leader.span.exact[offsets]
        if here.any():
            self._memory.share(leader, node, offsets[here])
            self._cut(leader, node, self._state.forest.common(leader, node))
            self._state.sharing_changed()
            self._report(node, int(here.sum()))
        return offsets[~here]

    def followers(self, absent: dict[int, Offsets]) -> list[Follower]:
        """The blocks that need what another one computes in the same forward.

        Args:
            absent: offsets of the tokens to compute, by row, in the order in which they are placed;
                those of a follower are taken out.
        """
        found: list[Follower] = []
        if self._state.hidden:
            return found
        leaders: set[int] = set()
        forest = self._state.forest
        for row in [row for row in absent if len(absent[row])]:
            node = forest[row]
            if not self._shares(node):
                continue
            for leader, common in forest.alike(node):
                if leader.row not in leaders:
                    continue
                both = np.intersect1d(absent[row], absent[leader.row], assume_unique=True)
                both = both[both < common]
                if len(both):
                    absent[row] = np.setdiff1d(absent[row], both, assume_unique=True)
                    found.append(Follower(leader, node, both))
            leaders.add(row)
        return found

    def follow(self, follower: Follower) -> None:
        """Let a block use tokens that have slots by now; for a prompt this is reported here, for
        others with what else comes back."""
        leader, node = follower.leader, follower.node
        self._memory.share(leader, node, follower.offsets, pending=True)
        self._cut(leader, node, self._state.forest.common(leader, node))
        self._state.sharing_changed()
        if node.parent is None:
            self._report(node, len(follower.offsets))

    def _shares(self, node: Node) -> bool:
        """Whether the mode lets a block share: prompts, and siblings that have closed."""
        if node.parent is None:
            return self._state.shares_prompts
        return self._state.shares_siblings and self._state.forest.may_share(node)

    def _cut(self, one: Node, other: Node, common: int) -> None:
        """Let pieces of context end where the two blocks, and those that share with them, part."""
        forest = self._state.forest
        alike = forest.alike(one)
        for node in (one, other, *(node for node, count in alike if count >= common)):
            forest.cut(node, common)

    def _report(self, node: Node, count: int) -> None:
        opened = self._state.of(node)
        opened.emit(Shared(nodes=((node.id, count),), kv=opened.kv))


def _exact(node: Node, count: int) -> Offsets:
    """Which of a block's first tokens are on the device and exact."""
    span = node.span
    return np.flatnonzero((span.slot[:count] != NO_SLOT) & span.exact[:count])
