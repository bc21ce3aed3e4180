"""The two modes: what must fit, what comes back, what stays, and what decodes together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from arbor.budget import DECODED
from arbor.engine.forest_state import ForestState
from arbor.engine.mode_names import Mode as Mode
from arbor.engine.mode_names import Rehydrate as Rehydrate
from arbor.engine.mode_names import Share as Share
from arbor.engine.open_tree import OpenTree
from arbor.engine.residency import PathsLose, Residency
from arbor.engine.scheduler import MOST_NEW, Scheduler, StreamedScheduler, WaveScheduler
from arbor.forest import Overlap
from arbor.retention.policy import Policy
from arbor.tree import NO_SLOT, Node, paths_of

Holes = dict[int, NDArray[np.int64]]  # by row, offsets of the tokens to compute, increasing

PIECE = 64  # tokens of a prompt that lossy mode prefills at once at most, evicting in between


class Rules:
    """What a mode decides. These are the rules of lossless mode: every running path is complete and
    exact before anything is computed after it.

    Attributes:
        must_fit: what `required` counts, in words.
        paths_lose: when running paths lose tokens.
        joining_loses: when they do as work joins.
    """

    must_fit = "the longest path"
    paths_lose: PathsLose = "never"
    joining_loses: PathsLose = "never"

    def __init__(self, state: ForestState, policy: Policy, rehydrate: Rehydrate) -> None:
        self._state = state
        self._memory = state.memory
        self._keeps_all = policy.keeps_all
        self._rehydrate = rehydrate

    def _slots(self, nodes: Sequence[Node]) -> int:
        """The budget of blocks that keep within the same."""
        return self._state.account(nodes[0].tree).slots

    def _keeps(self) -> bool:
        """Whether nothing has to leave."""
        return self._keeps_all or self._state.fits_whole

    def required(self, node: Node) -> int:
        """Tokens of the path to a block that have to be on the device while it grows: all."""
        return node.end

    def decoded(self, tokens: int) -> int:
        """Tokens of a block of at most so many that have to be on the device for it to begin: of
        all that it has to hold, one."""
        return min(tokens, 1)

    def room(self, opened: OpenTree, leaf_tokens: int, longest: int) -> int:
        """Blocks of up to `leaf_tokens` tokens that may decode at once within a search's own
        budget, at least 1: those that fit next to its longest path, of `longest` tokens."""
        return max(1, (opened.slots - longest) // max(1, leaf_tokens))

    def waves(self, nodes: Sequence[Node], extra: Sequence[int]) -> list[list[int]]:
        """Cut work into waves that fit: the union of a wave's paths does.

        Args:
            nodes: where each piece of work begins, in depth-first order, so that a wave shares what
                it can.
            extra: tokens each needs beyond its path.

        Returns:
            indices into `nodes`.
        """
        return list(fitting(nodes, extra, self._slots(nodes))) if nodes else []

    def scheduler(self, opened: OpenTree) -> Scheduler:
        """Decides which work within the budget of a tree takes part in the next forward: a block
        joins as soon as it is expected to fit."""
        overlap = Overlap(self._state.forest, self._state.shares)
        return Scheduler(opened.account, keeps=self._keeps, overlap=overlap)

    def pinned(self, nodes: Sequence[Node]) -> int:
        """Slots of what stays while these blocks decode: whole paths."""
        return self._memory.slots_of(paths_of(nodes))

    def is_crowded(self, nodes: Sequence[Node]) -> bool:
        """Whether some of these blocks have to wait before each of them gets one more token."""
        return self.pinned(nodes) + len(nodes) > self._slots(nodes)

    def is_outdated(self, leaf: Node) -> bool:
        """Whether logits known after a block may be improved by computing it again: never after a
        whole path."""
        return False

    def pieces(self, root: Node, room: int) -> list[range]:
        """The pieces in which a prompt that was never computed goes in; none: at once, with what
        else a path misses. A prompt fits, and the scheduler computes a long path part by part."""
        return []

    def splits(self, node: Node) -> bool:
        """Whether several forwards may each compute some of what a block misses: not where whole
        spans come back."""
        return self._rehydrate != "span" or node.row not in self._state.computed

    def holes(
        self, path: Sequence[Node], leaves: Sequence[Node], reserve: int, residency: Residency
    ) -> Holes:
        """Tokens of each block of the running paths that the next forward computes: all that are
        missing or were computed over a gap; where whole spans come back, all tokens of a computed
        block that lacks one.

        Where the paths do not stay whole, what the policy gives up of them has left when this
        returns.

        Args:
            path: the blocks of the paths, each once.
            leaves: ends of the paths.
            reserve: slots that must be free afterwards.
        """
        holes = {node.row: self._state.missing(node) for node in path}
        if self._rehydrate == "span":
            for node in path:
                if len(holes[node.row]) and node.row in self._state.computed:
                    holes[node.row] = np.arange(len(node.tokens))
        return holes


class Streamed(Rules):
    """Every running path is complete and exact, and attention reads what of it is in host memory
    there: the device holds the newest tokens, and of the others what the policy keeps.

    A token of a running path that leaves the device is in host memory, where nothing displaces it
    while the path runs: running paths have at most as many tokens together as that holds. A path
    that fits is copied back.
    """

    must_fit = "what decodes of a path"
    paths_lose: PathsLose = "last"
    joining_loses: PathsLose = "last"

    def required(self, node: Node) -> int:
        """The newest tokens."""
        return min(node.end, DECODED)

    def decoded(self, tokens: int) -> int:
        """The newest."""
        return min(tokens, DECODED)

    def room(self, opened: OpenTree, leaf_tokens: int, longest: int) -> int:
        """What fits into host memory next to the longest path."""
        return max(1, (self._memory.path_room - longest) // max(1, leaf_tokens))

    def waves(self, nodes: Sequence[Node], extra: Sequence[int]) -> list[list[int]]:
        """The union of a wave's paths fits into host memory."""
        return list(fitting(nodes, extra, self._memory.path_room))

    def scheduler(self, opened: OpenTree) -> Scheduler:
        """A block joins as soon as its path fits into host memory, and new tokens on the device."""
        return StreamedScheduler(
            opened.account, self._memory, lambda node: len(self._missing(node)), self._keeps
        )

    def _missing(self, node: Node) -> NDArray[np.int64]:
        """Offsets of the tokens that are computed before a block's path runs."""
        return self._state.missing(node)

    def pinned(self, nodes: Sequence[Node]) -> int:
        """The newest tokens of the open blocks."""
        return sum(self.required(node) for node in nodes)

    def is_crowded(self, nodes: Sequence[Node]) -> bool:
        """Where their paths exceed host memory, or these tokens the device."""
        paths = sum(len(node.tokens) for node in paths_of(nodes))
        return super().is_crowded(nodes) or paths + len(nodes) > self._memory.path_room

    def holes(
        self, path: Sequence[Node], leaves: Sequence[Node], reserve: int, residency: Residency
    ) -> Holes:
        """Everything that is nowhere or inexact; of paths that fit, what is in host memory too."""
        holes = super().holes(path, leaves, reserve, residency)
        if sum(len(node.tokens) for node in path) + reserve <= self._slots(leaves):
            for node in path:
                stored = np.flatnonzero(node.span.attended)
                if len(stored):
                    holes[node.row] = np.union1d(holes[node.row], stored)
        return holes


class StreamedLossy(Streamed):
    """Running paths lose tokens as the policy says, for good, and attention reads what is left of
    them on the device and in host memory. What is computed then is computed over the gaps.
    """

    def _missing(self, node: Node) -> NDArray[np.int64]:
        """What was never computed."""
        if node.row in self._state.computed:
            return np.empty(0, np.int64)
        return np.flatnonzero(~node.span.present)

    def holes(
        self, path: Sequence[Node], leaves: Sequence[Node], reserve: int, residency: Residency
    ) -> Holes:
        """What was never computed: nothing comes back."""
        return {node.row: self._missing(node) for node in path}


class Lossy(Rules):
    """Tokens of running paths may leave as well, as the policy says; what is computed then is
    computed over the gaps.

    What a search gives up changes its result, so each keeps within its own budget, whatever is
    searched next to it: the paths in one call are of one search (`ForestState.own_budgets`).
    """

    must_fit = "what is protected of a path"

    def __init__(self, state: ForestState, policy: Policy, rehydrate: Rehydrate) -> None:
        super().__init__(state, policy, rehydrate)
        self.paths_lose = "last" if policy.spares_paths else "equally"
        self._recent = max(1, policy.protect.recent)
        self._protected = policy.protect.sinks + policy.protect.recent

    def required(self, node: Node) -> int:
        """What the policy protects of a path."""
        return min(node.end, self._protected)

    def decoded(self, tokens: int) -> int:
        """The newest: the others may leave."""
        return min(tokens, DECODED)

    def room(self, opened: OpenTree, leaf_tokens: int, longest: int) -> int:
        """What fits into half of the budget."""
        return max(1, opened.slots // 2 // max(1, leaf_tokens))

    def waves(self, nodes: Sequence[Node], extra: Sequence[int]) -> list[list[int]]:
        """A wave takes at most half of the budget."""
        return list(halves(extra, self._slots(nodes))) if nodes else []

    def scheduler(self, opened: OpenTree) -> Scheduler:
        """Blocks join in waves, as any token may leave for good."""
        tree = opened.tree
        return WaveScheduler(opened.account, keeps=lambda: self._state.fits_alone(tree))

    def pinned(self, nodes: Sequence[Node]) -> int:
        """The newest tokens of the open blocks."""
        return sum(min(len(node.tokens), self._recent) for node in nodes)

    def is_outdated(self, leaf: Node) -> bool:
        """If the block was computed over a gap, or is not all there, and what is missing can come
        back."""
        return self._rehydrate != "off" and not leaf.span.certain.all()

    def pieces(self, root: Node, room: int) -> list[range]:
        """Pieces of at most a quarter of the budget, of a prompt that is longer than the room there
        is; larger ones of a long prompt that fits."""
        if root.row in self._state.computed or root.end <= min(room, MOST_NEW):
            return []
        fits = root.end <= room
        piece = MOST_NEW if fits else max(1, min(PIECE, self._slots([root]) // 4))
        return [range(at, min(root.end, at + piece)) for at in range(0, root.end, piece)]

    def splits(self, node: Node) -> bool:
        """No: a gap in one forward would be what a later one computes over."""
        return False

    def holes(
        self, path: Sequence[Node], leaves: Sequence[Node], reserve: int, residency: Residency
    ) -> Holes:
        """What was never computed, where nothing comes back; all that is missing, where the paths
        fit; else what the policy chooses."""
        if self._rehydrate == "off":
            return self._never_computed(path, leaves, reserve, residency)
        slots = self._slots(leaves)
        if sum(len(node.tokens) for node in path) + reserve <= slots:
            return super().holes(path, leaves, reserve, residency)
        # given tokens of open blocks are never left out: what follows would not read them
        new = [node for node in path if node.given and node.row not in self._state.computed]
        holes = {node.row: np.arange(len(node.tokens)) for node in new}
        room = slots - reserve - sum(len(node.tokens) for node in new)
        old = [node for node in path if node.row not in holes]
        chosen = residency.choose(old, leaves, room)
        for node in old:
            offsets = chosen[node.row]
            missing = offsets[node.span.slot[offsets] == NO_SLOT]
            all_anew = self._rehydrate == "span" and len(missing)
            if len(missing):  # a head that holds a missing token would have it twice
                mixed = np.flatnonzero(self._memory.mixed(node))
                missing = np.union1d(missing, mixed)
            holes[node.row] = offsets if all_anew else missing
        return holes

    def _never_computed(
        self, path: Sequence[Node], leaves: Sequence[Node], reserve: int, residency: Residency
    ) -> Holes:
        never = [node for node in path if node.row not in self._state.computed]
        new = sum(int((~node.span.resident).sum()) for node in never)
        residency.fit(new + reserve, leaves, "transition")
        holes: Holes = dict.fromkeys((node.row for node in path), np.empty(0, np.int64))
        return holes | {node.row: np.flatnonzero(~node.span.resident) for node in never}


def fitting(nodes: Sequence[Node], extra: Sequence[int], slots: int) -> Iterator[list[int]]:
    """Waves of which the union of all paths and the extra tokens are within the budget.

    Args:
        nodes: where each piece of work begins, in depth-first order, so that a wave shares what it
            can.
        extra: tokens each needs beyond its path.
        slots: the budget; no path with its own extra tokens is longer.

    Yields:
        indices into `nodes`.
    """
    wave: list[int] = []
    paths: set[int] = set()
    total = 0
    for index, (node, more) in enumerate(zip(nodes, extra, strict=True)):
        new = [n for n in node.path if n.id not in paths]
        cost = sum(len(n.tokens) for n in new) + more
        if wave and total + cost > slots:
            yield wave
            wave, paths = [], set()
            new, total = node.path, 0
            cost = node.end + more
        wave.append(index)
        paths.update(n.id for n in new)
        total += cost
    if wave:
        yield wave


def halves(extra: Sequence[int], slots: int) -> Iterator[list[int]]:
    """Waves whose extra tokens take at most half of the budget (one piece of work may take more);
    lossy mode leaves the rest to what the policy keeps of the paths. Yields indices into
    `extra`."""
    wave: list[int] = []
    total = 0
    for index, more in enumerate(extra):
        if wave and 2 * (total + more) > slots:
            yield wave
            wave, total = [], 0
        wave.append(index)
        total += more
    if wave:
        yield wave
