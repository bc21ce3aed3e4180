"""HeadSets: what single KV heads hold, shown to a policy and moved as it decides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from arbor.engine.forest_state import ForestState
from arbor.engine.head_statistics import HeadStatistics
from arbor.engine.policy_view import GOLDEN, ShowsKV
from arbor.errors import ModelError
from arbor.kernels.native_heads import head_moves, held_by_head, shared_moves
from arbor.memory.head_table import HeadMoves
from arbor.model.runner import ModelRunner
from arbor.retention.base import Ints, Tokens
from arbor.retention.head_budgets import Cells, Vacated
from arbor.retention.head_selection import HeadScorer, HeadSelection, SharedCells
from arbor.retention.policy import Policy
from arbor.retention.selection import Selection
from arbor.retention.token_kv import NO_KV, PlacedKV
from arbor.tree import Node


class HeadSets:
    """What KV heads hold, for a policy whose heads keep tokens of their own.

    Args:
        state: of the open trees.
        policy: with ``granularity=head``.
        statistics: attention in each KV head; None: the policy reads none.
        head_kv: what `PolicyView` takes, of every KV head; for policies that ask for keys.
    """

    def __init__(
        self,
        state: ForestState,
        policy: Policy,
        statistics: HeadStatistics | None,
        head_kv: ShowsKV | None = None,
    ) -> None:
        self._state = state
        self._scorer = policy.scorer
        self._statistics = statistics
        self._head_kv = head_kv if policy.observation.keys else None
        self._shared: SharedCells | None = None
        if policy.head_budgets is not None:
            layer = state.memory.heads.layer
            self._shared = SharedCells(
                policy.head_budgets, layer, self._holders, held_by_head, moved_cells
            )

    def scorer(self, leaves: Sequence[Node]) -> HeadScorer:
        """The policy's scorer for the tokens of an offer of `PolicyView`.

        Args:
            leaves: ends of the running paths.
        """
        shown = partial(self._tokens, leaves=leaves)
        return HeadScorer(self._scorer, shown, head_moves, self._shared)

    def moves(self, chosen: Selection) -> HeadMoves | None:
        """What heads keep of the slots that leave; None: nothing."""
        if not isinstance(chosen, HeadSelection) or not len(chosen.moved.cell):
            return None
        moved = chosen.moved
        slots = self._slots(_rows(chosen.tokens), chosen.tokens.offset)
        return HeadMoves(moved.cell, slots[moved.source], moved.into, slots[moved.target])

    def moved(self, moves: HeadMoves) -> None:
        """Let what is known of tokens follow moves that the memory has made."""
        if self._statistics is not None:
            self._statistics.move(moves)

    def _holders(self, tokens: Tokens) -> NDArray[np.integer] | None:
        """The KV heads whose tokens lie in the cells of some tokens' slots, [C, T]; None: its own
        in each."""
        memory = self._state.memory
        return memory.heads.holders(memory.table, self._slots(_rows(tokens), tokens.offset))

    def _slots(self, rows: NDArray[np.int64], offsets: NDArray[np.int64]) -> NDArray[np.int32]:
        """The slots of tokens on the device, int32 [T]; their blocks by row."""
        forest = self._state.forest
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
        memory, rows = self._state.memory, _rows(tokens)
        slots, count = self._slots(rows, tokens.offset), len(memory.heads)
        held = memory.heads.positions(memory.table, slots)

        def tiled(name: str) -> Callable[[Tokens], NDArray[Any]]:
            return lambda _: np.tile(getattr(tokens, name), count)

        def back(_: Tokens) -> NDArray[np.int64]:
            """How far before the slot's own token the one is that a head holds, [C * T]."""
            own: NDArray[np.int64] = tokens.position - held
            return own.ravel()

        def key(view: Tokens) -> NDArray[np.uint64]:
            with np.errstate(over="ignore"):
                return np.tile(tokens.key, count) - back(view).astype(np.uint64) * GOLDEN

        nothing = {
            name: partial(_zeros, len(slots) * count)
            for name in ("mass", "latest", "queries", "activated", "recurrence", "lately")
        }
        statistics = self._statistics
        return Tokens.when_read(
            {
                "block": tiled("block"),
                "offset": lambda view: np.tile(tokens.offset, count) - back(view),
                "position": lambda _: held.astype(np.int64).ravel(),
                "key": key,
                "protected": tiled("protected"),
                "credit": partial(_zeros, len(slots) * count),
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
