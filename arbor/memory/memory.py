"""KVMemory: the only writer of spans; the budget is the size of its pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from arbor.forest import Forest
from arbor.memory.lower_tiers import LowerTiers
from arbor.memory.packed_store import PackedStore
from arbor.memory.pool import KVPool, LayerKV, bytes_per_token
from arbor.memory.prefix_cache import PrefixCache
from arbor.memory.records import Tokens
from arbor.memory.slots import NO_OWNER, NO_TREE, LastTokens, SlotTable
from arbor.memory.staging_buffer import StagingBuffer
from arbor.memory.stores import NO_ROOM, HostStore, LowerRoom
from arbor.tree import NO_RECORD, NO_SLOT, Node, NodeState, ThoughtTree, Tier

if TYPE_CHECKING:
    from arbor.heads.table import HeadMoves, HeadTable

FIRST_BYTES = 64 * 2**20  # of a pool that grows

_NOTHING = np.empty(0, np.int64)
_NO_SLOTS = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class Placed:
    """Tokens of a block whose K/V the next forward writes, and whether they will be exact, or
    rounded.

    Attributes:
        node: the block.
        offsets: int64 [m], which of its tokens.
    """

    node: Node
    offsets: NDArray[np.int64]
    exact: bool
    rounded: bool


@dataclass(frozen=True, slots=True)
class Appended:
    """The same of the last token of each of n blocks, bool [n]."""

    last: LastTokens
    exact: NDArray[np.bool_]
    rounded: NDArray[np.bool_] | bool


class KVMemory:
    """The KV of the trees of a forest.

    A pool of a fixed budget has exactly as many slots, so that no event, transient or not, can hold
    more. One that grows begins with `FIRST_BYTES`, and is twice as large each time it is full: what
    may be held is then for the engine's `Account` to say. Tokens that were given slots are pending
    until `commit` says that a forward has written them; `rollback` takes their slots back.

    Attributes:
        prefixes: prompts of trees that were dropped, kept while nothing needs their slots.
        budget: tokens of KV on the device at any instant, the staging buffer included; of a pool
            that grows, its slots now.
        grows: whether the pool gets more slots when it is full.
        staging: the buffer through which attention reads KV in host memory; None: it reads none.

    Args:
        layers: what each layer stores per token.
        slots: the budget, the staging buffer included; None: the pool grows.
        dtype, device: of the pool.
        weight_bytes: see `KVPool`.
        lower: room for KV that leaves the device; see `LowerTiers`.
        heads: KV heads may hold different tokens; in a pool of a fixed budget.
        pool: of a memory that is not used any more, as large as this one's if that is fixed; None:
            a new one.
        debug: poison freed slots with NaN and check every invariant after every change.
    """

    def __init__(
        self,
        layers: Sequence[LayerKV],
        slots: int | None,
        dtype: torch.dtype,
        device: torch.device,
        *,
        weight_bytes: int = 0,
        lower: LowerRoom = NO_ROOM,
        heads: HeadTable | None = None,
        pool: KVPool | None = None,
        debug: bool = False,
    ) -> None:
        self.grows = slots is None
        if pool is not None:
            assert self.grows or pool.slots == slots, "a pool of another size"
            slots, pool.reader, pool.holders = pool.slots, None, None
        if slots is None:
            assert not lower.staging, "a staging buffer is the end of a pool of one size"
            slots = max(1, FIRST_BYTES // bytes_per_token(layers, dtype))
        assert lower.staging < slots, "a staging buffer of the whole budget"
        self.pool = pool or KVPool(
            layers, slots, dtype, device, weight_bytes=weight_bytes, staging=lower.staging
        )
        self._inexact = lower.inexact
        self.table = SlotTable(slots - lower.staging)
        assert heads is None or not self.grows, "what heads hold is a table of one size"
        self.heads = heads
        self.debug = debug
        self.forest = Forest()
        stores = lower.stores(self.pool)
        self.lower = LowerTiers(stores, self.forest)
        self.staging: StagingBuffer | None = None
        if lower.staging:
            read = [store for store in stores if isinstance(store, HostStore | PackedStore)]
            assert len(read) == len(stores), "checked by `LowerRoom`"
            self.staging = self.pool.reader = StagingBuffer(self.pool, read)
        self.prefixes = PrefixCache()
        self._placed: list[Placed] = []
        self._appended: Appended | None = None
        if debug and pool is not None:
            pool.poison(np.arange(self.slots, dtype=np.int32))

    # The account

    @property
    def budget(self) -> int:
        return self.pool.slots

    @property
    def slots(self) -> int:
        """Slots of blocks and questions: all of the pool but the staging buffer."""
        return self.table.slots

    @property
    def used(self) -> int:
        """Slots in use, temporary ones included."""
        return self.table.used

    @property
    def free(self) -> int:
        return self.table.free

    @property
    def kept_slots(self) -> int:
        """Slots that are free once no prompt of a dropped tree is kept."""
        return self.prefixes.slots_alone(self.table)

    @property
    def available(self) -> int:
        """Slots that are free, or are once no prompt of a dropped tree is kept."""
        return self.free + self.kept_slots

    def _grow_for(self, count: int) -> None:
        """Have so many free slots, if the pool grows."""
        if not self.grows or count <= self.table.free:
            return
        slots = self.slots
        while slots - self.table.used < count:
            slots *= 2
        self.pool.grow(slots)
        self.table.grow(slots)

    @property
    def peak(self) -> int:
        """Most slots ever in use at one instant since the forest was empty."""
        return self.table.peak

    @property
    def device_peak(self) -> int:
        """Most tokens of KV that the device ever held: in slots of blocks and questions, and in the
        staging buffer."""
        return self.peak + (0 if self.staging is None else self.staging.peak)

    @property
    def path_room(self) -> int:
        """Tokens that running paths may have together: where attention reads the host's KV, any
        part of them may be there in full precision."""
        if self.staging is None:
            return self.slots
        return next(iter(self.lower)).table.records

    def used_by(self, tree: ThoughtTree) -> int:
        """Slots a tree uses, temporary ones and those it shares included."""
        return int(self.table.used_by[tree.number])

    def shared_within(self, tree: ThoughtTree) -> int:
        """Tokens of a tree's blocks that are in the slots of siblings: what its blocks hold, minus
        the slots that takes."""
        return int(self.table.further_of[tree.number])

    def peak_of(self, tree: ThoughtTree) -> int:
        """Most slots a tree ever used at one instant."""
        return int(self.table.peak_of[tree.number])

    @property
    def bytes_per_token(self) -> int:
        return self.pool.bytes_per_token

    def adopt(self, tree: ThoughtTree) -> None:
        """Serve one more tree, of which nothing is on the device."""
        if not self.forest.trees:
            # peaks count from here, and slots that a failure may have left come back
            self.table = self.prefixes.moved_to(SlotTable(self.slots))
            self.lower.clear()
            self._placed, self._appended = [], None
            if self.staging is not None:
                self.staging.peak = 0
        if self.staging is not None:
            self.forest.spans.firsts = self.staging.firsts
            self.forest.spans.records_exact = not self._inexact
        self.forest.adopt(tree)
        self.table.open(tree.number)

    def free_tree(self, tree: ThoughtTree, *, keep_prompt: bool = False) -> list[int]:
        """Free what is held for a tree and serve it no longer.

        Args:
            keep_prompt: its prompt is kept for trees whose prompts begin alike, while nothing needs
                the slots; and, in a pool that does not grow, its text as far as it has one only.

        Returns:
            the rows its blocks had.
        """
        assert not self.pending, "the last step was neither committed nor rolled back"
        root = tree.root
        if keep_prompt:
            path = [root]
            while not self.grows and len(path[-1].children) == 1:
                path += path[-1].children
            self.prefixes.add(self.table, path)
        self.free_blocks(tree.nodes)
        temporary = self._temporary() & (self.table.tree == tree.number)
        self._free_slots(np.flatnonzero(temporary).astype(np.int32))
        return self.forest.drop(tree)

    def free_blocks(self, nodes: Sequence[Node]) -> int:
        """Drop everything the blocks hold; returns how many slots became free.

        Records in lower tiers go to siblings that lack the KV of equal tokens, else are given up.
        What PRUNED blocks have in common with others is forgotten: no work depends on blocks that
        were given up long ago.
        """
        held = [np.flatnonzero(node.span.resident) for node in nodes]
        counts = np.array([len(offsets) for offsets in held], np.int64)
        freed = self.evict_blocks(nodes, np.concatenate([_NOTHING, *held]), counts, stored=False)
        if self.lower:
            self._transfer_records(nodes)
            ranges = [node.span.begin + np.arange(len(node.span)) for node in nodes]
            self.lower.free(np.concatenate([_NOTHING, *ranges]))
        for node in nodes:
            if node.state is NodeState.PRUNED:
                self.forest.give_up(node)
        return freed

    def _transfer_records(self, nodes: Sequence[Node]) -> None:
        """Hand the records of blocks that are given up over to siblings, the first to close first.

        Siblings are found where they share KV (`Forest.close`); one that holds the token already,
        on the device or below it, gets no second record.
        """
        going = {node.row for node in nodes}
        for node in nodes:
            if node.parent is None or not (node.span.record != NO_RECORD).any():
                continue
            for other, common in self.forest.alike(node):
                if other.row in going or other.state is NodeState.PRUNED:
                    continue
                wanted = (other.span.slot[:common] == NO_SLOT) & (
                    other.span.record[:common] == NO_RECORD
                )
                offsets = np.flatnonzero(wanted & (node.span.record[:common] != NO_RECORD))
                if len(offsets):
                    self.lower.transfer(node, other, offsets)

    def slots_of(self, nodes: Sequence[Node]) -> int:
        """Slots that blocks hold, each counted once."""
        held = sum(int(np.count_nonzero(node.span.resident)) for node in nodes)
        cut = [node for node in nodes if node.row in self.forest.cuts]
        if len(cut) < 2:
            return held
        slots = np.concatenate([node.span.slot[node.span.resident] for node in cut])
        return held - len(slots) + len(np.unique(slots))

    def is_shared(self, slots: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Whether several blocks use a slot, bool [n]: the eviction of one frees nothing.

        A kept prompt is no block.

        Args:
            slots: int32 [n]; anything where it is `NO_SLOT`.
        """
        references = self.table.references
        shared = references[slots] > 1
        if self.prefixes and shared.any():
            shared &= (references - self.prefixes.references(self.slots))[slots] > 1
        return shared

    def tokens_at(
        self, addresses: NDArray[np.int64]
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Whose tokens lie at slots, or in records of host memory that attention reads.

        Args:
            addresses: int64 [n], as in the key lists of a forward.

        Returns:
            the row of each token's block, or `NO_OWNER`, and its position; int32 [n].
        """
        table = self.table
        if self.staging is None:
            return table.owner[addresses], table.position[addresses]
        owner = np.full(len(addresses), NO_OWNER, np.int32)
        position = np.full(len(addresses), NO_SLOT, np.int32)
        here = addresses < table.slots
        owner[here] = table.owner[addresses[here]]
        position[here] = table.position[addresses[here]]
        stored = addresses >= self.staging.records_from
        there = np.flatnonzero(stored)
        parts = self.staging.tiers_of(addresses[there] - self.staging.records_from)
        for shelf, (_, mine, records) in zip(self.lower, parts, strict=True):
            rows = shelf.table.row[records]
            starts = {node.row: node.start for node in self.forest.nodes(np.unique(rows).tolist())}
            begins = np.array([starts[row] for row in rows.tolist()], np.int32)
            owner[there[mine]] = rows
            position[there[mine]] = begins + shelf.table.offset[records]
        return owner, position

    # Blocks

    def starts(self, length: int, count: int) -> NDArray[np.int32]:
        """Where `count` new blocks of up to `length` tokens may best begin; a hint, see
        `SlotTable.runs`."""
        starts = self.table.runs(length, count)
        return np.concatenate([starts, np.full(count - len(starts), NO_SLOT, np.int32)])

    def place(
        self,
        node: Node,
        offsets: NDArray[np.int64],
        *,
        exact: bool,
        depth: int,
        rounded: bool = False,
        first: int = NO_SLOT,
    ) -> NDArray[np.int32]:
        """Give tokens of a block slots to be written in the next forward.

        Args:
            offsets: int64 [m] into its tokens, increasing; none of them resident.
            exact: whether they are exact once they are written: every earlier token of the path is
                resident and exact, or will be after the same forward.
            depth: layers that will be written.
            rounded: whether they are rounded instead: of the earlier tokens some are.
            first: preferred first slot.

        Returns:
            int32 [m] slots.
        """
        span = node.span
        assert (span.slot[offsets] == NO_SLOT).all(), (
            f"block {node.id}: a resident token was placed again"
        )
        self._free_records(node, offsets)
        self._grow_for(len(offsets))
        slots = self.table.take(len(offsets), first, tree=node.tree.number)
        self._placed.append(Placed(node, offsets, exact, rounded))
        self._assign(node, offsets, slots, depth)
        self._changed()
        return slots

    def receive(self, node: Node, offsets: NDArray[np.int64], rows: Tensor, *, depth: int) -> None:
        """Give tokens of a block slots that hold their K/V at once; the caller has made room.

        Args:
            offsets: int64 [m] into its tokens, increasing; none of them resident.
            rows: [m, numbers], see `KVPool.gather`, in the pool's dtype; exact.
            depth: layers that hold them.
        """
        span = node.span
        assert (span.slot[offsets] == NO_SLOT).all(), (
            f"block {node.id}: a resident token was loaded"
        )
        slots = self._slots_for(node, offsets)
        # if this is cut off, `rollback` finds slots that no block names
        self.pool.scatter(slots, rows.to(self.pool.device))
        self._free_records(node, offsets)
        self._assign(node, offsets, slots, depth)
        span.exact[offsets] = True
        self._changed()

    def _slots_for(self, node: Node, offsets: NDArray[np.int64]) -> NDArray[np.int32]:
        """Slots for tokens of a block, after that of the token before them if they are free."""
        before = int(node.span.slot[offsets[0] - 1]) if offsets[0] else NO_SLOT
        first = before + 1 if before != NO_SLOT else NO_SLOT
        self._grow_for(len(offsets))
        return self.table.take(len(offsets), first, tree=node.tree.number)

    def _assign(
        self,
        node: Node,
        offsets: NDArray[np.int64],
        slots: NDArray[np.int32],
        depth: int | NDArray[np.int16],
    ) -> None:
        """Let slots be those of a block's tokens."""
        self.table.owner[slots] = node.row
        self.table.token[slots] = np.asarray(node.tokens, np.int32)[offsets]
        self.table.position[slots] = node.start + offsets
        node.span.slot[offsets] = slots
        node.span.tier[offsets] = Tier.DEVICE
        node.span.depth[offsets] = depth

    def append(
        self,
        last: LastTokens,
        near: NDArray[np.int64],
        *,
        exact: NDArray[np.bool_],
        rounded: NDArray[np.bool_] | bool = False,
        depth: int,
    ) -> NDArray[np.int32]:
        """`place` for the last tokens of many blocks, the one call a decode step makes.

        Args:
            last: the tokens; none of them is resident.
            near: int64 [n], preferred slots, see `SlotTable.take_each`.
            exact: bool [n], whether each is exact once it is written.
            rounded: bool [n], whether each is rounded then.
            depth: layers that will be written.

        Returns:
            int32 [n] slots.
        """
        assert self._appended is None, "the last step was neither committed nor rolled back"
        if self.grows:
            self._grow_for(len(near))
        table, spans, at = self.table, last.spans, last.at
        slots = table.take_each(near, self.forest.numbers[last.row])
        self._appended = Appended(last, exact, rounded)
        table.owner[slots] = last.row
        table.token[slots] = last.token
        table.position[slots] = last.position
        spans.slot[at] = slots
        spans.tier[at] = Tier.DEVICE
        spans.depth[at] = depth
        if self.debug:
            self.check()
        return slots

    def name_appended(self, tokens: Sequence[int]) -> None:
        """Say which tokens the last `append` was given slots for, where they were not known."""
        assert self._appended is not None, "tokens are named before they are committed"
        last = self._appended.last
        last.token[:] = tokens
        self.table.token[last.spans.slot[last.at]] = last.token

    def rewrite(
        self,
        node: Node,
        offsets: NDArray[np.int64],
        *,
        exact: bool,
        depth: int,
        rounded: bool = False,
    ) -> NDArray[np.int32]:
        """Resident tokens whose K/V the next forward computes anew, in place; returns their slots,
        int32 [m]."""
        slots = node.span.slot[offsets]
        assert (slots != NO_SLOT).all(), f"block {node.id}: only resident tokens are rewritten"
        self._placed.append(Placed(node, offsets, exact, rounded))
        self._free_origins(node, offsets)
        self.table.mixed[slots] = self.table.lent[slots] = False
        node.span.exact[offsets] = node.span.rounded[offsets] = False
        node.span.depth[offsets] = depth
        return slots.copy()

    @property
    def pending(self) -> bool:
        """Whether tokens have slots that no forward has written yet."""
        return bool(self._placed) or self._appended is not None

    @property
    def pending_tokens(self) -> list[tuple[Node, NDArray[np.int64]]]:
        """Blocks and the offsets of their pending tokens."""
        pending = [(each.node, each.offsets) for each in self._placed]
        if self._appended is not None:
            last = self._appended.last
            pending += zip(last.nodes, (last.length - 1).reshape(-1, 1), strict=True)
        return pending

    def commit(self) -> None:
        """Mark all pending tokens as written by a forward."""
        for each in self._placed:
            each.node.span.exact[each.offsets] = each.exact
            each.node.span.rounded[each.offsets] = each.rounded
        if (appended := self._appended) is not None:
            spans, at = appended.last.spans, appended.last.at
            spans.exact[at], spans.rounded[at] = appended.exact, appended.rounded
        self._placed, self._appended = [], None
        if self.debug:
            self.check()

    def rollback(self) -> dict[Node, int]:
        """After a failure: drop pending tokens, and free every slot that no block holds, temporary
        ones included.

        Returns:
            how many pending tokens each block lost.
        """
        pending = self.pending_tokens
        lost: dict[Node, int] = {}
        for node, offsets in pending:
            here = offsets[node.span.slot[offsets] != NO_SLOT]
            node.span.spans.drop(node.span.begin + here)
            lost[node] = lost.get(node, 0) + len(here)
        self._placed, self._appended = [], None
        self._count_again()
        for node, _ in pending:
            if node.row in self.forest.cuts:
                self._find_owners(node)
        self._changed()
        return lost

    def evict(self, node: Node, offsets: NDArray[np.int64]) -> int:
        """Let resident tokens of a block leave the device; returns how many slots became free
        (shared ones stay for the others)."""
        return self.evict_blocks([node], offsets, np.array([len(offsets)]))

    def evict_for_good(
        self, nodes: Sequence[Node], offsets: Sequence[NDArray[np.int64]]
    ) -> list[int]:
        """Give up tokens of blocks wherever they are, for good.

        Args:
            nodes: distinct blocks.
            offsets: int64, of each, tokens that attention reads, increasing.

        Returns:
            how many of each were on the device.
        """
        here = [
            each[node.span.slot[each] != NO_SLOT] for node, each in zip(nodes, offsets, strict=True)
        ]
        counts = [len(each) for each in here]
        there = [
            node.span.begin + each[node.span.record[each] != NO_RECORD]
            for node, each in zip(nodes, offsets, strict=True)
        ]
        if nodes:
            self.evict_blocks(nodes, np.concatenate(here), np.array(counts, np.int64), stored=False)
            self.lower.free(np.concatenate(there))
            self._changed()
        return counts

    def is_packed(self, at: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which tokens were packed in few bits, wherever they are now, bool [n].

        Args:
            at: int64 [n], places in the forest's spans.
        """
        spans = self.forest.spans
        packed: NDArray[np.bool_] = spans.tier[at] == Tier.COMPRESSED
        return packed | (spans.origin[at] != NO_RECORD)

    def pack(self, nodes: Sequence[Node], offsets: Sequence[NDArray[np.int64]]) -> dict[Node, int]:
        """Let tokens that attention reads lie in host memory in few bits from now on, quantised
        once, in this order; those that were packed before stay as they are, and so does what the
        store has no room for.

        Args:
            nodes: distinct blocks.
            offsets: int64, of each, tokens on the device or in host memory, increasing.

        Returns:
            how many tokens have left the device, by block, where any has.
        """
        spans = self.forest.spans
        counts = [len(each) for each in offsets]
        row = np.repeat(np.array([node.row for node in nodes], np.int64), counts)
        offset = np.concatenate([_NOTHING, *offsets])
        at = np.repeat(np.array([node.span.begin for node in nodes], np.int64), counts) + offset
        fresh = ~self.is_packed(at)
        row, offset, at = row[fresh], offset[fresh], at[fresh]
        if not len(at):
            return {}
        slots = spans.slot[at]
        moved = self.lower.pack(self.pool, Tokens(row, offset, spans.depth[at]), at)
        gone = moved & (slots != NO_SLOT)
        self._free_slots(slots[gone], self.forest.numbers[row[gone]])
        self._changed()
        lost, often = np.unique(row[gone], return_counts=True)
        return dict(zip(self.forest.nodes(lost.tolist()), often.tolist(), strict=True))

    def evict_blocks(
        self,
        nodes: Sequence[Node],
        offsets: NDArray[np.int64],
        counts: NDArray[np.int64],
        *,
        stored: bool = True,
        moves: HeadMoves | None = None,
    ) -> int:
        """`evict` for many blocks at once.

        Args:
            nodes: distinct blocks.
            offsets: int64 [sum(counts)], block after block.
            counts: int64 [len(nodes)].
            stored: lower tiers take what they have room for.
            moves: what KV heads keep of these tokens, in other slots of the same blocks.
        """
        if len(offsets) == 0:
            return 0
        spans = nodes[0].span.spans
        begins = np.array([node.span.begin for node in nodes])
        at = np.repeat(begins, counts) + offsets
        slots = spans.slot[at]
        assert (slots != NO_SLOT).all(), "an absent token was evicted"
        if moves is not None and len(moves):
            assert np.isin(moves.source, slots).all(), "KV was moved out of a slot that stays"
            self._move_heads(moves)
        rows = np.array([node.row for node in nodes])
        if stored and self.lower:
            known = spans.origin[at] != NO_RECORD
            certain = spans.exact[at] | spans.rounded[at] | (not spans.records_exact)
            last = np.flatnonzero(certain & ~known & self._is_last_use(slots))
            if len(last):  # first, as it may fail, and nothing has changed then
                row = np.repeat(rows, counts)[last]
                tokens = Tokens(row, offsets[last], spans.depth[at[last]])
                self.lower.save(self.pool, slots[last], tokens, at[last])
            self.lower.put_back(at[known])
            spans.drop(at[spans.slot[at] != NO_SLOT])
        else:
            self.lower.free_origins(at)
            spans.drop(at)
        numbers = np.repeat(self.forest.numbers[rows], counts)
        freed = self._free_slots(slots, numbers)
        if freed < len(slots):
            ends = np.cumsum(counts)
            for node, end, count in zip(nodes, ends, counts, strict=True):
                self._transfer_slots(node, slots[end - count : end])
        self._changed()
        return freed

    # KV heads that hold different tokens

    def mixed(self, node: Node) -> NDArray[np.bool_]:
        """Tokens of a block whose slots hold others in some KV heads, bool [n]."""
        return node.span.resident & self.table.mixed[node.span.slot]

    def _move_heads(self, moves: HeadMoves) -> None:
        """Let KV heads keep in other slots what they hold in slots that are about to be freed.

        The tokens of the targets are inexact from then on: they come back with all of their block
        that is not as full retention would hold it, by `rewrite`.
        """
        table = self.table
        targets = np.unique(moves.target)
        assert (table.references[targets] == 1).all(), "only own slots of blocks are mixed"
        rows = table.owner[targets]
        each, which = np.unique(rows, return_inverse=True)
        nodes = self.forest.nodes(each.tolist())
        first = np.array([node.span.begin - node.start for node in nodes], np.int64)
        at: NDArray[np.int64] = first[which] + table.position[targets]
        spans = self.forest.spans
        assert (spans.slot[at] == targets).all(), "a slot is mixed that its block does not name"
        pending = [node.span.slot[offsets] for node, offsets in self.pending_tokens]
        moved = np.concatenate([moves.source, moves.target])
        assert not np.isin(moved, np.concatenate([_NO_SLOTS, *pending])).any(), (
            "KV was moved before it was written"
        )
        assert self.heads is not None, "KV heads hold the same tokens"
        copy = self.pool.copy_heads(moves, self.heads)  # may fail, and nothing has changed then
        if self.lower:
            self.lower.free_origins(at)
        # first, so that an interruption leaves nothing exact that is moved
        spans.exact[at] = spans.rounded[at] = False
        if moves.into is not moves.cell:
            self.pool.holders = partial(self.heads.holders, table)
        try:
            self.heads.move(table, moves)
            copy()
        except Exception:  # what lies there is not known any more
            spans.drop(at)
            self._free_slots(targets)
            raise

    # Lower tiers

    def _is_last_use(self, slots: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Of references that are about to be given up: those after which a slot is free, one for
        each such slot; bool [n]."""
        references = self.table.references[slots]
        if references.max() == 1:
            return np.ones(len(slots), np.bool_)
        each, first, count = np.unique(slots, return_index=True, return_counts=True)
        last = np.zeros(len(slots), np.bool_)
        last[first[count == self.table.references[each]]] = True
        return last

    def fetch(self, tokens: Mapping[Node, NDArray[np.int64]]) -> dict[Node, int]:
        """Copy tokens back to the device that lower tiers hold; the caller has made room.

        They are exact, and bit for bit what left, or rounded where the tier is packed. What a tier
        has lost (a damaged record) is dropped.

        Args:
            tokens: int64 offsets of each block's tokens that have records, increasing.

        Returns:
            how many came back, by block, where any did.
        """
        taken = [self._slots_for(node, offsets) for node, offsets in tokens.items()]
        places = [node.span.begin + offsets for node, offsets in tokens.items()]
        at, slots = np.concatenate([_NOTHING, *places]), np.concatenate([_NO_SLOTS, *taken])
        try:
            loaded = self.lower.load(self.pool, slots, at)
        except Exception:
            self._free_slots(slots)
            raise
        self.forest.spans.drop(at)
        ends = np.cumsum([len(offsets) for offsets in tokens.values()])
        back: dict[Node, int] = {}
        for (node, offsets), end in zip(tokens.items(), ends.tolist(), strict=True):
            mine = np.arange(end - len(offsets), end)
            good = mine[loaded.intact[mine]]
            here = offsets[loaded.intact[mine]]
            if len(here):
                self._assign(node, here, slots[good], loaded.depth[good])
                # what lossy mode reads in place may have been computed over gaps
                node.span.exact[here] = loaded.exact[good] & self.forest.spans.records_exact
                node.span.rounded[here] = ~loaded.exact[good]
                node.span.origin[here] = loaded.origin[good]
                back[node] = len(here)
        self._free_slots(slots[~loaded.intact])
        self._changed()
        return back

    def _free_records(self, node: Node, offsets: NDArray[np.int64]) -> None:
        """Give up the records of tokens that are about to be on the device."""
        if self.lower:
            self.lower.free(node.span.begin + offsets)

    def _free_origins(self, node: Node, offsets: NDArray[np.int64]) -> None:
        """Give up the records kept for tokens on the device, whose KV is about to be another."""
        if self.lower:
            self.lower.free_origins(node.span.begin + offsets)

    # Shared tokens

    def share(
        self, source: Node, target: Node, offsets: NDArray[np.int64], *, pending: bool = False
    ) -> None:
        """Let a block use the K/V of another one's tokens, without a copy.

        Callers share equal tokens after equal tokens only; `check` finds anything else.

        Args:
            source: a sibling, or the root of another tree.
            target: the block.
            offsets: int64 [m], tokens that the source has on the device and the target does not,
                increasing.
            pending: the next forward writes them.
        """
        assert source.parent is target.parent, "only siblings hold equal K/V for equal tokens"
        assert all(source.tokens[at] == target.tokens[at] for at in offsets), (
            "shared tokens must be equal"
        )
        assert (target.span.slot[offsets] == NO_SLOT).all()
        self._share_slots(source, target, offsets)
        if pending:
            self._placed.append(Placed(target, offsets, exact=True, rounded=False))
        self._changed()

    def merge(self, source: Node, target: Node, offsets: NDArray[np.int64]) -> None:
        """Let a block use the K/V of a sibling's tokens in place of its own, whose slots are free
        then.

        Args:
            source: the sibling.
            target: the block.
            offsets: int64 [m], equal tokens that both have on the device, increasing.
        """
        own = target.span.slot[offsets]
        assert (own != NO_SLOT).all() and not self.is_shared(own).any(), "only own slots are freed"
        self._share_slots(source, target, offsets)
        self._free_slots(own, target.tree.number)
        self._changed()

    def _share_slots(self, source: Node, target: Node, offsets: NDArray[np.int64]) -> None:
        """Have the slots of a source's tokens serve a target as well."""
        slots = source.span.slot[offsets]
        assert (slots != NO_SLOT).all(), "only tokens on the device are shared"
        self.table.retain(slots, target.tree.number, again=source.tree is target.tree)
        self._free_records(target, offsets)
        target.span.slot[offsets] = slots
        for name in ("tier", "exact", "depth"):
            getattr(target.span, name)[offsets] = getattr(source.span, name)[offsets]

    def restore(self, root: Node) -> int:
        """Let a root use what is kept of a prompt that begins alike; returns how many tokens."""
        found = self.prefixes.take(np.array(root.tokens, np.int64))
        if found is None:
            return 0
        slots, depth = found
        offsets = np.flatnonzero(root.span.slot[: len(slots)] == NO_SLOT)
        gained = slots[offsets]
        self._free_records(root, offsets)
        self.table.retain(gained, root.tree.number)
        self.table.owner[gained], self.table.tree[gained] = root.row, root.tree.number
        root.span.slot[offsets] = gained
        root.span.tier[offsets], root.span.exact[offsets] = Tier.DEVICE, True
        root.span.depth[offsets] = depth[offsets]
        self._changed()
        return len(offsets)

    def invalidate(self, node: Node, begin: int) -> None:
        """Mark a block's tokens from `begin` on as not exact: they are another text's."""
        self._free_origins(node, np.arange(begin, len(node.span)))
        node.span.exact[begin:] = node.span.rounded[begin:] = False
        self._changed()

    def free_kept_prompts(self, count: int) -> None:
        """Give up prompts of dropped trees until so many slots more are free; all, if fewer are."""
        used = self.used
        while used - self.used < count and self.prefixes:
            self._free_slots(self.prefixes.oldest(), NO_TREE)

    def _transfer_slots(self, node: Node, slots: NDArray[np.int32]) -> None:
        """Let slots that a block has released, and others still use, belong to one of these."""
        table = self.table
        left = slots[(table.references[slots] > 0) & (table.owner[slots] == node.row)]
        if not len(left):
            return
        table.owner[left] = NO_OWNER
        for other in self._peers(node):
            mine = left[np.isin(left, other.span.slot)]
            table.owner[mine], table.tree[mine] = other.row, other.tree.number

    def _peers(self, node: Node) -> list[Node]:
        """The blocks that may use a block's slots: the roots of all trees, or it and its
        siblings."""
        if node.parent is None:
            return [tree.root for tree in self.forest.trees]
        return node.parent.children

    def _count_again(self) -> None:
        """Set the references of all slots to those of spans and kept prompts."""
        table = self.table
        held = self.prefixes.references(self.slots)
        table.further[:] = 0
        for tree in self.forest.trees:
            slots = np.concatenate([_NO_SLOTS, *(node.span.slot for node in tree.nodes)])
            count = np.bincount(slots[slots != NO_SLOT], minlength=self.slots).astype(np.int32)
            held += count
            further = np.maximum(count - 1, 0)
            table.further += further
            table.further_of[tree.number] = further.sum()
            table.used_by[tree.number] = np.count_nonzero(count)
        surplus = np.maximum(table.references - held, 0)
        self._free_slots(np.repeat(np.arange(self.slots, dtype=np.int32), surplus), NO_TREE)

    def _find_owners(self, node: Node) -> None:
        """After a rollback: shared slots that a block no longer names belong to another one."""
        table = self.table
        kept = node.span.slot
        lost = (table.owner == node.row) & (table.references > 0)
        lost[kept[kept != NO_SLOT]] = False
        self._transfer_slots(node, np.flatnonzero(lost).astype(np.int32))

    # Questions and beams: tokens that belong to no block

    def borrow(
        self,
        tokens: Sequence[int],
        after: Node,
        *,
        positions: NDArray[np.int64] | None = None,
    ) -> NDArray[np.int32]:
        """Temporary slots for tokens after a path; give them back with `free_borrowed`.

        Args:
            tokens: their ids.
            after: the block at the path's end.
            positions: int64 [n], of each; by default consecutive after that block.
        """
        self._grow_for(len(tokens))
        slots = self.table.take(len(tokens), tree=after.tree.number)
        self.table.token[slots] = tokens
        consecutive = np.arange(after.end, after.end + len(tokens))
        self.table.position[slots] = consecutive if positions is None else positions
        return slots

    def free_borrowed(self, slots: NDArray[np.int32]) -> None:
        """End of a question."""
        self._free_slots(slots)

    def _free_slots(
        self, slots: NDArray[np.int32], trees: NDArray[np.int64] | int | None = None
    ) -> int:
        freed = self.table.release(slots, trees)
        if self.debug and len(freed):
            self.pool.poison(freed)
        return len(freed)

    def _temporary(self) -> NDArray[np.bool_]:
        """Slots that only questions use, bool [slots]."""
        table = self.table
        used = (table.references > 0) & (table.owner == NO_OWNER)
        return used & (self.prefixes.references(table.slots) == 0)

    # Invariants

    def _changed(self) -> None:
        if self.debug:
            self.check()

    def check_reads(self, addresses: NDArray[np.int32], positions: NDArray[np.int32]) -> None:
        """Assert that tokens at these positions lie where a forward is about to read them."""
        _, found = self.tokens_at(addresses.astype(np.int64))
        assert (found == positions).all(), "a token that is about to be read lies elsewhere now"

    def check(self) -> None:
        """Assert every invariant: partition, ownership, references, what each slot says it holds,
        exactness."""
        table = self.table
        references = np.zeros(table.slots, np.int32)
        for node in self.forest:
            span, what = node.span, f"block {node.id}: "
            resident, slots = span.resident, span.slot[span.resident]
            assert len(span) == len(node.tokens), what + "span and tokens differ in length"
            assert ((span.tier == Tier.DEVICE) == resident).all(), what + "tier without slot"
            assert not (span.exact & ~resident).any(), what + "exact but not on the device"
            odd = span.rounded & (span.exact | ~resident)
            assert not odd.any(), what + "rounded and exact, or not on the device"
            kept = span.rounded[span.origin != NO_RECORD]
            assert kept.all(), what + "a record is kept for a token that is not rounded"
            twice = span.record[resident] != NO_RECORD
            assert not twice.any(), what + "a token on the device has a record too"
            assert len(np.unique(slots)) == len(slots), what + "it names a slot twice"
            references[slots] += 1
            tokens = np.asarray(node.tokens, np.int32)[resident]
            positions = (node.start + np.arange(len(span)))[resident]
            assert (table.token[slots] == tokens).all(), what + "a slot holds another token"
            assert (table.position[slots] == positions).all(), what + "a slot has another position"
            mixed = span.certain[self.mixed(node)]
            assert not mixed.any(), what + "exact or rounded where heads hold different tokens"
        for node, offsets in self.pending_tokens:
            assert (node.span.slot[offsets] != NO_SLOT).all(), f"block {node.id}: pending, no slot"
            early = node.span.certain[offsets]
            assert not early.any(), f"block {node.id}: exact before its forward"
        if self.heads is not None:
            self.heads.check(table)
        self.lower.check()
        references += self.prefixes.references(table.slots)
        temporary = self._temporary()
        references[temporary] += 1
        assert (table.references == references).all(), "references do not add up"
        assert table.used == int((table.references > 0).sum()), "used slots do not add up"
        further = np.zeros(table.slots, np.int32)
        for tree in self.forest.trees:
            held = np.concatenate([_NO_SLOTS, *(node.span.slot for node in tree.nodes)])
            slots, counts = np.unique(held[held != NO_SLOT], return_counts=True)
            further[slots] += counts - 1
            own = int(np.count_nonzero(temporary & (table.tree == tree.number)))
            served = table.used_by[tree.number]
            assert served == len(slots) + own, f"the slots of tree {tree.number} do not add up"
            within = table.further_of[tree.number]
            assert within == (counts - 1).sum(), f"what tree {tree.number} shares does not add up"
        assert (table.further == further).all(), "references within a tree do not add up"
        for row in self.forest.cuts:
            node = self.forest[row]
            slots = node.span.slot[node.span.resident]
            owners = set(self.forest.nodes(np.unique(table.owner[slots]).tolist()))
            unlike = owners - set(self._peers(node))
            assert not unlike, f"slots of block {node.id} belong to one that is unlike it"
        assert (table.used_by <= table.peak_of).all(), "the peak of a tree was not recorded"
        fits = table.used <= table.peak <= table.slots
        assert fits, "the peak was not recorded, or the budget broken"
        assert self.device_peak <= self.budget, "blocks and staging exceed the budget"
