"""The KV of full retention, folded from the events of a search at any budget."""

from __future__ import annotations

from arbor.events import Boundary, Event, Opened, Pruned


class FullRetention:
    """A listener that counts the KV that full retention of the same search holds.

    Full retention holds every token of every block that is not pruned. A lossless search grows the
    same tree at any budget, so the events of any of them give the same count. The prompt and a
    verifier's questions are not included.

    Attributes:
        held: tokens of closed blocks that are not pruned.
        peak: their maximum so far.
    """

    def __init__(self) -> None:
        self.held = 0
        self.peak = 0
        self._tokens: dict[int, int] = {}

    def __call__(self, event: Event) -> None:
        """Counts a closed block in, and pruned blocks out."""
        match event:
            case Opened(parent=None):
                self.held = self.peak = 0
                self._tokens.clear()
            case Boundary(node=node, ids=ids):
                self._tokens[node] = len(ids)
                self.held += len(ids)
                self.peak = max(self.peak, self.held)
            case Pruned(nodes=nodes):
                self.held -= sum(self._tokens.pop(node, 0) for node in nodes)
            case _:
                pass
