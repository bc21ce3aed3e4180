"""Fetching: copies back what lower tiers hold of running paths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from arbor.engine.forest_state import ForestState
from arbor.engine.forward_pass import nvtx_range
from arbor.engine.mode import Holes
from arbor.engine.prefix_sharing import Follower, PrefixSharing
from arbor.events import Rehydrated
from arbor.forest import by_tree
from arbor.model.fetch_costs import FetchCosts, Run
from arbor.tree import NO_RECORD, NO_SLOT, Node, Tier

Offsets = NDArray[np.int64]

_NOTHING = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class Fetch:
    """What one step copies back.

    Attributes:
        stored: offsets of the tokens, by the row of the block that has the records.
        lent: those of them that are for other blocks with the same tokens.
    """

    stored: Holes
    lent: Sequence[Follower]

    @property
    def tokens(self) -> int:
        """Slots that it needs."""
        return sum(map(len, self.stored.values()))


_NO_FETCH = Fetch({}, ())


class Fetching:
    """Copies back what lower tiers hold of running paths, where that is worth it.

    It is planned before room is made, so that its records stay meanwhile, and carried out after.

    Args:
        costs: of copying and of computing; None: all that can be copied is.
    """

    def __init__(
        self, state: ForestState, sharing: PrefixSharing, costs: FetchCosts | None
    ) -> None:
        self._state = state
        self._memory = state.memory
        self._sharing = sharing
        self._costs = costs

    def plan(
        self,
        path: Sequence[Node],
        holes: Holes,
        wanted: set[int],
        rows: int,
        most: int | None,
    ) -> Fetch:
        """Take out of the holes of paths what is copied back.

        Args:
            path: the blocks of the paths, in order.
            holes: offsets of the missing tokens of each, by row; those that are copied are removed.
            wanted: rows of the blocks whose last token runs in any case, for its logits.
            rows: others that the forward computes.
            most: tokens that the forward computes; what comes after more than these is left.
        """
        if not self._memory.lower:
            return _NO_FETCH
        own = self._stored(path, holes, wanted, most)
        lent = self._equal(own)
        for each in self._lent(path, holes, wanted, most):
            lent += _first_hand(each, lent)
        stored = dict(own)
        for each in lent:
            _add(each.offsets, each.leader.row, stored)
        if self._costs is not None and stored:
            stored = self._worth_it(self._costs, stored, holes, rows)
            for row, offsets in own.items():
                _add(np.setdiff1d(offsets, stored.get(row, _NOTHING)), row, holes)
            lent = [_loan(each, stored, holes) for each in lent]
            lent = [each for each in lent if len(each.offsets)]
        self._memory.lower.spare(self._at(stored))
        return Fetch(stored, lent)

    def carry_out(self, fetch: Fetch) -> Holes:
        """Copy back what was planned, and report it; room has been made.

        Returns:
            offsets of the tokens that the tiers had lost, by row, also of blocks that only lend; on
            the paths they are computed.
        """
        if not fetch.stored:
            return {}
        memory, forest = self._memory, self._state.forest
        memory.lower.spare(_NOTHING)
        tokens = {forest[row]: offsets for row, offsets in fetch.stored.items()}
        with nvtx_range("fetch"):
            back = memory.fetch(tokens)
        self._state.changed(tokens)
        for tree, nodes in by_tree(back).items():
            opened = self._state.trees[tree]
            counts = tuple(sorted((node.id, back[node]) for node in nodes))
            opened.emit(Rehydrated(counts, mode="fetch", kv=opened.kv))
        lost = {
            node.row: offsets[node.span.slot[offsets] == NO_SLOT]
            for node, offsets in tokens.items()
        }
        for each in fetch.lent:
            row = each.node.row
            lost[row] = np.union1d(lost.get(row, _NOTHING), self._sharing.take(each))
        self._state.report_discarded()
        return lost

    def _stored(
        self, path: Sequence[Node], holes: Holes, wanted: set[int], most: int | None
    ) -> Holes:
        """Take out of the holes what lower tiers hold; its offsets, by row. Arguments as for
        `plan`."""
        stored: Holes = {}
        for node, hole in self._fetchable(path, holes, wanted, most):
            here = hole[node.span.record[hole] != NO_RECORD]
            if len(here):
                stored[node.row] = here
                holes[node.row] = np.setdiff1d(holes[node.row], here, assume_unique=True)
        return stored

    def _equal(self, own: Holes) -> list[Follower]:
        """Take out what one block has records of and another one on the paths as well: it is
        fetched once, for both. Packed records are rounded, and serve their own block only."""
        exact = {
            row: offsets[self._state.forest[row].span.tier[offsets] != Tier.COMPRESSED]
            for row, offsets in own.items()
        }
        twice = self._sharing.followers(exact)
        for each in twice:
            row = each.node.row
            own[row] = np.setdiff1d(own[row], each.offsets, assume_unique=True)
            if not len(own[row]):
                del own[row]
        return twice

    def _lent(
        self, path: Sequence[Node], holes: Holes, wanted: set[int], most: int | None
    ) -> list[Follower]:
        """Take out of the holes what lower tiers hold as equal tokens of other blocks, but for what
        these compute anyway. Arguments as for `plan`."""
        lent: list[Follower] = []
        for node, hole in self._fetchable(path, holes, wanted, most):
            hole = hole[node.span.slot[hole] == NO_SLOT]  # others are computed anew in place
            for each in self._sharing.stored(node, hole):
                computed = holes.get(each.leader.row, _NOTHING)
                offsets = np.setdiff1d(each.offsets, computed, assume_unique=True)
                if len(offsets):
                    lent.append(replace(each, offsets=offsets))
                    rest = np.setdiff1d(holes[node.row], offsets, assume_unique=True)
                    holes[node.row] = rest
        return lent

    def _fetchable(
        self, path: Sequence[Node], holes: Holes, wanted: set[int], most: int | None
    ) -> Iterator[tuple[Node, Offsets]]:
        """Blocks with holes, and which tokens of them need not be computed in this forward."""
        for node in path:
            hole = holes[node.row]
            if node.row in wanted and len(hole) and hole[-1] == len(node.tokens) - 1:
                hole = hole[:-1]
            if len(hole):
                yield node, hole
            if most is not None and (most := most - len(holes[node.row])) < 0:
                return

    def _worth_it(self, costs: FetchCosts, stored: Holes, holes: Holes, rows: int) -> Holes:
        """What of it is fetched, by the measured costs.

        Args:
            stored: offsets of the tokens that can be fetched, by row.
            holes: offsets of the tokens to compute, by row.
            rows: others that the forward computes.
        """
        places: list[tuple[int, Offsets]] = []
        runs: list[Run] = []
        for row, offsets in stored.items():
            node = self._state.forest[row]
            tier = node.span.tier[offsets]
            cuts = np.flatnonzero((np.diff(offsets) != 1) | (np.diff(tier) != 0)) + 1
            for part in np.split(offsets, cuts):
                first = int(part[0])
                name = Tier(int(node.span.tier[first])).name.lower()
                places.append((row, part))
                runs.append(Run(len(part), node.start + first, name))
        rows += sum(len(offsets) for offsets in holes.values())
        worth: Holes = {}
        for (row, part), fetched in zip(places, costs.fetched(runs, rows), strict=True):
            if fetched:
                _add(part, row, worth)
        return worth

    def _at(self, tokens: Holes) -> NDArray[np.int64]:
        """Places in the spans of tokens given by row and offset."""
        begins = [self._state.forest[row].span.begin for row in tokens]
        each = [begin + offsets for begin, offsets in zip(begins, tokens.values(), strict=True)]
        return np.concatenate([_NOTHING, *each])


def _add(offsets: Offsets, row: int, holes: Holes) -> None:
    """Add tokens of a block to others of it."""
    if len(offsets):
        holes[row] = np.union1d(holes.get(row, _NOTHING), offsets)


def _first_hand(lent: Follower, earlier: Sequence[Follower]) -> list[Follower]:
    """A loan, of which what the lender itself is lent comes from the block that has it fetched."""
    found, rest = [], lent.offsets
    for each in earlier:
        if each.node is lent.leader:
            passed = np.intersect1d(rest, each.offsets, assume_unique=True)
            if len(passed):
                found.append(replace(lent, leader=each.leader, offsets=passed))
                rest = np.setdiff1d(rest, passed, assume_unique=True)
    return [*found, replace(lent, offsets=rest)] if len(rest) else found


def _loan(lent: Follower, stored: Holes, holes: Holes) -> Follower:
    """The part of a loan that is fetched; the rest becomes part of the borrower's holes again."""
    fetched = np.isin(lent.offsets, stored.get(lent.leader.row, _NOTHING))
    _add(lent.offsets[~fetched], lent.node.row, holes)
    return replace(lent, offsets=lent.offsets[fetched])
