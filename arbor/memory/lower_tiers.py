"""LowerTiers: the KV of tokens that have left the device, and the records that hold it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from arbor.forest import Forest
from arbor.memory.out_of_memory import lower_tier
from arbor.memory.pool import KVPool
from arbor.memory.records import RECORD_BYTES, GroupedRecords, Records, RecordTable, Tokens
from arbor.memory.stores import Store
from arbor.tree import NO_RECORD, Node, Tier

CPU = torch.device("cpu")
_NONE = np.empty(0, np.int32)
ROOM = 64  # a full store makes room for at least a 64th of its records at once


@dataclass(slots=True)
class Moves:
    """What happened to records since this was last asked, in tokens by block.

    Attributes:
        stored: tokens that left the device and were stored.
        lost: tokens whose records were given up, or handed over.
        taken: tokens whose records were handed over, by the block that has them now.
    """

    stored: dict[Node, int] = field(default_factory=dict)
    lost: dict[Node, int] = field(default_factory=dict)
    taken: dict[Node, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Shelf:
    """A store and the account of its records."""

    store: Store
    table: RecordTable


@dataclass(frozen=True, slots=True)
class Loaded:
    """Tokens that were copied to slots.

    Attributes:
        intact: bool [n]; where it is not, the KV is lost.
        exact: bool [n], bit for bit what was stored.
        origin: int32 [n], the record that is kept, or `NO_RECORD`.
        depth: int16 [n], layers that hold it.
    """

    intact: NDArray[np.bool_]
    exact: NDArray[np.bool_]
    origin: NDArray[np.int32]
    depth: NDArray[np.int16]


def _table_of(store: Store) -> RecordTable:
    """The account of a store's records.

    Raises:
        UsageError: the machine has no memory for so many.
    """
    with lower_tier(store.records * RECORD_BYTES):
        if store.group == 1:
            return RecordTable(store.records)
        return GroupedRecords(store.records, store.group)


class LowerTiers:
    """Stores in the order in which KV goes down: what the first has no room for goes to the second.

    A token's KV is in exactly one place: what comes back to the device gives up its record. A
    rounded record is kept as the token's `origin` instead, to which the token returns when it
    leaves the device, so that nothing is quantised twice.

    Args:
        stores: at most one of each tier.
    """

    _moves: Moves

    def __init__(self, stores: Sequence[Store], forest: Forest) -> None:
        self._forest = forest
        self._stores = list(stores)
        self.clear()

    def __bool__(self) -> bool:
        """Whether there is a store."""
        return bool(self._stores)

    def __iter__(self) -> Iterator[Shelf]:
        return iter(self._shelves.values())

    def used(self, tier: Tier) -> int:
        """Records in use of a tier, those kept for tokens on the device included."""
        return self._shelves[tier].table.used if tier in self._shelves else 0

    def used_by(self, tier: Tier, number: int) -> int:
        """Records of a tier that hold tokens of a tree (`ThoughtTree.number`)."""
        held = self._held.get(tier)
        return 0 if held is None or number >= len(held) else int(held[number])

    def take_moves(self) -> Moves:
        """What happened since the last call."""
        moves, self._moves = self._moves, Moves()
        return moves

    def clear(self) -> None:
        """Forget every record: nothing names one any more."""
        self._shelves = {store.tier: Shelf(store, _table_of(store)) for store in self._stores}
        self._moves = Moves()
        self._held: dict[Tier, NDArray[np.int64]] = {}  # by number of tree
        self._spared: dict[Tier, Records] = {}
        self._pinned: set[int] = set()

    def close(self) -> None:
        """Free what the stores hold."""
        for store in self._stores:
            store.close()

    # Down

    def save(
        self, pool: KVPool, slots: NDArray[np.int32], tokens: Tokens, at: NDArray[np.int64]
    ) -> None:
        """Store KV that is about to leave the device, as far as there is room, the first first.

        Args:
            slots: int32 [n].
            at: int64 [n], their places in the forest's spans, which name the slots still.
        """
        rows = pool.gather(slots)
        stored = self._down(0, rows, tokens)
        spans = self._forest.spans
        for shelf, records, places in stored:
            spans.lower(at[places], shelf.store.tier, records)
        done = np.concatenate([places for _, _, places in stored]) if stored else _NONE
        _count(self._moves.stored, self._forest, tokens.row[done])

    def pack(self, pool: KVPool, tokens: Tokens, at: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Move KV to the store in few bits, in this order, from the device or from above it in host
        memory; the caller frees the slots of what is moved.

        Args:
            pool: of what is on the device.
            tokens: whose it is; none of them was packed before.
            at: int64 [n], their places in the forest's spans.

        Returns:
            bool [n], whether each was moved; what there is no room for stays where it is.
        """
        spans = self._forest.spans
        ((level, shelf),) = (each for each in enumerate(self) if each[1].store.keeps)
        slots, tiers, records = spans.slot[at], spans.tier[at], spans.record[at]
        rows = torch.empty(len(at), pool.numbers, dtype=pool.dtype)
        here = np.flatnonzero(tiers == Tier.DEVICE)
        rows[torch.from_numpy(here)] = pool.gather(slots[here]).to(CPU)
        above = [(each, np.flatnonzero(tiers == each.store.tier)) for each in list(self)[:level]]
        for each, mine in above:
            rows[torch.from_numpy(mine)], _ = each.store.read(records[mine], CPU)
        result: list[tuple[Shelf, Records, NDArray[np.int64]]] = []
        self._write(level, shelf, rows, tokens, np.arange(len(at)), result)
        moved = np.zeros(len(at), np.bool_)
        for _, packed, places in result:
            moved[places] = True
            spans.lower(at[places], shelf.store.tier, packed)
        for each, mine in above:
            self._free_records(each, records[mine[moved[mine]]])
        _count(self._moves.stored, self._forest, tokens.row[moved & (tiers == Tier.DEVICE)])
        return moved

    def put_back(self, at: NDArray[np.int64]) -> None:
        """Let tokens that are about to leave the device return to the records they came from.

        Args:
            at: int64 [n], their places in the forest's spans, each with an origin.
        """
        spans = self._forest.spans
        for shelf in self._keeping():
            records = spans.origin[at]
            shelf.table.lent[records] = False
            rows = shelf.table.row[records]
            self._hold(shelf, rows, +1)
            spans.lower(at, shelf.store.tier, records)
            _count(self._moves.stored, self._forest, rows)

    def free_origins(self, at: NDArray[np.int64]) -> None:
        """Give up the records that are kept for tokens on the device, where there are some."""
        spans = self._forest.spans
        for shelf in self._keeping():
            mine = at[spans.origin[at] != NO_RECORD]
            shelf.table.release(spans.origin[mine])
            spans.origin[mine] = NO_RECORD

    def _keeping(self) -> list[Shelf]:
        """The store that keeps rounded records, if there is one."""
        return [shelf for shelf in self if shelf.store.keeps]

    def _down(
        self, level: int, rows: Tensor, tokens: Tokens
    ) -> list[tuple[Shelf, Records, NDArray[np.int64]]]:
        """Store rows in a tier, or below it where they do not fit.

        Returns:
            for each tier that took some: it, the records, and which rows, int64.
        """
        result: list[tuple[Shelf, Records, NDArray[np.int64]]] = []
        left = np.arange(len(tokens))
        try:
            for at, shelf in enumerate(list(self)[level:], level):
                left = self._write(at, shelf, rows, tokens, left, result)
                if not len(left):
                    break
        except Exception:
            for shelf, records, _ in result:
                self._free_records(shelf, records)
            raise
        return result

    def _write(
        self,
        level: int,
        shelf: Shelf,
        rows: Tensor,
        tokens: Tokens,
        wanted: NDArray[np.int64],
        result: list[tuple[Shelf, Records, NDArray[np.int64]]],
    ) -> NDArray[np.int64]:
        """Store some of the rows in one tier, add what it took to `result`, and return what it did
        not."""
        self._make_room(level, len(wanted))
        some = wanted[: shelf.table.free]
        records = shelf.table.take(tokens.of(some))
        try:
            written = shelf.store.write(records, rows[some])
        except Exception:
            shelf.table.release(records)
            raise
        shelf.table.release(records[~written])
        if written.any():
            mine = some[written]
            self._hold(shelf, tokens.row[mine], +1)
            result.append((shelf, records[written], mine))
        return np.concatenate([some[~written], wanted[len(some) :]])

    def _make_room(self, level: int, count: int) -> None:
        """Have as many free records in a tier as possible, up to `count`: the oldest go down."""
        shelf = list(self)[level]
        table = shelf.table
        short = min(count, table.records) - table.free
        if short <= 0:
            return
        spared = self._spared.get(shelf.store.tier, _NONE)
        if self._pinned:
            pinned = table.in_use & np.isin(table.row, list(self._pinned))
            spared = np.concatenate([spared, np.flatnonzero(pinned)])
        gone = table.oldest(max(short, table.records // ROOM), spared)
        if not len(gone):
            return
        tokens = table.tokens(gone)
        at = self._places(tokens)
        kept = np.zeros(len(gone), np.bool_)
        lower: list[tuple[Shelf, Records, NDArray[np.int64]]] = []
        if level + 1 < len(self._stores):
            rows, intact = shelf.store.read(gone, CPU)
            whole = np.flatnonzero(intact)
            moved = self._down(level + 1, rows[whole], tokens.of(whole))
            lower = [(below, records, whole[places]) for below, records, places in moved]
        self._free_records(shelf, gone)
        for below, records, places in lower:
            self._forest.spans.lower(at[places], below.store.tier, records)
            kept[places] = True
        self._forest.spans.drop(at[~kept])
        _count(self._moves.lost, self._forest, tokens.row[~kept])

    # Up

    def spare(self, at: NDArray[np.int64]) -> None:
        """Keep the records of these places, which are about to be read, when room is needed; of
        none after an empty call."""
        spans = self._forest.spans
        self._spared = {tier: spans.record[at[spans.tier[at] == tier]] for tier in self._shelves}

    def pin(self, rows: Iterable[int]) -> None:
        """Keep the records of these blocks, which attention reads where they are, when room is
        needed; of none other."""
        self._pinned = set(rows)

    def may_rise(self, at: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which tokens have a record that changes no more, bool [n]: those of a group that waits to
        be packed do not.

        Args:
            at: int64 [n], places in the forest's spans.
        """
        spans = self._forest.spans
        able = np.zeros(len(at), np.bool_)
        for tier, shelf in self._shelves.items():
            mine = np.flatnonzero(spans.tier[at] == tier)
            records = spans.record[at[mine]]
            able[mine] = shelf.store.rounded(records) if shelf.store.keeps else True
        return able

    def load(self, pool: KVPool, slots: NDArray[np.int32], at: NDArray[np.int64]) -> Loaded:
        """Copy KV to slots, and give up its records unless they are kept; the caller writes the
        spans.

        Args:
            slots: int32 [n].
            at: int64 [n], places in the forest's spans of tokens that have records.
        """
        spans = self._forest.spans
        count = len(at)
        loaded = Loaded(
            np.zeros(count, np.bool_),
            np.zeros(count, np.bool_),
            np.full(count, NO_RECORD, np.int32),
            np.zeros(count, np.int16),
        )
        read: list[tuple[Shelf, Records, NDArray[np.bool_], NDArray[np.bool_]]] = []
        for tier, shelf in self._shelves.items():
            mine = np.flatnonzero(spans.tier[at] == tier)
            if not len(mine):
                continue
            records = spans.record[at[mine]]
            rows, whole = shelf.store.read(records, pool.device)
            good = np.flatnonzero(whole)
            pool.scatter(slots[mine[good]], rows if whole.all() else rows[good])
            loaded.intact[mine], loaded.depth[mine] = whole, shelf.table.depth[records]
            rounded = shelf.store.rounded(records)
            loaded.exact[mine] = whole & ~rounded
            kept = whole & rounded & shelf.store.keeps
            loaded.origin[mine[kept]] = records[kept]
            read.append((shelf, records, whole, kept))
        for shelf, records, whole, kept in read:  # once nothing can fail any more
            _count(self._moves.lost, self._forest, shelf.table.row[records[~whole]])
            shelf.table.lent[records[kept]] = True
            self._hold(shelf, shelf.table.row[records[kept]], -1)
            self._free_records(shelf, records[~kept])
        return loaded

    def free(self, at: NDArray[np.int64]) -> None:
        """Give up the records of tokens, where they have some; their spans are dropped."""
        spans = self._forest.spans
        at = at[spans.record[at] != NO_RECORD]
        for tier, shelf in self._shelves.items():
            mine = at[spans.tier[at] == tier]
            if len(mine):
                records = spans.record[mine]
                _count(self._moves.lost, self._forest, shelf.table.row[records])
                self._free_records(shelf, records)
                spans.drop(mine)

    def transfer(self, source: Node, target: Node, offsets: NDArray[np.int64]) -> None:
        """Let the records of a block's tokens be those of a sibling's equal ones.

        Args:
            source: the block.
            target: the sibling.
            offsets: int64 [n], equal tokens of which the source has records and the target has no
                KV.
        """
        spans = self._forest.spans
        before, after = source.span.begin + offsets, target.span.begin + offsets
        for tier, shelf in self._shelves.items():
            mine = spans.tier[before] == tier
            records = spans.record[before[mine]]
            shelf.table.row[records] = target.row
            spans.lower(after[mine], tier, records)
        spans.drop(before)
        self._moves.lost[source] = self._moves.lost.get(source, 0) + len(offsets)
        self._moves.taken[target] = self._moves.taken.get(target, 0) + len(offsets)

    # The account

    def _places(self, tokens: Tokens) -> NDArray[np.int64]:
        begins = {row: self._forest[row].span.begin for row in set(tokens.row.tolist())}
        begin = np.array([begins[row] for row in tokens.row.tolist()], np.int64)
        return begin + tokens.offset

    def _free_records(self, shelf: Shelf, records: Records) -> None:
        self._hold(shelf, shelf.table.row[records], -1)
        shelf.table.release(records)

    def _hold(self, shelf: Shelf, rows: NDArray[np.integer], sign: int) -> None:
        held = self._held.get(shelf.store.tier, np.zeros(0, np.int64))
        more = np.bincount(self._forest.numbers[rows], minlength=len(held))
        held = np.pad(held, (0, len(more) - len(held)))
        self._held[shelf.store.tier] = held + sign * more

    def check(self) -> None:
        """Assert that spans and records name each other, and that the counts add up."""
        named = {
            tier: np.zeros(shelf.store.records, np.int64) for tier, shelf in self._shelves.items()
        }
        by_tree: dict[tuple[Tier, int], int] = {}
        lent: dict[Tier, int] = {}
        for node in self._forest:
            span = node.span
            for tier, shelf in self._shelves.items():
                offsets = np.flatnonzero(span.tier == tier)
                records = span.record[offsets]
                assert (shelf.table.row[records] == node.row).all(), "a record of another block"
                assert (shelf.table.offset[records] == offsets).all(), "a record of another token"
                named[tier][records] += 1
                key = tier, node.tree.number
                by_tree[key] = by_tree.get(key, 0) + len(offsets)
                if shelf.store.keeps:
                    kept = np.flatnonzero(span.origin != NO_RECORD)
                    origins = span.origin[kept]
                    assert (shelf.table.row[origins] == node.row).all(), "an origin of another"
                    assert (shelf.table.offset[origins] == kept).all(), "an origin of another"
                    assert shelf.table.lent[origins].all(), "an origin that is not lent"
                    named[tier][origins] += 1
                    lent[tier] = lent.get(tier, 0) + len(kept)
            lower = np.isin(span.tier, [int(tier) for tier in self._shelves])
            assert ((span.record != NO_RECORD) == lower).all(), (
                f"block {node.id}: a record without its tier"
            )
        for tier, shelf in self._shelves.items():
            assert (named[tier] == shelf.table.in_use).all(), "records and spans do not add up"
            assert shelf.table.used == int(shelf.table.in_use.sum()), "used records do not add up"
            assert lent.get(tier, 0) == int(shelf.table.lent.sum()), "lent records do not add up"
        for tree in self._forest.trees:
            for tier in self._shelves:
                held = by_tree.get((tier, tree.number), 0)
                assert self.used_by(tier, tree.number) == held, (
                    f"the records of tree {tree.number} do not add up"
                )


def _count(counts: dict[Node, int], forest: Forest, rows: NDArray[np.integer]) -> None:
    """Count tokens by block, one for each time a row is named."""
    distinct, often = np.unique(rows, return_counts=True)
    for node, count in zip(forest.nodes(distinct.tolist()), often.tolist(), strict=True):
        counts[node] = counts.get(node, 0) + count
