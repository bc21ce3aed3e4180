"""BeamSearch: token-level beam search; a fork at every token, and no KV is copied."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from arbor.engine.beam_hypotheses import BeamGroup, BeamSettings, Hypothesis
from arbor.engine.forest_state import ForestState
from arbor.engine.forward_pass import ForwardPasses, Part
from arbor.errors import BudgetInfeasible
from arbor.memory import KVMemory
from arbor.model.plan import Segment
from arbor.model.sharing import Context, Piece
from arbor.tree import ThoughtTree


class BeamSearch:
    """Token-level beam search after a tree's prompt.

    The K/V of a token lie in one slot, whichever hypotheses go through it, and leave with the last
    of them. What neighbouring hypotheses share is read once, as a level of the cascade.

    Args:
        state: of the open trees.
        forwards: run the model.
        tree: its prompt is complete; its blocks do not change.
        settings: of the search.
        ends: token ids that end the text.
    """

    def __init__(
        self,
        state: ForestState,
        forwards: ForwardPasses,
        tree: ThoughtTree,
        settings: BeamSettings,
        ends: tuple[int, ...],
    ) -> None:
        device = forwards.runner.device
        size = settings.beams // settings.groups
        self._state = state
        self._memory: KVMemory = state.memory
        self._forwards = forwards
        self._tree = tree
        self._settings = settings
        self._groups = [BeamGroup(size, settings, ends, device) for _ in range(settings.groups)]
        self._size = size
        self._slots = np.empty((settings.beams, 0), np.int32)  # of the tokens of each hypothesis
        self._held = np.empty(0, np.int32)  # each slot once

    def run(self, logits: Tensor, interrupted: Callable[[], bool] = bool) -> list[Hypothesis]:
        """Search until no hypothesis can become better than those that are finished.

        Args:
            logits: [V], after the prompt.
            interrupted: asked after every forward; the hypotheses so far are the result.

        Returns:
            the best `beams` hypotheses, best first.

        Raises:
            BudgetInfeasible: the hypotheses hold more tokens than the budget.
        """
        try:
            every = torch.log_softmax(logits.float(), dim=-1).expand(self._settings.beams, -1)
            while not self._choose(every) and not interrupted():
                every = torch.log_softmax(self._forward(), dim=-1)
            found = [each for group in self._groups for each in group.hypotheses()]
            return sorted(found, key=lambda each: (not each.finished, -each.score))
        finally:
            self._give_back(self._held)

    def _choose(self, log_probs: Tensor) -> bool:
        """Let every group choose its next tokens, and keep the slots of what goes on; returns
        whether the search has ended.

        Args:
            log_probs: float32 [beams, V].
        """
        penalty = torch.zeros(log_probs.shape[1], device=log_probs.device)
        parents = []
        for place, group in enumerate(self._groups):
            mine = slice(place * self._size, (place + 1) * self._size)
            if group.over:
                chosen = np.arange(self._size)
            else:
                each = log_probs[mine]
                chosen = group.choose(each - penalty if place else each)
                counts = torch.bincount(group.chosen, minlength=len(penalty))
                penalty += self._settings.diversity * counts
            parents.append(chosen + place * self._size)
        if all(group.over for group in self._groups):
            return True
        self._slots = self._slots[np.concatenate(parents)]
        for place, group in enumerate(self._groups):  # those that share tokens next to each other
            mine = slice(place * self._size, (place + 1) * self._size)
            if self._slots.shape[1]:
                order = np.lexsort(self._slots[mine].T[::-1])
                group.reorder(order)
                self._slots[mine] = self._slots[mine][order]
        used = np.unique(self._slots[self._going()])
        self._give_back(np.setdiff1d(self._held, used, assume_unique=True))
        self._held = used
        return False

    def _forward(self) -> Tensor:
        """Compute the last token of every hypothesis that goes on; logits float32 [beams, V]."""
        rows = self._going()
        running = [group for group in self._groups if not group.over]
        tokens = np.concatenate([group.tokens[:, -1] for group in running]).tolist()
        position = self._tree.root.end + self._slots.shape[1]
        self._make_room(len(rows))
        new = self._memory.borrow(tokens, self._tree.root, positions=np.full(len(rows), position))
        self._held = np.concatenate([self._held, new])
        segments = [
            Segment(
                context=context,
                tokens=[token],
                positions=np.full(1, position),
                tail=new[i : i + 1],
                write=new[i : i + 1],
                logits=1,
            )
            for i, (token, context) in enumerate(zip(tokens, self._contexts(rows), strict=True))
        ]
        logits = self._forwards.run([Part(self._tree, "decode", segments)])
        column = np.full(self._settings.beams, new[0], np.int32)
        column[rows] = new
        self._slots = np.concatenate([self._slots, column[:, None]], axis=1)
        if len(rows) == self._settings.beams:
            return logits
        every = logits.new_zeros(self._settings.beams, logits.shape[1])
        every[rows] = logits
        return every

    def _going(self) -> list[int]:
        """The rows of the groups that have not ended."""
        return [row for row in range(self._settings.beams) if not self._of(row).over]

    def _of(self, row: int) -> BeamGroup:
        return self._groups[row // self._size]

    def _make_room(self, needed: int) -> None:
        if needed > self._memory.free:
            self._memory.free_kept_prompts(needed)
            self._state.sharing_changed()
        if self._memory.free < needed:
            settings, prompt = self._settings, self._tree.root.end
            raise BudgetInfeasible(
                prompt + settings.beams * settings.max_tokens,
                self._memory.slots,
                f"a search with {settings.beams:,} beams of {settings.max_tokens:,} tokens",
                "Use a larger --budget, fewer --beams or fewer --max-tokens.",
            )

    def _contexts(self, rows: list[int]) -> Iterator[Context]:
        """What each row reads: the prompt, and the slots of its hypothesis in pieces that end where
        some neighbours part."""
        (prompt,) = self._state.contexts([self._tree.root])
        slots = self._slots[rows]
        length = slots.shape[1]
        same = slots[1:] == slots[:-1]
        common = np.where(same.all(axis=1), length, same.argmin(axis=1)) if length else []
        cuts = sorted({*np.asarray(common, np.int64).tolist(), length} - {0})
        begins = [0, *cuts]
        start = self._tree.root.end
        places = [
            np.arange(start + begin, start + end, dtype=np.int32)
            for begin, end in zip(begins, cuts, strict=False)
        ]
        known: dict[int, Piece] = {}
        for row in slots:
            pieces = list(prompt)
            for begin, end, positions in zip(begins, cuts, places, strict=False):
                last = int(row[end - 1])  # two rows with this slot share all before it
                piece = known.get(last)
                if piece is None:
                    piece = known[last] = Piece((last, "beam"), row[begin:end], positions)
                pieces.append(piece)
            yield tuple(pieces)

    def _give_back(self, slots: NDArray[np.int32]) -> None:
        if len(slots):
            self._memory.free_borrowed(slots)
