"""EPTree: chains that branch where the model was least certain; nothing is pruned."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from itertools import cycle, islice
from typing import ClassVar, Literal

from arbor.tree import Node, ThoughtTree

from .base import Expansion
from .search import Rounds, check_at_once, check_settings, give_up


@dataclass(frozen=True)
class EPTree:
    """Entropy-guided tree of TreeRL (Hou et al., arXiv 2506.11902, ACL 2025; THUDM/TreeRL).

        begin    `chains` chains of the root grow to their ends
        round    `rounds` times: before each of the `forks` least probable tokens of the tree,
                 `width` chains branch off and grow to their ends

    So a tree has chains + rounds x forks x width finished paths, as trainers need it: nothing is
    pruned, and no path waits for its value. Of several tokens that are equally probable, the one of
    the earlier block counts, then the earlier token.

    Args:
        chains: M; 6 as published.
        forks: tokens of a round; 12 is N = 2 for each of 6 chains.
        width: T; 2 as published.
        rounds: L; 1 as published.
        at: ``token``: chains branch inside thoughts; ``thought``: where a thought begins, the one
            with the least mean log probability first.

    Differs from the source: the least probable tokens are those of the whole tree, not N of each
    chain and its branches; a tree with fewer than `forks` places to branch at branches there more
    than once. As released, the uncertainty of a token is its negative log probability, not the
    entropy of its distribution, and a round may branch where an earlier one did. A new chain gets
    the tokens of the thought in which it branches off, whose KV is computed again.
    """

    threshold: ClassVar[float] = -math.inf  # chains go on whatever they are worth
    stop_value: ClassVar[float | None] = None

    chains: int = 6
    forks: int = 12
    width: int = 2
    rounds: int = 1
    at: Literal["token", "thought"] = "token"

    def __post_init__(self) -> None:
        check_settings(self, {"chains": 1, "forks": 1, "width": 1, "rounds": 0})
        check_at_once(self, "chains")
        check_at_once(self, "forks", "width")

    @property
    def leaves(self) -> int:
        """Finished paths of a tree."""
        return self.chains + self.rounds * self.forks * self.width

    def start(self, tree: ThoughtTree, max_depth: int) -> EPTreeSearch:
        return EPTreeSearch(self, tree, max_depth, self.chains)

    def max_blocks(self, max_depth: int) -> int:
        return self.leaves * max_depth


class EPTreeSearch(Rounds[EPTree]):
    """The tree of one problem."""

    _rounds = 0

    def reads(self, children: Sequence[Node]) -> Sequence[Node]:
        return ()

    def tell(self, children: Sequence[Node]) -> None:
        ordered = sorted(children, key=lambda child: child.id)
        self._next = [Expansion(child, 1) for child in ordered if self._may_grow(child)]
        growing = {expansion.leaf.id for expansion in self._next}
        give_up((child for child in ordered if child.id not in growing), lambda node: True)
        if not self._next and self._rounds < self._settings.rounds:
            self._rounds += 1
            self._next = self._branches()

    def _branches(self) -> list[Expansion]:
        """What branches off in a round."""
        settings = self._settings
        least = nsmallest(settings.forks, self._places())
        times = Counter(islice(cycle(least), settings.forks if least else 0))
        branches = []
        for (_, node, offset), count in times.items():
            child = self._tree[node]
            assert child.parent is not None, "the prompt is not sampled"
            begin = (child, offset) if offset else None
            branches.append(Expansion(child.parent, count * settings.width, begin=begin))
        return branches

    def _places(self) -> Iterator[tuple[float, int, int]]:
        """Where the tree may branch: log probability, block, and tokens of the block before it."""
        for node in self._tree.nodes[1:]:
            sampled = node.logprobs[node.given :]
            if self._settings.at == "thought":
                yield math.fsum(sampled) / max(1, len(sampled)), node.id, 0
            else:
                for offset, logprob in enumerate(sampled, node.given):
                    yield logprob, node.id, offset
