"""Chain of thought: one path, or several independent ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from arbor.tree import Node, ThoughtTree

from .base import Expansion
from .search import Levels, check_at_once, check_settings


@dataclass(frozen=True)
class Chain:
    """Best-of-N over whole chains of thought (Snell et al., arXiv 2408.03314, section 5).

    All chains grow in one batch, one thought each per step, and share only the prompt. The best
    finished chain is the one with the highest value of its last thought, then the highest mean log
    probability, then the first.

    Args:
        samples: N chains; 1 is plain chain of thought (Wei et al., arXiv 2201.11903). Each is a
            sample of the model; they begin spread over its distribution (`Sampling.arithmetic`;
            false for independent ones).

    Differs from the sources: no chain is stopped by its value on the way, and none is replaced; a
    chain that reaches the depth limit without an answer is given up. Votes on the answers are the
    solver's `aggregate`: with ``majority``, this is self-consistency.
    """

    kind: ClassVar[str] = "controller"  # of its names, see `registry.KINDS`
    threshold: ClassVar[float] = -math.inf  # chains go on whatever they are worth
    stop_value: ClassVar[float | None] = None

    samples: int = 1
    registered_as: str = field(
        default="", kw_only=True, repr=False, compare=False, metadata={"setting": False}
    )

    def __post_init__(self) -> None:
        check_settings(self, {"samples": 1})
        check_at_once(self, "samples")

    @property
    def summary(self) -> str:
        """A sentence for lists of controllers."""
        return f"`chain` with {self.samples} samples; with --aggregate majority, self-consistency."

    def start(self, tree: ThoughtTree, max_depth: int) -> ChainSearch:
        return ChainSearch(self, tree, max_depth, self.samples)

    def max_blocks(self, max_depth: int) -> int:
        return self.samples * max_depth


BEST_OF_N = Chain(samples=16, registered_as="best-of-n")


class ChainSearch(Levels[Chain]):
    """The chains of one problem."""

    def reads(self, children: Sequence[Node]) -> Sequence[Node]:
        return ()

    def _chosen(self, level: Sequence[Node]) -> list[Expansion]:
        return [Expansion(child, 1) for child in level if self._may_grow(child)]
