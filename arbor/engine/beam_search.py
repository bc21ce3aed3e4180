"""BeamSearch: token-level beam search; a fork at every token, and no KV is copied."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from arbor.engine.forest_state import ForestState
from arbor.engine.forward_pass import ForwardPasses, Part
from arbor.errors import BudgetInfeasible, logits_not_finite
from arbor.memory import KVMemory
from arbor.model.plan import Segment
from arbor.model.sharing import Context, Piece
from arbor.support.texts import counted
from arbor.tree import ThoughtTree

NEVER = -1.0e9  # the score of what is not there
EarlyStopping = Literal["first", "heuristic", "never"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSettings:
    """Settings of a token-level beam search, with the meaning and the defaults they have in
    transformers' `generate`.

    Attributes:
        beams: hypotheses that go on at each step.
        max_tokens: tokens of the longest hypothesis.
        length_penalty: a finished hypothesis scores its log probability / length ** this; above 0
            it favours long ones.
        early_stopping: when to end once `beams` hypotheses are finished: ``first``: at once
            (transformers' True); ``heuristic``: when the best that goes on scores less at its
            present length than the worst of them (False); ``never``: when it does so at the
            longest length as well.
        groups: the beams are divided into so many groups, one after the other at each step.
        diversity: taken off a token's log probability for each beam of an earlier group that has
            chosen it at this step (diverse beam search, arXiv 1610.02424, Hamming diversity).
    """

    beams: int = 4
    max_tokens: int = 64
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = "heuristic"
    groups: int = 1
    diversity: float = 0.0


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One continuation of the prompt.

    Attributes:
        tokens: its ids, the one that ends the text included.
        score: what hypotheses are ranked by: log probability / length ** `length_penalty`, after
            the penalties of `diversity`.
        finished: it ends with the end of the text or at `max_tokens`; False after an interruption.
    """

    tokens: tuple[int, ...]
    score: float
    finished: bool = True


class BeamGroup:
    """The hypotheses of one group of beams: those that go on, and the best finished ones.

    Selection is transformers' (`GenerationMixin._beam_search`, 5.23), for one prompt. Of the best
    max(2, 1 + end tokens) times `count` continuations, those that end the text among the first
    `count` are finished, and the best `count` of the others go on.

    Args:
        ends: token ids that end the text.

    Attributes:
        over: the search of this group has ended.
        tokens: int64 [count, s], the hypotheses that go on.
        chosen: int64 [count], last tokens of the best continuations, those that end the text
            included.
    """

    def __init__(
        self, count: int, settings: BeamSettings, ends: tuple[int, ...], device: torch.device
    ) -> None:
        self.over = False
        self.tokens: NDArray[np.int64] = np.empty((count, 0), np.int64)
        self.chosen = torch.empty(0, dtype=torch.int64, device=device)
        self._count = count
        self._settings = settings
        self._kept = max(2, 1 + len(ends)) * count
        self._ends = torch.tensor(ends, dtype=torch.int64, device=device)
        # all beams read the same prompt at first: only one of them counts
        self._scores = torch.full((count,), NEVER, dtype=torch.float32, device=device)
        self._finished_scores = self._scores.clone()
        self._scores[0] = 0.0
        self._finished: list[NDArray[np.int64] | None] = [None] * count
        self._improvable = True

    def choose(self, log_probs: Tensor) -> NDArray[np.int64]:
        """Choose each beam's next token.

        Args:
            log_probs: float32 [count, V], of the token after each hypothesis.

        Returns:
            int64 [count], the hypothesis that each new one continues.
        """
        settings, count = self._settings, self._count
        length = self.tokens.shape[1] + 1
        vocabulary = log_probs.shape[1]
        totals = (log_probs + self._scores[:, None]).reshape(-1)
        best, flat = torch.topk(totals, min(self._kept, len(totals)))
        parents = (flat // vocabulary).cpu().numpy()
        ids = flat % vocabulary
        self.chosen = ids[:count]
        ends = torch.isin(ids, self._ends)
        if length >= settings.max_tokens:
            ends[:] = True
        tokens = np.concatenate([self.tokens[parents], ids.cpu().numpy()[:, None]], axis=1)
        self._finish(tokens, best / length**settings.length_penalty, ends & (best > NEVER / 2))
        going = best + ends.to(best.dtype) * NEVER
        chosen = torch.topk(going, count).indices
        self._scores = going[chosen]
        order = chosen.cpu().numpy()
        self.tokens = tokens[order]
        self._look_ahead(length, bool(ends.all()))
        return parents[order]  # type: ignore[no-any-return]

    def reorder(self, order: NDArray[np.int64]) -> None:
        """Put the hypotheses that go on into another order, int64 [count]."""
        self.tokens = self.tokens[order]
        self._scores = self._scores[torch.from_numpy(order).to(self._scores.device)]

    def hypotheses(self) -> list[Hypothesis]:
        """The best `count` hypotheses, best first; those that go on stand in for what is not
        finished."""
        found = [
            Hypothesis(tuple(tokens.tolist()), score)
            for tokens, score in zip(self._finished, self._finished_scores.tolist(), strict=True)
            if tokens is not None
        ]
        if self.tokens.shape[1]:
            length = self.tokens.shape[1] ** self._settings.length_penalty
            scored = [
                (score, tuple(tokens))
                for tokens, score in zip(self.tokens.tolist(), self._scores.tolist(), strict=True)
                if score > NEVER / 2
            ]
            going = sorted(scored, reverse=True)
            found += [Hypothesis(tokens, score / length, False) for score, tokens in going]
        return found[: self._count]

    def _finish(self, tokens: NDArray[np.int64], scores: Tensor, ends: Tensor) -> None:
        """Keep the best finished hypotheses.

        Args:
            tokens: int64 [k, s], continuations, best first.
            scores: float32 [k], with the length penalty.
            ends: bool [k], which of them are finished.
        """
        count = self._count
        new = ends.clone()
        new[count:] = False  # the others are there to go on in their place
        closed = self._all_finished and self._settings.early_stopping == "first"
        if closed or not self._improvable:
            scores = scores + NEVER
        merged = torch.cat([self._finished_scores, scores + (~new).to(scores.dtype) * NEVER])
        best = torch.topk(merged, count).indices
        self._finished_scores = merged[best]
        known = [*self._finished]
        is_new = new.tolist()
        self._finished = [
            known[place]
            if place < count
            else tokens[place - count]
            if is_new[place - count]
            else None
            for place in best.tolist()
        ]

    @property
    def _all_finished(self) -> bool:
        return all(tokens is not None for tokens in self._finished)

    def _look_ahead(self, length: int, at_end: bool) -> None:
        """Whether what goes on may still be better than what is finished."""
        settings = self._settings
        longest = settings.early_stopping == "never" and settings.length_penalty > 0
        assumed = settings.max_tokens if longest else length
        best = float(self._scores[0] / assumed**settings.length_penalty)
        worst = float(self._finished_scores.min()) if self._all_finished else NEVER
        self._improvable = self._improvable and best > worst
        closed = self._all_finished and settings.early_stopping == "first"
        self.over = not self._improvable or closed or at_end


class BeamSearch:
    """Token-level beam search after a tree's prompt.

    The K/V of a token lie in one slot, whichever hypotheses go through it, and leave with the last
    of them. What neighbouring hypotheses share is read once, as a level of the cascade.

    Args:
        tree: its prompt is complete; its blocks do not change.
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
            ModelError: logits are not finite.
        """
        try:
            every = _log_probs(logits.float()).expand(self._settings.beams, -1)
            while not self._choose(every) and not interrupted():
                every = _log_probs(self._forward())
            found = [each for group in self._groups for each in group.hypotheses()]
        except Exception:
            self._give_back(self._held)
            raise
        self._give_back(self._held)
        return sorted(found, key=lambda each: (not each.finished, -each.score))

    def _choose(self, log_probs: Tensor) -> bool:
        """Let every group choose its next tokens, and keep the slots of what goes on; returns
        whether the search has ended.

        Args:
            log_probs: float32 [beams, V].
        """
        penalty = log_probs.new_zeros(log_probs.shape[1])
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
            buffer = self._memory.budget - self._memory.slots
            raise BudgetInfeasible(
                prompt + settings.beams * settings.max_tokens + buffer,
                self._memory.budget,
                f"a search with {counted(settings.beams, 'beam')} of {settings.max_tokens:,} tokens",
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


def _log_probs(logits: Tensor) -> Tensor:
    """Log probabilities of logits, float32 [..., V].

    Raises:
        ModelError: some are not finite, which makes all of a row NaN.
    """
    found = torch.log_softmax(logits, dim=-1)
    if found[..., 0].isnan().any():
        raise logits_not_finite()
    return found
