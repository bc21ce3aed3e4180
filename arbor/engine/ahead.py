"""Ahead: the decode step that a GPU computes while the host still learns the tokens before it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from arbor.engine.forward_pass import Begun, DecodeBatch, ForwardPasses
from arbor.memory import KVMemory

UNKNOWN = 0  # the id of a token that the host has not been told


class Ahead:
    """One decode step that runs ahead of the host.

    A step draws its tokens on the GPU, and the next one computes their K/V. The host has only to
    know which rows there are and where their K/V go, and lays the next step out with the tokens
    still on the GPU. It is told them while that step runs, and goes on as after any step.

    A step ahead counts for nothing before `take`: its slots are pending, and `drop` leaves the tree
    and the KV as they are between two steps. So whatever else comes up in between drops it.

    Args:
        memory: of the K/V.
        forwards: run the model.
        batch: the rows that decode.

    Attributes:
        waiting: a step was begun that was neither taken nor dropped.
    """

    def __init__(self, memory: KVMemory, forwards: ForwardPasses, batch: DecodeBatch) -> None:
        self._memory = memory
        self._forwards = forwards
        self._batch = batch
        self._begun: Begun | None = None
        self._unknown = 0  # rows whose last token is `UNKNOWN`
        self.waiting = False

    def begin(self, ids: Tensor) -> None:
        """Begin the step that computes these tokens, int64 [n] on the GPU, one for each row."""
        self.waiting = True
        for row in self._batch.rows:
            row.node.tree.append(row.node, UNKNOWN)
            self._unknown += 1
        self._begun = self._forwards.begin(self._batch, ids)

    def learn(self, tokens: Sequence[int | None], as_drawn: bool) -> None:
        """Let the blocks have the tokens.

        Args:
            tokens: of the rows; None: there is none.
            as_drawn: they are those that the step was begun with. Otherwise it is dropped.
        """
        known = [token for token in tokens if token is not None]
        if not as_drawn or len(known) < len(tokens):
            self.drop()
            return
        for row, token in zip(self._batch.rows, known, strict=True):
            row.node.tokens[-1] = token
        self._memory.name_appended(known)
        self._unknown = 0

    def take(self) -> Tensor:
        """The logits of the step, [n, V] float32; its K/V count from now on."""
        assert self._begun is not None and not self._unknown, "the step was not begun and learned"
        logits = self._forwards.step(self._batch, self._begun)
        self._begun, self.waiting = None, False
        return logits

    def drop(self) -> None:
        """Have no step ahead: what was chosen stays, and is still to be computed."""
        if not self.waiting:
            return
        self._memory.rollback()
        for row in self._batch.rows[: self._unknown]:
            row.node.tree.take_back(row.node)
        self._begun, self._unknown, self.waiting = None, 0, False
