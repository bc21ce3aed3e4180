"""Scorers and their statistics, against the whole history of attention, kept row by row."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.offers import SEEDS, offer

from arbor.errors import UsageError
from arbor.papers.lazyeviction.lazy_eviction import LazyEviction
from arbor.papers.related.raas import RaaS
from arbor.papers.related.tova import TOVA
from arbor.retention.base import Scorer, Tokens
from arbor.retention.policy import Protect
from arbor.retention.scorers.heavy_hitters import HeavyHitters
from arbor.retention.scorers.random_tokens import _PIECE, RandomTokens, _mixed
from arbor.retention.scorers.recency import Recency
from arbor.retention.scorers.window import Window
from arbor.retention.token_statistics import TokenStatistics
from arbor.tree import Node, ThoughtTree

SCORERS: tuple[Scorer, ...] = (
    Recency(),
    HeavyHitters(),
    HeavyHitters(normalise=True),
    TOVA(),
    RandomTokens(),
    RandomTokens(seed=3),
    RaaS(),
    Window(),
    LazyEviction(),
    LazyEviction("paper"),
)
every_scorer = pytest.mark.parametrize("scorer", SCORERS, ids=repr)


@dataclass
class History:
    """A tree that grows, forgets and attends, with every row's attention: the O(n^2) reference.

    rows: for each forward, each row's attention to visible tokens, by node id and position.
    """

    seed: int
    tree: ThoughtTree = field(init=False)
    gone: set[tuple[int, int]] = field(default_factory=set)
    rows: list[list[dict[tuple[int, int], float]]] = field(default_factory=list)
    statistics: TokenStatistics = field(default_factory=lambda: TokenStatistics(threshold=0.2))

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.tree = ThoughtTree(range(int(self.rng.integers(1, 4))))
        self.statistics.open(0, 0, self.tree.root.end)
        for _ in range(12):
            self.step()

    def step(self) -> None:
        """Fork, decode a token in several leaves at once, evict or bring back; then one forward."""
        draw = self.rng.random()
        if draw < 0.3 or len(self.tree) == 1:
            parent = self.tree[int(self.rng.integers(len(self.tree)))]
            child = self.tree.fork(parent)
            self.statistics.open(child.id, child.start, int(self.rng.integers(0, 3)))
        leaves = [node for node in self.tree if not node.children and node.parent]
        if not leaves:
            return
        running = [leaf for leaf in leaves if self.rng.random() < 0.5] or leaves[:1]
        count = 1 if draw < 0.8 else 3  # several rows a leaf, as a prefill has
        for leaf in running:
            leaf.tokens.extend([0] * count)
            self.statistics.grow(leaf.id, len(leaf.tokens))
        tokens = [(n.id, n.start + t) for n in self.tree for t in range(len(n.tokens))]
        if self.rng.random() < 0.4:
            self.gone = {token for token in tokens if self.rng.random() < 0.3}
        forward = [
            self.attention(leaf, leaf.end - 1 - back) for leaf in running for back in range(count)
        ]
        self.rows.append(forward)
        seen = sorted({token for row in forward for token in row})
        order = self.rng.permutation(len(seen))  # slots come in any order
        owner = np.array([seen[i][0] for i in order], np.int32)
        position = np.array([seen[i][1] for i in order], np.int32)
        mass = np.array([sum(row.get(seen[i], 0.0) for row in forward) for i in order], np.float32)
        queries = np.array([sum(seen[i] in row for row in forward) for i in order], np.int64)
        self.statistics.observe(owner, position, mass, queries)

    def attention(self, leaf: Node, at: int) -> dict[tuple[int, int], float]:
        """The attention of a row at a position: to earlier resident tokens of its path."""
        path = [
            (node.id, position) for node in leaf.path for position in range(node.start, node.end)
        ]
        visible = [token for token in path if token[1] < at and token not in self.gone]
        weight = self.rng.dirichlet(np.ones(len(visible) + 1))  # the rest goes to the row itself
        return dict(zip(visible, weight.tolist(), strict=False))

    def of(self, token: tuple[int, int]) -> list[list[float]]:
        """For each forward that could see a token, what its rows gave it."""
        each = [[row[token] for row in forward if token in row] for forward in self.rows]
        return [rows for rows in each if rows]

    def view(self) -> tuple[list[tuple[int, int]], Tokens]:
        """All tokens ever written, and the token view of them."""
        names = [(n.id, n.start + t) for n in self.tree for t in range(len(n.tokens))]
        owner = np.array([name[0] for name in names], np.int64)
        position = np.array([name[1] for name in names], np.int64)
        offset = position - np.array([self.tree[i].start for i in owner], np.int64)
        seen = self.statistics.view(owner, offset)
        none = np.zeros(len(names), np.bool_)
        key = np.arange(len(names)).astype(np.uint64)
        return names, Tokens(owner, offset, position, *seen, key=key, protected=none)


@given(seed=SEEDS)
def test_h2o_is_all_attention_ever_received(seed: int) -> None:
    history = History(seed)
    names, tokens = history.view()
    received = [sum(map(sum, history.of(name))) for name in names]
    looks = [sum(map(len, history.of(name))) for name in names]

    assert HeavyHitters().scores(tokens) == pytest.approx(received, abs=1e-6)
    assert tokens.queries.tolist() == looks
    mean = [total / max(1, count) for total, count in zip(received, looks, strict=True)]
    assert HeavyHitters(normalise=True).scores(tokens) == pytest.approx(mean, abs=1e-6)


@given(seed=SEEDS)
def test_tova_is_the_attention_of_the_last_forward_that_could_see_the_token(seed: int) -> None:
    history = History(seed)
    names, tokens = history.view()

    last = [np.mean(history.of(name)[-1]) if history.of(name) else 0.0 for name in names]

    assert TOVA().scores(tokens) == pytest.approx(last, abs=1e-6)


@given(seed=SEEDS)
def test_a_token_is_activated_when_its_attention_reaches_the_threshold_again(seed: int) -> None:
    history = History(seed)
    names, tokens = history.view()

    found = zip(names, tokens.activated.tolist(), tokens.recurrence.tolist(), strict=True)
    for name, activated, recurrence in found:
        expected = looks = longest = 0
        for at, rows in enumerate(history.of(name)):
            looks += len(rows)
            if at and np.float32(sum(rows)) / len(rows) >= 0.2:
                longest = max(longest, looks - expected)
                expected = looks
            elif not at:  # written
                expected = looks
        assert (activated, recurrence) == (expected, longest)


@given(seed=SEEDS)
def test_a_blocks_attention_is_the_mean_mass_per_query_that_could_see_it(seed: int) -> None:
    history = History(seed)
    for node in history.tree:
        mass = queries = 0.0
        for forward in history.rows:
            for row in forward:
                here = [m for (owner, _), m in row.items() if owner == node.id]
                mass, queries = mass + sum(here), queries + bool(here)

        found = history.statistics.block_attention(np.array([node.id]))[0]

        assert found == pytest.approx(mass / queries if queries else 0.0, abs=1e-6)
        assert 0 <= found <= 1


@given(seed=SEEDS)
def test_all_blocks_at_once_are_each_block_alone(seed: int) -> None:
    statistics = History(seed).statistics
    ids = np.arange(15)[::-1]  # some of them unknown

    together = statistics.block_attention(ids)

    assert together.tolist() == [statistics.block_attention(np.array([i]))[0] for i in ids]


def test_an_inactive_branch_does_not_age() -> None:
    statistics = TokenStatistics()
    for node_id, start in ((0, 0), (1, 2), (2, 2)):
        statistics.open(node_id, start, 2)
    both = np.array([0, 0, 1, 1, 2, 2]), np.array([0, 1, 2, 3, 2, 3])
    statistics.observe(*both, np.full(6, 0.5, np.float32), np.array([2, 2, 1, 1, 1, 1]))
    before = statistics.view(2, np.arange(2))

    for _ in range(50):
        here = np.array([0, 0, 1, 1]), np.array([0, 1, 2, 3])
        statistics.observe(*here, np.full(4, 0.1, np.float32), np.ones(4, np.int64))

    after = statistics.view(2, np.arange(2))
    assert all((a == b).all() for a, b in zip(before, after, strict=True))
    assert statistics.view(1, np.arange(2)).queries.tolist() == [51, 51]


def test_rows_that_could_not_see_a_token_change_nothing() -> None:
    statistics = TokenStatistics()
    statistics.open(0, 0, 2)

    statistics.observe(
        np.array([0, 0]), np.array([0, 1]), np.array([0.5, 0.0], np.float32), np.array([1, 0])
    )

    assert statistics.view(0, np.arange(2)).queries.tolist() == [1, 0]
    assert statistics.view(0, np.arange(2)).latest.tolist() == [0.5, 0.0]
    assert statistics.block_attention(np.array([0]))[0] == 0.5


def test_attention_at_the_threshold_activates() -> None:
    statistics = TokenStatistics(threshold=0.5)
    statistics.open(0, 0, 3)
    tokens = np.zeros(3, int), np.arange(3)
    statistics.observe(*tokens, np.zeros(3), np.array([3, 2, 1]))
    statistics.observe(*tokens, np.array([0.5, 0.25, 1.0]), np.array([1, 1, 2]))

    assert statistics.view(0, np.arange(3)).activated.tolist() == [4, 2, 3]
    assert statistics.view(0, np.arange(3)).recurrence.tolist() == [1, 0, 2]
    assert TokenStatistics().threshold == Protect().threshold == 1e-4


def test_only_an_open_block_grows() -> None:
    statistics = TokenStatistics()
    statistics.open(1, 0, 2)

    with pytest.raises(AssertionError, match="block 0 is not open"):
        statistics.grow(0, 1)


def test_what_was_never_opened_was_never_seen() -> None:
    statistics = TokenStatistics()
    assert statistics.block_attention(np.array([0, 7])).tolist() == [0, 0]
    for column in statistics.view(3, np.arange(4)):
        assert column.tolist() == [0] * 4

    statistics.open(0, 0, 2)
    statistics.observe(np.array([0]), np.array([1]), np.ones(1, np.float32), np.ones(1, np.int64))

    seen = statistics.view(np.array([0, 0, 1, 99]), np.array([1, 2, 0, 0]))
    for name, column in seen._asdict().items():
        known = 0 if name in ("recurrence", "credit") else 1
        assert column.tolist() == [known, 0, 0, 0], name


@given(sizes=st.lists(st.integers(0, 3000), min_size=1, max_size=6), seed=SEEDS)
def test_blocks_that_grow_keep_what_is_known(sizes: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    statistics = TokenStatistics()
    known: dict[tuple[int, int], float] = {}
    length = [0, 0, 0]
    for node_id in range(3):
        statistics.open(node_id, 10 * node_id, node_id)
    for size in sizes:
        node_id = int(rng.integers(3))
        length[node_id] += size
        statistics.open(node_id, 10 * node_id, length[node_id])
        offsets = np.unique(rng.integers(0, max(1, length[node_id]), 5))[: length[node_id]]
        mass = rng.random(len(offsets)).astype(np.float32)
        statistics.observe(
            np.full(len(offsets), node_id), 10 * node_id + offsets, mass, np.ones(len(offsets), int)
        )
        for offset, each in zip(offsets.tolist(), mass.tolist(), strict=True):
            known[node_id, offset] = known.get((node_id, offset), 0.0) + each

    for node_id in range(3):
        found = statistics.view(node_id, np.arange(length[node_id])).mass
        expected = [known.get((node_id, offset), 0.0) for offset in range(length[node_id])]
        assert found.tolist() == pytest.approx(expected)


def test_tokens_beyond_the_room_of_their_block_are_not_their_neighbours() -> None:
    statistics = TokenStatistics()
    statistics.open(0, 0, 2)
    statistics.open(1, 2, 2)
    statistics.observe(np.array([1]), np.array([2]), np.ones(1, np.float32), np.ones(1, np.int64))

    assert statistics.view(0, np.arange(4)).mass.tolist() == [0, 0, 0, 0]


@given(seed=SEEDS)
def test_a_column_made_on_demand_is_that_of_the_view(seed: int) -> None:
    """Also for blocks nobody opened, and for tokens beyond the room of theirs."""
    statistics = History(seed).statistics
    rng = np.random.default_rng(seed)
    for ids in (np.arange(int(rng.integers(0, 4))), np.sort(rng.permutation(90)[:9])):
        held = [np.flatnonzero(rng.random(6) < 0.4) for _ in ids]
        sizes = np.array([len(each) for each in held], np.int64)
        offsets = np.concatenate([np.empty(0, np.int64), *held])

        makers = statistics.makers(ids, sizes, offsets)

        view = statistics.view(np.repeat(ids, sizes), offsets)
        assert set(makers) == set(view._fields)
        for name, make in makers.items():
            assert make(None).tolist() == getattr(view, name).tolist()


def test_more_blocks_change_nothing_about_earlier_ones() -> None:
    statistics = TokenStatistics()
    for node_id in range(200):
        statistics.open(node_id, 0, 1)
        one = np.ones(1, np.int64)
        statistics.observe(np.array([node_id]), np.array([0]), one * np.float32(0.5), 2 * one)

    assert statistics.block_attention(np.arange(200)).tolist() == [0.25] * 200


# Scorers


@every_scorer
@given(seed=SEEDS)
def test_scores_are_finite_numbers_one_a_token(scorer: Scorer, seed: int) -> None:
    tokens = offer(seed).tokens

    scores = scorer.scores(tokens)

    assert scores.shape == tokens.block.shape and scores.dtype == np.float64
    assert np.isfinite(scores).all()


@every_scorer
@given(seed=SEEDS)
def test_a_score_does_not_depend_on_what_else_is_resident(scorer: Scorer, seed: int) -> None:
    """Physical order and the history of eviction do not matter: a token's own figures alone."""
    tokens = offer(seed).tokens
    rng = np.random.default_rng(seed)
    some = rng.permutation(len(tokens.block))[: len(tokens.block) // 2]
    fewer = Tokens(**{f.name: getattr(tokens, f.name)[some] for f in dataclasses.fields(Tokens)})

    assert (scorer.scores(fewer) == scorer.scores(tokens)[some]).all()


@every_scorer
@given(seed=SEEDS)
def test_a_scorer_that_observes_nothing_reads_no_attention(scorer: Scorer, seed: int) -> None:
    tokens = offer(seed, 9, ties=False).tokens
    zero = np.zeros(len(tokens.block))
    blind = dataclasses.replace(
        tokens,
        mass=zero,
        latest=zero,
        queries=zero.astype(int),
        activated=zero.astype(int),
        recurrence=zero.astype(int),
        lately=zero,
    )

    same = (scorer.scores(blind) == scorer.scores(tokens)).all()

    assert same != scorer.observes


def test_recency_is_the_position_on_the_path() -> None:
    tokens = offer(3, 5, ties=False).tokens

    assert (Recency().scores(tokens) == tokens.position).all()


def test_random_scores_are_splitmix64_of_key_and_seed() -> None:
    """The first outputs of the generator's reference implementation for the states 0 and 1."""
    outputs = _mixed(np.array([0, 1], np.uint64))
    assert outputs.tolist() == [0xE220A8397B1DCDAF, 0x910A2DEC89025CC1]

    tokens = offer(0, 2000, ties=False, longest=20).tokens
    count = len(tokens.key)
    keys = np.arange(count).astype(np.uint64)
    scores = RandomTokens(seed=1).scores(dataclasses.replace(tokens, key=keys))

    assert count > _PIECE
    mixed = _mixed(keys ^ np.uint64(0x910A2DEC89025CC1))
    assert scores.tolist() == [(number >> 11) / (1 << 53) for number in mixed.tolist()]


def test_random_tokens_are_uniform_and_their_own_for_every_seed() -> None:
    tokens = offer(0, 2000, ties=False).tokens
    tokens = dataclasses.replace(tokens, key=np.arange(len(tokens.block)).astype(np.uint64))

    first, second = RandomTokens(0).scores(tokens), RandomTokens(1).scores(tokens)

    assert ((first >= 0) & (first < 1)).all()
    assert len(np.unique(first)) == len(first)
    counts = np.bincount((first * 20).astype(int), minlength=20)
    expected = len(first) / 20
    assert (
        (counts - expected) ** 2 / expected
    ).sum() < 45  # chi-square, 19 degrees of freedom: p = 7e-4
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.05
    assert abs(np.corrcoef(first[1:], first[:-1])[0, 1]) < 0.05
    assert (RandomTokens(0).scores(tokens) == first).all()
    assert (
        np.isfinite(RandomTokens(-1).scores(tokens)).all()
        and np.isfinite(RandomTokens(2**80).scores(tokens)).all()
    )


@given(seed=SEEDS)
def test_the_window_weighs_later_queries_more(seed: int) -> None:
    history = History(seed)
    names, tokens = history.view()

    wanted = []
    for name in names:
        total = 0.0
        for rows in history.of(name):
            total = total * (31 / 32) ** len(rows) + sum(rows)
        wanted.append(total)
    assert Window().scores(tokens) == pytest.approx(wanted, abs=1e-5)


def one(**columns: float) -> Tokens:
    """The view of a single token."""
    figures = {name: np.array([value]) for name, value in columns.items()}
    return Tokens.when_read({}, **figures)


@given(seed=SEEDS)
def test_raas_is_the_time_since_a_token_was_last_activated(seed: int) -> None:
    history = History(seed)
    names, tokens = history.view()

    ages = []
    for name in names:
        since = 0
        for at, rows in enumerate(history.of(name)):
            since += len(rows)
            if not at or np.float32(sum(rows)) / len(rows) >= 0.2:
                since = 0
        ages.append(-since)
    assert RaaS().scores(tokens).tolist() == ages


@given(
    age=st.integers(0, 400),
    interval=st.integers(0, 400),
    window=st.integers(1, 300),
)
def test_lazy_eviction_is_the_formula_of_the_paper(age: int, interval: int, window: int) -> None:
    def sigma(x: float) -> float:
        return 1 / (1 + math.exp(-x)) if x > -700 else 0.0

    tokens = one(queries=500, activated=500 - age, recurrence=interval)
    h1 = 2 * sigma(-age / interval) if interval else float(age == 0)
    paper = 2 * sigma(-1 / (interval - 1)) if interval > 1 else 0.0
    fixed = 2 * sigma(-(interval - 1) / window) if interval else 0.0

    assert LazyEviction("off").scores(tokens)[0] == pytest.approx(h1)
    assert LazyEviction("paper").scores(tokens)[0] == pytest.approx(h1 + paper)
    assert LazyEviction("fixed", window).scores(tokens)[0] == pytest.approx(h1 + fixed)


def test_lazy_eviction_s_second_term_falls_with_the_interval_and_the_paper_s_rises() -> None:
    def of(h2: Any) -> list[float]:
        tokens = [one(queries=9, activated=9, recurrence=each) for each in (1, 2, 5, 25, 175)]
        return [float(LazyEviction(h2).scores(each)[0]) - 1 for each in tokens]

    assert of("paper") == pytest.approx([0, 0.538, 0.876, 0.979, 0.997], abs=1e-3)
    fixed = of("fixed")
    assert fixed[0] == 1 and fixed == sorted(fixed, reverse=True)


@pytest.mark.parametrize(
    ("settings", "message"), [({"h2": "new"}, "fixed, paper or off"), ({"window": 0}, "at least 1")]
)
def test_settings_of_lazy_eviction_are_checked(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        LazyEviction(**settings)
