"""check_policy: test of a user's retention policy against what the engine relies on.

    from arbor.testing import check_policy

    def test_my_policy():
        check_policy(MyPolicy())

It needs no model and no test framework, and takes about a second.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from arbor import components
from arbor.errors import BudgetInfeasible
from arbor.heads.selection import HeadScorer, HeadSelection, SharedCells, select_by_head
from arbor.retention.allocators.pooled import Pooled
from arbor.retention.base import NEVER, Allocator, Blocks, Ints, Scorer, Tokens
from arbor.retention.policy import Policy
from arbor.retention.scorers import Recency
from arbor.retention.token_kv import NO_KV, HeadKV, KVSequence, PairRotation, TokenKV

EXAMPLES = 200
MOST_BLOCKS = 12
MOST_TOKENS = 16
# columns of tokens: what a scorer observes
ATTENTION = ("mass", "latest", "queries", "activated", "recurrence", "lately")


def check_policy(
    policy: Policy | Allocator | Scorer | type[Any] | str, examples: int = EXAMPLES
) -> None:
    """Offers random blocks to a policy and checks its answers.

    An allocator returns one integer per block: at least the block's floor, at most its resident
    tokens, in sum at most the room. It is deterministic, and treats blocks by their columns, not by
    their ids: where no values are equal, the same blocks in another order keep as many tokens (one
    more or less where rounding ties). `active` and `turn` always have equal values: a policy that
    ranks by them needs another column for ties. A scorer returns one finite number per token:
    deterministic, independent of the order of blocks and of the other tokens shown, and of
    attention unless `observes` is true. Neither writes into its arguments. A policy's settings
    survive a trace.

    Args:
        policy: a ready policy, allocator or scorer; or its class, or a policy's name.
        examples: number of offers.

    Raises:
        AssertionError: a rule is broken; the message holds the offer.
    """
    whole = _as_policy(policy)
    _check_settings(whole)
    for number in range(examples):
        draw = np.random.default_rng([0, number])
        ties = number % 2 == 1
        keys = whole.observation.keys
        blocks = make_offer(draw, size=number % (MOST_BLOCKS + 1), ties=ties, keys=keys)
        least, most = int(blocks.floor.sum()), int(blocks.resident.sum())
        room = (least, most, int(draw.integers(least, most + 1)))[number % 3]
        _check_scorer(whole.scorer, blocks, draw)
        _check_allocator(whole, blocks, room, None if ties else draw.permutation(len(blocks)))
        if whole.by_head:
            _check_heads(whole, blocks, room)


def make_offer(draw: Generator, size: int, ties: bool, keys: bool = False) -> Blocks:
    """Random, partly resident blocks; read-only.

    Args:
        draw: source of the values.
        size: number of blocks.
        ties: many values are equal; otherwise no two are.
        keys: the tokens have keys, values and queries over them.
    """
    length = draw.integers(1, MOST_TOKENS + 1, size)
    resident = draw.integers(0 if ties else 1, length + 1)
    block = np.repeat(np.arange(size), resident)
    held = [np.sort(draw.permutation(n)[:k]) for n, k in zip(length, resident, strict=True)]
    offset = np.concatenate([np.empty(0, np.int64), *held]).astype(np.int64)
    count = len(block)
    protected = draw.random(count) < draw.choice([0.0, 0.3])
    floor = np.minimum(
        np.maximum(np.bincount(block[protected], minlength=size), draw.choice([0, 2])), resident
    )

    def part(many: int) -> NDArray[np.float64]:
        return draw.integers(0, 3, many) / 2 if ties else draw.random(many)

    def whole(many: int) -> Ints:
        return draw.integers(0, 3, many) if ties else draw.permutation(many)

    def moment() -> Ints:
        never = draw.random(size) < 0.4 if ties else np.zeros(size, np.bool_)
        return np.where(never, NEVER, whole(size))

    tokens = Tokens(
        block=block,
        offset=offset,
        position=(draw.integers(0, 40, size)[block] + offset) if ties else draw.permutation(count),
        mass=part(count) * 4,
        latest=part(count),
        queries=whole(count),
        activated=whole(count),
        recurrence=whole(count),
        lately=part(count),
        credit=part(count),
        key=draw.permutation(4 * count)[:count].astype(np.uint64),
        protected=protected,
        kv=random_kv(int(draw.integers(1 << 32)), count) if keys else NO_KV,
    )
    blocks = Blocks(
        ids=np.sort(draw.permutation(4 * size)[:size]),
        length=length,
        resident=resident,
        floor=floor,
        depth=whole(size),
        distance=whole(size),
        active=draw.random(size) < 0.2,
        value=part(size),
        confidence=part(size),
        attention=part(size),
        score=0.01 + 0.98 * part(size),
        last_used=whole(size),
        scheduled=moment(),
        reentry=part(size),
        turn=whole(size) % 3,
        next_use=moment(),
        see=tokens.only,
    )
    _freeze(tokens)
    _freeze(blocks)
    return blocks


def random_kv(seed: int, count: int) -> TokenKV:
    """Random keys, values and queries of so many tokens, in no order, and of a few more."""
    import torch

    draw = np.random.default_rng(seed)
    tokens, queries, heads, group, dim = count + 3, 4, 2, 2, 4

    def numbers(kind: int, layer: int, *shape: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed % (1 << 32) + 10 * layer + kind)
        return torch.randn(*shape, generator=generator, dtype=torch.float32)

    def logits(layer: int) -> list[torch.Tensor]:
        every = numbers(2, layer, queries, heads * group, tokens)
        # the last query sees all, the first all but the newest tokens
        unseen = torch.arange(tokens) > tokens - queries + torch.arange(queries)[:, None]
        every = every.masked_fill(unseen[:, None], -torch.inf)
        return [every[1:], every[:1]]

    sequence = KVSequence(
        positions=np.arange(tokens),
        layers=(1, 3),
        keys=lambda layer: numbers(0, layer, tokens, heads, dim),
        values=lambda layer: numbers(1, layer, tokens, heads, dim),
        logits=logits,
        whole=logits,
        recent=np.arange(tokens) > tokens - 3,
        asked=np.arange(tokens + 1 - queries, tokens + 1),
        wrote=np.arange(tokens - queries, tokens),
        queries=lambda layer: numbers(3, layer, queries, heads * group, dim),
        rotation=lambda layer: PairRotation(False, torch.tensor([1.0, 0.1]).double(), 1.25),
        scaling=lambda layer: 0.5,
    )
    return TokenKV((sequence,), draw.permutation(tokens)[:count])


def _freeze(view: Tokens | Blocks) -> None:
    for field in dataclasses.fields(view):
        column = getattr(view, field.name)
        if isinstance(column, np.ndarray):
            column.setflags(write=False)


def _as_policy(given: Policy | Allocator | Scorer | type[Any] | str) -> Policy:
    """A policy around a policy, allocator, scorer, class or name."""
    made = components.build("policy", given) if isinstance(given, str | type) else given
    if isinstance(made, Policy):
        return made
    name = type(made).__name__
    if isinstance(made, Allocator):
        return Policy(made, Recency())
    assert isinstance(made, Scorer), (
        f"{name} is not a policy: it has neither counts(blocks, room, scorer) nor scores(tokens)"
    )
    return Policy(Pooled(), made)


def _check_settings(policy: Policy) -> None:
    """Check that a trace's form of the policy, its class and settings, builds the same policy."""
    if type(policy) is Policy and not policy.registered_as:
        return
    spec = components.spec_of(policy)
    try:
        again = components.build("policy", json.loads(json.dumps(spec)))
    except TypeError:
        again = None
    assert again == policy, (
        f"{policy.name}: {spec} builds {again}, not {policy}: is every part a frozen dataclass?"
    )


def _check_allocator(policy: Policy, blocks: Blocks, room: int, order: Ints | None) -> None:
    """Check one answer of an allocator, repeated, and with the blocks in another order."""
    try:
        counts = _counts(policy, blocks, room)
    except BudgetInfeasible:
        return  # refusing is allowed; keeping less than the floors is not
    offer = f"offered {blocks.resident.tolist()} of {blocks.length.tolist()} with room for {room}"
    assert (counts >= blocks.floor).all(), (
        f"{policy.name}: {counts.tolist()} falls below the floors {blocks.floor.tolist()}; {offer}"
    )
    assert (counts <= blocks.resident).all(), (
        f"{policy.name}: {counts.tolist()} keeps more tokens than are resident; {offer}"
    )
    assert counts.sum() <= room, (
        f"{policy.name}: {counts.tolist()} is {counts.sum()} tokens in all; {offer}"
    )
    again = _counts(policy, blocks, room)
    assert (again == counts).all(), (
        f"{policy.name}: {counts.tolist()}, then {again.tolist()} for the same; {offer}"
    )
    if order is None:
        return
    moved = _counts(policy, reordered(blocks, order), room)
    # where rounding ties, a token may go to the one or to the other
    assert (np.abs(moved - counts[order]) <= 1).all(), (
        f"{policy.name}: {counts[order].tolist()}, but {moved.tolist()} for the same blocks with their ids "
        f"exchanged; ties of `active` and `turn` need another column; {offer}"
    )


def _counts(policy: Policy, blocks: Blocks, room: int) -> Ints:
    counts = _unharmed(policy.name, lambda: policy.allocator.counts(blocks, room, policy.scorer))
    assert isinstance(counts, np.ndarray) and counts.dtype == np.int64, (
        f"{policy.name}: counts is {type(counts).__name__} of {getattr(counts, 'dtype', '?')}, not int64"
    )
    assert counts.shape == (len(blocks),), (
        f"{policy.name}: {counts.shape} counts for {len(blocks)} blocks"
    )
    return counts


def _check_scorer(scorer: Scorer, blocks: Blocks, draw: Generator) -> None:
    """Check one answer of a scorer, repeated, with blocks in another order, without attention."""
    name, tokens = type(scorer).__name__, blocks.tokens
    scores = _unharmed(name, lambda: scorer.scores(tokens))
    assert isinstance(scores, np.ndarray) and scores.dtype == np.float64, (
        f"{name}: scores is {type(scores).__name__} of {getattr(scores, 'dtype', '?')}, not float64"
    )
    assert scores.shape == tokens.block.shape, (
        f"{name}: {scores.shape} scores for {len(tokens.block)} tokens"
    )
    assert np.isfinite(scores).all(), f"{name}: a score is not finite: {scores.tolist()}"
    assert (scorer.scores(tokens) == scores).all(), f"{name}: other scores for the same tokens"
    order = draw.permutation(len(blocks))
    moved = scorer.scores(reordered(blocks, order).tokens)
    assert np.allclose(moved, scores[_places(blocks, order)], rtol=1e-12, atol=0), (
        f"{name}: other scores for the same blocks in another order"
    )
    part = np.flatnonzero(draw.random(len(blocks)) < 0.5)
    some = scorer.scores(blocks.see(part))
    assert np.allclose(some, scores[np.isin(tokens.block, part)], rtol=1e-12, atol=0), (
        f"{name}: other scores for the same tokens when only some blocks are shown"
    )
    if not scorer.observes:
        unseen = {each: np.zeros_like(getattr(tokens, each)) for each in ATTENTION}
        same = scorer.scores(dataclasses.replace(tokens, **unseen))
        assert (same == scores).all(), f"{name}: reads attention, but `observes` is false"


def _check_heads(policy: Policy, blocks: Blocks, room: int) -> None:
    """Check a policy whose KV heads keep tokens of their own, with heads that hold the same."""

    def by_head(tokens: Tokens) -> Tokens:
        columns = {f.name: getattr(tokens, f.name) for f in dataclasses.fields(Tokens)}
        kv, heads = columns.pop("kv"), 2
        if kv.place is not None:
            (sequence,) = kv.sequences
            heads = sum(sequence.keys(layer).shape[1] for layer in sequence.layers)
            begins = np.arange(heads)[:, None] * len(sequence)
            kv = HeadKV(kv.sequences, (begins + kv.place).ravel())
        return Tokens(**{name: np.tile(each, heads) for name, each in columns.items()}, kv=kv)

    shared = None
    if policy.head_budgets is not None:  # one layer of two heads, whose cells hold their own
        shared = SharedCells(policy.head_budgets, np.zeros(2, np.int64), lambda tokens: None)
    scorer = HeadScorer(policy.scorer, by_head, shared=shared)
    try:
        counts, chosen = _unharmed(
            policy.name, lambda: select_by_head(blocks, room, policy.allocator, scorer)
        )
    except BudgetInfeasible:
        return
    assert (counts >= blocks.floor).all() and counts.sum() <= room, (
        f"{policy.name}: heads keep {counts.tolist()} with room for {room}"
    )
    if isinstance(chosen, HeadSelection):
        moved, tokens = chosen.moved, chosen.tokens
        assert (moved.source < moved.target).all(), f"{policy.name}: KV moves to earlier slots"
        assert (tokens.block[moved.source] == tokens.block[moved.target]).all(), (
            f"{policy.name}: KV moves to another block"
        )
        guarded = np.bincount(tokens.block[tokens.protected], minlength=len(blocks))
        roomy = (guarded <= counts)[tokens.block]
        assert not (moved.leaving & tokens.protected & roomy).any(), (
            f"{policy.name}: protected tokens leave where there is room for them"
        )
    if blocks.tokens.kv.place is None:
        alone = _counts(policy, blocks, room)
        assert (counts == alone).all(), (
            f"{policy.name}: heads that hold the same keep {counts.tolist()}, not {alone.tolist()}"
        )


def _unharmed(name: str, ask: Callable[[], Any]) -> Any:
    """An answer computed without writing into the arguments."""
    try:
        return ask()
    except ValueError as error:
        assert "read-only" not in str(error), f"{name}: writes into its arguments; copy them first"
        raise


def reordered(blocks: Blocks, order: Ints) -> Blocks:
    """The same blocks with their ids exchanged: block j becomes block ``order[j]``."""
    at = _places(blocks, order)
    tokens = blocks.tokens
    columns = {f.name: getattr(tokens, f.name)[at] for f in dataclasses.fields(Tokens)}
    columns["block"] = np.repeat(np.arange(len(order)), blocks.resident[order])
    moved = Tokens(**columns)
    figures = {
        f.name: getattr(blocks, f.name)[order]
        for f in dataclasses.fields(Blocks)
        if f.name not in ("ids", "see")
    }
    again = Blocks(ids=blocks.ids, **figures, see=moved.only)
    _freeze(moved)
    _freeze(again)
    return again


def _places(blocks: Blocks, order: Ints) -> Ints:
    """Former index of each token of the reordered blocks."""
    ends = np.cumsum(blocks.resident)
    starts = ends - blocks.resident
    ranges = [np.arange(starts[old], ends[old]) for old in order]
    return np.concatenate([np.empty(0, np.int64), *ranges])
