"""What a retention policy sees and decides: how many tokens each block keeps on the device, and which.

A policy is an allocator (how many) and a scorer (which). It reads struct-of-arrays views and answers with numbers; it never
touches the pool. When a policy is asked and how age is counted belong to the engine, equal for all; what is protected is a
setting of the policy (`Protect`), which whoever compares policies makes equal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from arbor.retention.columns import Columns

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Tokens(Columns):
    """The tokens of the offered blocks that are on the device, block after block, each block's in order; T in all.

    Attributes:
        block: int64 [T], index of the token's block in `Blocks`; increasing.
        offset: int64 [T], place in its block.
        position: int64 [T], place on its path.
        mass: float64 [T], attention it received from queries that could see it, its own included, summed over queries
            (each query: mean over the observed layers, mean over heads); 0 where attention is not observed.
        latest: float64 [T], attention it received from the last query that could see it.
        queries: int64 [T], queries that could see it, its own included; an inactive branch does not age.
        activated: int64 [T], `queries` when its attention last reached the scorer's threshold; 0 = never since written.
        key: uint64 [T], a number that names the token whatever the order of the search (for reproducible randomness).
        protected: bool [T], stays in any case (sinks, recent window, block tails).
    """

    block: Ints
    offset: Ints
    position: Ints
    mass: Floats
    latest: Floats
    queries: Ints
    activated: Ints
    key: NDArray[np.uint64]
    protected: Bools

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

    Attributes:
        ids: int64 [M], node ids, increasing.
        length: int64 [M], n, tokens of the block.
        resident: int64 [M], of these, tokens on the device: the most it can keep.
        floor: int64 [M], tokens it keeps in any case; 0 <= floor <= resident.
        depth: int64 [M], edges to the root.
        distance: int64 [M], edges to the nearest running leaf (ArborKV's Delta, the minimum over running leaves).
        active: bool [M], on a running path (offered in lossy mode only).
        value: float64 [M], the search's opinion in [0, 1] (MSVE's v); of a block without one, that of the nearest above.
        confidence: float64 [M], 1 - H / ln|V| at the boundary (MSVE's u).
        attention: float64 [M], mean attention mass per query that could see some of it, in [0, 1] (MSVE's a).
        score: float64 [M], MSVE's s in (0, 1).
        last_used: int64 [M], clock of the last forward that read it; larger is later.
        scheduled: int64 [M], waves of the operation in progress until the block is needed again; `NEVER` if none needs it.
        reentry: float64 [M], probability that a later round reads the block, in [0, 1].
        next_use: int64 [M], when a recorded run reads it next; `NEVER` if not again or nothing is recorded.
        see: makes the token view of some blocks, given by their indices, int64, increasing. Policies that rank the tokens
            of all blocks read `tokens`.
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
    next_use: Ints
    see: Callable[[Ints], Tokens]

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def tokens(self) -> Tokens:
        """Token view of all blocks, made on first use."""
        return self.see(np.arange(len(self)))


NEVER = int(np.iinfo(np.int64).max)


@runtime_checkable
class Scorer(Protocol):
    """Which tokens matter: higher is kept; equal scores are broken by recency (the larger position is kept).

    A token's score follows from its own figures, so that it is the same whatever else is looked at.
    """

    @property
    def observes(self) -> bool:
        """Whether it reads attention (`mass`, `latest`, `queries`, `activated`)."""
        ...

    def scores(self, tokens: Tokens) -> Floats:
        """float64 [T], finite."""
        ...


@runtime_checkable
class Allocator(Protocol):
    """How many tokens each block keeps."""

    def counts(self, blocks: Blocks, room: int, scorer: Scorer) -> Ints:
        """Tokens each block keeps.

        Args:
            blocks: what may be taken from.
            room: slots they may keep together; sum(floor) <= room.
            scorer: which tokens matter, for allocators that rank tokens over all blocks.

        Returns:
            int64 [M], floor <= k <= resident; the sum is at most `room`.
        """
        ...


@runtime_checkable
class TokenAllocator(Allocator, Protocol):
    """An allocator that ranks the tokens of all blocks, and therefore knows which ones leave."""

    def leaving(self, blocks: Blocks, room: int, scorer: Scorer) -> Ints:
        """The tokens that leave.

        Returns:
            int64, indices into `blocks.tokens`, distinct; `counts` is what remains without them. Of each block they are those
            that `arbor.retention.selection.kept` would not keep.
        """
        ...
