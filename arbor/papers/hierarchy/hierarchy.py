"""The lower tiers of the memory hierarchy: by a clock, the least important tokens are destroyed,
and more of them packed in few bits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np

from arbor.components import ONLY_IF_SET
from arbor.errors import check_settings
from arbor.retention.allocators.pooled import Pooled
from arbor.retention.base import Blocks, Bools, Ints, Scorer
from arbor.retention.ordering import ranks_within
from arbor.retention.policy import Policy, Protect, Trigger
from arbor.retention.scorers import HeavyHitters
from arbor.retention.selection import checked_scores

Evict = Literal["cumulative", "per_event", "size"]


@dataclass(frozen=True)
class Hierarchy(Pooled):
    """Destroy the worst of the tokens that are eligible, at each of the policy's times.

    Eligible are the tokens of thoughts but the `first` ones of each path and what is protected.
    Memory hierarchy (arXiv 2605.09490), section 3.3 and algorithm 1: its importance is the scorer
    `HeavyHitters` (attention summed over steps, mean over layers and heads), those of its Table 12
    the scorers ``vatp`` and ``combined``; its interval the
    trigger's `every`, its window `recent`, and its prompt is protected. Which of device and host
    memory holds a token changes nothing that is computed, so that is left to the tiers' own
    settings (`--host`, `staging`); which tokens are in few bits (T2) does, and is chosen here.

    Differs: where the paper destroys `ratio` of what is left at each event, which adds up to much
    more (a token eligible at 20 events of 3 % survives with 54 %), the default bounds the sum. One
    kept set for all layers and heads. Where room runs out before, tokens compete as in `Pooled`.

    Attributes:
        destroys: what leaves is gone for good: only where nothing is computed again.
        ratio: the part destroyed, in [0, 1].
        evict: of what it is a part: ``cumulative``, of all tokens that were ever eligible, in
            blocks that the search has not given up, those included that have none left;
            ``per_event``, of those left, at each event, as in the paper; ``size``, of nothing: all
            but the best `size` are destroyed, as by policies with a budget of live tokens.
        size: eligible tokens of a path's tree that stay, for ``size``.
        first: first tokens of the first thoughts that are never eligible (k_s).
        packed: the part of the eligible tokens that are left which lies in few bits, the least
            important ones, in [0, 1]; a token that was packed stays so, and counts. The paper names
            the tier, and no threshold; it packs all or nothing of what is off the device.
    """

    destroys: ClassVar[bool] = True

    ratio: float = 0.03
    evict: Evict = "cumulative"
    size: int = 128
    first: int = 4
    packed: float = field(default=0.0, metadata=ONLY_IF_SET)

    by_score: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_settings(
            self,
            ratio=(0 <= self.ratio <= 1, "in [0, 1]"),
            packed=(0 <= self.packed <= 1, "in [0, 1]"),
            size=(self.size >= 0, "0 or more"),
            first=(self.first >= 0, "0 or more"),
        )

    def excess(self, blocks: Blocks) -> int:
        """Tokens that are destroyed now."""
        if len(blocks) == 0:
            return 0
        return int(self._quotas(blocks, self._eligible(blocks)).sum())

    def leaving(self, blocks: Blocks, room: int, scorer: Scorer) -> Ints:
        """Indices of the tokens that leave, int64, distinct: of each tree its worst eligible ones;
        where more have to leave than are destroyed now, the worst of all."""
        excess = int(blocks.resident.sum()) - room
        if excess <= 0:
            return np.empty(0, np.int64)
        eligible = self._eligible(blocks)
        quotas = self._quotas(blocks, eligible)
        if excess != quotas.sum():
            return super().leaving(blocks, room, scorer)
        return self._worst(blocks, eligible, quotas, scorer)

    def packing(self, blocks: Blocks, done: Bools, scorer: Scorer) -> Ints:
        """See `PackingAllocator`: of each tree its worst eligible tokens."""
        if self.packed == 0 or len(blocks) == 0:
            return np.empty(0, np.int64)
        eligible = self._eligible(blocks)
        turns = int(blocks.turn.max(initial=0)) + 1
        turn = blocks.turn[blocks.tokens.block]
        held = np.bincount(turn[eligible], minlength=turns)
        already = np.bincount(turn[eligible & done], minlength=turns)
        quotas = np.floor(self.packed * held).astype(np.int64) - already
        return self._worst(blocks, eligible & ~done, np.maximum(quotas, 0), scorer)

    def _worst(self, blocks: Blocks, some: Bools, quotas: Ints, scorer: Scorer) -> Ints:
        """Indices of so many of these tokens of each tree (by turn), those with the lowest scores;
        of equal scores the earlier position."""
        tokens = blocks.tokens
        at = np.flatnonzero(some)
        turn = blocks.turn[tokens.block[at]]
        rank = ranks_within(turn, checked_scores(scorer, tokens)[at], tokens.position[at])
        worst: Ints = at[rank < quotas[turn]]
        return worst

    def _eligible(self, blocks: Blocks) -> Bools:
        """Tokens on the device that may be destroyed, bool [T]: of trees that decode, as the window
        of others is not protected."""
        tokens = blocks.tokens
        prompt = np.zeros(int(blocks.turn.max(initial=0)) + 1, np.int64)
        roots = blocks.depth == 0
        prompt[blocks.turn[roots]] = blocks.length[roots]
        begins = prompt[blocks.turn] + self.first
        decodes = np.isin(blocks.turn, blocks.turn[blocks.active])
        free = (tokens.position >= begins[tokens.block]) & ~tokens.protected
        eligible: Bools = free & decodes[tokens.block]
        return eligible

    def _quotas(self, blocks: Blocks, eligible: Bools) -> Ints:
        """How many tokens of each tree are destroyed now, int64 by turn."""
        turns = int(blocks.turn.max(initial=0)) + 1
        held: Ints = np.bincount(blocks.turn[blocks.tokens.block[eligible]], minlength=turns)
        if self.evict == "size":
            quotas: Ints = np.maximum(held - self.size, 0)
            return quotas
        if self.evict == "per_event":
            quotas = np.floor(self.ratio * held).astype(np.int64)
            return quotas
        # the last token of a block that decodes is still to be computed
        computed = blocks.length - (blocks.scheduled == 0)
        lost = np.where(blocks.depth > 0, np.maximum(computed - blocks.resident, 0), 0)
        gone = np.bincount(blocks.turn, lost, turns).astype(np.int64)
        bound = np.floor(self.ratio * (held + gone)).astype(np.int64)
        quotas = np.clip(bound - gone, 0, held)
        return quotas


POLICY = Policy(
    Hierarchy(),
    HeavyHitters(),
    Protect(recent=128, prompt=True),
    trigger=Trigger(every=64),
    summary="Destroys a bounded part of the thoughts' tokens, those with the least attention, every 64 "
    "steps (memory hierarchy).",
)
