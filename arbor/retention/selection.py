"""Which tokens stay: protected ones first, then by score; of equals the newer."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from arbor.errors import ArborError, UsageError
from arbor.retention.base import (
    Allocator,
    Blocks,
    Bools,
    CappedAllocator,
    CreditingAllocator,
    Floats,
    Ints,
    Scorer,
    TokenAllocator,
    Tokens,
)


class Selection:
    """The offsets each block keeps, int64 [count], sorted; computed block by block when read.

    Args:
        blocks: the offer.
        counts: int64 [M], how many tokens each block keeps.
        tokens: T tokens, of at least the blocks that keep a part of theirs; None without such
            blocks.
        stays: bool [T], the tokens of these that stay.
        whole: whether these are the tokens of all blocks.
        credit: float64 [T], what the allocator credits these tokens with; None: nothing.
    """

    def __init__(
        self,
        blocks: Blocks,
        counts: Ints,
        tokens: Tokens | None = None,
        stays: Bools | None = None,
        *,
        whole: bool = False,
        credit: Floats | None = None,
    ) -> None:
        self._blocks = blocks
        self._counts = counts
        self._tokens = tokens
        self._stays = stays
        self._whole = whole
        self._credit = credit

    def __len__(self) -> int:
        return len(self._counts)

    def __getitem__(self, index: int) -> Ints:
        index = range(len(self))[index]
        count = int(self._counts[index])
        if count in (0, self._blocks.length[index]):
            return np.arange(count)
        if count == self._blocks.resident[index]:
            # all it has, with gaps
            return self._blocks.see(np.array([index])).offset
        assert self._tokens is not None and self._stays is not None
        begin, end = np.searchsorted(self._tokens.block, [index, index + 1])
        return self._tokens.offset[begin:end][self._stays[begin:end]]

    @property
    def credit(self) -> Floats | None:
        """What the allocator credits all tokens of the offer with, float64 [T]; None: nothing."""
        return self._credit

    def credited(self) -> tuple[Ints, Ints, Floats]:
        """What the allocator credits tokens that stay with.

        Returns:
            int64 [T'], index of each token's block, int64 [T'], its offset, and float64 [T'];
            empty without credit.
        """
        if self._credit is None or self._tokens is None or self._stays is None:
            none = np.empty(0, np.int64)
            return none, none, np.empty(0)
        stay = np.flatnonzero(self._stays)
        return self._tokens.block[stay], self._tokens.offset[stay], self._credit[stay]

    def leaving(self) -> tuple[Ints, Ints]:
        """The tokens that leave.

        Returns:
            int64 [T'], index of each token's block, increasing, and int64 [T'], its offset,
            increasing in each block.
        """
        blocks, counts = self._blocks, self._counts
        views = []
        if self._tokens is not None and self._stays is not None:
            gone = np.flatnonzero(~self._stays)
            views.append((self._tokens.block[gone], self._tokens.offset[gone]))
        empty = np.flatnonzero((counts == 0) & (blocks.resident > 0))
        if len(empty) and not self._whole:
            rest = blocks.see(empty)
            views.append((rest.block, rest.offset))
        if not views:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        if len(views) == 1:
            return views[0]
        block, offset = (np.concatenate(columns) for columns in zip(*views, strict=True))
        by_block = np.argsort(block, kind="stable")
        return block[by_block], offset[by_block]


def select_by_count(blocks: Blocks, counts: Ints, scorer: Scorer) -> Selection:
    """The best tokens of each block.

    Tokens are read only in blocks that keep a part of theirs.

    Args:
        blocks: the offer.
        counts: int64 [M], how many tokens each block keeps, 0 <= count <= resident.
        scorer: which tokens matter.
    """
    parted = np.flatnonzero((counts > 0) & (counts < blocks.resident))
    if len(parted) == 0:
        return Selection(blocks, counts)
    tokens = blocks.see(parted)
    scores = checked_scores(scorer, tokens)
    stays = best_tokens(tokens.protected, scores, blocks.resident[parted], counts[parted])
    return Selection(blocks, counts, tokens, stays)


def select(
    blocks: Blocks, room: int, allocator: Allocator, scorer: Scorer
) -> tuple[Ints, Selection]:
    """How many tokens each block keeps, int64 [M], and which.

    An allocator that ranks tokens ranks them once.

    Raises:
        UsageError: an answer of the allocator or the scorer that breaks its protocol.
    """
    if isinstance(allocator, TokenAllocator):
        return select_all_but(blocks, *checked_leaving(allocator, blocks, room, scorer))
    counts = checked_counts(allocator, blocks, room, scorer)
    return counts, select_by_count(blocks, counts, scorer)


def checked_counts(allocator: Allocator, blocks: Blocks, room: int, scorer: Scorer) -> Ints:
    """An allocator's counts, checked: int64 [M], each from its block's floor to what it holds.

    A capacity of its own may be below the floors.

    Raises:
        UsageError: anything else, or more than there is room for.
    """
    answer = _answer(allocator, "counts", lambda: allocator.counts(blocks, room, scorer))
    counts = _whole_numbers(allocator, "counts", answer)
    if len(counts) != len(blocks):
        raise _refused(allocator, f"gave {len(counts)} counts for {len(blocks)} blocks")
    wrong = np.flatnonzero((counts < 0) | (counts > blocks.resident))
    if len(wrong):
        count, held = int(counts[wrong[0]]), int(blocks.resident[wrong[0]])
        raise _refused(allocator, f"gave a count of {count} for a block that holds {held}")
    _check_floors(allocator, counts, blocks)
    _check_room(allocator, int(counts.sum()), room)
    return counts


def checked_leaving(
    allocator: TokenAllocator, blocks: Blocks, room: int, scorer: Scorer
) -> tuple[Ints, Floats | None]:
    """The tokens that an allocator lets go, checked.

    Returns:
        int64, indices into `blocks.tokens`, and float64 [T], what it credits these tokens with;
        None if it credits nothing.

    Raises:
        UsageError: an answer that breaks its protocol, or that leaves more than there is room for.
    """
    count = int(blocks.resident.sum())
    credit: Floats | None = None
    if isinstance(allocator, CreditingAllocator):
        method = "credited"
        answer = _answer(allocator, method, lambda: allocator.credited(blocks, room, scorer))
        leaving, credit = _pair(allocator, answer, count)
    else:
        method = "leaving"
        leaving = _answer(allocator, method, lambda: allocator.leaving(blocks, room, scorer))
    gone = _whole_numbers(allocator, method, leaving)
    if len(gone) and not (gone.min() >= 0 and gone.max() < count):
        raise _refused(allocator, f"named a token outside 0 to {count - 1}")
    _check_room(allocator, count - len(gone), room)
    _check_floors(allocator, _all_but(gone, blocks), blocks)
    return gone, credit


def _all_but(gone: Ints, blocks: Blocks) -> Ints:
    """How many tokens each block keeps, int64 [M], where these leave."""
    return blocks.resident - np.bincount(blocks.tokens.block[gone], minlength=len(blocks))


def _check_floors(allocator: Allocator, counts: Ints, blocks: Blocks) -> None:
    """Refuse counts below what blocks keep in any case; a capacity may be below that."""
    wrong = np.flatnonzero(counts < blocks.floor)
    if len(wrong) and not isinstance(allocator, CappedAllocator):
        count, floor = int(counts[wrong[0]]), int(blocks.floor[wrong[0]])
        raise _refused(allocator, f"keeps {count} tokens of a block that keeps {floor} in any case")


def _check_room(allocator: Allocator, kept: int, room: int) -> None:
    if kept > room:
        raise _refused(allocator, f"keeps {kept} tokens where there is room for {room}")


def _pair(allocator: Allocator, answer: object, count: int) -> tuple[object, Floats]:
    """The two parts of a crediting allocator's answer, the second checked."""
    if not isinstance(answer, tuple) or len(answer) != 2:
        raise _refused(allocator, f"answered 'credited' with {_shown(answer)}, not a pair")
    leaving, given = answer
    try:
        credit = np.asarray(given, np.float64)
    except Exception as error:
        raise _refused(allocator, f"gave {_shown(given)} for credit") from error
    if credit.shape != (count,) or not np.isfinite(credit).all():
        raise _refused(allocator, f"gave no finite credit for each of {count} tokens")
    return leaving, credit


def _whole_numbers(allocator: Allocator, method: str, answer: object) -> Ints:
    """An allocator's answer, int64 [n]."""
    try:
        array = np.asarray(answer)
    except Exception:  # rows of different lengths, or an object that refuses
        array = np.empty((0, 0))
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise _refused(allocator, f"answered '{method}' with {_shown(answer)}, not whole numbers")
    return array.astype(np.int64, copy=False)


def _answer(component: Allocator | Scorer, method: str, call: Callable[[], Any]) -> Any:
    """What a method of a policy's part answers.

    Raises:
        UsageError: a part that is not arbor's raised something other than an `ArborError`.
    """
    try:
        return call()
    except ArborError:
        raise
    except Exception as error:
        if type(component).__module__.startswith("arbor."):
            raise
        what = f"raised {type(error).__name__} in '{method}': {_shown(error)}"
        raise _refused(component, what) from error


def _shown(value: object) -> str:
    """A value on one short line."""
    text = str(value) if isinstance(value, Exception) else reprlib.repr(value)
    line = "".join(each if each.isprintable() else " " for each in text[:80])
    return " ".join(line.split())


def _refused(component: Allocator | Scorer, what: str) -> UsageError:
    return UsageError(
        "policy-answer",
        f"{type(component).__name__} {what}.",
        "docs/retention.md says what allocators and scorers answer.",
    )


def select_all_but(
    blocks: Blocks, gone: Ints, credit: Floats | None = None
) -> tuple[Ints, Selection]:
    """How many tokens each block keeps, int64 [M], and which, when some leave.

    Args:
        blocks: the offer.
        gone: indices of the tokens that leave in `blocks.tokens`.
        credit: float64 [T], of all of `blocks.tokens`; None: nothing is remembered of them.
    """
    if len(gone) == 0 and credit is None:
        counts = blocks.resident.copy()
        return counts, Selection(blocks, counts)
    tokens = blocks.tokens
    stays = np.ones(len(tokens.block), np.bool_)
    stays[gone] = False
    if np.count_nonzero(stays) != len(stays) - len(gone):
        raise UsageError(
            "policy-answer", "an allocator named a token twice among those that leave."
        )
    counts = _all_but(gone, blocks)
    return counts, Selection(blocks, counts, tokens, stays, whole=True, credit=credit)


def checked_scores(scorer: Scorer, tokens: Tokens) -> Floats:
    """A scorer's answer, checked: one finite number a token.

    Raises:
        UsageError: anything else.
    """
    answer = _answer(scorer, "scores", lambda: scorer.scores(tokens))
    try:
        scores = np.asarray(answer)
    except Exception as error:
        raise _refused(scorer, f"answered 'scores' with {_shown(answer)}") from error
    if scores.shape != tokens.block.shape or scores.dtype.kind not in "fiu":
        raise _refused(
            scorer,
            f"gave scores of shape {scores.shape} and type {scores.dtype}, not {len(tokens.block)} numbers",
        )
    if scores.dtype.kind != "f":
        scores = scores.astype(np.float64)
    if not np.isfinite(scores).all():
        raise _refused(scorer, "gave a score that is not finite")
    return scores


def filled_floors(blocks: Blocks, tokens: Tokens, scores: Floats) -> Bools:
    """The tokens that fill the floors, bool [T]: protected ones, then the best of each block."""
    protected = np.bincount(tokens.block[tokens.protected], minlength=len(blocks))
    filled = tokens.protected.copy()
    # where the protected tokens are the floor, nothing needs ranking
    unfilled = protected != blocks.floor
    ranked = np.flatnonzero(unfilled)
    if len(ranked):
        asked = np.flatnonzero(unfilled[tokens.block])
        sizes, floor = blocks.resident[ranked], blocks.floor[ranked]
        filled[asked] = best_tokens(tokens.protected[asked], scores[asked], sizes, floor)
    return filled


def best_tokens(protected: Bools, scores: Floats, sizes: Ints, counts: Ints) -> Bools:
    """The best tokens of each block: protected ones, then the higher score, then the later one.

    Args:
        protected: bool [S], block after block.
        scores: float64 [S], finite.
        sizes: int64 [P], tokens of each block; summing to S.
        counts: int64 [P], how many to choose, at most `sizes`.

    Returns:
        bool [S], summing to sum(counts).
    """
    if protected.any():
        safe = _sums(protected, sizes)
        # where not even the protected ones fit, they compete
        tight = np.repeat(safe > counts, sizes)
        scores = np.where(protected & ~tight, np.inf, scores)
        scores[tight & ~protected] = -np.inf
    return ~worst(scores, sizes, sizes - counts)


def worst(scores: Floats, sizes: Ints, lose: Ints) -> Bools:
    """The lowest scores of each block, as many as it loses; of equals the earlier one.

    Each block has a limit up to which tokens leave, so no order of all tokens is needed.

    Args:
        scores: float64 [S].
        sizes: int64 [P].
        lose: int64 [P], how many each loses; 0 <= lose <= sizes.

    Returns:
        bool [S].
    """
    most = _nth_lowest(scores, sizes, lose)
    limit = np.repeat(most, sizes)
    gone = scores < limit
    # of those at the limit the first ones go, until there are enough
    level = np.flatnonzero(scores == limit)
    block = np.searchsorted(np.cumsum(sizes), level, side="right")
    begins = np.searchsorted(block, np.arange(len(sizes)))
    wanted = lose - _sums(gone, sizes)
    gone[level[np.arange(len(level)) - begins[block] < wanted[block]]] = True
    return gone


def _nth_lowest(scores: Floats, sizes: Ints, nth: Ints) -> Floats:
    """The nth lowest score of each block, float64 [P]; -inf where n is 0."""
    result = np.full(len(sizes), -np.inf)
    begins = np.cumsum(sizes) - sizes
    some = np.flatnonzero(sizes > 0)
    if len(some):
        result[some] = np.minimum.reduceat(scores, begins[some])
    result[nth == 0] = -np.inf
    for rows, at, inside in rows_by_size(np.where(nth > 1, sizes, 0), begins):
        table = np.where(inside, scores[at], np.inf)
        places = np.unique(nth[rows] - 1)
        if len(places) > 4:
            table.sort(axis=1)
        else:
            table.partition(places, axis=1)
        result[rows] = table[np.arange(len(rows)), nth[rows] - 1]
    return result


def rows_by_size(sizes: Ints, begins: Ints) -> Iterator[tuple[Ints, Ints, Bools]]:
    """Blocks of about the same size as the rows of matrices, without those of size 0.

    Args:
        sizes: int64 [P].
        begins: int64 [P], where the tokens of each begin.

    Yields:
        the blocks [R], where the tokens of each are [R, w], and which entries are some [R, w], the
        first ones of each row.
    """
    bucket = np.ceil(np.log2(np.maximum(sizes, 1))).astype(np.int64)
    for each in np.unique(bucket[sizes > 0]).tolist():
        rows = np.flatnonzero((bucket == each) & (sizes > 0))
        place = np.arange(int(sizes[rows].max()))
        inside = place < sizes[rows, None]
        yield rows, np.where(inside, begins[rows, None] + place, 0), inside


def _sums(flags: Bools, sizes: Ints) -> Ints:
    """How many flags of each block are set, int64 [P]."""
    total = np.concatenate([[0], np.cumsum(flags, dtype=np.int64)])
    ends = np.cumsum(sizes)
    counts: Ints = total[ends] - total[ends - sizes]
    return counts
