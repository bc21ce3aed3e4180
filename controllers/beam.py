"""Step-level beam search: keep the best few partial paths after every thought."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from arbor.tree import Node, NodeState, ThoughtTree

from .base import Expansion
from .search import Levels, check_at_once, check_settings, without_repeats


@dataclass(frozen=True)
class Beam:
    """Beam search over thoughts (Snell et al., arXiv 2408.03314, section 5.2; search-and-learn).

        step 1    beam_size x width thoughts of the root
        step t    rank the new thoughts together with the finished paths by value, ties by id;
                  the best beam_size hold the places of the beam; every unfinished one of them grows
                  width thoughts

    In search-and-learn's letters, N = beam_size x width and M = width. The whole beam is grown in
    one ask.

    Args:
        beam_size: places in the beam, N / M.
        width: M, thoughts sampled of each beam.
        dedup: of paths with the same thoughts, only the first may hold a place
            (`filter_duplicates`).
        threshold, stop_value: what grows at all, and when the search ends; see `Stops`.

    Differs from the released code: a finished path keeps its place while it is among the best
    (released: it leaves, and the rest is inflated to N again, so more than N paths are made, of
    which the first N to finish are kept); paths are ranked by value at the end, never by the order
    of finishing; a beam with few survivors is not filled up with copies; every problem has its own
    beam; no lookahead (released: generated but never scored); `dedup` is on; `threshold` and
    `stop_value` are new (-1 and None for the released behaviour).
    """

    beam_size: int = 5
    width: int = 4
    dedup: bool = True
    threshold: float = 0.0
    stop_value: float | None = 1.0

    def __post_init__(self) -> None:
        check_settings(self, {"beam_size": 1, "width": 1})
        check_at_once(self, "beam_size", "width")

    def start(self, tree: ThoughtTree, max_depth: int) -> ThoughtBeam:
        return ThoughtBeam(self, tree, max_depth)

    def max_blocks(self, max_depth: int) -> int:
        return self.beam_size * self.width * max_depth


class ThoughtBeam(Levels[Beam]):
    """The beam of one problem; `_places` holds the finished paths with a place."""

    def __init__(self, settings: Beam, tree: ThoughtTree, max_depth: int) -> None:
        super().__init__(settings, tree, max_depth, settings.beam_size * settings.width)
        self._places: list[Node] = []

    def _chosen(self, level: Sequence[Node]) -> list[Expansion]:
        settings = self._settings
        # Finished paths of earlier steps have fewer blocks, so a new path can repeat only one of
        # its own step.
        fresh = without_repeats(level) if settings.dedup else level
        able = [
            child for child in fresh if child.state is NodeState.TERMINAL or self._may_grow(child)
        ]
        ranked = sorted([*self._places, *able], key=lambda node: (-node.value, node.id))
        beam = ranked[: settings.beam_size]
        self._places = [node for node in beam if node.state is NodeState.TERMINAL]
        return [Expansion(node, settings.width) for node in beam if node.state is NodeState.CLOSED]
