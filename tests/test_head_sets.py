"""KV heads that keep tokens of their own (``granularity=head``)."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.head_reads import HeadReads, held, masked_forward, recorded
from support.models import build, path_keys
from support.policies import POLICIES
from support.slow_cases import drawn, every
from support.trees import GREEDY, PROMPT, Lab, relative_error

from arbor import Solver
from arbor.engine.mode import Rehydrate
from arbor.errors import OutOfMemory, UsageError
from arbor.events import Evicted, Forwarded
from arbor.heads.selection import (
    HeadScorer,
    ranked_means,
)
from arbor.heads.table import HeadMoves, HeadTable
from arbor.kernels.native import native_library
from arbor.kernels.native_heads import head_moves
from arbor.memory.pool import KVPool, LayerKV
from arbor.memory.stores import LowerRoom
from arbor.papers.ams.ams import AMS, Strata
from arbor.papers.related.expected_attention import ExpectedAttention
from arbor.papers.related.rkv import RKV
from arbor.papers.related.snapkv_budgets import Chunks
from arbor.papers.related.triattention import TriAttention
from arbor.papers.related.window_attention import WindowAttention
from arbor.retention.allocators.by_block import Uniform
from arbor.retention.allocators.pooled import Pooled
from arbor.retention.allocators.segments import Segmented
from arbor.retention.base import CreditingAllocator
from arbor.retention.head_budgets import Vacated
from arbor.retention.policy import Policy, Protect, Trigger
from arbor.retention.scorers import RandomTokens
from arbor.retention.token_kv import KVScorer, KVSequence
from arbor.tree import Node, ThoughtTree

pytestmark = pytest.mark.usefixtures("loaded_once")

SLOTS = 24
LONG = 40
SCORED = {
    **{name: {} for name in ("h2o", "tova", "snapkv", "raas", "lazyeviction", "keydiff", "vatp")},
    "rkv": {"scorer": RKV(window=3, pooled=3)},
    "rpc": {"scorer": WindowAttention(window=3, pooled=3)},
    "expected": {"scorer": ExpectedAttention(window=4)},
    "triattention": {"scorer": TriAttention(window=4)},
}


def by_head(name: str, **settings: object) -> Policy:
    """A policy whose KV heads keep tokens of their own, with little protection."""
    policy = POLICIES[name]
    return dataclasses.replace(
        policy,
        **{"granularity": "head", "protect": Protect(sinks=2, recent=3), "trigger": Trigger()}
        | settings,  # type: ignore[arg-type]
    )


def heads_of(lab: Lab) -> int:
    """KV heads of all layers."""
    assert lab.memory.heads is not None
    return len(lab.memory.heads)


def lossy(
    policy: Policy, model: str = "llama", rehydrate: Rehydrate = "off", **more: object
) -> Lab:
    return Lab(build(model), policy=policy, mode="lossy", rehydrate=rehydrate, debug=True, **more)  # type: ignore[arg-type]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> HeadReads:
    """What each KV head reads for each decoded token."""
    return recorded(monkeypatch)


# Agreement with attention over what each head holds


def check_path(lab: Lab, model: str, node: Node, seen: HeadReads) -> None:
    """The blocks of a path are those of full attention under each head's masks."""
    logits, _, _ = masked_forward(build(model), node, seen, heads_of(lab))
    tokens = [token for each in node.path for token in each.tokens]
    chosen = logits[len(PROMPT) - 1 : -1].argmax(-1).tolist()
    assert chosen == tokens[len(PROMPT) :]
    assert relative_error(lab.state.logits[node.row], logits[-1]) < 1e-4


@pytest.mark.parametrize("name", every(3, list(SCORED)))
def test_each_head_attends_to_its_own_tokens(name: str, seen: HeadReads) -> None:
    lab = lossy(by_head(name, **SCORED[name]))
    tree = lab.plant(SLOTS)
    (block,) = lab.sprout([(tree.root, 1)], GREEDY, LONG)

    assert lab.memory.mixed(block).any()
    check_path(lab, "llama", block, seen)


SHARES = ("equal", "adaptive", "pyramid")
SEGMENTING: tuple[Segmented, ...] = (
    Strata(4),
    Chunks(3),
    AMS(delta=0.2, shortest=2, longest=6),
    AMS(delta=0.2, shortest=2, longest=6, mass="paper", padded=3),
)


@pytest.mark.parametrize(
    ("heads", "model"), drawn(SHARES, ["qwen3", "phi3", "gpt_neox", "deepseek_v3", "gemma"])
)
def test_models_whose_heads_keep_their_own(model: str, heads: str, seen: HeadReads) -> None:
    lab = lossy(by_head("h2o", heads=heads), model)
    tree = lab.plant(SLOTS)
    (block,) = lab.sprout([(tree.root, 1)], GREEDY, LONG)

    assert lab.memory.mixed(block).any()
    check_path(lab, model, block, seen)


@pytest.mark.parametrize(
    ("allocator", "spare", "heads"), every(2, drawn([Pooled(), Uniform()], [0, 5], SHARES, count=4))
)
def test_branches_read_what_is_left_of_mixed_blocks(
    allocator: Pooled | Uniform, spare: int, heads: str, seen: HeadReads
) -> None:
    lab = lossy(by_head("h2o", allocator=allocator, trigger=Trigger(spare=spare), heads=heads))
    tree = lab.plant(2 * SLOTS)
    first, second = lab.sprout([(tree.root, 2)], GREEDY, LONG // 2)
    third, fourth = lab.sprout([(first, 2)], GREEDY, LONG // 2)
    (last,) = lab.sprout([(second, 1)], GREEDY, LONG // 2)

    for leaf in (third, fourth, last):
        check_path(lab, "llama", leaf, seen)
    assert any(lab.memory.mixed(node).any() for node in tree)
    assert any(isinstance(event, Evicted) for event in lab.events)


@pytest.mark.parametrize(("allocator", "spare"), every(2, drawn(SEGMENTING, [0, 5])))
def test_heads_keep_their_own_tokens_of_segments(
    allocator: Segmented, spare: int, seen: HeadReads
) -> None:
    lab = lossy(by_head("h2o", allocator=allocator, trigger=Trigger(spare=spare)))
    tree = lab.plant(2 * SLOTS)
    first, second = lab.sprout([(tree.root, 2)], GREEDY, LONG // 2)
    third, fourth = lab.sprout([(first, 2)], GREEDY, LONG // 2)
    (last,) = lab.sprout([(second, 1)], GREEDY, LONG // 2)

    for leaf in (third, fourth, last):
        check_path(lab, "llama", leaf, seen)
    assert any(lab.memory.mixed(node).any() for node in tree)
    remembers = isinstance(allocator, CreditingAllocator)
    credit = [lab.state.statistics.view(n.row, np.arange(len(n.tokens))).credit for n in tree]
    assert any((each > 0).any() for each in credit) == remembers


@pytest.mark.parametrize("heads", SHARES)
def test_the_figures_of_a_head_are_those_of_its_own_attention(heads: str, seen: HeadReads) -> None:
    lab = lossy(by_head("h2o", heads=heads))
    tree = lab.plant(SLOTS)
    (block,) = lab.sprout([(tree.root, 1)], GREEDY, LONG)

    _, weights, read = masked_forward(build("llama"), block, seen, heads_of(lab))
    weights, read = weights[:, : block.end], read[:, : block.end]
    slots = np.concatenate([node.span.slot[node.span.resident] for node in block.path])
    positions, holders = held(lab.memory, block.path)
    view = lab.residency._heads._statistics.makers(slots.astype(np.int64))  # type: ignore[union-attr]
    shape = positions.shape
    # a token counts what read it from when it was written until now
    mass = (weights * read).sum(1)[holders, positions]
    queries = read.sum(1)[holders, positions]
    latest = weights[:, -1][holders, positions]

    assert view["queries"](None).reshape(shape).tolist() == queries.tolist()
    assert view["mass"](None).reshape(shape) == pytest.approx(mass, abs=1e-4)
    assert view["latest"](None).reshape(shape) == pytest.approx(latest, abs=1e-5)
    faded = np.zeros_like(weights[:, 0])
    for query in range(block.end):
        faded = faded * np.where(read[:, query], 1 - 1 / 32, 1) + weights[:, query]
    # the prompt's queries are of one forward, in which all weigh the same
    new = positions >= len(PROMPT)
    lately = faded[holders, positions]
    assert view["lately"](None).reshape(shape)[new] == pytest.approx(lately[new], abs=1e-4)


def test_searches_that_divide_the_room_keep_their_own_heads_tokens() -> None:
    lab = lossy(by_head("h2o", among="fair"))
    first = ThoughtTree(PROMPT)
    second = ThoughtTree(PROMPT[:7])
    lab.open(first, SLOTS, pool=2 * SLOTS)
    lab.open(second, SLOTS, alone=False)
    for tree in (first, second):
        lab.extend(tree.root)
        lab.sprout([(tree.root, 1)], GREEDY, LONG)

    assert lab.memory.used <= 2 * SLOTS
    assert all(any(lab.memory.mixed(node).any() for node in tree) for tree in (first, second))


# What heads give up


@st.composite
def offers(
    draw: st.DrawFn,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Scores by head, protected tokens, sizes of blocks, and how many each loses."""
    sizes = np.array(draw(st.lists(st.integers(2, 9), min_size=1, max_size=5)))
    lose = np.array([draw(st.integers(1, int(size) - 1)) for size in sizes])
    heads, count = draw(st.integers(1, 4)), int(sizes.sum())
    few = draw(st.booleans())
    values = st.integers(0, 2 if few else 1000)
    scores = np.array(draw(st.lists(values, min_size=heads * count, max_size=heads * count)))
    flags = draw(st.lists(st.booleans(), min_size=count, max_size=count))
    dtype = draw(st.sampled_from([np.float32, np.float64]))
    return scores.reshape(heads, count).astype(dtype), np.array(flags), sizes, lose


def moves_in_numpy(
    scores: np.ndarray, protected: np.ndarray, sizes: np.ndarray, lose: np.ndarray
) -> Vacated:
    scorer = HeadScorer(RandomTokens(), lambda tokens: tokens)
    return scorer.moves(scores, protected, sizes, sizes - lose)


@given(offers())
def test_each_head_gives_up_its_lowest_unprotected_tokens(
    offer: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray],
) -> None:
    scores, protected, sizes, lose = offer
    moved = moves_in_numpy(scores, protected, sizes, lose)
    assert (moved.cell == moved.into).all()
    gone = np.tile(moved.leaving, (len(scores), 1))
    gone[moved.cell, moved.source] = False
    gone[moved.into, moved.target] = True
    ends = np.cumsum(sizes)
    for head in range(len(scores)):
        for end, size, count in zip(ends, sizes, lose, strict=True):
            mine = range(end - size, end)
            order = sorted(mine, key=lambda at: (protected[at], scores[head, at], at))
            assert np.flatnonzero(gone[head, end - size : end]).tolist() == sorted(
                at - (end - size) for at in order[:count]
            )


def same_moves(offer: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]) -> bool:
    """Whether the native kernel moves the same as numpy, where it can."""
    moved = head_moves(*offer)
    if moved is None:
        return False
    expected = moves_in_numpy(*offer)
    head, source, target, leaving = moved
    for mine, reference in zip((head, source, head, target, leaving), expected, strict=True):
        assert mine.tolist() == reference.tolist()
    return True


@pytest.mark.parametrize(
    ("sizes", "kind"),
    drawn(
        [[1000], [64], [63, 65], [2, 700, 1, 128, 3]],
        ["uniform", "both signs", "few", "huge", "zeros"],
        count=8,
    ),
)
def test_the_native_kernel_moves_what_numpy_moves_of_long_blocks(
    sizes: list[int], kind: str
) -> None:
    draw = np.random.default_rng(5)
    each = np.array(sizes)
    shape = 6, sum(sizes)
    scores = {
        "uniform": lambda: draw.random(shape),
        "both signs": lambda: draw.standard_normal(shape),
        "few": lambda: draw.integers(-2, 2, shape),
        "huge": lambda: draw.choice([-3.4e38, -1e-45, 1e-45, 3.4e38, 1.0], shape),
        "zeros": lambda: draw.choice([-0.0, 0.0], shape),
    }[kind]().astype(np.float32)
    for share in (0.0, 0.3, 1.0):
        protected = draw.random(shape[1]) < share / 2
        lose = np.maximum(1, (each * share).astype(np.int64))
        offer = scores, protected, each, lose
        assert same_moves(offer) == (native_library() is not None)
        wide = np.concatenate([scores, scores], axis=1)[:, : shape[1]]  # rows further apart
        assert same_moves((wide, *offer[1:])) == (native_library() is not None)


def test_no_other_counts_let_heads_keep_more() -> None:
    """Pooled counts from ranked means are the best of all equal counts per block."""
    draw = np.random.default_rng(3)
    for _ in range(30):
        sizes = draw.integers(1, 5, 3)
        scores = draw.random((3, int(sizes.sum())))
        ends = np.cumsum(sizes)
        sums = [
            np.concatenate(
                [[0], np.cumsum(np.sort(scores[:, end - size : end], 1)[:, ::-1].sum(0))]
            )
            for end, size in zip(ends, sizes, strict=True)
        ]
        room = int(draw.integers(0, sizes.sum() + 1))
        best = max(
            sum(each[k] for each, k in zip(sums, counts, strict=True))
            for counts in np.ndindex(*(sizes + 1))
            if sum(counts) == room
        )
        ranked = ranked_means(scores, scores.mean(0), sizes)
        block = np.repeat(np.arange(len(sizes)), sizes)
        kept = np.bincount(block[np.argsort(-ranked)[:room]], minlength=len(sizes))
        assert sum(each[k] for each, k in zip(sums, kept, strict=True)) == pytest.approx(best)


# Slots


def moves(
    cell: list[int],
    source: np.ndarray,
    target: np.ndarray,
    into: list[int] | None = None,
) -> HeadMoves:
    """Moves between cells; by default each within its own."""
    cells = np.array(cell)
    return HeadMoves(cells, source, cells if into is None else np.array(into), target)


def test_moves_are_checked() -> None:
    lab = lossy(by_head("random"))
    tree = lab.plant(SLOTS)
    slots = tree.root.span.slot
    one = np.array([1])
    for gone, wanted, wrong in (
        (1, moves([0, 0], slots[[1, 1]], slots[[3, 4]]), "holds a token twice"),
        (3, moves([0], slots[[3]], slots[[1]]), "later token"),
        (1, moves([0], slots[[2]], slots[[3]]), "out of a slot that stays"),
        (1, moves([1, 1], slots[[1, 1]], slots[[3, 4]], [1, 2]), "holds a token twice"),
    ):
        lab = lossy(by_head("random"))
        tree = lab.plant(SLOTS)
        with pytest.raises(AssertionError, match=wrong):
            lab.memory.evict_blocks([tree.root], np.array([gone]), one, moves=wanted)


@pytest.mark.parametrize("widths", [(16, 16), (16, 24)], ids=["layers alike", "layers differ"])
def test_a_copy_moves_single_heads_and_nothing_else(widths: tuple[int, int]) -> None:
    layers = [LayerKV(2, width, 8) for width in widths]
    pool = KVPool(layers, 6, torch.float32, torch.device("cpu"))
    table = HeadTable([2, 2], 6)
    for part in (*pool.k, *pool.v):
        part.copy_(torch.randn(part.shape))
    wanted = [part.clone() for part in (*pool.k, *pool.v)]
    cells, source, target = [0, 0, 3], [1, 2, 1], [4, 5, 3]
    for cell, old, new in zip(cells, source, target, strict=True):
        layer, head = divmod(cell, 2)
        for part in (wanted[layer], wanted[2 + layer]):
            part[new, head] = part[old, head]

    pool.copy_heads(moves(cells, np.array(source), np.array(target)), table)()

    for part, right in zip((*pool.k, *pool.v), wanted, strict=True):
        assert torch.equal(part, right)


@pytest.mark.parametrize("where", ["before", "after"])
def test_a_copy_that_fails_leaves_nothing_wrong(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = lossy(by_head("h2o", heads="adaptive"))
    tree = lab.plant(SLOTS)
    copy_heads = KVPool.copy_heads
    calls = 0

    def failing(self: KVPool, *given: Any) -> Any:
        nonlocal calls
        calls += 1
        copy = copy_heads(self, *given)
        if calls < 5:
            return copy
        if where == "before":
            raise torch.OutOfMemoryError("no room for the copy")

        def broken() -> None:
            copy()
            raise ZeroDivisionError

        return broken

    monkeypatch.setattr(KVPool, "copy_heads", failing)
    with pytest.raises((OutOfMemory, ZeroDivisionError)):
        lab.sprout([(tree.root, 1)], GREEDY, LONG)
    lab.memory.rollback()
    lab.memory.check()
    monkeypatch.undo()
    lab.sprout([(tree.root, 1)], GREEDY, LONG)
    assert lab.memory.peak <= SLOTS


# What comes back


@pytest.mark.parametrize(
    ("rehydrate", "stored", "heads"),
    every(2, drawn(["selective", "span"], [False, True], SHARES, count=4)),
)
def test_a_mixed_block_comes_back_whole(rehydrate: Rehydrate, stored: bool, heads: str) -> None:
    lower = LowerRoom(host=200) if stored else LowerRoom()
    lab = lossy(by_head("h2o", heads=heads), rehydrate=rehydrate, lower=lower)
    tree = lab.plant(LONG + len(PROMPT) + 8)
    (first,) = lab.sprout([(tree.root, 1)], GREEDY, LONG)
    (second,) = lab.sprout([(tree.root, 1)], GREEDY, LONG, seed=4)
    assert lab.memory.mixed(first).any()
    lab.extend(first)

    assert not lab.memory.mixed(first).any()
    assert first.span.exact.all() and tree.root.span.exact.all()
    keys = lab.memory.pool.k[-1]
    tokens = [token for node in first.path for token in node.tokens]
    slots = np.concatenate([node.span.slot for node in first.path])
    wanted = path_keys(build("llama"), tokens)
    assert relative_error(keys[torch.from_numpy(slots).long()], wanted) < 1e-4
    assert not second.span.resident.all()


@pytest.mark.parametrize(("rehydrate", "heads"), every(3, drawn(["selective", "span"], SHARES)))
def test_reversible_searches_below_a_path_s_length(rehydrate: Rehydrate, heads: str) -> None:
    lab = lossy(by_head("snapkv", heads=heads), rehydrate=rehydrate)
    tree = lab.plant(2 * SLOTS)
    first, second = lab.sprout([(tree.root, 2)], GREEDY, LONG)
    third, _ = lab.sprout([(second, 1), (first, 1)], GREEDY, LONG)
    lab.ask([third], [(7, 8, 9)])

    peaks = [event.peak for event in lab.events if isinstance(event, Forwarded)]
    assert max(peaks) <= 2 * SLOTS
    assert [len(node.tokens) for node in tree][1:] == [LONG] * 4


# Refused combinations


class OneScore(KVScorer):
    """A user's scorer that knows one score for all heads."""

    def of(self, sequence: KVSequence, layer: int) -> torch.Tensor:
        return -sequence.keys(layer).norm(dim=-1).mean(-1)


def test_policies_that_say_nothing_of_heads_are_refused() -> None:
    for name in ("hierarchy", "thinkv", "thinkv-bits"):
        with pytest.raises(UsageError, match="chooses tokens by their places"):
            dataclasses.replace(POLICIES[name], granularity="head")
    for settings in ({"heads": "adaptive"}, {"among": "fair"}):
        for name in ("ams", "chunkkv", "strata"):
            with pytest.raises(UsageError, match="equally many tokens of each segment"):
                by_head(name, **settings)
    with pytest.raises(UsageError, match="one score"):
        Policy(Pooled(), OneScore(), granularity="head")
    with pytest.raises(UsageError, match="must be token or head"):
        Policy(Pooled(), RandomTokens(), granularity="layer")  # type: ignore[arg-type]
    for name in ("keydiff", "rkv"):
        with pytest.raises(UsageError, match="hold equally many"):
            dataclasses.replace(POLICIES[name], granularity="head", heads="adaptive")
    for settings, wrong in (
        ({"heads": "most"}, "must be equal, adaptive or pyramid"),
        ({"heads": "pyramid", "granularity": "token"}, "Take granularity=head"),
        ({"safeguard": 1.5}, "must be 0 to 1"),
        ({"safeguard": float("nan")}, "must be 0 to 1"),
        ({"beta": 0.5}, "must be 1 or more"),
    ):
        with pytest.raises(UsageError) as refused:
            by_head("h2o", **settings)
        assert wrong in str(refused.value) + str(refused.value.hint)


def test_lossless_and_streamed_searches_are_refused() -> None:
    with pytest.raises(UsageError, match="lossy"):
        Solver(policy="h2o,granularity=head", budget=0.5)
    with pytest.raises(UsageError, match="host memory"):
        Solver(
            policy="h2o,granularity=head",
            mode="lossy",
            budget="100tok",
            host="1MiB",
            staging="32tok",
        )
