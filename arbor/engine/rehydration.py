"""Rehydration: gives slots to what running paths miss, and lays it out for one forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from arbor.engine.fetching import Fetching
from arbor.engine.forest_state import ForestState, contexts_of, head
from arbor.engine.mode import Rules
from arbor.engine.prefix_sharing import Follower, PrefixSharing
from arbor.engine.residency import Residency
from arbor.engine.warm_start import Found, WarmStart
from arbor.events import Rehydrated
from arbor.forest import by_tree
from arbor.memory.prompt_files import PromptFiles
from arbor.model.fetch_costs import FetchCosts
from arbor.model.plan import Segment
from arbor.tree import NO_SLOT, Node, ThoughtTree, paths_of

# runs a segment of a prompt in a forward of its own; logits [n, V] where it asks for them
RunPiece = Callable[[Node, Segment], Tensor]


@dataclass(slots=True)
class Placed:
    """Missing tokens of paths, with slots and ready to run.

    Attributes:
        segments: the tokens to run.
        owners: the block of each segment.
        wanted: blocks whose logits after the last token they give, in order.
        written: blocks of which they write tokens.
        again: trees of which some of these had been computed before.
        moved: whether tokens that running rows read may lie elsewhere now.
    """

    segments: list[Segment] = field(default_factory=list)
    owners: list[Node] = field(default_factory=list)
    wanted: list[Node] = field(default_factory=list)
    written: list[Node] = field(default_factory=list)
    again: set[ThoughtTree] = field(default_factory=set)
    moved: bool = False

    def add(self, other: Placed) -> None:
        """Add what was placed for other paths."""
        self.segments += other.segments
        self.owners += other.owners
        self.wanted += other.wanted
        self.written += other.written
        self.again |= other.again
        self.moved = self.moved or other.moved


@dataclass(slots=True)
class _Missing:
    """What running paths miss, as int64 offsets by the row of each block.

    Attributes:
        compute: tokens that the next forward computes.
        later: rows of blocks of which further tokens are computed later.
        without_slot: those of `compute` that are given a slot.
        followers: tokens that use the slots of equal ones which are computed.
    """

    compute: dict[int, NDArray[np.int64]]
    later: set[int]
    without_slot: dict[int, NDArray[np.int64]] = field(default_factory=dict)
    followers: dict[int, list[Follower]] = field(default_factory=dict)

    def leave(self, follower: Follower) -> None:
        """Leave to another block what it computes."""
        row = follower.node.row
        self.compute[row] = np.setdiff1d(self.compute[row], follower.offsets, assume_unique=True)

    def set_without_slot(self, path: Sequence[Node]) -> None:
        """See which tokens to compute have no slot now."""
        for node in path:
            offsets = self.compute[node.row]
            self.without_slot[node.row] = offsets[node.span.slot[offsets] == NO_SLOT]

    @property
    def slots(self) -> int:
        """Slots that are given."""
        return sum(map(len, self.without_slot.values()))


@dataclass(frozen=True, slots=True)
class _Returned:
    """Tokens of a block computed before that come back: given slots, computed anew in place, or
    read in the slots of equal ones."""

    node: Node
    placed: int
    in_place: int
    shared: int


class Rehydration:
    """Completes paths of the open trees.

    Every run of consecutive missing tokens is one segment whose context ends where the run begins;
    all K/V are written before anything attends, so earlier runs are context of later ones.

    Args:
        run_piece: runs a piece of a prompt longer than the budget.
    """

    def __init__(
        self,
        state: ForestState,
        residency: Residency,
        rules: Rules,
        layers: int,
        costs: FetchCosts | None,
        run_piece: RunPiece,
        prompts: PromptFiles | None = None,
    ) -> None:
        self._state = state
        self._residency = residency
        self._memory = state.memory
        self._logits = state.logits
        self._rules = rules
        self._layers = layers
        self._run_piece = run_piece
        # tokens that were reported to be on the device, and are not computed yet
        self._announced: dict[Node, int] = {}
        self._sharing = PrefixSharing(state)
        self._fetching = Fetching(state, self._sharing, costs)
        self._warm = None if prompts is None else WarmStart(state, self._sharing, layers, prompts)

    def prepare(self, leaves: Sequence[Node], *, want: Sequence[Node], reserve: int) -> None:
        """Forget logits that are to be improved, and compute the prompts that go in piece by piece,
        in forwards of their own, before anything is placed for the next one.

        Args:
            leaves, want, reserve: as for `place`.

        Raises:
            BudgetInfeasible, UsageError: as `place`.
        """
        for leaf in want:
            if self._rules.is_outdated(leaf):
                self._logits.pop(leaf.row, None)
        room = self._state.account(leaves[0].tree).slots - reserve - len(want)
        for root in [tree.root for tree in by_tree(leaves)]:
            new = root.row not in self._state.computed
            if pieces := self._rules.pieces(root, room):
                self._prefill_in_pieces(root, pieces)
            if new and root.end <= room:
                room -= root.end

    def place(
        self,
        leaves: Sequence[Node],
        *,
        want: Sequence[Node] = (),
        reserve: int,
        running: Sequence[Node] = (),
        most: int | None = None,
    ) -> Placed:
        """Give slots to the missing tokens of the leaves' paths, to be run in the next forward;
        after `prepare`.

        Args:
            leaves: ends of the paths, which keep within the same budget.
            want: leaves whose logits after the last token are needed.
            reserve: slots that must be free afterwards.
            running: ends of other running paths, which stay.
            most: tokens to run, the first ones, of one path only; None: all.

        Raises:
            BudgetInfeasible: the policy will not give up as much.
            UsageError: the policy's answer breaks its protocol.
        """
        path = sorted(paths_of(leaves), key=lambda node: (node.tree.number, node.key))
        self._sharing.reuse(path)
        wanted = {leaf.row for leaf in want if leaf.row not in self._logits}
        compute = self._rules.holes(path, leaves, reserve + len(wanted), self._residency)
        fetch = self._fetching.plan(path, compute, wanted, reserve, most)
        found = Found() if self._warm is None else self._warm.find(path, compute)
        later = set() if most is None else self._put_off(path, leaves, compute, most)
        missing = _Missing(compute, later)
        # the last token of a leaf runs again for its logits, and needs a slot while it does
        asked = [leaf for leaf in want if leaf.row in wanted]
        self._add_last_tokens(asked, missing)
        for follower in found.followers:  # a last token among them runs again in its leader's slot
            missing.leave(follower)
        missing.set_without_slot(path)
        for follower in self._sharing.followers(missing.without_slot):
            missing.followers.setdefault(follower.node.row, []).append(follower)
            missing.leave(follower)
        needed = missing.slots + fetch.tokens + found.slots
        lose = self._rules.joining_loses
        if lose != "never":  # any token of the paths may leave, what is computed in place too
            needed = sum(map(len, compute.values())) + len(wanted) + fetch.tokens
        if self._residency.fit(
            needed + reserve, [*leaves, *running], "transition", paths_lose=lose
        ):
            self._add_last_tokens(asked, missing)
            missing.set_without_slot(path)
        self._rewrite_mixed(path, compute)
        for row, lost in self._fetching.carry_out(fetch).items():
            for each in (missing.without_slot, compute) if row in compute else ():
                each[row] = np.union1d(each[row], lost)
        if self._warm is not None:
            self._warm.load(found, missing.without_slot, compute, missing.followers)
        placed = Placed(moved=lose != "never")
        placed.again = self._report(self._give_slots(path, missing))
        self._lay_out(path, compute, wanted, placed)
        placed.written = [
            node
            for node in path
            if node.row not in later and (len(compute[node.row]) or node.row in missing.followers)
        ]
        return placed

    def _lay_out(
        self,
        path: Sequence[Node],
        compute: dict[int, NDArray[np.int64]],
        wanted: set[int],
        placed: Placed,
    ) -> None:
        """Add the runs of tokens to compute as segments; a run's context ends where it begins.

        Args:
            path: blocks whose tokens have slots, depth first.
            compute: offsets of the tokens, increasing, by row.
            wanted: rows of blocks whose logits after the last token are needed.
            placed: takes the segments.
        """
        state, nowhere = self._state, np.full(1, self._memory.pool.trash, np.int32)

        def add(node: Node, begin: int, end: int, hidden: frozenset[int], **how: Any) -> None:
            slots = node.span.slot[begin:end]
            placed.owners.append(node)
            placed.segments.append(
                Segment(
                    context=(*contexts_of([node.parent], hidden)[0], *head(node, begin)),
                    tokens=node.tokens[begin:end],
                    positions=np.arange(node.start + begin, node.start + end),
                    tail=slots,
                    **{"write": slots, **how},
                )
            )

        for node in path:
            # K/V of a block that was computed before others were hidden attend to them all the same
            masked = frozenset() if node.row in state.before_hiding else state.hidden
            runs = runs_of(compute[node.row])
            end = len(node.tokens)
            asked = node.row in wanted
            # the last token runs once more, for its logits only: it is resident, or its K/V attend
            # to more than they do
            again = asked and (not runs or runs[-1][1] != end or masked != state.hidden)
            for begin, stop in runs:
                logits = int(asked and stop == end and not again)
                add(node, begin, stop, masked, logits=logits, again=node.row in state.computed)
            if asked:
                placed.wanted.append(node)
            if again:
                add(node, end - 1, end, state.hidden, write=nowhere, logits=1, again=True)

    def _add_last_tokens(self, leaves: Sequence[Node], missing: _Missing) -> None:
        """Compute the last tokens of leaves, those of them that are not on the device."""
        for leaf in leaves:
            last = len(leaf.tokens) - 1
            if not self._holds(leaf, last):
                missing.compute[leaf.row] = np.union1d(missing.compute[leaf.row], [last])

    def _give_slots(self, path: Sequence[Node], missing: _Missing) -> list[_Returned]:
        """Give slots to what is computed next, from the root down; returns what comes back."""
        returned: list[_Returned] = []
        complete: dict[int, bool] = {}  # up to the end of a block
        rounded: dict[int, bool] = {}  # likewise, whether any token is
        for node in path:
            row, parent = node.row, node.parent
            compute, place = missing.compute[row], missing.without_slot[row]
            in_place = np.setdiff1d(compute, place, assume_unique=True)
            followers = missing.followers.get(row, [])
            later = row in missing.later
            whole = (
                (parent is None or complete[parent.row])
                and self._state.sees_all(node)
                and _is_whole(node, compute, *(each.offsets for each in followers), later=later)
            )
            complete[row] = whole and not later
            rounded[row] = bool(node.span.rounded.any()) or (
                parent is not None and rounded[parent.row]
            )
            for follower in followers:
                self._sharing.follow(follower)
                self._announced[node] = self._announced.get(node, 0) + len(follower.offsets)
            kept = {"exact": whole and not rounded[row], "rounded": whole and rounded[row]}
            if len(in_place):
                self._memory.rewrite(node, in_place, depth=self._layers, **kept)
            if len(place):
                first = int(node.span.slot[place[0] - 1]) + 1 if place[0] else NO_SLOT
                self._memory.place(node, place, depth=self._layers, first=first, **kept)
            # what a prompt takes from another one has been reported
            shared = sum(len(each.offsets) for each in followers) if parent is not None else 0
            if (len(compute) or shared) and row in self._state.computed:
                returned.append(_Returned(node, len(place), len(in_place), shared))
        self._state.changed(path)
        return returned

    def _report(self, returned: Sequence[_Returned]) -> set[ThoughtTree]:
        """Report what comes back; the trees of which something does."""
        back = {each.node: each for each in returned}
        for node in back:
            # all it is given counts as back, what is computed once more in place as well
            self._announced[node] = len(node.tokens)
        trees = by_tree(back)
        for tree, nodes in trees.items():
            opened = self._state.trees[tree]
            counts = sorted((node.id, back[node].placed + back[node].shared) for node in nodes)
            opened.emit(
                Rehydrated(
                    tuple(counts),
                    mode="recompute",
                    kv=opened.kv,
                    repeated=sum(back[node].in_place for node in nodes),
                    shared=sum(back[node].shared for node in nodes),
                )
            )
        self._state.report_discarded()
        return set(trees)

    def _rewrite_mixed(self, path: Sequence[Node], holes: dict[int, NDArray[np.int64]]) -> None:
        """Give up what KV heads hold in slots that are about to be computed anew, before any token
        comes back that they hold there."""
        for node in path:
            hole = holes[node.row]
            mixed = hole[self._memory.mixed(node)[hole]]
            if len(mixed):
                self._memory.rewrite(node, mixed, exact=False, depth=self._layers)
                self._announced[node] = len(mixed)

    def _holds(self, node: Node, offset: int) -> bool:
        """Whether a token of a block is on the device in every KV head."""
        slot = node.span.slot[offset]
        return bool(slot != NO_SLOT and not self._memory.table.mixed[slot])

    def _put_off(
        self,
        path: Sequence[Node],
        leaves: Sequence[Node],
        holes: dict[int, NDArray[np.int64]],
        most: int,
    ) -> set[int]:
        """Leave the first `most` tokens of the holes; returns the rows of the blocks whose others
        are computed later.

        Whatever runs after another leaf would read over what is put off of its path.
        """
        if len(leaves) > 1:
            raise RuntimeError(f"a part of a path is computed alone, not with {len(leaves)} paths")
        later = set()
        for node in path:
            hole = holes[node.row]
            if len(hole) > most and (most == 0 or self._rules.splits(node)):
                holes[node.row] = hole[:most]
                later.add(node.row)
            most = max(0, most - len(hole))
        return later

    def computed(self) -> None:
        """Record that a forward has computed what was placed."""
        self._announced = {}
        if self._warm is not None:
            self._warm.keep()

    def undo(self) -> None:
        """After a failure: drop tokens that were placed and never computed, and report the eviction
        of those that were reported as rehydrated."""
        lost = self._memory.rollback()
        announced, self._announced = self._announced, {}
        self._state.changed(self._state.forest)
        gone = {node: min(lost.get(node, 0), count) for node, count in announced.items()}
        self._state.report_evicted(
            {node: count for node, count in gone.items() if count}, "transition"
        )

    def _prefill_in_pieces(self, root: Node, pieces: Sequence[range]) -> None:
        """A long prompt in lossy mode: piece by piece, the policy evicting in between."""
        try:
            for piece in pieces:
                logits = self._prefill_piece(root, piece.start, piece.stop)
        except Exception:  # a prompt counts as computed once all of it is
            self.undo()
            self._memory.free_blocks([root])
            self._state.changed([root])
            raise
        self._state.mark_computed([root])
        self._logits.remember([root.row], logits)

    def _prefill_piece(self, root: Node, begin: int, end: int) -> Tensor:
        """The tokens of a prompt from `begin` to `end`; logits [1, V] after the last one of all."""
        self._residency.fit(end - begin, [root], "transition")
        exact = bool(root.span.exact[:begin].all())  # nothing of it comes back meanwhile
        offsets = np.arange(begin, end)
        context = tuple(head(root, begin))
        slots = self._memory.place(root, offsets, exact=exact, depth=self._layers)
        self._state.changed([root])
        segment = Segment(
            context=context,
            tokens=root.tokens[begin:end],
            positions=offsets,
            tail=slots,
            write=slots,
            logits=int(end == root.end),
        )
        return self._run_piece(root, segment)


def _is_whole(node: Node, *computed: NDArray[np.int64], later: bool) -> bool:
    """Whether every token of a block is ready once these are computed; up to the last of them, if
    others are computed later."""
    ready = node.span.ready.copy()
    end = 0 if later else len(ready)
    for offsets in computed:
        ready[offsets] = True
        end = max(end, int(offsets.max(initial=-1)) + 1)
    return bool(ready[:end].all())


def runs_of(offsets: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Increasing offsets as half-open runs of consecutive ones: 0 1 2 5 -> (0, 3), (5, 6)."""
    if len(offsets) == 0:
        return []
    breaks = np.flatnonzero(np.diff(offsets) != 1) + 1
    begins = offsets[np.concatenate(([0], breaks))]
    ends = offsets[np.concatenate((breaks - 1, [len(offsets) - 1]))] + 1
    return list(zip(begins.tolist(), ends.tolist(), strict=True))
