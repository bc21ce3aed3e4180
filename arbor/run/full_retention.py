"""The KV of full retention, folded from the events of a search at any budget."""

from __future__ import annotations

from arbor.events import Boundary, Event, Opened, Pruned


class FullRetention:
    """A listener that counts the KV that full retention of the same search holds.

    Full retention holds every token of every block that is not pruned; tokens that siblings share
    count for each of them, so a search that shares needs less. A lossless search grows the same
    tree at any budget, so the events of any of them give the same count: blocks that are open when
    others are pruned count with all of their tokens, since how many they have by then depends on
    the budget. The prompt and a verifier's questions are not included.

    Attributes:
        held: tokens of closed blocks that are not pruned.
        peak: the most so far.
    """

    def __init__(self) -> None:
        self.held = 0
        self.peak = 0
        self._tokens: dict[int, int] = {}
        self._opened: dict[int, int] = {}  # prunings before each block that is open
        self._pruned: list[int] = []  # tokens held at each pruning, by what is known so far

    def __call__(self, event: Event) -> None:
        """Counts a closed block in, and pruned blocks out."""
        match event:
            case Opened(parent=None):
                self.held = self.peak = 0
                self._tokens.clear()
                self._opened.clear()
                self._pruned.clear()
            case Opened(node=node):
                self._opened[node] = len(self._pruned)
            case Boundary(node=node, ids=ids):
                self._tokens[node] = len(ids)
                self.held += len(ids)
                since = range(self._opened.pop(node, len(self._pruned)), len(self._pruned))
                for pruning in since:
                    self._pruned[pruning] += len(ids)
                self.peak = max(self.peak, self.held, *(self._pruned[at] for at in since))
            case Pruned(nodes=nodes):
                self._pruned.append(self.held)
                self.held -= sum(self._tokens.pop(node, 0) for node in nodes)
            case _:
                pass
