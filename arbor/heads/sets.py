"""HeadSets: what single KV heads hold, shown to a policy and moved as it decides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from arbor.errors import ModelError
from arbor.heads.selection import HeadScorer, HeadSelection, SharedCells
from arbor.heads.table import HeadMoves
from arbor.kernels.native_heads import head_moves, held_by_head, shared_moves
from arbor.memory.memory import KVMemory
from arbor.model.runner import ModelRunner
from arbor.retention.base import GOLDEN, Ints, Scorer, Tokens
from arbor.retention.head_budgets import Cells, HeadBudgets, Vacated
from arbor.retention.policy import Policy
from arbor.retention.selection import Selection
from arbor.retention.token_kv import NO_KV, PlacedKV, ShowsKV
from arbor.retention.token_statistics import AttentionColumns, TokenStatistics
from arbor.tree import NO_SLOT, Node

# figures of each token, as in `AttentionColumns`, but of every KV head
_NAMES = ("mass", "latest", "queries", "activated", "recurrence", "lately", "credit")
_WHOLE = ("queries", "activated", "recurrence")


class HeadStatistics:
    """Figures of each cell of each slot (`HeadTable`), as tensors [C, slots] on the pool's device.

    They are those of `TokenStatistics`, of one head instead of the mean over all, and belong to
    slots: where a head moves what it holds, they move along (`move`), and a token that gets a slot
    begins with the figures that it has as a whole, so that one that comes back is not new.
    """

    def __init__(self, memory: KVMemory, whole: TokenStatistics) -> None:
        assert memory.heads is not None, "KV heads hold the same tokens"
        self._memory = memory
        self._whole = whole
        size = (len(memory.heads), memory.slots)
        device = memory.pool.device
        self._columns = {
            name: torch.zeros(
                size, dtype=torch.int32 if name in _WHOLE else torch.float32, device=device
            )
            for name in _NAMES
        }
        # what each slot held when its figures were last looked at
        self._owner = np.full(memory.slots, NO_SLOT, np.int32)
        self._position = np.full(memory.slots, NO_SLOT, np.int32)
        self._mixed = np.zeros(memory.slots, np.bool_)

    def observe(self, slots: NDArray[np.int64], mass: Tensor, queries: NDArray[np.int64]) -> None:
        """Add the attention of one forward, before `TokenStatistics` does.

        Args:
            slots: int64 [S], distinct, increasing.
            mass: float32 [C, slots of the pool], attention each received, summed over the rows that
                could see it; the mean over the query heads of a KV head.
            queries: int64 [S], number of these rows, >= 1.
        """
        self._follow()
        within = slots < self._memory.slots
        slots, queries = slots[within], queries[within]
        if not len(slots):
            return
        # all slots up to the last one, as products with masks cost less than selections
        end = int(slots[-1]) + 1
        seen = np.zeros(end, np.int32)
        seen[slots] = queries
        added = torch.from_numpy(seen).to(mass.device)
        some = added > 0
        columns = {name: column[:, :end] for name, column in self._columns.items()}
        mass = mass[:, :end] * some
        written = columns["queries"] == 0
        total = columns["queries"].add_(added)
        columns["mass"].add_(mass)
        columns["lately"].mul_(self._whole.fading**added).add_(mass)
        latest = mass / added.clamp_min(1)
        columns["latest"].copy_(torch.where(some, latest, columns["latest"]))
        active = (latest >= self._whole.threshold) & some
        activated, longest = columns["activated"], columns["recurrence"]
        since = (total - activated) * (active & ~written)
        torch.maximum(longest, since, out=longest)
        activated.copy_(torch.where(active | (written & some), total, activated))

    def move(self, moves: HeadMoves) -> None:
        """Let figures follow what KV heads have moved; after the memory has done so."""
        numbers = np.stack([moves.cell, moves.source, moves.into, moves.target]).astype(np.int64)
        at, old, into, new = torch.from_numpy(numbers).to(self._memory.pool.device)
        for column in self._columns.values():
            column[into, new] = column[at, old]
        self._mixed[moves.target] = True

    def remember(self, slots: NDArray[np.integer], credit: NDArray[np.float64]) -> None:
        """Set what an allocator remembers of what each head holds in some slots, [C, n]."""
        self._follow()
        column = self._columns["credit"]
        index = torch.from_numpy(slots.astype(np.int64)).to(column.device)
        column[:, index] = torch.from_numpy(credit).to(column)

    def makers(self, slots: NDArray[np.int64]) -> dict[str, Callable[[Any], NDArray[Any]]]:
        """Columns of some slots by head, [C * n], each by a function, for `Columns.when_read`."""
        self._follow()
        index = torch.from_numpy(slots).to(self._memory.pool.device)

        def read(name: str) -> Callable[[Any], NDArray[Any]]:
            return lambda _: self._columns[name].index_select(1, index).flatten().cpu().numpy()

        return {name: read(name) for name in _NAMES}

    def forget(self, rows: Sequence[int]) -> None:
        """Have slots of blocks that were dropped begin anew, also for blocks that get their rows
        and slots at once."""
        self._owner[np.isin(self._owner, rows)] = NO_SLOT

    def _follow(self) -> None:
        """Begin anew where a slot holds something else than before."""
        table = self._memory.table
        stale = np.flatnonzero(
            (table.owner != self._owner)
            | (table.position != self._position)
            | (table.mixed != self._mixed)
        )
        if not len(stale):
            return
        owner, position = table.owner[stale], table.position[stale]
        self._owner[stale], self._position[stale] = owner, position
        self._mixed[stale] = table.mixed[stale]
        index = torch.from_numpy(stale).to(self._memory.pool.device)
        known = torch.from_numpy(owner >= 0).to(index.device)
        figures = self._figures(owner, position)
        for name, column in self._columns.items():
            column[:, index] = torch.from_numpy(getattr(figures, name)).to(column) * known

    def _figures(self, owner: NDArray[np.int32], position: NDArray[np.int32]) -> AttentionColumns:
        """Figures of whole tokens; those of no block have anything."""
        known = owner >= 0
        rows = np.where(known, owner, 0)
        starts = np.zeros(len(owner), np.int64)
        if known.any():
            each, which = np.unique(rows[known], return_inverse=True)
            nodes = self._memory.forest.nodes(each.tolist())
            starts[known] = np.array([node.start for node in nodes])[which]
        return self._whole.view(rows, np.maximum(position - starts, 0))


class HeadSets:
    """What KV heads hold, for a policy whose heads keep tokens of their own.

    Args:
        memory: of the open trees; with a `HeadTable`.
        policy: with ``granularity=head``.
        statistics: attention in each KV head; None: the policy reads none.
        head_kv: what `PolicyView` takes, of every KV head; for policies that ask for keys.
    """

    def __init__(
        self,
        memory: KVMemory,
        policy: Policy,
        statistics: HeadStatistics | None,
        head_kv: ShowsKV | None = None,
    ) -> None:
        assert memory.heads is not None, "KV heads hold the same tokens"
        self._memory = memory
        self._heads = memory.heads
        self._scorer = policy.scorer
        self._statistics = statistics
        self._head_kv = head_kv if policy.observation.keys else None
        self._budgets = policy.head_budgets

    def scorer(self, leaves: Sequence[Node]) -> HeadScorer:
        """The policy's scorer for the tokens of an offer of `PolicyView`.

        Args:
            leaves: ends of the running paths.
        """
        return self._by_head(self._scorer, leaves, self._budgets)

    def newest(self, scorer: Scorer, leaves: Sequence[Node]) -> HeadScorer:
        """A scorer in place of the policy's, by which all heads keep equally many of their best.

        Args:
            scorer: by the places of tokens.
            leaves: ends of the running paths.
        """
        budgets = None if self._budgets is None else self._budgets.evened()
        return self._by_head(scorer, leaves, budgets)

    def _by_head(
        self, scorer: Scorer, leaves: Sequence[Node], budgets: HeadBudgets | None
    ) -> HeadScorer:
        shown, shared = partial(self._tokens, leaves=leaves), None
        if budgets is not None:
            shared = SharedCells(
                budgets, self._heads.layer, self._holders, held_by_head, moved_cells
            )
        return HeadScorer(scorer, shown, head_moves, shared)

    def moves(self, chosen: Selection) -> HeadMoves | None:
        """What heads keep of the slots that leave; None: nothing. What the allocator credits them
        with is remembered."""
        if not isinstance(chosen, HeadSelection):
            return None
        moved = chosen.moved
        if not len(moved.cell) and chosen.head_credit is None:
            return None
        slots = self._slots(_rows(chosen.tokens), chosen.tokens.offset)
        if self._statistics is not None and chosen.head_credit is not None:
            self._statistics.remember(slots, chosen.head_credit)
        if not len(moved.cell):
            return None
        return HeadMoves(moved.cell, slots[moved.source], moved.into, slots[moved.target])

    def moved(self, moves: HeadMoves) -> None:
        """Let what is known of tokens follow moves that the memory has made."""
        if self._statistics is not None:
            self._statistics.move(moves)

    def forget(self, rows: Sequence[int]) -> None:
        """Remove what is known of blocks that were dropped; others may have their rows later."""
        if self._statistics is not None:
            self._statistics.forget(rows)

    def _holders(self, tokens: Tokens) -> NDArray[np.integer] | None:
        """The KV heads whose tokens lie in the cells of some tokens' slots, [C, T]; None: its own
        in each."""
        slots = self._slots(_rows(tokens), tokens.offset)
        return self._heads.holders(self._memory.table, slots)

    def _slots(self, rows: NDArray[np.int64], offsets: NDArray[np.int64]) -> NDArray[np.int32]:
        """The slots of tokens on the device, int32 [T]; their blocks by row."""
        forest = self._memory.forest
        each, which = np.unique(rows, return_inverse=True)
        begins = np.array([node.span.begin for node in forest.nodes(each.tolist())], np.int64)
        slots: NDArray[np.int32] = forest.spans.slot[begins[which] + offsets]
        return slots

    def _tokens(self, tokens: Tokens, *, leaves: Sequence[Node]) -> Tokens:
        """What each KV head holds in the slots of some tokens, as tokens, [C * T].

        Args:
            tokens: shown, T of them.
            leaves: ends of the running paths.
        """
        rows = _rows(tokens)
        slots, count = self._slots(rows, tokens.offset), len(self._heads)
        held = self._heads.positions(self._memory.table, slots)

        def tiled(name: str) -> Callable[[Tokens], NDArray[Any]]:
            return lambda _: np.tile(getattr(tokens, name), count)

        def back(_: Tokens) -> NDArray[np.int64]:
            """How far before the slot's own token the one is that a head holds, [C * T]."""
            own: NDArray[np.int64] = tokens.position - held
            return own.ravel()

        def key(view: Tokens) -> NDArray[np.uint64]:
            with np.errstate(over="ignore"):
                return np.tile(tokens.key, count) - back(view).astype(np.uint64) * GOLDEN

        nothing = {name: partial(_zeros, len(slots) * count) for name in _NAMES}
        statistics = self._statistics
        return Tokens.when_read(
            {
                "block": tiled("block"),
                "offset": lambda view: np.tile(tokens.offset, count) - back(view),
                "position": lambda _: held.astype(np.int64).ravel(),
                "key": key,
                "protected": tiled("protected"),
                **(nothing if statistics is None else statistics.makers(slots.astype(np.int64))),
                "kv": lambda _: (
                    NO_KV if self._head_kv is None else self._head_kv(rows, tokens.offset, leaves)
                ),
            }
        )


def moved_cells(cells: Cells, counts: Ints, competes: bool, pools: int) -> Vacated | None:
    """What moves of some cells, by a native kernel; see `moved_out`."""
    moved = shared_moves(
        cells.scores,
        cells.holder,
        cells.protected,
        cells.sizes,
        cells.keep,
        counts,
        cells.held,
        cells.layers,
        pools,
        competes,
    )
    return None if moved is None else Vacated(*moved)


def _rows(tokens: Tokens) -> NDArray[np.int64]:
    """The blocks of tokens, int64 [T], by row."""
    assert isinstance(tokens.kv, PlacedKV), "made by `PolicyView`"
    return tokens.kv.rows


def _zeros(count: int, _: Tokens) -> NDArray[Any]:
    return np.zeros(count)


def check_layers(runner: ModelRunner, policy: Policy) -> None:
    """Refuse models whose KV heads cannot keep tokens of their own.

    Raises:
        ModelError: a layer has a window, which needs the positions that keys in slots come from; or
            heads keep different numbers, and layers differ in heads or widths.
    """
    windowed = [layer for layer, spec in enumerate(runner.specs) if spec.shape.window is not None]
    if windowed:
        raise ModelError(
            "arch-unsupported",
            f"model_type '{runner.config.model_type}': layer {windowed[0]} has a window, and with "
            "granularity=head a slot stands for a position of its own in each KV head.",
            f"Take {policy.by_token}.",
        )
    kinds = {
        (spec.shape.num_qo_heads, kv)
        for spec, kv in zip(runner.specs, runner.layer_kv, strict=True)
    }
    if policy.head_budgets is not None and len(kinds) > 1:
        raise ModelError(
            "arch-unsupported",
            f"model_type '{runner.config.model_type}': its layers differ in heads or in their "
            f"widths, and with heads={policy.heads} heads hold tokens in each other's cells.",
            "Take heads=equal, such as --policy snapkv,granularity=head.",
        )
