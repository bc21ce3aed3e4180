"""PrefixCache: KV of texts whose trees were dropped, for later prompts that begin alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from arbor.forest import LEAST_COMMON, common_start
from arbor.memory.slots import NO_OWNER, NO_TREE, SlotTable
from arbor.tree import Node

MOST_PREFIXES = 64


@dataclass(frozen=True, slots=True)
class Kept:
    """The first n tokens of a text: int64 [n], their slots int32 [n] and depths int16 [n].

    Attributes:
        prompt: how many of them are its prompt, all of that; 0: a part of it only.
    """

    tokens: NDArray[np.int64]
    slots: NDArray[np.int32]
    depth: NDArray[np.int16]
    prompt: int

    def same_text(self, other: Kept) -> bool:
        """Whether another one has the same tokens, as a prompt, in as many layers."""
        return (
            self.prompt == other.prompt
            and np.array_equal(self.tokens, other.tokens)
            and np.array_equal(self.depth, other.depth)
        )

    def of_prompt(self) -> Kept:
        """The same without what was generated after the prompt."""
        end = self.prompt
        return Kept(self.tokens[:end], self.slots[:end], self.depth[:end], end)


class PrefixCache:
    """Prompts of finished problems that stay on the device while nothing needs their slots.

    An only continuation stays with its prompt: it is a part of the next turn's. Each text holds a
    reference to its slots, so that texts which begin alike take the common part once. They are
    given up before any tree loses a token, the least recently used first.
    """

    def __init__(self) -> None:
        self._prefixes: list[Kept] = []  # the least recently used first

    def __len__(self) -> int:
        return len(self._prefixes)

    def add(self, table: SlotTable, path: Sequence[Node]) -> None:
        """Keep the first tokens of a path that are on the device, exact and of as many layers as
        the first one; it is about to be dropped.

        Args:
            path: from a prompt on.
        """
        depth = np.concatenate([node.span.depth for node in path])
        exact = np.concatenate([node.span.exact for node in path])
        missing = np.flatnonzero(~exact | (depth < depth[0]))
        tokens = np.array([token for node in path for token in node.tokens], np.int64)
        count = int(missing[0]) if len(missing) else len(tokens)
        if count < LEAST_COMMON:
            return
        slots = np.concatenate([node.span.slot for node in path])[:count]
        prompt = len(path[0].tokens)
        prefix = Kept(tokens[:count], slots, depth[:count], prompt if prompt <= count else 0)
        table.retain(prefix.slots)
        again = [place for place, kept in enumerate(self._prefixes) if kept.same_text(prefix)]
        if again or len(self) == MOST_PREFIXES:
            table.release(self._prefixes.pop(again[0] if again else 0).slots, NO_TREE)
        self._prefixes.append(prefix)

    def take(self, prompt: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.int16]] | None:
        """The slots and depths of the longest beginning of a prompt that is kept, which stays.

        Args:
            prompt: int64 [n], its tokens.
        """
        best, most = None, 0
        for place, prefix in enumerate(self._prefixes):
            common = common_start(prefix.tokens, prompt, LEAST_COMMON)
            if common >= max(most, LEAST_COMMON):
                best, most = place, common
        if best is None:
            return None
        prefix = self._prefixes.pop(best)
        self._prefixes.append(prefix)
        return prefix.slots[:most], prefix.depth[:most]

    def nearest(self, prompt: NDArray[np.int64]) -> Kept | None:
        """The whole prompt that has the most tokens in common with another one, at the beginning
        and at the end together; of several the most recently used.

        Args:
            prompt: int64 [n], its tokens.
        """

        def in_common(kept: Kept) -> int:
            backwards = common_start(kept.tokens[::-1], prompt[::-1], 0)
            return common_start(kept.tokens, prompt, 0) + backwards

        whole = [kept.of_prompt() for kept in reversed(self._prefixes) if kept.prompt]
        return max(whole, key=in_common, default=None)

    def oldest(self) -> NDArray[np.int32]:
        """Remove the least recently used prompt; returns the slots to release."""
        return self._prefixes.pop(0).slots

    def slots_alone(self, table: SlotTable) -> int:
        """Slots that nothing but kept prompts uses."""
        if not self._prefixes:
            return 0
        mine = self.references(table.slots)
        return int(np.count_nonzero((mine > 0) & (mine == table.references)))

    def references(self, slots: int) -> NDArray[np.int32]:
        """References of kept prompts to each slot, int32 [slots]."""
        held = [prefix.slots for prefix in self._prefixes]
        if not held:
            return np.zeros(slots, np.int32)
        return np.bincount(np.concatenate(held), minlength=slots).astype(np.int32)

    def moved_to(self, table: SlotTable) -> SlotTable:
        """Another table of the same slots, none of which is in use, in which the prompts have
        theirs."""
        for prefix in self._prefixes:
            free = table.references[prefix.slots] == 0
            table.claim(prefix.slots[free])
            table.retain(prefix.slots[~free])
            table.owner[prefix.slots] = NO_OWNER
            table.token[prefix.slots] = prefix.tokens
            table.position[prefix.slots] = np.arange(len(prefix.slots))
        return table
