"""ReusedTokens: tokens whose KV new blocks found computed, since they share their path."""

from __future__ import annotations

from arbor.events import Boundary, Event, Opened


class ReusedTokens:
    """A listener that counts the tokens above each new block, whose KV its path already has.

    Without prefix sharing every block would prefill them. Tokens that had been evicted and were
    computed again count too, see `Metrics.tokens_recomputed`.

    Attributes:
        total: tokens, over all blocks but the root.
    """

    def __init__(self) -> None:
        self.total = 0
        self._parent: dict[int, int] = {}
        self._end: dict[int, int] = {}  # tokens of the path up to each closed block's end

    def __call__(self, event: Event) -> None:
        """Count an opened block's path."""
        match event:
            case Opened(node=node, parent=None, tokens=tokens):
                self._end[node] = tokens
            case Opened(node=node, parent=int(above)):
                self._parent[node] = above
                self.total += self._end.get(above, 0)
            case Boundary(node=node, ids=ids):
                self._end[node] = self._end.get(self._parent.get(node, 0), 0) + len(ids)
            case _:
                pass
