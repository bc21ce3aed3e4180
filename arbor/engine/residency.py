"""What stays on the device: one tree's memory, the policy that decides, and the figures it decides by."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from arbor.engine.nvtx import nvtx_range
from arbor.errors import BudgetInfeasible
from arbor.events import KV, Allocated, Cause, Event, Evicted, Pressure
from arbor.memory import KVMemory
from arbor.retention.base import NEVER, Blocks, Tokens
from arbor.retention.block_table import BlockTable
from arbor.retention.future_reads import FutureReads
from arbor.retention.msve import MSVE
from arbor.retention.policy import Policy, Protect
from arbor.retention.selection import Selection, select
from arbor.retention.token_statistics import TokenStatistics
from arbor.tree import NO_SLOT, Node, ThoughtTree

Where = Literal["beside", "on", "anywhere"]  # blocks beside the running paths, on them, or both
GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # odd: consecutive offsets get keys far apart


class Residency:
    """Decides for the engine which tokens leave when room is needed, and keeps what policies read.

    The engine plans (how many slots an event needs), this fits (what leaves), then the engine allocates and computes.

    Args:
        tree: holds only its root.
        memory: attached to the tree.
        policy: what evictable blocks keep, and which tokens.
        msve: block values for the policies that read them.
        lossy: tokens on running paths may leave as well.
        uses: a recorded run's uses, for the clairvoyant policy.
        emit: listener.
    """

    def __init__(
        self,
        tree: ThoughtTree,
        memory: KVMemory,
        policy: Policy,
        *,
        msve: MSVE,
        lossy: bool,
        uses: FutureReads | None,
        emit: Callable[[Event], None],
    ) -> None:
        self.tree = tree
        self.memory = memory
        self.policy = policy
        self.msve = msve
        self.lossy = lossy
        self.uses = uses
        self.emit = emit
        self.table = BlockTable(policy.protect.tail)
        self.table.touch(tree.root)
        self.statistics = TokenStatistics(threshold=policy.protect.threshold)
        self.outlook: Callable[[], Mapping[int, float]] = dict
        self.operation = 0
        self._upcoming: list[list[Node]] = []
        self._clock = 0
        self._names = np.zeros(0, np.uint64)  # by node id; 0 = not made yet

    @property
    def kv(self) -> KV:
        """Slots per tier now."""
        return KV(device=self.memory.used)

    # What the engine reports

    def changed(self, nodes: Sequence[Node]) -> None:
        """These blocks grew, closed, were valued or gained tokens."""
        for node in nodes:
            self.table.touch(node)

    def used(self, path: Sequence[Node]) -> None:
        """A forward read these blocks."""
        self._clock += 1
        self.changed(path)
        self.table.use(path, self._clock)

    def expect(self, waves: Sequence[Sequence[Node]]) -> None:
        """Blocks at whose end each later wave of the operation in progress begins, the next wave first."""
        self._upcoming = [list(wave) for wave in waves]

    def observe(
        self, slots: NDArray[np.int64], mass: NDArray[np.float32], queries: NDArray[np.int64]
    ) -> None:
        """Attention of one forward.

        Args:
            slots: int64 [S], distinct.
            mass: float32 [S], attention each received, summed over rows (each row: mean over layers and heads).
            queries: int64 [S], rows that could see it.
        """
        owner = self.memory.table.owner[slots]
        mine = owner >= 0
        owner = owner[mine]
        position = self.memory.table.position[slots[mine]]
        for node_id in np.unique(owner):
            node = self.tree[int(node_id)]
            self.statistics.open(node.id, node.start, len(node.tokens))
        self.statistics.observe(owner, position, mass[mine], queries[mine])

    # Fitting

    def fit(
        self, needed: int, leaves: Sequence[Node], cause: Cause, *, spare: bool | None = None
    ) -> bool:
        """Free slots until `needed` are free; whether anything left.

        Args:
            needed: slots.
            leaves: ends of the running paths.
            cause: the event that asks.
            spare: the running paths stay as they are; by default unless lossy. Lossy, where the policy spares them, they
                lose tokens only once everything beside them has left.

        Raises:
            BudgetInfeasible: the policy will not give up as much; nothing has left.
        """
        if needed <= self.memory.free:
            return False
        with nvtx_range("policy"):
            self._free(needed, leaves, cause, spare)
        return True

    def _free(self, needed: int, leaves: Sequence[Node], cause: Cause, spare: bool | None) -> None:
        memory = self.memory
        self.emit(Pressure(needed=needed, free=memory.free, limit=memory.slots))
        began = time.perf_counter()
        spared = (not self.lossy or self.policy.spares_paths) if spare is None else spare
        offer = partial(self.offered, leaves, where="beside" if spared else "anywhere")
        blocks = offer()
        room = memory.free + int(blocks.resident.sum()) - needed
        beside: Blocks | None = None
        if room < 0 and spare is None and self.lossy:
            # all of it leaves, and of the paths what must
            beside, offer = blocks, partial(self.offered, leaves, where="on")
            blocks = offer()
            room += int(blocks.resident.sum())
        assert room >= 0, "more was planned than fits"
        blocks, counts, chosen = self.decide(blocks, room, lambda protect: offer(protect=protect))
        if beside is not None and len(beside):
            none = np.zeros(len(beside), np.int64)
            self.keep(beside, Selection(beside, none), none, 0, cause, began)
            began = time.perf_counter()  # what came before has been told
        self.keep(blocks, chosen, counts, room, cause, began)
        assert memory.free >= needed, "the policy kept more than there was room for"

    def decide(
        self, blocks: Blocks, room: int, eased: Callable[[Protect], Blocks]
    ) -> tuple[Blocks, NDArray[np.int64], Selection]:
        """How many tokens each block keeps, and which: what the policy answers, checked.

        Args:
            blocks: what is offered, under all of the policy's protection.
            room: tokens that may stay.
            eased: the same offer under less protection, for where there is no room for all that is protected.

        Returns:
            the offer as it was decided on, how many tokens each block keeps, and which.

        Raises:
            BudgetInfeasible: the policy will not give up as much.
        """
        less = self.policy.protect.easing()
        next(less)
        while int(blocks.floor.sum()) > room:  # ends where nothing is protected
            blocks = eased(next(less))
        try:
            counts, chosen = select(blocks, room, self.policy.allocator, self.policy.scorer)
        except BudgetInfeasible as error:  # it knows its room, not what the rest takes
            slots, more = self.memory.slots, error.needed - error.budget
            what = f"the policy '{self.policy.name}', at this point of the search,"
            raise BudgetInfeasible(slots + more, slots, what, error.hint) from error
        assert len(counts) == len(blocks), "one count per block"
        assert (counts >= 0).all() and (counts <= blocks.resident).all(), "0 <= k <= resident"
        assert int(counts.sum()) <= room, "the policy keeps more than there is room for"
        return blocks, counts, chosen

    def keep(
        self,
        blocks: Blocks,
        chosen: Selection,
        counts: NDArray[np.int64],
        room: int,
        cause: Cause,
        began: float,
    ) -> None:
        """Evict what was not chosen, and say what was decided and why."""
        ids, held, lost = self._evict(blocks, *chosen.leaving())
        at = np.searchsorted(blocks.ids, ids)
        told = zip(ids.tolist(), held.tolist(), counts[at].tolist(), strict=True)
        looked_at = [name for name in blocks.read if name != "length"]
        self.emit(
            Allocated(
                policy=self.policy.name,
                cause=cause,
                room=room,
                offered=len(blocks),
                nodes=tuple(told),
                signals={name: _told(getattr(blocks, name)[at]) for name in looked_at},
                elapsed_s=time.perf_counter() - began,
            )
        )
        gone = tuple(zip(ids.tolist(), lost.tolist(), strict=True))
        if gone:
            self.emit(Evicted(cause=cause, nodes=gone, kv=self.kv))

    def _evict(
        self, blocks: Blocks, index: NDArray[np.int64], offsets: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Drop tokens of offered blocks, given by index in `blocks` and offset, where they are on the device.

        Returns:
            int64 each: the blocks that lost some, by node id; what they held before; how many they lost.
        """
        spans = self.tree.spans
        offered, counts = np.unique(index, return_counts=True)
        begins = np.array([self.tree[i].span.begin for i in blocks.ids[offered].tolist()], np.int64)
        here = spans.slot[np.repeat(begins, counts) + offsets] != NO_SLOT
        offered, counts = np.unique(index[here], return_counts=True)
        ids = blocks.ids[offered]
        nodes = [self.tree[i] for i in ids.tolist()]
        held = self.table.resident[ids].copy()
        self.memory.evict_from(nodes, offsets[here], counts)
        for node in nodes:
            self.table.touch(node)
        return ids, held, counts

    # What a policy sees

    def offered(
        self,
        leaves: Sequence[Node],
        ids: NDArray[np.int64] | None = None,
        *,
        where: Where = "beside",
        whole: bool = False,
        protect: Protect | None = None,
    ) -> Blocks:
        """The blocks the policy may take tokens from.

        Args:
            leaves: ends of the running paths.
            ids: these blocks only, instead of all that may leave.
            where: which blocks these are.
            whole: all tokens of a block are offered, on the device or not (to choose what should come back).
            protect: what stays in any case; by default what the policy says.
        """
        protect = protect or self.policy.protect
        table = self.table
        table.refresh()
        running = [leaf.id for leaf in leaves]
        active = table.on_paths(running)
        if ids is None:
            able = (table.resident > 0) & ~table.open
            if where != "anywhere":
                able &= active if where == "on" else ~active
            ids = np.flatnonzero(able)
        resident = table.length[ids] if whole else table.resident[ids]

        def see(indices: NDArray[np.int64]) -> Tokens:
            return self._tokens(ids, indices, leaves, whole, protect)

        def score(blocks: Blocks) -> NDArray[np.float64]:
            return self.msve.scores(blocks.value, blocks.confidence, blocks.attention)

        # most policies read a few of these only
        return Blocks.when_read(
            {
                "length": lambda _: table.length[ids],
                "depth": lambda _: table.depth[ids],
                "distance": lambda _: table.distances(running)[ids],
                "active": lambda _: active[ids],
                "value": lambda _: table.expected()[ids],
                "confidence": lambda _: table.confidence[ids],
                "attention": lambda _: self._attention(ids),
                "score": score,
                "last_used": lambda _: table.last_used[ids],
                "scheduled": lambda _: self._scheduled(ids),
                "reentry": lambda _: self._reentry(ids),
                "next_use": lambda _: self._next_use(ids),
            },
            ids=ids,
            resident=resident,
            floor=self._floor(ids, resident, see, leaves, where, whole, protect),
            see=see,
        )

    def _floor(
        self,
        ids: NDArray[np.int64],
        resident: NDArray[np.int64],
        see: Callable[[NDArray[np.int64]], Tokens],
        leaves: Sequence[Node],
        where: Where,
        whole: bool,
        protect: Protect,
    ) -> NDArray[np.int64]:
        """What each block keeps in any case: its protected tokens, and K_min. Sinks and what is recent lie in few blocks,
        and only there tokens are looked at; what there is of tails is counted in the table."""
        floor = np.minimum(resident, protect.floor)
        if protect.tail:
            tail = resident if whole else self.table.tail[ids]
            floor = np.maximum(floor, np.minimum(tail, protect.tail))
        if protect.tail or where != "beside":
            start = self.table.start[ids]
            ends = start + self.table.length[ids]
            recent = self._oldest(leaves, protect)[ids]
            few = np.flatnonzero((start < protect.sinks) | (ends > recent))
            if len(few):
                tokens = see(few)
                guarded = np.bincount(tokens.block[tokens.protected], minlength=len(ids))
                floor = np.maximum(floor, guarded)
        return floor

    def _oldest(self, leaves: Sequence[Node], protect: Protect) -> NDArray[np.int64]:
        """Where in each block the window of recent tokens begins, int64 by node id; `NEVER` where it does not reach."""
        oldest = np.full(len(self.table), NEVER)
        for leaf in leaves if protect.recent else ():
            # the window of a block several leaves share begins where the shortest one's does
            begin = leaf.end - protect.recent
            for node in reversed(leaf.path):
                oldest[node.id] = min(oldest[node.id], begin)
                if node.start <= begin:
                    break
        return oldest

    def _attention(self, ids: NDArray[np.int64]) -> NDArray[np.float64]:
        if not self.policy.observes:
            return np.zeros(len(ids))
        return self.statistics.block_attention(ids)

    def _next_use(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        if self.uses is None:
            return np.full(len(ids), NEVER)
        return self.uses.after(self.operation, ids)

    def _scheduled(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        if not self._upcoming:
            return np.full(len(ids), NEVER)
        waits = [(n.id, at) for at, wave in enumerate(self._upcoming, 1) for n in wave]
        return self.table.soonest(*zip(*waits, strict=True))[ids]

    def _reentry(self, ids: NDArray[np.int64]) -> NDArray[np.float64]:
        likely = self.outlook()
        if not likely:
            return np.zeros(len(ids))
        leaves = np.fromiter(likely, np.int64, len(likely))
        chance = np.fromiter(likely.values(), np.float64, len(likely))
        return np.minimum(1.0, self.table.reentry(leaves, chance)[ids])

    def _tokens(
        self,
        ids: NDArray[np.int64],
        indices: NDArray[np.int64],
        leaves: Sequence[Node],
        whole: bool,
        protect: Protect,
    ) -> Tokens:
        nodes = ids[indices]
        table = self.table
        if whole:
            sizes = table.length[nodes]
            offset = np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        else:
            sizes, offset = table.held.of(nodes)

        def protected(tokens: Tokens) -> NDArray[np.bool_]:
            # places in the path from which tokens are protected, by block
            since = self._oldest(leaves, protect)[nodes]
            if protect.tail:
                since = np.minimum(since, table.start[nodes] + table.length[nodes] - protect.tail)
            sinks = table.start[nodes] < protect.sinks
            result = np.zeros(len(offset), np.bool_)
            if (since < NEVER).any():
                result = tokens.position >= np.repeat(since, sizes)
            if sinks.any():
                result |= tokens.position < protect.sinks
            return result

        def key(_: Tokens) -> NDArray[np.uint64]:
            with np.errstate(over="ignore"):
                return np.repeat(self._named(nodes), sizes) + offset.astype(np.uint64) * GOLDEN

        nothing = {
            "mass": lambda _: np.zeros(len(offset)),
            "latest": lambda _: np.zeros(len(offset)),
            "queries": lambda _: np.zeros(len(offset), np.int64),
            "activated": lambda _: np.zeros(len(offset), np.int64),
        }
        observed = self.policy.observes
        return Tokens.when_read(
            {
                "block": lambda _: np.repeat(indices, sizes),
                "position": lambda _: np.repeat(table.start[nodes], sizes) + offset,
                "key": key,
                "protected": protected,
                **(self.statistics.makers(nodes, sizes, offset) if observed else nothing),
            },
            offset=offset,
        )

    def _named(self, ids: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Names of blocks, which do not depend on the order of the search."""
        if len(self._names) < len(self.table):
            more = max(len(self.table), 2 * len(self._names)) - len(self._names)
            self._names = np.concatenate([self._names, np.zeros(more, np.uint64)])
        for node_id in ids[self._names[ids] == 0].tolist():
            self._names[node_id] = _name(self.tree[node_id])
        return self._names[ids]


def _told(column: NDArray[Any]) -> list[Any]:
    """A column as plain numbers; None for `NEVER`."""
    if column.dtype.kind == "f":
        return np.round(column, 4).tolist()  # type: ignore[no-any-return]
    return [None if number == NEVER else number for number in column.tolist()]


def _name(node: Node) -> int:
    """A number for a block that does not depend on the order of the search."""
    text = ".".join(map(str, node.key)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
