"""ForestState: the engine's knowledge of the open trees, read and reported to by its parts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from arbor.engine.open_tree import OpenTree
from arbor.engine.retained import Account, PartOfRetained
from arbor.events import Cause, Discarded, Evicted
from arbor.forest import Forest, by_tree
from arbor.memory import KVMemory
from arbor.memory.lower_tiers import Moves
from arbor.model.sharing import Context, Piece
from arbor.retention.block_table import BlockTable
from arbor.retention.policy import Protect
from arbor.retention.token_statistics import TokenStatistics
from arbor.tree import Certainty, Node, ThoughtTree, paths_of

MOST_LOGITS = 256 << 20  # bytes of logits after blocks that are kept


class LastLogits(dict[int, Tensor]):
    """Row of a block -> [V] logits; beyond `MOST_LOGITS` the oldest are dropped, and computed again
    from one token when they are needed."""

    def remember(self, blocks: Sequence[int], logits: Tensor) -> None:
        """Keep these rows ([n, V]) of these blocks, in any case.

        One call copies all rows, each into memory of its own: views of one gathered [n, V] would
        keep every row alive as long as any of them is.
        """
        for row in blocks:
            self.pop(row, None)  # to the end of the order
        # torch's stub says that unbind_copy returns nothing
        rows: Any = torch.unbind_copy(logits)  # type: ignore[func-returns-value]
        self.update(zip(blocks, rows, strict=True))
        if blocks:
            row_bytes = logits.shape[-1] * logits.element_size()
            most = max(len(blocks), MOST_LOGITS // row_bytes)
            while len(self) > most:
                del self[next(iter(self))]


class ForestState:
    """The state of the open trees, shared by the parts of the engine.

    Blocks are known by their rows (`Forest`).

    Args:
        protect: the policy's; says which tokens the figures of blocks count.
        shares_prompts: prompts that begin alike share KV.
        shares_siblings: siblings that begin alike do.
        keeps_prompts: prompts of finished problems stay for later ones while nothing needs their
            slots.
        own_budgets: each search keeps within its own budget, and none shares a slot with another;
            else all of them share one.
        part: the budget that all searches share as a part of full retention; None: it is the slots
            of the pool, or each search has its own.

    Attributes:
        trees: the open trees, in the order in which they were opened.
        logits: after blocks' last tokens, where they are known.
        table: figures of blocks that policies read.
        statistics: attention that tokens received.
        computed: rows of the blocks computed at least once; their missing tokens count as
            rehydrated, not prefilled.
        hidden: rows of the blocks that nothing attends to.
        budgets_move: whether a budget changes while searches neither come nor go.
        before_hiding: rows of the blocks computed before these were hidden; empty while nothing is.
    """

    def __init__(
        self,
        memory: KVMemory,
        protect: Protect,
        *,
        shares_prompts: bool = False,
        shares_siblings: bool = False,
        keeps_prompts: bool = False,
        own_budgets: bool = False,
        part: Fraction | None = None,
    ) -> None:
        assert not (own_budgets and (shares_prompts or shares_siblings or keeps_prompts))
        self.memory = memory
        self.own_budgets = own_budgets
        self.shares_prompts = shares_prompts
        self.shares_siblings = shares_siblings
        self.keeps_prompts = keeps_prompts
        self.trees: dict[ThoughtTree, OpenTree] = {}
        self.logits = LastLogits()
        self.table = BlockTable(
            protect.tail, memory.is_shared if shares_prompts or keeps_prompts else None
        )
        self.statistics = TokenStatistics(protect.threshold)
        self.computed: set[int] = set()
        self.hidden: frozenset[int] = frozenset()
        self.before_hiding: frozenset[int] = frozenset()
        self._clock = 0
        self._turns = 0
        staging = memory.budget - memory.slots
        shared = memory.slots if part is None else PartOfRetained(part, staging)
        self._shared = Account(memory, shared)
        self.budgets_move = False

    # Trees

    @property
    def forest(self) -> Forest:
        """Every block by its row."""
        return self.memory.forest

    def open(self, opened: OpenTree, part: Fraction | None = None) -> None:
        """Take a tree that the memory has adopted.

        Args:
            part: its own budget as a part of full retention; None: it is the tree's slots.
        """
        if self.own_budgets:
            if not self.memory.grows:
                together = opened.slots + sum(each.slots for each in self.trees.values())
                assert together <= self.memory.slots, "budgets of more slots than the pool has"
            limit = opened.slots if part is None else PartOfRetained(part)
            opened.account = Account(self.memory, limit, opened.tree)
        else:
            opened.account = self._shared
        self.trees[opened.tree] = opened
        if (moving := opened.account.part) is not None:
            moving.take(opened.retained)
        self._look()
        opened.turn = self._turns
        opened.rank = 0 if self._shared.part is not None else self._turns
        self._turns += 1
        self.table.touch(opened.tree.root)

    def _look(self) -> None:
        """Searches have come or gone."""
        parts = [opened.account.part for opened in self.trees.values()]
        self.budgets_move = any(each is not None and each.part < 1 for each in parts)

    @property
    def fits_whole(self) -> bool:
        """Whether nothing ever has to leave: there are slots for full retention of all open trees
        at their worst."""
        if (part := self._shared.part) is not None:
            return part.part == 1
        total = 0
        for opened in self.trees.values():
            if opened.retained.most is None:
                return False
            total += opened.retained.most
        return total <= self.memory.slots

    def account(self, tree: ThoughtTree) -> Account:
        """The budget that an open tree keeps within."""
        return self.trees[tree].account

    def fits_alone(self, tree: ThoughtTree) -> bool:
        """Whether nothing of an open tree ever has to leave: its budget has slots for full
        retention at its worst; where a pool is shared, see `fits_whole`."""
        if not self.own_budgets:
            return self.fits_whole
        opened = self.trees[tree]
        if (part := opened.account.part) is not None:
            return part.part == 1
        most = opened.retained.most
        return most is not None and most <= opened.slots

    def close(self, opened: OpenTree) -> list[int]:
        """Let a tree go, and free what it holds; returns the rows its blocks had."""
        rows = self.memory.free_tree(opened.tree, keep_prompt=self.keeps_prompts)
        self.memory.lower.take_moves()  # its run hears of nothing any more
        self.sharing_changed()
        del self.trees[opened.tree]
        if (moving := opened.account.part) is not None:
            moving.drop(opened.retained)
        self._look()
        for row in rows:
            self.logits.pop(row, None)
        self.computed.difference_update(rows)
        self.table.forget(rows)
        self.statistics.forget(rows)
        return rows

    def of(self, node: Node) -> OpenTree:
        """The open tree of a block."""
        return self.trees[node.tree]

    def report_evicted(self, counts: Mapping[Node, int], cause: Cause) -> None:
        """Report to each tree which of its blocks lost how many tokens, and what lower tiers took
        and gave up."""
        moves = self.memory.lower.take_moves()
        for tree, nodes in by_tree(counts).items():
            opened = self.trees[tree]
            gone = tuple(sorted((node.id, counts[node]) for node in nodes))
            kept = [node for node in nodes if node in moves.stored]
            stored = tuple(sorted((node.id, moves.stored[node]) for node in kept))
            opened.emit(Evicted(cause=cause, nodes=gone, kv=opened.kv, stored=stored))
        self._report_lost(moves)

    def report_discarded(self) -> None:
        """Report to each tree what lower tiers gave up since the last report."""
        moves = self.memory.lower.take_moves()
        assert not moves.stored, "what was stored was not reported as evicted"
        self._report_lost(moves)

    def _report_lost(self, moves: Moves) -> None:
        heirs = by_tree(moves.taken)
        for tree, nodes in by_tree(moves.lost).items():
            opened = self.trees[tree]
            lost = tuple(sorted((node.id, moves.lost[node]) for node in nodes))
            taken = tuple(sorted((node.id, moves.taken[node]) for node in heirs.get(tree, ())))
            opened.emit(Discarded(nodes=lost, kv=opened.kv, taken=taken))

    def sharing_changed(self) -> None:
        """Record that blocks may share other tokens than before."""
        self.changed(self.forest.nodes(self.forest.cuts))
        if self.keeps_prompts:
            self.changed(tree.root for tree in self.forest.trees)

    def shares(self, node: Node) -> bool:
        """Whether a block shares KV with those that begin alike, where it may."""
        if self.hidden:
            return False
        return self.shares_prompts if node.parent is None else self.shares_siblings

    # What the parts report

    def changed(self, nodes: Iterable[Node]) -> None:
        """Record that these blocks grew, closed, were valued, or gained or lost tokens."""
        for node in nodes:
            self.table.touch(node)

    def used(self, path: Sequence[Node]) -> None:
        """Record that a forward read these blocks."""
        self._clock += 1
        self.changed(path)
        self.table.use(path, self._clock)

    def mark_computed(self, nodes: Iterable[Node]) -> None:
        """Record that the tokens of these blocks were run through the model."""
        for tree, group in by_tree(nodes).items():
            self.computed.update(node.row for node in group)
            self.trees[tree].reached(group)
            self.trees[tree].retained.take(group)

    def observe(
        self, slots: NDArray[np.int64], mass: NDArray[np.float32], queries: NDArray[np.int64]
    ) -> None:
        """Attention of one forward.

        Args:
            slots: int64 [S], distinct; or addresses of records in host memory.
            mass: float32 [S], attention each received, summed over rows (each row: mean over layers
                and heads).
            queries: int64 [S], rows that could see it.
        """
        owner, position = self.memory.tokens_at(slots)
        mine = owner >= 0
        owner, position = owner[mine], position[mine]
        for node in self.forest.nodes(np.unique(owner).tolist()):
            self.statistics.open(node.row, node.start, len(node.tokens))
        self.statistics.observe(owner, position, mass[mine], queries[mine])

    def remember(
        self, rows: NDArray[np.int64], offsets: NDArray[np.int64], credit: NDArray[np.float64]
    ) -> None:
        """Set what an allocator remembers of tokens, also where no attention is observed.

        Args:
            rows: int64 [T], of their blocks.
            offsets: int64 [T], places in these; the tokens are distinct.
            credit: float64 [T].
        """
        for node in self.forest.nodes(np.unique(rows).tolist()):
            self.statistics.open(node.row, node.start, len(node.tokens))
        self.statistics.remember(rows, offsets, credit)

    # What forwards read

    def contexts(self, nodes: Sequence[Node]) -> list[Context]:
        """The context of a token after each of these blocks."""
        return contexts_of(nodes, self.hidden)

    def missing(self, node: Node) -> NDArray[np.int64]:
        """Offsets of the tokens that are not as full retention would hold them, up to the rounding
        of packed records, increasing; those that attention reads in host memory are."""
        held = node.span.ready
        if not self.sees_all(node):
            held = node.span.resident & ~self.memory.mixed(node)
        return np.flatnonzero(~held)

    def sees_all(self, node: Node) -> bool:
        """Whether a block's tokens attend to every block above it."""
        if not self.hidden or node.row in self.before_hiding:
            return True
        return not any(above.row in self.hidden for above in node.path[:-1])

    def certainty_after(self, nodes: Sequence[Node]) -> list[Certainty]:
        """What a token after each of these blocks is, if it attends to all of them: exact where
        every token before it is, rounded where some of these are."""
        known: dict[int, Certainty] = {}
        for each in paths_of(nodes):
            above = Certainty.EXACT if each.parent is None else known[each.parent.row]
            if each.row in self.hidden or not each.span.ready.all():
                above = Certainty.NONE
            elif each.span.rounded.any():
                above = min(above, Certainty.ROUNDED)
            known[each.row] = above
        return [known[node.row] for node in nodes]

    @contextmanager
    def hiding(self, nodes: Sequence[Node]) -> Iterator[None]:
        """Within, nothing attends to these blocks: neither what is computed for the first time, nor
        logits."""
        known = dict(self.logits)
        self.logits.clear()
        self.hidden = frozenset(node.row for node in nodes)
        self.before_hiding = frozenset(self.computed)
        try:
            yield
        finally:
            self.hidden = self.before_hiding = frozenset()
            self.logits.clear()
            self.logits.update(known)


def contexts_of(
    nodes: Sequence[Node | None], hidden: AbstractSet[int] = frozenset()
) -> list[Context]:
    """The context that each of several paths is, by the block it ends with (None: no path).

    It consists of the resident tokens of the blocks that are not hidden, by row. Paths that
    share blocks share their pieces.
    """
    heads: dict[int, list[Piece]] = {}
    contexts: list[Context] = []
    for node in nodes:
        path = node.path if node is not None else []
        for each in path:
            if each.row not in heads:
                heads[each.row] = [] if each.row in hidden else head(each, len(each.tokens))
        contexts.append(tuple(piece for each in path for piece in heads[each.row]))
    return contexts


def head(node: Node, end: int) -> list[Piece]:
    """The resident ones of a block's first `end` tokens, and those that attention reads in host
    memory.

    They are one piece (or none); those of a prompt end where what it shares with other prompts
    ends, and the pieces of such prompts that name the same slots have equal keys.
    """
    slots = node.span.address[:end]
    offsets = np.flatnonzero(slots >= 0)
    if len(offsets) == 0:
        return []
    positions = (node.start + offsets).astype(np.int32)
    forest = node.tree.forest
    cuts = forest.cuts.get(node.row, ()) if forest is not None and forest.cuts else ()
    if not cuts:
        return [Piece((node.row, end), slots[offsets], positions)]
    ends = np.searchsorted(offsets, [0, *(cut for cut in cuts if cut < end), end])
    pieces = []
    for first, last in pairwise(ends.tolist()):
        if first < last:
            part = slots[offsets[first:last]]
            # a slot holds one token at one position, so equal ends mean equal K/V between them
            key = (int(part[0]), int(part[-1]), last - first)
            pieces.append(Piece(key, part, positions[first:last]))
    return pieces
