"""Residency: frees slots when room is needed, as the policy decides."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from arbor.engine.forest_state import ForestState
from arbor.engine.forward_pass import nvtx_range
from arbor.engine.policy_view import PolicyView, Where
from arbor.engine.retained import Account
from arbor.errors import BudgetInfeasible
from arbor.events import Allocated, Cause, Pressure, Rehydrated
from arbor.forest import Forest, by_tree
from arbor.heads.selection import select_by_head
from arbor.heads.sets import HeadSets
from arbor.heads.table import HeadMoves
from arbor.retention.base import NEVER, Blocks, BlockScores, PackingAllocator
from arbor.retention.ordering import order
from arbor.retention.policy import Policy, Protect
from arbor.retention.selection import Selection, checked_scores, select
from arbor.retention.token_kv import ShowsKV
from arbor.tree import NO_SLOT, Node, ThoughtTree, paths_of

# when running paths lose tokens: never, once everything off them has left, or like all other blocks
PathsLose = Literal["never", "last", "equally"]


class DoesNotFit(Exception):
    """Work that joins needs more room than can be made: less of it may join.

    Args:
        short: slots that are missing.
    """

    def __init__(self, short: int) -> None:
        super().__init__(f"{short} slots are missing")
        self.short = short


class Residency:
    """Decides for the engine which tokens leave when room is needed.

    The engine plans (how many slots an event needs), this fits (what leaves), then the engine
    allocates and computes. Where each search has a budget of its own, the running paths of one call
    are those of one search, and only that loses tokens.

    Args:
        policy: what evictable blocks keep, and which tokens.
        scores: of blocks, for the policies that read them.
        heads: what KV heads hold, if each keeps tokens of its own.

    Attributes:
        view: shows the policy the blocks.
        acts_by_time: whether the policy may act after a decode step though there is room.
    """

    def __init__(
        self,
        state: ForestState,
        policy: Policy,
        scores: BlockScores,
        paths_lose: PathsLose = "never",
        *,
        token_kv: ShowsKV | None = None,
        heads: HeadSets | None = None,
    ) -> None:
        self._heads = heads
        self.view = PolicyView(state, policy, scores, token_kv)
        self._state = state
        self._memory = state.memory
        self._policy = policy
        self._paths_lose: PathsLose = paths_lose
        self._steps: Counter[ThoughtTree | None] = Counter()  # of decoding, by budget
        # what a policy destroys at its times may lie on running paths, whichever blocks lose when
        # room runs out
        destroys_paths = policy.destroys and paths_lose != "never"
        self._at_clock: PathsLose = "equally" if destroys_paths else paths_lose
        self._capped = policy.capped  # asked at every step: looked at once
        self._destroys = policy.destroys and state.memory.staging is not None
        self.acts_by_time = self._destroys or self._capped is not None or policy.trigger.above < 1
        self._packing: PackingAllocator | None = None
        if policy.packs and isinstance(policy.allocator, PackingAllocator):
            self._packing = policy.allocator

    def fit(
        self,
        needed: int,
        leaves: Sequence[Node],
        cause: Cause,
        *,
        paths_lose: PathsLose | None = None,
    ) -> bool:
        """Free slots until `needed` are free.

        Args:
            leaves: ends of the running paths.
            cause: the event that asks. At ``clock`` no room is needed: what leaves does not depend
                on kept prompts, which count as free and stay, unless KV heads lose tokens each.
            paths_lose: when running paths lose tokens; by default as always.

        Returns:
            whether the running paths may have lost tokens.

        Raises:
            DoesNotFit: the running paths and what is needed are more than the budget; nothing that
                the policy decides on has left.
            BudgetInfeasible: the policy will not give up as much; nothing has left.
            UsageError: the policy's answer breaks its protocol; nothing has left.
        """
        account = self._account(leaves)
        if needed <= (free := account.free):
            return False
        if cause != "clock":
            self._free_kept_prompts(needed - free)
        if needed <= account.available:
            return False
        if self._heads is not None:  # heads keep tokens in slots of others, which prompts may use
            self._free_kept_prompts(self._memory.slots)
        with nvtx_range("policy"):
            usual = self._at_clock if cause == "clock" else self._paths_lose
            return self._free(needed, leaves, cause, paths_lose or usual)

    def _free_kept_prompts(self, count: int) -> None:
        if self._memory.prefixes:
            self._memory.free_kept_prompts(count)
            self._state.sharing_changed()

    def due(self, leaves: Sequence[Node]) -> int | None:
        """Count a decode step; tokens that may stay if the policy acts now, else None.

        Args:
            leaves: ends of the running paths.
        """
        whose = self._alone(leaves)
        self._steps[whose] += 1
        trigger = self._policy.trigger
        if not self.acts_by_time or self._steps[whose] % trigger.every:
            return None
        account = self._account(leaves)
        used = account.slots - account.available
        room = min(used, int(trigger.above * account.slots))
        if self._capped is not None and not self._destroys:  # that has a time of its own: `assign`
            where: Where = "anywhere" if self._at_clock == "equally" else "off"
            offered = self.view.offered(leaves, where=where, tree=whose)
            room = min(room, used - self._capped.excess(offered))
        return room if room < used else None

    def forget(self, tree: ThoughtTree, rows: Sequence[int]) -> None:
        """Remove what is known of a tree that was dropped; other blocks may have its rows later."""
        del self._steps[tree]
        self.view.forget(rows)
        if self._heads is not None:
            self._heads.forget(rows)

    def _alone(self, leaves: Sequence[Node]) -> ThoughtTree | None:
        """The tree whose own budget is concerned; None: that of all trees."""
        return leaves[0].tree if self._state.own_budgets else None

    def _account(self, leaves: Sequence[Node]) -> Account:
        return self._state.account(leaves[0].tree)

    def assign(self, leaves: Sequence[Node]) -> bool:
        """Let a policy that destroys tokens assign tiers at its time, where attention reads host
        memory too: some tokens are destroyed, some packed, and what room the device has until the
        next time goes to the best of those in host memory.

        Args:
            leaves: ends of the running paths.

        Returns:
            whether tokens that running rows read lie elsewhere now, or nowhere.

        Raises:
            UsageError: the policy's answer breaks its protocol.
        """
        if not self._destroys or self._steps[None] % self._policy.trigger.every:
            return False
        changed = self._destroy(leaves)
        if self._packing is not None:
            changed |= self._pack(self._packing, leaves)
        return self._promote(leaves) or changed

    def _destroy(self, leaves: Sequence[Node]) -> bool:
        assert self._capped is not None, "a policy that destroys says how many"
        offer = partial(self.view.offered, leaves, where="anywhere", stored=True)
        blocks = offer()
        excess = self._capped.excess(blocks)
        if not excess:
            return False
        room = int(blocks.resident.sum()) - excess
        blocks, _, chosen = self.decide(blocks, room, lambda protect: offer(protect=protect))
        index, offsets = chosen.leaving()
        losers, begins = np.unique(index, return_index=True)
        nodes = self._state.forest.nodes(blocks.ids[losers].tolist())
        counts = self._memory.evict_for_good(nodes, np.split(offsets, begins[1:]))
        index, offsets, credit = chosen.credited()
        self._state.remember(blocks.ids[index], offsets, credit)
        self._state.changed(nodes)
        here = {node: count for node, count in zip(nodes, counts, strict=True) if count}
        self._state.report_evicted(here, "clock")
        return True

    def _pack(self, allocator: PackingAllocator, leaves: Sequence[Node]) -> bool:
        memory = self._memory
        blocks = self.view.offered(leaves, where="anywhere", stored=True)
        done = memory.is_packed(self._places(blocks))
        chosen = np.sort(allocator.packing(blocks, done, self._policy.scorer))
        if not len(chosen):
            return False
        memory.lower.pin(node.row for node in paths_of(leaves))
        nodes, offsets = self._by_node(blocks, chosen)
        here = memory.pack(nodes, offsets)
        self._state.changed(nodes)
        self._state.report_evicted(here, "clock")
        return True

    def _promote(self, leaves: Sequence[Node]) -> bool:
        """Copy the best tokens of running paths that are in host memory to slots that no new token
        takes before the next time: protected ones first, then by score, the later ones first."""
        memory, trigger = self._memory, self._policy.trigger
        room = int(trigger.above * memory.slots) - memory.used - trigger.every * len(leaves)
        if room <= 0:
            return False
        blocks = self.view.offered(leaves, where="on", stored=True)
        able = np.flatnonzero(memory.lower.may_rise(self._places(blocks)))
        if not len(able):
            return False
        tokens = blocks.tokens
        scores = checked_scores(self._policy.scorer, tokens)[able]
        preferred = order(~tokens.protected[able], -scores, -tokens.position[able])
        chosen = np.sort(able[preferred[:room]])
        nodes, offsets = self._by_node(blocks, chosen)
        back = self._memory.fetch(dict(zip(nodes, offsets, strict=True)))
        self._state.changed(nodes)
        for tree, mine in by_tree(back).items():
            opened = self._state.trees[tree]
            counts = tuple(sorted((node.id, back[node]) for node in mine))
            opened.emit(Rehydrated(counts, mode="fetch", kv=opened.kv))
        return True

    def _places(self, blocks: Blocks) -> NDArray[np.int64]:
        """Where the tokens of an offer stand in the forest's spans, int64 [T]."""
        nodes = self._state.forest.nodes(blocks.ids.tolist())
        begins = np.array([node.span.begin for node in nodes], np.int64)
        return begins[blocks.tokens.block] + blocks.tokens.offset

    def _by_node(
        self, blocks: Blocks, chosen: NDArray[np.int64]
    ) -> tuple[list[Node], list[NDArray[np.int64]]]:
        """Tokens of an offer, given by increasing index, as blocks and offsets of each."""
        index, begins = np.unique(blocks.tokens.block[chosen], return_index=True)
        nodes = self._state.forest.nodes(blocks.ids[index].tolist())
        return nodes, np.split(blocks.tokens.offset[chosen], begins[1:])

    def _free(
        self, needed: int, leaves: Sequence[Node], cause: Cause, paths_lose: PathsLose
    ) -> bool:
        state, memory = self._state, self._memory
        account, whose = self._account(leaves), self._alone(leaves)
        if memory.staging is not None:
            memory.lower.pin(node.row for node in paths_of(leaves))
        for tree in by_tree(leaves) or state.trees:
            free = account.available  # kept prompts are gone, but at ``clock``
            state.trees[tree].emit(Pressure(needed=needed, free=free, limit=account.slots))
        began = time.perf_counter()
        offered = partial(self.view.offered, leaves, tree=whose)
        offer = partial(offered, where="anywhere" if paths_lose == "equally" else "off")
        blocks = offer()
        room = account.available + int(blocks.resident.sum()) - needed
        off_paths: Blocks | None = None
        if room < 0 and paths_lose == "last":
            # all of it leaves, and of the paths what must
            off_paths, offer = blocks, partial(offered, where="on")
            blocks = offer()
            room += int(blocks.resident.sum())
        if room < 0 and self._drop_shared(-room, leaves, cause):
            blocks = offer()
            room = account.available + int(blocks.resident.sum()) - needed
        if room < 0:
            raise DoesNotFit(-room)
        more = max(0, self._policy.trigger.spare * len(leaves) - needed)
        room = max(room - more, min(room, int(blocks.floor.sum())), room // 2)
        idle = paths_lose != "equally" and off_paths is None
        blocks, counts, chosen = self.decide(
            blocks,
            room,
            lambda protect: offer(protect=protect),
            leaves,
            idle=idle,
            slots=account.slots,
        )
        if off_paths is not None and len(off_paths):
            none = np.zeros(len(off_paths), np.int64)
            self.keep(off_paths, Selection(off_paths, none), none, 0, cause, began, tree=whose)
            began = time.perf_counter()  # what came before has been reported
        self.keep(blocks, chosen, counts, room, cause, began, tree=whose)
        index, offsets, credit = chosen.credited()
        state.remember(blocks.ids[index], offsets, credit)
        assert account.available >= needed, "the policy kept more than there was room for"
        return paths_lose == "equally" or off_paths is not None

    def _drop_shared(self, short: int, leaves: Sequence[Node], cause: Cause) -> bool:
        """Evict what blocks share of which none is on a running path, until so many slots are free;
        returns whether there was any.

        The policy is not asked for it: what several blocks read leaves last, the least recently
        used first.
        """
        state, memory, forest = self._state, self._memory, self._state.forest
        running = {node.row for node in paths_of(leaves)}
        used = [forest[row].span.slot for row in forest.cuts if row in running]
        stays = np.concatenate([*used, np.empty(0, np.int32)])
        idle = [forest[row] for row in forest.cuts if row not in running]
        idle = [node for node in idle if node.span.resident.any()]
        lost: dict[Node, int] = {}
        used_last = state.table.last_used

        def latest(node: Node) -> int:
            return max(int(used_last[each.row]) for each in (node, *_others(forest, node)))

        for node in sorted(idle, key=latest):
            if short <= 0:
                break
            slots = node.span.slot
            gone = slots[(slots != NO_SLOT) & memory.is_shared(slots) & ~np.isin(slots, stays)]
            if not len(gone):
                continue
            users = [node, *_others(forest, node)]
            offsets = [np.flatnonzero(np.isin(each.span.slot, gone)) for each in users]
            counts = np.array([len(each) for each in offsets])
            memory.evict_blocks(users, np.concatenate(offsets), counts)
            for each, count in zip(users, counts.tolist(), strict=True):
                if count:
                    lost[each] = lost.get(each, 0) + count
            short -= len(gone)
        state.sharing_changed()
        state.report_evicted(lost, cause)
        return bool(lost)

    def choose(
        self, path: Sequence[Node], leaves: Sequence[Node], room: int
    ) -> dict[int, NDArray[np.int64]]:
        """Let the policy choose among all tokens of a path, on the device or not; of the others
        none stays.

        Args:
            leaves: ends of the running paths.
            room: tokens it may choose.

        Returns:
            offsets of the chosen tokens, increasing, by row.
        """
        began = time.perf_counter()
        ids = np.array(sorted(node.row for node in path), np.int64)
        offer = partial(self.view.offered, leaves, ids, where="on", whole=True)
        blocks, counts, chosen = self.decide(
            offer(),
            room,
            lambda protect: offer(protect=protect),
            slots=self._account(leaves).slots,
        )
        whose = self._alone(leaves)
        self.keep(blocks, chosen, counts, room, "transition", began, tree=whose)
        return {int(row): chosen[index] for index, row in enumerate(ids)}

    def decide(
        self,
        blocks: Blocks,
        room: int,
        eased: Callable[[Protect], Blocks],
        leaves: Sequence[Node] | None = None,
        *,
        idle: bool = False,
        slots: int | None = None,
    ) -> tuple[Blocks, NDArray[np.int64], Selection]:
        """How many tokens each block keeps, and which: what the policy answers, checked.

        Args:
            blocks: what is offered, under all of the policy's protection.
            room: tokens that may stay.
            eased: the same offer under less protection, for where there is no room for all that is
                protected.
            leaves: ends of the running paths, where each KV head may keep tokens of its own; None:
                all keep the same.
            idle: all blocks of the offer are off the running paths, see `Policy.idle`.
            slots: the budget that room runs out of; by default that of all trees.

        Returns:
            the offer as it was decided on, how many tokens each block keeps, and which.

        Raises:
            BudgetInfeasible: the policy will not give up as much.
            UsageError: an answer that breaks the protocol of allocators or scorers.
        """
        less = self._policy.protect.easing()
        next(less)
        while int(blocks.floor.sum()) > room:  # ends where nothing is protected
            blocks = eased(next(less))
        allocator, scored = self._policy.shared_allocator, self._policy.scorer
        newest = idle and self._policy.idle == "newest"
        if newest:
            allocator, scored = self._policy.for_idle
        try:
            if self._heads is None or leaves is None:
                counts, chosen = select(blocks, room, allocator, scored)
            else:
                heads = self._heads
                scorer = heads.newest(scored, leaves) if newest else heads.scorer(leaves)
                counts, chosen = select_by_head(blocks, room, allocator, scorer)
        except BudgetInfeasible as error:  # it knows its room, not what the rest takes
            slots, more = slots or self._memory.slots, error.needed - error.budget
            what = f"the policy '{self._policy.name}', at this point of the search,"
            raise BudgetInfeasible(slots + more, slots, what, error.hint) from error
        return blocks, counts, chosen

    def keep(
        self,
        blocks: Blocks,
        chosen: Selection,
        counts: NDArray[np.int64],
        room: int,
        cause: Cause,
        began: float,
        *,
        tree: ThoughtTree | None = None,
    ) -> None:
        """Evict what was not chosen, and report to each tree what was decided of it and why.

        Args:
            blocks, chosen, counts, room: what was offered, what stays, and of how many tokens.
            cause: the event that asked.
            began: when the policy was asked.
            tree: the only one whose blocks were offered; None: those of all trees may have been.
        """
        moves = None if self._heads is None else self._heads.moves(chosen)
        rows, held, lost = self._evict(blocks, *chosen.leaving(), moves)
        if moves is not None and self._heads is not None:
            self._heads.moved(moves)
        elapsed_s = time.perf_counter() - began
        nodes = self._state.forest.nodes(rows.tolist())
        places = {node: place for place, node in enumerate(nodes)}
        at = np.searchsorted(blocks.ids, rows)
        kept = counts[at]
        looked_at = [name for name in blocks.read if name != "length"]
        signals = {name: getattr(blocks, name)[at] for name in looked_at}
        losers = by_tree(nodes)
        # a tree alone hears of it also where it loses nothing
        hear = losers if len(self._state.trees) > 1 else self._state.trees
        for each in hear if tree is None else (tree,):
            group = sorted(losers.get(each, ()), key=lambda node: node.id)
            mine = [places[node] for node in group]
            ids = [node.id for node in group]
            self._state.trees[each].emit(
                Allocated(
                    policy=self._policy.name,
                    cause=cause,
                    room=room,
                    offered=len(blocks),
                    nodes=tuple(zip(ids, held[mine].tolist(), kept[mine].tolist(), strict=True)),
                    signals={name: _plain(column[mine]) for name, column in signals.items()},
                    elapsed_s=elapsed_s,
                )
            )
        if nodes:
            self._state.report_evicted(dict(zip(nodes, lost.tolist(), strict=True)), cause)

    def _evict(
        self,
        blocks: Blocks,
        index: NDArray[np.int64],
        offsets: NDArray[np.int64],
        moves: HeadMoves | None = None,
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Drop tokens of offered blocks, given by index in `blocks` and offset, where they are on
        the device; `moves` are what KV heads keep of them.

        Returns:
            int64 each: the rows of the blocks that lost some; what they held before; how many they
                lost.
        """
        forest = self._state.forest
        offered, counts = np.unique(index, return_counts=True)
        begins = np.array(
            [node.span.begin for node in forest.nodes(blocks.ids[offered].tolist())], np.int64
        )
        here = forest.spans.slot[np.repeat(begins, counts) + offsets] != NO_SLOT
        offered, counts = np.unique(index[here], return_counts=True)
        ids = blocks.ids[offered]
        nodes = forest.nodes(ids.tolist())
        held = self._state.table.resident[ids].copy()
        try:
            self._memory.evict_blocks(nodes, offsets[here], counts, moves=moves)
        finally:
            self._state.changed(nodes)
        return ids, held, counts


def _others(forest: Forest, node: Node) -> list[Node]:
    """The blocks that may share tokens with a block."""
    return [other for other, _ in forest.alike(node)]


def _plain(column: NDArray[Any]) -> list[Any]:
    """A column as plain numbers; None for `NEVER`."""
    if column.dtype.kind == "f":
        return np.round(column, 4).tolist()  # type: ignore[no-any-return]
    return [None if number == NEVER else number for number in column.tolist()]
