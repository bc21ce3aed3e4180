"""PolicyView: the blocks a policy is shown, and the figures it decides by."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from arbor.engine.forest_state import ForestState
from arbor.retention.base import GOLDEN, NEVER, Blocks, BlockScores, Tokens
from arbor.retention.policy import Policy, Protect
from arbor.retention.token_kv import NO_KV, PlacedKV, ShowsKV, TokenKV
from arbor.support.growable import grown
from arbor.tree import Node, NodeState, ThoughtTree

Where = Literal["off", "on", "anywhere"]  # blocks off the running paths, on them, or both
# tokens of a block: all; those that attention reads, also in host memory; those on the device
Places = Literal["whole", "present", "resident"]


class PolicyView:
    """Shows a policy the blocks of the open trees, as columns that are made when they are read.

    Args:
        scores: of blocks, for the policies that read them.
        token_kv: where the keys and values of tokens are; for policies that ask for them.
    """

    def __init__(
        self,
        state: ForestState,
        policy: Policy,
        scores: BlockScores,
        token_kv: ShowsKV | None = None,
    ) -> None:
        self._state = state
        self._table = state.table
        self._policy = policy
        self._scores = scores
        self._token_kv = token_kv if policy.observation.keys else None
        self._names = np.zeros(0, np.uint64)  # by row; 0 = not made yet

    def offered(
        self,
        leaves: Sequence[Node],
        ids: NDArray[np.int64] | None = None,
        *,
        where: Where = "off",
        whole: bool = False,
        stored: bool = False,
        protect: Protect | None = None,
        tree: ThoughtTree | None = None,
    ) -> Blocks:
        """The blocks the policy may take tokens from.

        A policy that destroys tokens also sees the blocks that have none left, unless the search
        has given them up: what it may still take follows from what they have lost.

        Args:
            leaves: ends of the running paths.
            ids: these blocks only, instead of all that may leave.
            where: which blocks these are.
            whole: all tokens of a block are offered, on the device or not (to choose what should
                come back).
            stored: tokens that attention reads in host memory are offered too, as if they were on
                the device.
            protect: what stays in any case; by default what the policy says.
            tree: the tree that may lose tokens; None: all may.
        """
        protect = protect or self._policy.protect
        table = self._table
        if where != "off":
            self._state.changed(leaves)  # open blocks have grown
        table.refresh()
        running = [leaf.row for leaf in leaves]
        active = table.on_paths(running)
        counts = self._present() if stored else table.resident
        if ids is None:
            able = counts > 0
            if self._policy.destroys:
                able[self._emptied(counts)] = True
            if where != "anywhere":
                able &= active if where == "on" else ~(active | table.open)
            ids = np.flatnonzero(able)
            if tree is not None and len(self._state.trees) > 1:
                ids = ids[self._state.forest.numbers[ids] == tree.number]
        resident = table.length[ids] if whole else counts[ids]
        places: Places = "whole" if whole else "present" if stored else "resident"

        def see(indices: NDArray[np.int64]) -> Tokens:
            return self._tokens(ids, indices, leaves, places, protect)

        def score(blocks: Blocks) -> NDArray[np.float64]:
            return self._scores.scores(blocks.value, blocks.confidence, blocks.attention)

        several = len(self._state.trees) > 1
        decoding = table.open[ids]  # read by every step

        def latest(values: NDArray[Any], now: Any) -> NDArray[Any]:
            return np.where(decoding, now, values) if decoding.any() else values

        # most policies read a few of these only
        return Blocks.when_read(
            {
                "length": lambda _: table.length[ids],
                "depth": lambda _: table.depth[ids],
                "distance": lambda _: table.distances(running)[ids],
                "active": lambda _: active[ids],
                "value": lambda _: table.expected(self._scored())[ids],
                "confidence": lambda _: table.confidence[ids],
                "attention": lambda _: self._attention(ids),
                "score": score,
                "last_used": lambda _: latest(table.last_used[ids], table.last_used.max() + 1),
                "scheduled": lambda _: latest(self._scheduled(ids), 0),
                "reentry": lambda _: latest(self._reentry(ids), 1.0),
                "next_use": lambda _: self._next_use(ids),
                **({"turn": lambda _: self._turn(ids)} if several else {}),
            },
            **({} if several else {"turn": np.zeros(len(ids), np.int64)}),
            ids=ids,
            resident=resident,
            floor=self._floor(ids, resident, see, leaves, where, whole, protect),
            see=see,
        )

    # Columns of blocks

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
        """What each block keeps in any case: its protected tokens, and K_min.

        Sinks and recent tokens lie in few blocks, and only there tokens are looked at; tails are
        counted in the table, as long as the policy has them, of tokens on the device.
        """
        table = self._table
        floor = np.minimum(resident, protect.floor)
        uncounted = np.zeros(len(ids), np.bool_)
        if protect.tail:
            tail = resident if whole else table.tail[ids]
            if not whole:
                uncounted = resident > table.resident[ids]
            if not whole and protect.tail < self._policy.protect.tail:
                uncounted |= resident < table.length[ids]
            floor = np.maximum(floor, np.where(uncounted, 0, np.minimum(tail, protect.tail)))
        if protect.tail or where != "off":
            start = table.start[ids]
            ends = start + table.length[ids]
            recent = self._oldest(leaves, protect)[ids]
            few = np.flatnonzero((start < protect.sinks) | (ends > recent) | uncounted)
            if len(few):
                tokens = see(few)
                guarded = np.bincount(tokens.block[tokens.protected], minlength=len(ids))
                floor = np.maximum(floor, guarded)
        return floor

    def _oldest(self, leaves: Sequence[Node], protect: Protect) -> NDArray[np.int64]:
        """Where in each block the window of recent tokens begins, int64 by row; `NEVER` where
        it does not reach. In a protected prompt it begins with the prompt."""
        oldest = np.full(len(self._table), NEVER)
        if protect.prompt:
            oldest[[leaf.path[0].row for leaf in leaves]] = 0
        for leaf in leaves if protect.recent else ():
            # the window of a block several leaves share begins where the shortest one's does
            begin = leaf.end - protect.recent
            for node in reversed(leaf.path):
                oldest[node.row] = min(oldest[node.row], begin)
                if node.start <= begin:
                    break
        return oldest

    def _attention(self, ids: NDArray[np.int64]) -> NDArray[np.float64]:
        if not self._policy.observes:
            return np.zeros(len(ids))
        return self._state.statistics.block_attention(ids)

    def _next_use(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        result = np.full(len(ids), NEVER)
        numbers = self._state.forest.numbers[ids]
        for opened in self._state.trees.values():
            if opened.reads is not None:
                mine = np.flatnonzero(numbers == opened.tree.number)
                nodes = self._state.forest.nodes(ids[mine].tolist())
                own = np.array([node.id for node in nodes], np.int64)
                now = opened.operation + np.isin(own, list(opened.read_early))
                result[mine] = opened.reads.after(now, own)
        return result

    def _turn(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        places = np.zeros(1 + max(tree.number for tree in self._state.trees), np.int64)
        for place, tree in enumerate(self._state.trees):
            places[tree.number] = place
        return places[self._state.forest.numbers[ids]]

    def _scored(self) -> dict[int, float]:
        """The figures by which searches choose, by row, for policies that go by these."""
        if not self._policy.reads_search_scores:
            return {}
        return {
            opened.tree[node_id].row: score
            for opened in self._state.trees.values()
            for node_id, score in opened.run.scores().items()
        }

    def _scheduled(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        waits = [
            (node.row, at)
            for opened in self._state.trees.values()
            for at, wave in enumerate(opened.upcoming, 1)
            for node in wave
        ]
        if not waits:
            return np.full(len(ids), NEVER)
        return self._table.soonest(*zip(*waits, strict=True))[ids]

    def _reentry(self, ids: NDArray[np.int64]) -> NDArray[np.float64]:
        likely = {
            opened.tree[node_id].row: chance
            for opened in self._state.trees.values()
            for node_id, chance in opened.run.outlook().items()
        }
        if not likely:
            return np.zeros(len(ids))
        leaves = np.fromiter(likely, np.int64, len(likely))
        chance = np.fromiter(likely.values(), np.float64, len(likely))
        return self._table.reentry(leaves, chance)[ids]

    def _emptied(self, counts: NDArray[np.int64]) -> list[int]:
        """Rows of the blocks that were computed, not given up, and have no tokens left.

        Args:
            counts: int64 by row, tokens left.
        """
        table, computed = self._table, self._state.computed
        none = np.flatnonzero((counts == 0) & (table.length > 0) & ~table.pruned)
        return [
            node.row
            for node in self._state.forest.nodes(none.tolist())
            if node.row in computed or (node.state is NodeState.OPEN and not node.given)
        ]

    # Tokens

    def _present(self) -> NDArray[np.int64]:
        """Tokens of each block that attention reads, int64 by row."""
        counts = np.zeros(len(self._table), np.int64)
        for node in self._state.forest:
            counts[node.row] = np.count_nonzero(node.span.present)
        return counts

    def _tokens(
        self,
        ids: NDArray[np.int64],
        indices: NDArray[np.int64],
        leaves: Sequence[Node],
        places: Places,
        protect: Protect,
    ) -> Tokens:
        nodes = ids[indices]
        table = self._table
        if places == "whole":
            sizes = table.length[nodes]
            offset = np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        elif places == "present":
            spans = [node.span for node in self._state.forest.nodes(nodes.tolist())]
            each = [np.flatnonzero(span.present) for span in spans]
            sizes = np.array([len(offsets) for offsets in each], np.int64)
            offset = np.concatenate([*each, np.empty(0, np.int64)])
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

        statistics = self._state.statistics
        known = statistics.makers(nodes, sizes, offset)
        if not self._policy.observes:
            whole = ("queries", "activated", "recurrence")
            known |= dict.fromkeys(whole, lambda _: np.zeros(len(offset), np.int64))
            known |= dict.fromkeys(("mass", "latest", "lately"), lambda _: np.zeros(len(offset)))

        def kv(_: Tokens) -> TokenKV:
            shows, rows = self._token_kv, np.repeat(nodes, sizes)
            found = NO_KV if shows is None else shows(rows, offset, leaves)
            if not self._policy.by_head:
                return found
            return PlacedKV(found.sequences, found.place, rows=rows)

        return Tokens.when_read(
            {
                "block": lambda _: np.repeat(indices, sizes),
                "position": lambda _: np.repeat(table.start[nodes], sizes) + offset,
                "key": key,
                "protected": protected,
                **known,
                "kv": kv,
            },
            offset=offset,
        )

    def _named(self, ids: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Names of blocks, which do not depend on the order of the search."""
        self._names = grown(self._names, len(self._table))
        for row in ids[self._names[ids] == 0].tolist():
            self._names[row] = _name(self._state.forest[row])
        return self._names[ids]

    def forget(self, rows: Sequence[int]) -> None:
        """Remove the blocks of a tree that was dropped; other blocks may have their rows later."""
        self._names[[row for row in rows if row < len(self._names)]] = 0


def _name(node: Node) -> int:
    """A number for a block that does not depend on the order of the search."""
    text = ".".join(map(str, node.key)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
