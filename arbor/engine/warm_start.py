"""WarmStart: new prompts begin with KV that earlier runs kept in files, and are kept there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from torch import Tensor

from arbor.engine.forest_state import ForestState
from arbor.engine.mode import Holes
from arbor.engine.prefix_sharing import Follower, Offsets, PrefixSharing
from arbor.events import Shared
from arbor.memory.prompt_files import PromptFiles
from arbor.tree import NO_SLOT, Node

_NOTHING = np.empty(0, np.int64)


@dataclass(slots=True)
class Found:
    """Tokens of new prompts that files hold.

    Attributes:
        offsets: those that are loaded, by row.
        followers: prompts that use what is loaded for another one.
    """

    offsets: Holes = field(default_factory=dict)
    followers: list[Follower] = field(default_factory=list)

    @property
    def slots(self) -> int:
        """Slots that loading takes."""
        return sum(len(offsets) for offsets in self.offsets.values())


class WarmStart:
    """Looks up prompts that were never computed, loads what files hold of them, and keeps prompts
    once all of their KV is there and exact.

    A load is done before the forward that computes the rest, in slots that the same transaction has
    made free, and stays valid if that forward fails.
    """

    def __init__(
        self, state: ForestState, sharing: PrefixSharing, layers: int, files: PromptFiles
    ) -> None:
        self._state = state
        self._memory = state.memory
        self._sharing = sharing
        self._layers = layers
        self._files = files
        self._new: list[Node] = []  # prompts of the forward in progress

    def find(self, path: Sequence[Node], holes: Holes) -> Found:
        """Take out of the holes what files hold.

        Prompts that begin alike load their common part once; what an earlier one computes of it in
        this forward is left to `PrefixSharing.followers`.

        Args:
            path: blocks in order.
            holes: offsets of the tokens that are missing, by row.
        """
        found = Found()
        self._new = []
        if self._state.hidden:
            return found
        first: Holes = {}  # what each of the prompts before loads or computes itself
        for node in path:
            hole = holes[node.row]
            if node.parent is not None or node.row in self._state.computed or not len(hole):
                continue
            self._new.append(node)
            mine = hole[hole < self._files.find(np.array(node.tokens, np.int64))]
            followed = _NOTHING
            for leader, common in self._alike(node):
                both = np.intersect1d(hole, first.get(leader.row, _NOTHING), assume_unique=True)
                both = np.setdiff1d(both[both < common], followed, assume_unique=True)
                mine = np.setdiff1d(mine, both, assume_unique=True)
                loaded = np.intersect1d(both, found.offsets.get(leader.row, _NOTHING))
                if len(loaded):
                    found.followers.append(Follower(leader, node, loaded))
                    followed = np.union1d(followed, loaded)
            if len(mine):
                found.offsets[node.row] = mine
            first[node.row] = np.setdiff1d(hole, followed, assume_unique=True)
            holes[node.row] = np.setdiff1d(first[node.row], mine, assume_unique=True)
        return found

    def load(
        self, found: Found, absent: Holes, holes: Holes, followers: dict[int, list[Follower]]
    ) -> None:
        """Load what was found, into slots that are free, and report it.

        Args:
            absent, holes: tokens to compute, by row; take what could not be loaded.
            followers: of what is computed, by row; take the followers of that.
        """
        for row, offsets in found.offsets.items():
            root = self._state.forest[row]
            lost = self._load(root, offsets)
            for each in (absent, holes):
                each[row] = np.union1d(each[row], lost)
        for follower in found.followers:
            lost = self._sharing.take(follower)
            if len(lost):  # the leader computes them
                left = replace(follower, offsets=lost)
                followers.setdefault(follower.node.row, []).append(left)

    def keep(self) -> None:
        """Keep the prompts that the last forward has completed."""
        new, self._new = self._new, []
        for root in new:
            if root.span.exact.all() and (root.span.depth == self._layers).all():
                self._keep(root)

    def _keep(self, root: Node) -> None:
        pool, slots = self._memory.pool, root.span.slot

        def rows_of(offsets: Offsets) -> Tensor:
            return pool.gather(slots[offsets])

        self._files.save(np.array(root.tokens, np.int64), pool.bytes_per_token, rows_of)

    def _load(self, root: Node, offsets: Offsets) -> Offsets:
        """Load tokens of a prompt; returns those that could not be."""
        pool = self._memory.pool
        tokens = np.array(root.tokens, np.int64)
        for here, rows in self._files.load(tokens, offsets, pool.numbers, pool.dtype):
            self._memory.receive(root, here, rows, depth=self._layers)
        lost = offsets[root.span.slot[offsets] == NO_SLOT]
        self._state.changed([root])
        if count := len(offsets) - len(lost):
            opened = self._state.of(root)
            opened.emit(Shared(nodes=((root.id, count),), kv=opened.kv, source="file"))
        return lost

    def _alike(self, node: Node) -> list[tuple[Node, int]]:
        return self._state.forest.alike(node) if self._state.shares_prompts else []
