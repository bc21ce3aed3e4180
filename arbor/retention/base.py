"""The protocols of retention: how many tokens each block keeps on the device, and which.

A policy is an allocator (how many) and a scorer (which). It reads struct-of-arrays views and
answers with numbers; it never touches the pool. When a policy is asked and how age is counted
belong to the engine, equal for all; what is protected is a setting of the policy (`Protect`), set
equal for all policies compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from arbor.retention.token_kv import NO_KV, TokenKV


class Columns:
    """A frozen dataclass of arrays; a column that is never read need not be computed.

    The constructor takes all columns; `when_read` makes some of them at their first use, once, and
    lets none be written into.
    """

    @classmethod
    def when_read(cls, later: Mapping[str, Callable[[Self], Any]], **now: Any) -> Self:
        """A struct with some columns still to be computed.

        Args:
            later: for each of these columns, a function that computes it from the struct (a closure
                over the struct would keep it alive until garbage collection). What the function
                reads must not change until then.
            now: the other columns.
        """
        made = object.__new__(cls)
        made.__dict__.update({name: _to_read(each) for name, each in now.items()}, _later=later)
        return made

    @property
    def read(self) -> tuple[str, ...]:
        """The columns computed at their first use that have been used."""
        return tuple(name for name in self.__dict__.get("_later", ()) if name in self.__dict__)

    # hidden from type checkers, which would accept any name for a column
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            make = self.__dict__.get("_later", {}).get(name)
            if make is None:
                raise AttributeError(f"{type(self).__name__} has no column {name!r}")
            column = self.__dict__[name] = _to_read(make(self))
            return column


def _to_read(column: Any) -> Any:
    """A column that cannot be written into; what is no array stays as it is."""
    if isinstance(column, np.ndarray):
        column = column.view()
        column.flags.writeable = False
    return column


Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Tokens(Columns):
    """The tokens of the offered blocks that are on the device, T in all.

    They lie block after block, each block's by offset.

    Attributes:
        block: int64 [T], index of the token's block in `Blocks`; increasing.
        offset: int64 [T], place in its block.
        position: int64 [T], place on its path.
        mass: float64 [T], attention it received from queries that could see it, its own included,
            summed over queries (each query: mean over the observed layers, mean over heads); 0
            where attention is not observed.
        latest: float64 [T], attention it received from the last query that could see it.
        queries: int64 [T], queries that could see it, its own included; an inactive branch does not
            age.
        activated: int64 [T], `queries` when its attention last reached `Protect.threshold`, or else
            after the forward that wrote it.
        recurrence: int64 [T], most queries between two such times; 0 = the threshold was not
            reached since it was written.
        lately: float64 [T], attention from the last queries that could see it: a sum in which each
            weighs 31/32 of the one after it, so that it is of about 32 queries, or of as many as an
            `Observation` asks for.
        credit: float64 [T], what the allocator last credited it with (`CreditingAllocator`); 0 if
            it never did.
        key: uint64 [T], identifies the token in every order of the search (for reproducible
            randomness).
        protected: bool [T], stays in any case (sinks, recent window, block tails).
        kv: of each token, where its key and value are; empty unless the policy's `Observation` asks
            for them.
    """

    block: Ints
    offset: Ints
    position: Ints
    mass: Floats
    latest: Floats
    queries: Ints
    activated: Ints
    recurrence: Ints
    lately: Floats
    credit: Floats
    key: NDArray[np.uint64]
    protected: Bools
    # not a default, which would be an attribute of the class and hide columns made later
    kv: TokenKV = field(default_factory=lambda: NO_KV)

    def only(self, indices: Ints) -> Tokens:
        """The tokens of these blocks, given by index in `Blocks`, increasing."""
        if len(self.block) == 0:
            return self
        asked = np.zeros(int(self.block[-1]) + 1, np.bool_)
        asked[indices[: np.searchsorted(indices, len(asked))]] = True
        here = asked[self.block]
        if here.all():
            return self
        return Tokens(**{each.name: getattr(self, each.name)[here] for each in fields(self)})


@dataclass(frozen=True)
class Blocks(Columns):
    """The blocks a policy may take tokens from, by node id; M in all.

    A policy that destroys tokens (its allocator has ``destroys``) sees those without any left too.

    Attributes:
        ids: int64 [M], node ids, increasing.
        length: int64 [M], n, tokens of the block.
        resident: int64 [M], tokens of these on the device: the most it can keep.
        floor: int64 [M], tokens it keeps in any case; 0 <= floor <= resident.
        depth: int64 [M], edges to the root.
        distance: int64 [M], edges to the nearest running leaf (ArborKV's Delta, the minimum over
            running leaves).
        active: bool [M], on a running path (offered in lossy mode only).
        value: float64 [M], the search's value in [0, 1] (MSVE's v); of a block without one, that of
            its nearest valued ancestor.
        confidence: float64 [M], 1 - H / ln|V| at the boundary (MSVE's u).
        attention: float64 [M], mean attention mass per query that could see some of it, in [0, 1]
            (MSVE's a).
        score: float64 [M], MSVE's s in (0, 1).
        last_used: int64 [M], clock of the last forward that read it; larger is later. A block that
            is being decoded is read by every forward.
        scheduled: int64 [M], waves of the operation in progress until the block is needed again; 0
            while it is decoded; `NEVER` if none needs it.
        reentry: float64 [M], probability that a later round reads the block, in [0, 1]; 1 while it
            is decoded.
        turn: int64 [M], place of the block's tree among the open ones, by when they were opened; 0
            where there is one.
        next_use: int64 [M], the next operation of a recorded run that reads it; `NEVER` if none
            does, or without a recording.
        see: makes the token view of some blocks, given by index, int64, increasing. Policies that
            rank the tokens of all blocks read `tokens`.
    """

    ids: Ints
    length: Ints
    resident: Ints
    floor: Ints
    depth: Ints
    distance: Ints
    active: Bools
    value: Floats
    confidence: Floats
    attention: Floats
    score: Floats
    last_used: Ints
    scheduled: Ints
    reentry: Floats
    turn: Ints
    next_use: Ints
    see: Callable[[Ints], Tokens]

    def __len__(self) -> int:
        return len(self.ids)

    def only(self, indices: Ints) -> Blocks:
        """The offer of some of these blocks, given by index, increasing."""

        def see(chosen: Ints) -> Tokens:
            tokens = self.see(indices[chosen])
            names = [each.name for each in fields(Tokens) if each.name != "block"]
            return Tokens.when_read(
                {name: partial(_column, tokens, name) for name in names},
                block=np.searchsorted(indices, tokens.block),
            )

        names = [each.name for each in fields(self) if each.name != "see"]
        return Blocks.when_read(
            {name: partial(_column, self, name, at=indices) for name in names}, see=see
        )

    def showing(self, tokens: Tokens) -> Blocks:
        """The same offer with these tokens in the slots of its own, such as those of one head."""
        names = [each.name for each in fields(self) if each.name != "see"]
        columns = {name: partial(_column, self, name) for name in names}
        return Blocks.when_read(columns, see=tokens.only)

    @cached_property
    def tokens(self) -> Tokens:
        """Token view of all blocks, made on first use."""
        return self.see(np.arange(len(self)))


def _column(view: Columns, name: str, _: Columns, *, at: Ints | None = None) -> NDArray[Any]:
    column: NDArray[Any] = getattr(view, name)
    return column if at is None else column[at]


NEVER = int(np.iinfo(np.int64).max)
GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # odd: consecutive offsets get keys far apart


@runtime_checkable
class Scorer(Protocol):
    """Which tokens matter: the higher score is kept, of equal ones the larger position.

    A token's score follows from its own figures, so it does not depend on the other tokens shown.
    A scorer that reads keys, values or queries (`Tokens.kv`) has an attribute ``observation``, an
    `Observation` of these.
    """

    @property
    def observes(self) -> bool:
        """Whether it reads attention (`mass`, `latest`, `queries`, `activated`,
        `recurrence`, `lately`)."""
        ...

    def scores(self, tokens: Tokens) -> Floats:
        """One finite number a token, float64 [T]."""
        ...


@runtime_checkable
class CalibratedScorer(Scorer, Protocol):
    """A scorer that may read figures of one model from a file."""

    def check_file(self) -> None:
        """Read the file, if there is one.

        Raises:
            UsageError: it cannot be read, or holds something else.
        """
        ...

    def check_model(self, layers: int, heads: int, head_dim: int) -> None:
        """Refuse a model that the file is not of.

        Args:
            layers: of the model.
            heads: query heads of its first layer.
            head_dim: numbers of a query there.

        Raises:
            UsageError: names the sizes of both.
        """
        ...

    def without_file(self) -> Scorer:
        """The same scorer without the file's figures, for replays, which have no keys."""
        ...


@runtime_checkable
class Allocator(Protocol):
    """How many tokens each block keeps.

    An allocator that reads `Blocks.next_use` has an attribute ``needs_recording = True``, one that
    reads `Blocks.value` or `Blocks.score` an attribute ``reads_values = True``, and one that reads
    keys, values or queries (`Tokens.kv`) an ``observation``, as a scorer does.
    """

    def counts(self, blocks: Blocks, room: int, scorer: Scorer) -> Ints:
        """Tokens each block keeps.

        Args:
            blocks: the blocks that may lose tokens.
            room: slots they may keep together; sum(floor) <= room.
            scorer: which tokens matter, for allocators that rank tokens over all blocks.

        Returns:
            int64 [M], floor <= k <= resident; the sum is at most `room`.
        """
        ...


@runtime_checkable
class CappedAllocator(Allocator, Protocol):
    """An allocator with a capacity of its own, which may be below the budget."""

    def excess(self, blocks: Blocks) -> int:
        """Tokens that leave although there is room.

        Args:
            blocks: all blocks off the running paths; where paths lose tokens like all others, and
                for an allocator that destroys tokens, these too.

        Returns:
            0, or what `counts` gives up of them with room for all.
        """
        ...


@runtime_checkable
class PackingAllocator(Allocator, Protocol):
    """An allocator that says which tokens lie in host memory in few bits.

    Attributes:
        packed: which of the tokens that may leave; falsy: none.
    """

    @property
    def packed(self) -> object: ...

    def packing(self, blocks: Blocks, done: Bools, scorer: Scorer) -> Ints:
        """The tokens that lie there from now on.

        Args:
            blocks: all blocks, with the tokens that attention reads wherever they are.
            done: bool [T], which of `blocks.tokens` were packed before, for good.
            scorer: which tokens matter.

        Returns:
            int64, indices into `blocks.tokens`, distinct, none of them packed before.
        """
        ...


@runtime_checkable
class TokenAllocator(Allocator, Protocol):
    """An allocator that ranks the tokens of all blocks, and so finds the ones that leave.

    One that ranks them by their scores, wherever they are, has an attribute ``by_score = True``:
    only such a one, and a `SegmentingAllocator`, serve policies whose KV heads keep tokens of their
    own.
    """

    def leaving(self, blocks: Blocks, room: int, scorer: Scorer) -> Ints:
        """The tokens that leave.

        Returns:
            int64, indices into `blocks.tokens`, distinct; `counts` is what remains without them.
        """
        ...


@runtime_checkable
class SegmentingAllocator(TokenAllocator, Protocol):
    """An allocator that divides the sequence into segments and keeps the best tokens of each.

    One with an attribute ``own_segments = True`` is asked for each KV head by itself where heads
    differ, about what that head holds; of others all heads share the segments.
    """

    def segment_of(self, blocks: Blocks, room: int, scorer: Scorer) -> Ints:
        """The segments, by which each KV head keeps its own best tokens where heads differ.

        Returns:
            int64 [T], of each of `blocks.tokens`; in a block non-decreasing, except for -1, of
            tokens that stay in any case.
        """
        ...


@runtime_checkable
class CreditingAllocator(TokenAllocator, Protocol):
    """An allocator that remembers a figure of each token from one event to the next."""

    def credited(self, blocks: Blocks, room: int, scorer: Scorer) -> tuple[Ints, Floats]:
        """What leaves, and what each token is credited with.

        Returns:
            what `leaving` gives, and float64 [T], finite, a figure of each of `blocks.tokens`.
            `Tokens.credit` shows it at the next event, of the tokens that stay at this one.
        """
        ...


@runtime_checkable
class BlockScores(Protocol):
    """Scores of blocks, for the policies that read them."""

    @property
    def top(self) -> int:
        """Tokens in the entropy of a block's confidence: so many most probable ones, and the others
        as one; 0: all."""
        ...

    def scores(self, value: Floats, confidence: Floats, attention: Floats) -> Floats:
        """The score of each block.

        Args:
            value: [M], the search's values.
            confidence: [M], in [0, 1].
            attention: [M], in [0, 1].

        Returns:
            float64 [M], in [0, 1].
        """
        ...


@dataclass(frozen=True)
class ValueScores:
    """The score of a block is its value, where nothing else gives scores."""

    top: ClassVar[int] = 0

    def scores(self, value: Floats, confidence: Floats, attention: Floats) -> Floats:
        return normalised(value)


def normalised(value: Floats) -> Floats:
    """Values in [0, 1] as they are; others scaled from the smallest to the largest.

    Equal values outside [0, 1] become 0.5.
    """
    if len(value) == 0:
        return value
    low, high = float(value.min()), float(value.max())
    if low >= 0 and high <= 1:
        return value
    if high == low:
        return np.full(len(value), 0.5)
    return (value - low) / (high - low)
