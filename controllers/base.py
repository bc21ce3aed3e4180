"""What a controller is: it says which leaves to grow next, and which path was best."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from arbor.tree import Node, ThoughtTree


@dataclass(frozen=True, slots=True)
class Expansion:
    """Grow `width` children of `leaf`."""

    leaf: Node
    width: int


@runtime_checkable
class Search(Protocol):
    """One search in progress, ask/tell: everything asked for at once decodes in one batch.

    A search reads `state`, `value`, `depth` and `children` of blocks and may set `state` to PRUNED, `visits` and
    `value`; it never sees tokens' KV.
    """

    def ask(self, room: int) -> list[Expansion]:
        """Every leaf to grow now; an empty list ends the search. Asking again before `tell` gives the same.

        Args:
            room: blocks that may decode at once within the budget, >= 1; a hint for controllers that adapt their
                width. More than that is allowed: it decodes in several waves.
        """
        ...

    def tell(self, children: Sequence[Node]) -> None:
        """The grown, closed and valued children of the last `ask`, in any order; fewer than asked where a limit or an
        interruption cut the round short."""
        ...

    def best(self) -> list[Node]:
        """Finished (TERMINAL) leaves, best first; empty if no path has come to an end."""
        ...


@runtime_checkable
class Foresight(Protocol):
    """What a search may have beside `Search`, if it comes back to leaves it has left."""

    def prospects(self) -> Mapping[int, float]:
        """Leaves (by id) that a later round may grow, with how likely that is, in [0, 1]; those of the round in progress
        left out. What retention policies weigh a block's re-entry by."""
        ...


@runtime_checkable
class Controller(Protocol):
    """A search algorithm and its settings: a frozen dataclass, the published defaults, checked at construction."""

    def start(self, tree: ThoughtTree, max_depth: int) -> Search:
        """Begin a search on a tree that holds only its root.

        Args:
            tree: the tree to grow.
            max_depth: blocks on one path, from the task.
        """
        ...

    def max_blocks(self, max_depth: int) -> int:
        """Upper bound of blocks (root excluded) the search creates; full retention is measured by it."""
        ...
