"""Random offers to a policy: blocks with their tokens, by a seed."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
from hypothesis import strategies as st
from support.policies import POLICIES

from arbor.retention.base import NEVER, Blocks, Ints, Scorer, Tokens
from arbor.retention.ordering import order, whole_blocks
from arbor.retention.policy import Policy
from arbor.retention.scorers import Recency
from arbor.testing import random_kv

SEEDS = st.integers(0, 2**32 - 1)

# Every policy that evicts, and variants of their settings: each test of what a policy may do runs
# over all of them.
EVERY: dict[str, Policy] = {name: policy for name, policy in POLICIES.items() if name != "full"}


@dataclasses.dataclass(frozen=True)
class AtMost:
    """An allocator with a capacity of its own: the blocks used last stay, so many of them."""

    capacity: int

    def counts(self, blocks: Blocks, room: int, scorer: Scorer) -> Ints:
        preferred = order(-blocks.last_used)
        counts = whole_blocks(blocks, room, preferred)
        kept = preferred[(blocks.resident > blocks.floor)[preferred]]
        counts[kept[self.capacity :]] = blocks.floor[kept[self.capacity :]]
        return counts

    def excess(self, blocks: Blocks) -> int:
        held = int(blocks.resident.sum())
        return held - int(self.counts(blocks, held, Recency()).sum())


def variant(name: str, **parts: Any) -> Policy:
    """A named policy whose allocator and scorer have other settings."""
    policy = POLICIES[name]
    known = {field.name for field in dataclasses.fields(policy.allocator)}
    allocator = {key: value for key, value in parts.items() if key in known}
    scorer = {key: value for key, value in parts.items() if key not in known}
    return dataclasses.replace(
        policy,
        allocator=dataclasses.replace(policy.allocator, **allocator),  # type: ignore[type-var]
        scorer=dataclasses.replace(policy.scorer, **scorer),  # type: ignore[type-var]
    )


EVERY |= {
    f"{name}, {what}": variant(name, **parts)
    for name, what, parts in (
        ("arborkv", "eta 1", {"eta": 1.0, "lambda_depth": -0.3}),
        ("arborkv", "ratio_min", {"ratio_min": 0.4, "gamma": 1.0}),
        ("kkt", "no distance", {"lambda_distance": 0.0, "gamma": 1.0}),
        ("h2o", "normalised", {"normalise": True}),
        ("random", "seed 7", {"seed": 7}),
    )
    if name in POLICIES
}


def offer(seed: int, size: int | None = None, *, ties: bool = True, longest: int = 12) -> Blocks:
    """Blocks of random lengths, partly resident, with random figures.

    Args:
        size: how many; 0 to 9 if None.
        ties: figures come from few values, so that many are equal; otherwise all differ.
    """
    rng = np.random.default_rng(seed)
    count = int(rng.integers(0, 10)) if size is None else size
    length = rng.integers(0 if ties else 1, longest + 1, count)
    resident = rng.integers(0 if ties else 1, length + 1)
    offsets = [
        np.sort(rng.permutation(n)[:k])
        for n, k in zip(length.tolist(), resident.tolist(), strict=True)
    ]
    start = rng.integers(0, 30, count)
    total = int(resident.sum())
    block = np.repeat(np.arange(count), resident)
    offset = np.concatenate([np.empty(0, np.int64), *offsets]).astype(np.int64)
    protected = rng.random(total) < rng.choice([0.0, 0.2, 0.6])
    guarded = np.bincount(block[protected], minlength=count)
    floor = np.minimum(np.maximum(guarded, rng.choice([0, 2])), resident)

    def figures(high: float) -> np.ndarray:
        return rng.integers(0, 3, count) * high / 3 if ties else rng.random(count) * high

    def numbers(high: int) -> np.ndarray:
        return rng.integers(0, high, count) if ties else rng.permutation(count * 3)[:count]

    def sometimes(values: np.ndarray) -> np.ndarray:
        return np.where(rng.random(count) < 0.5, values, NEVER)

    def heat() -> np.ndarray:
        return rng.integers(0, 3, total) / 3 if ties else rng.random(total)

    tokens = Tokens(
        block=block,
        offset=offset,
        position=start[block] + offset,
        mass=heat() * 5,
        latest=heat(),
        queries=rng.integers(0, 6, total),
        activated=rng.integers(0, 6, total),
        recurrence=rng.integers(0, 9, total),
        lately=heat() * 2,
        credit=heat() / 9,
        key=rng.integers(0, 2**63, total).astype(np.uint64),
        protected=protected,
        kv=random_kv(seed, total),
    )
    return Blocks(
        ids=np.sort(rng.permutation(3 * count)[:count]),
        length=length,
        resident=resident,
        floor=floor,
        depth=numbers(4),
        distance=numbers(6),
        active=rng.random(count) < 0.2,
        value=figures(1.0),
        confidence=figures(1.0),
        attention=figures(1.0),
        score=np.clip(figures(1.0), 0.01, 0.99),
        last_used=numbers(5),
        scheduled=sometimes(numbers(3)),
        reentry=figures(1.0),
        turn=rng.integers(0, 3, count),
        next_use=sometimes(numbers(9)),
        see=tokens.only,
    )


def room_for(blocks: Blocks, share: float) -> int:
    """Room between the floors (0) and everything (1)."""
    least, most = int(blocks.floor.sum()), int(blocks.resident.sum())
    return least + round(share * (most - least))


def held(blocks: Blocks, index: int) -> np.ndarray:
    """Offsets of a block's tokens on the device."""
    return blocks.tokens.offset[blocks.tokens.block == index]


def evict(blocks: Blocks, chosen: list[np.ndarray]) -> Blocks:
    """The next offer, after only the chosen tokens stayed."""
    tokens = blocks.tokens
    stays = np.zeros(len(tokens.block), np.bool_)
    for index, offsets in enumerate(chosen):
        stays |= (tokens.block == index) & np.isin(tokens.offset, offsets)
    after = Tokens(**{f.name: getattr(tokens, f.name)[stays] for f in dataclasses.fields(Tokens)})
    resident = np.bincount(after.block, minlength=len(blocks))
    floor = np.minimum(blocks.floor, resident)
    return dataclasses.replace(blocks, resident=resident, floor=floor, see=after.only)


def blocks_of(count: int, **columns: object) -> Blocks:
    """Blocks of 10 resident tokens that differ in these columns only."""
    zeros = np.zeros(count, np.int64)
    plain: dict[str, object] = {
        "ids": np.arange(count),
        "length": np.full(count, 10),
        "resident": np.full(count, 10),
        "floor": zeros,
        "depth": zeros,
        "distance": zeros,
        "active": np.zeros(count, np.bool_),
        "value": np.zeros(count),
        "confidence": np.zeros(count),
        "attention": np.zeros(count),
        "score": np.full(count, 0.5),
        "last_used": zeros,
        "scheduled": np.full(count, NEVER),
        "reentry": np.zeros(count),
        "turn": zeros,
        "next_use": np.full(count, NEVER),
    }
    given = {name: np.asarray(column) for name, column in columns.items()}
    if "length" in given and "resident" not in given:
        given["resident"] = given["length"]
    return Blocks(**{**plain, **given}, see=offer(0, 0).see)  # type: ignore[arg-type]


def choices(blocks: Blocks, room: int) -> list[tuple[int, ...]]:
    """Every way to keep whole tokens within the room."""
    ranges = [range(low, high + 1) for low, high in zip(blocks.floor, blocks.resident, strict=True)]
    return [counts for counts in itertools.product(*ranges) if sum(counts) <= room]
