"""Scorers and their statistics, against the whole history of attention, kept row by row."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.offers import SEEDS, offer

from arbor.papers.lazyeviction.lazy_eviction import LazyEviction
from arbor.papers.related.raas import RaaS
from arbor.papers.related.tova import TOVA
from arbor.retention.base import Scorer, Tokens
from arbor.retention.scorers.heavy_hitters import HeavyHitters
from arbor.retention.scorers.random_tokens import RandomTokens
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


# Scorers


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
