"""Judged: which blocks of a search are valued: those whose values something reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from arbor.aggregate.base import Aggregate, Confident, PathValues, ReadsPaths
from arbor.controllers.base import ReadsValues, Search
from arbor.run.limits import Limits
from arbor.tree import Node, NodeState, ThoughtTree
from arbor.verifiers.base import Compares, Verifier


@dataclass(frozen=True, slots=True)
class Judged:
    """The readers of a search's values, next to the search itself.

    Attributes:
        verifier: judges.
        aggregate: chooses among finished paths; with one path there is no choice.
        limits: some end the search by the value of a path.
        by_policy: whether what KV stays, and so the tree, depends on values.
    """

    verifier: Verifier
    aggregate: Aggregate
    limits: Limits
    by_policy: bool = False

    def of(self, search: Search, tree: ThoughtTree, children: Sequence[Node]) -> list[Node]:
        """Those of the children that are to be valued before they are reported to the search.

        A verifier that compares candidates gets all of them or none.

        Args:
            search: that grew them.
            tree: of the search.
            children: closed or finished blocks, not valued yet.
        """
        steering = search.reads(children) if isinstance(search, ReadsValues) else children
        read = {child.id for child in (children if self.by_policy else steering)}
        if len(read) < len(children) and (paths := self._read_of_paths) != "none":
            ending = [child for child in children if _may_rank(child, paths)]
            if self._limit_reads or any(_has_rival(tree, child) for child in ending):
                read |= {child.id for child in ending}
        if isinstance(self.verifier, Compares) and self.verifier.compares and read:
            return list(children)
        return [child for child in children if child.id in read]

    @property
    def _read_of_paths(self) -> PathValues:
        """What is read of the values of a finished path."""
        own = self.aggregate.reads if isinstance(self.aggregate, ReadsPaths) else "all"
        return "last" if own == "none" and self._limit_reads else own

    @property
    def _limit_reads(self) -> bool:
        """Whether the search may end by the value of a single path."""
        by_score = self.limits.confidence is not None and not isinstance(self.aggregate, Confident)
        return self.limits.first == "verified" or by_score


def _may_rank(child: Node, paths: PathValues) -> bool:
    """Whether the block's value is, or may become, one of those read of a finished path."""
    return paths == "all" or child.state is NodeState.TERMINAL


def _has_rival(tree: ThoughtTree, child: Node) -> bool:
    """Whether the tree has another path that has ended, or may."""
    others = sum(node.state is not NodeState.PRUNED for node in tree)
    return others > len(child.path)
