"""Controllers: which leaves to grow next, and which path is best."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from arbor.tree import Node, ThoughtTree

Generate = Literal["sample", "propose"]


@dataclass(frozen=True, slots=True)
class Expansion:
    """Grow `width` children of `leaf`.

    Attributes:
        leaf: a closed block.
        width: children; with ``propose`` at most.
        generate: ``sample``: each child is a sample; ``propose``: the model lists next thoughts in
            one completion, and each different one becomes a child (see `Proposer`).
        begin: an earlier child of the leaf, and how many of its first tokens, but not all, the
            sampled children begin with; None: they begin at the leaf.
    """

    leaf: Node
    width: int
    generate: Generate = "sample"
    begin: tuple[Node, int] | None = None


@runtime_checkable
class Search(Protocol):
    """One search in progress, ask/tell: everything asked for at once decodes in one batch.

    A search reads `state`, `value`, `depth`, `children` and `logprobs` of blocks, and may set
    `state` to PRUNED and `value`; it never sees tokens' KV.
    """

    def ask(self, room: int) -> list[Expansion]:
        """Every leaf to grow now; an empty list ends the search. The same again until `tell`.

        Args:
            room: blocks that may decode at once within the budget, >= 1; a hint for controllers
                that adapt their width. More than that is allowed: it decodes in several waves.
        """
        ...

    def tell(self, children: Sequence[Node]) -> None:
        """Report the grown, closed and valued children of the last `ask`, in any order.

        They are fewer than asked where a limit or an interruption cut the round short, or where
        the model proposed fewer. A leaf that a limit left out may be asked for again. Blocks of a
        path that went on alone at a limit are not reported; the session adds its leaf to what
        `best` returns.
        """
        ...

    def best(self) -> list[Node]:
        """Finished (TERMINAL) leaves, best first; empty if no path has ended."""
        ...


@runtime_checkable
class Foresight(Protocol):
    """An optional addition to `Search`, for searches that return to leaves they have left."""

    def prospects(self) -> Mapping[int, float]:
        """Ids of leaves that a later round may grow, with the probability of that, in [0, 1].

        Leaves that grow now are left out. Retention policies weigh a block's re-entry by
        these.
        """
        ...


@runtime_checkable
class Scores(Protocol):
    """An optional addition to `Search`, for searches that do not choose by the value alone."""

    def scores(self) -> Mapping[int, float]:
        """Ids of blocks with the figure by which the search chooses what grows next, finite.

        Of a block that is left out its value is this figure. Retention policies may weigh blocks by
        these.
        """
        ...


@runtime_checkable
class ReadsValues(Protocol):
    """An optional addition to `Search`, for searches that do not go by the value of every block."""

    def reads(self, children: Sequence[Node]) -> Sequence[Node]:
        """Those of the children whose values decide how the search goes on.

        It is asked before `tell`, with the same children, and may be asked before that with some of
        them, about which questions are asked then while the others grow. Others are not valued,
        which leaves their value at 0 and `Node.valued` false, unless something else reads it:
        `best` need not count, since what the choice among finished paths reads is valued in any
        case.
        """
        ...


@runtime_checkable
class Continuous(Protocol):
    """An optional addition to `Search`, for searches without rounds.

    Leaves at different depths decode in one batch, and the children of each are reported as soon
    as they have ended, while others still grow:

    - `ask` is called at the beginning and after every `tell`. It returns further leaves, which
      begin to grow at once and are not returned again; an empty list means nothing more for now.
      The search ends when it returns nothing and nothing grows. No leaf grows after a limit or an
      interruption, asked for or not.
    - `tell` gets the children of one expansion, or of several that end at the same time.
    - `room` counts blocks in all, those that grow already included.

    Time is logical, so that the tree depends neither on the budget nor on other searches: a block
    takes a tick per token, a verification one tick if it asks the model, else none, and an
    expansion begins at the time of the `tell` that led to it. What ends earlier by this clock is
    reported earlier. Blocks that were not reported yet may be ahead of it: a search reads neither
    their state nor their value, and prunes none of them.

    Attributes:
        continuous: False: the search goes in rounds after all, like one without this addition.
    """

    continuous: bool


@runtime_checkable
class Controller(Protocol):
    """A search algorithm: a frozen dataclass with the published defaults, checked when made."""

    def start(self, tree: ThoughtTree, max_depth: int) -> Search:
        """Begin a search on a tree that holds only its root.

        Args:
            tree: the tree to grow.
            max_depth: blocks on one path, from the task.
        """
        ...

    def max_blocks(self, max_depth: int) -> int:
        """Upper bound of the blocks a search creates, root excluded; sizes full retention."""
        ...


@runtime_checkable
class Proposer(Protocol):
    """An optional addition to `Controller`, for searches with expansions that ``propose``.

    The question for such an expansion and the model's completion are one more child of its leaf,
    which is given up before the thoughts grow; `Controller.max_blocks` counts it. Where nothing was
    proposed, `tell` gets no child of the leaf.
    """

    def most_proposals(self, max_depth: int) -> int:
        """Upper bound of the expansions that propose at a time; 0: this search samples."""
        ...
