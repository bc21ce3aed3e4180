"""Streaming: attention reads KV in host memory where it lies, through a buffer of fixed size."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from support.masked_reads import masked_logits, recorded
from support.models import Words, build, path_logits
from support.policies import POLICIES
from support.slow_cases import every
from support.trees import (
    GREEDY,
    PROMPT,
    QUESTIONS,
    Lab,
    grown,
    leaves_of,
    own_answers,
    path_ids,
    relative_error,
)
from torch import Tensor

from arbor import Solver
from arbor.engine.operation import GivenBlock, Growth
from arbor.engine.stop_rule import StopRule
from arbor.errors import UsageError
from arbor.events import Event
from arbor.kernels.attention.base import AttentionBackend, AttentionShape
from arbor.kernels.attention.native_cascade import NativeCascade
from arbor.kernels.attention.rowwise import RowwiseAttention
from arbor.kernels.attention.torch_cascade import TorchCascade
from arbor.kernels.native import native_library
from arbor.memory import KVMemory
from arbor.memory.pool import LayerKV
from arbor.memory.staging_buffer import StagingBuffer
from arbor.memory.stores import LowerRoom
from arbor.model.plan import Segment, SegmentTable
from arbor.model.sharing import Piece
from arbor.model.streaming import StreamedAttention, chunks_of
from arbor.retention.policy import Policy, Protect, Trigger
from arbor.tasks.base import BlockLimits
from arbor.trace.fold import Replay
from arbor.tree import Node, NodeState

pytestmark = pytest.mark.usefixtures("loaded_once")

CPU = torch.device("cpu")
SHAPE = AttentionShape(4, 2, 16, 16, scaling=0.25)
STAGING = 3
PUZZLE = "4 5 6 10"
BACKENDS = [RowwiseAttention, TorchCascade] + (
    [NativeCascade] if native_library() is not None else []
)


# Chunks


def memory_of(slots: int, host: int, staging: int = STAGING) -> KVMemory:
    """Memory of one layer whose every number is another one."""
    memory = KVMemory(
        [LayerKV(2, 16, 16)], slots, torch.float32, CPU, lower=LowerRoom(host, staging=staging)
    )
    for place, part in enumerate((*memory.pool.k, *memory.pool.v)):
        part.copy_(torch.randn(part.shape, generator=torch.Generator().manual_seed(place)))
    return memory


def buffer_of(memory: KVMemory) -> StagingBuffer:
    assert memory.staging is not None
    return memory.staging


def segment(keys: Sequence[int], rows: int, positions: Sequence[int] | None = None) -> Segment:
    """Rows after keys at these addresses; the rows' own are the last ones."""
    places = np.arange(len(keys)) if positions is None else np.array(positions)
    split = len(keys) - rows
    own = np.array(keys[split:], np.int32)
    context = np.array(keys[:split], np.int32)
    piece = Piece(0, context, places[:split].astype(np.int32))
    return Segment((piece,) if split else (), [0] * rows, places[split:], own, own)


def shown(memory: KVMemory, *segments: Segment, window: int | None = None) -> list[Any]:
    """The chunks of segments: rows, their keys by request, whether causal, and the records."""
    result = []
    for chunk in chunks_of(SegmentTable.of(segments), buffer_of(memory), window):
        (level,) = chunk.layout.levels
        ends = level.kv_indptr.tolist()
        keys = [level.kv_indices[a:b].tolist() for a, b in pairwise(ends)]
        result.append((chunk.rows.tolist(), keys, level.causal, chunk.records.tolist()))
    return result


def test_rows_with_the_same_keys_are_one_request_and_read_records_once() -> None:
    memory = memory_of(13, 8)
    first = buffer_of(memory).records_from
    shared = [first + 1, 3, first + 7]
    one, other = segment([*shared, 4], 1), segment([*shared, 5], 1)
    assert shown(memory, one, other) == [
        ([0, 1], [[10, 3, 11]], False, [1, 7]),
        ([0, 1], [[4], [5]], True, []),
    ]


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[Segment], int]:
    """Segments of up to 3 rows after paths that begin alike, with gaps; the tokens they read."""
    segments: list[Segment] = []
    tokens = 0
    stem = draw(st.integers(0, 7))
    gaps = draw(st.lists(st.integers(1, 2), min_size=stem, max_size=stem))
    stem_at = np.cumsum([0, *gaps])[:stem] if stem else np.empty(0, np.int64)
    tokens = stem
    for _ in range(draw(st.integers(1, 3))):
        more, rows = draw(st.integers(0, 4)), draw(st.integers(1, 3))
        begin = int(stem_at[-1]) + draw(st.integers(1, 2)) if stem else 0
        own = begin + np.arange(more + rows)
        keys = [*range(stem), *range(tokens, tokens + more + rows)]
        tokens += more + rows
        segments.append(segment(keys, rows, [*stem_at.tolist(), *own.tolist()]))
    return segments, tokens


def placed(segments: Sequence[Segment], where: Sequence[int]) -> list[Segment]:
    """Segments whose keys lie at other addresses."""
    at = np.array(where, np.int32)
    return [
        replace(
            each,
            context=tuple(replace(piece, slots=at[piece.slots]) for piece in each.context),
            tail=at[each.tail],
            write=at[each.write],
        )
        for each in segments
    ]


def attended(
    segments: Sequence[Segment],
    kv: Tensor,
    stored: Sequence[bool],
    shape: AttentionShape,
    backend: AttentionBackend,
    staging: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, log-sum-exp and mass by token, with some tokens in host memory.

    Args:
        segments: name tokens by number.
        kv: [tokens, 2, H, D].
        stored: whether each token is in host memory.
        shape: of the layer.
        backend: computes the chunks.
        staging: tokens of the buffer.
    """
    count = len(kv)
    memory = memory_of(count + staging, count, staging)
    buffer, pool = buffer_of(memory), memory.pool
    pool.k[0].fill_(torch.nan)
    pool.v[0].fill_(torch.nan)
    where = [
        buffer.records_from + token if lower else count - 1 - token
        for token, lower in enumerate(stored)
    ]
    (host,) = memory.lower
    host.store.write(np.arange(count, dtype=np.int32), kv.flatten(1))
    for token, address in enumerate(where):
        if address < count:
            pool.k[0][address], pool.v[0][address] = kv[token]
    streamed = StreamedAttention(SegmentTable.of(placed(segments, where)), buffer, backend)
    rows = sum(each.rows for each in segments)
    q = torch.randn(rows, 4, 16, generator=torch.Generator().manual_seed(1))
    out, lse = streamed.run(0, shape, q, (pool.k[0], pool.v[0]), None)
    mass = streamed.mass(0, shape, q, pool.k[0], lse, None)
    assert buffer.peak <= staging
    return out, lse, mass[torch.tensor(where)]


def reference(
    segments: Sequence[Segment], kv: Tensor, shape: AttentionShape
) -> tuple[Tensor, Tensor, Tensor]:
    """The same by the definition, row by row, every key at once."""
    rows = sum(each.rows for each in segments)
    q = torch.randn(rows, 4, 16, generator=torch.Generator().manual_seed(1))
    out, lse, mass = torch.zeros(rows, 4, 16), torch.zeros(rows, 4), torch.zeros(len(kv))
    row = 0
    for each in segments:
        keys = np.concatenate([*(piece.slots for piece in each.context), each.tail])
        places = np.concatenate([*(piece.positions for piece in each.context), each.positions])
        # a segment's tail is its rows' own keys here
        for position in each.positions.tolist():
            seen = places <= position
            if shape.window is not None:
                seen &= places > position - shape.window
            mine = torch.from_numpy(keys[seen].astype(np.int64))
            for head in range(4):
                k, v = kv[mine, 0, head // 2], kv[mine, 1, head // 2]
                logits = (k @ q[row, head]) * shape.scaling
                lse[row, head] = logits.logsumexp(0)
                weights = (logits - lse[row, head]).exp()
                out[row, head] = weights @ v
                mass[mine] += weights
            row += 1
    return out, lse, mass


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=10)
@given(
    batch=batches(),
    window=st.sampled_from([None, 1, 3, 5]),
    staging=st.integers(1, 6),
    data=st.data(),
)
def test_attention_over_both_tiers_is_attention_over_all_keys(
    backend: type[AttentionBackend],
    batch: tuple[list[Segment], int],
    window: int | None,
    staging: int,
    data: st.DataObject,
) -> None:
    segments, tokens = batch
    shape = replace(SHAPE, window=window)
    kv = torch.randn(tokens, 2, 2, 16, generator=torch.Generator().manual_seed(tokens))
    lists = st.lists(st.booleans(), min_size=tokens, max_size=tokens)
    stored, other = data.draw(lists), data.draw(lists)

    got = attended(segments, kv, stored, shape, backend(), staging)

    for mine, wanted in zip(got, reference(segments, kv, shape), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-5)
    if backend is not TorchCascade:  # its bits depend on where keys lie
        again = attended(segments, kv, other, shape, backend(), staging)
        assert torch.equal(again[0], got[0]) and torch.equal(again[1], got[1])


# Engines


DEEPEST = len(PROMPT) + 3 * 5 + 3  # tokens of the longest path and a question


def lab_of(
    name: str, staging: int = 4, host: int = 200, policy: str | Policy = "lru", **more: Any
) -> Lab:
    room = LowerRoom(host, staging=staging)
    return Lab(build(name), policy=policy, share="off", lower=room, debug=True, **more)


@functools.cache
def roomy(name: str) -> tuple[list[list[int]], Tensor]:
    """The tree of `grown`, as tokens of each path, and its answers, by Hugging Face's forward."""
    lab = Lab(build(name), share="off")
    tree, _ = grown(lab)
    return [path_ids(leaf) for leaf in leaves_of(tree)], own_answers(build(name), tree)


@pytest.mark.slow
@settings(max_examples=25)
@given(
    slots=st.integers(9, 60),
    staging=st.integers(1, 8),
    host=st.integers(DEEPEST + 5, 90),
    policy=st.sampled_from(["lru", "reentry", "h2o"]),
    order=st.permutations(range(6)),
)
def test_any_split_and_any_order_of_visits_gives_the_same(
    slots: int, staging: int, host: int, policy: str, order: list[int]
) -> None:
    paths, answers = roomy("llama")
    lab = lab_of("llama", staging, host, policy)
    tree, _ = grown(lab, slots + staging)
    assert [path_ids(leaf) for leaf in leaves_of(tree)] == paths
    leaves = leaves_of(tree)
    chosen = [leaves[place % len(leaves)] for place in order]
    again = lab.ask(chosen, [QUESTIONS[0]] * len(chosen))
    wanted = torch.stack([answers[len(QUESTIONS) * (place % len(leaves))] for place in order])
    assert relative_error(again, wanted) < 1e-4
    assert lab.memory.device_peak <= slots + staging


class Split(RuleBasedStateMachine):
    """Blocks grow, answer, lose tokens to host memory and are given up; every answer is that of
    full attention over the path, and the budget holds at every instant."""

    @initialize(
        slots=st.integers(9, 40),
        staging=st.integers(1, 6),
        host=st.integers(40, 80),
        policy=st.sampled_from(["lru", "reentry", "h2o"]),
    )
    def begin(self, slots: int, staging: int, host: int, policy: str) -> None:
        self.budget = slots + staging
        self.lab = lab_of("llama", staging, host, policy)
        self.tree = self.lab.plant(self.budget)
        self.model = build("llama")

    def alive(self) -> list[Node]:
        return [node for node in self.tree if node.state is not NodeState.PRUNED]

    @precondition(lambda self: len(self.alive()) < 8)
    @rule(data=st.data(), width=st.integers(1, 3), length=st.integers(1, 6))
    def grow(self, data: st.DataObject, width: int, length: int) -> None:
        leaf = data.draw(st.sampled_from([node for node in self.alive() if node.end < 30]))
        self.lab.sprout([(leaf, width)], length=length, seed=len(self.tree.nodes))

    @rule(data=st.data())
    def ask(self, data: st.DataObject) -> None:
        nodes = data.draw(st.lists(st.sampled_from(self.alive()), min_size=1, max_size=3))
        answers = self.lab.ask(nodes, [(7, 8, 9)] * len(nodes))
        for node, answer in zip(nodes, answers, strict=True):
            want = path_logits(self.model, [*path_ids(node), 7, 8, 9])[-1]
            assert relative_error(answer, want) < 1e-4

    @rule(data=st.data())
    def demote(self, data: st.DataObject) -> None:
        node = data.draw(st.sampled_from(self.alive()))
        here = np.flatnonzero(node.span.resident).tolist()
        some = data.draw(st.lists(st.sampled_from(here), unique=True)) if here else []
        self.lab.memory.evict(node, np.array(sorted(some), np.int64))
        self.lab.state.changed([node])
        self.lab.memory.lower.take_moves()

    @precondition(lambda self: len(self.alive()) > 2)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        ends = [node for node in self.alive() if not any(c in self.alive() for c in node.children)]
        node = data.draw(st.sampled_from([node for node in ends if node.parent is not None]))
        node.state = NodeState.PRUNED
        self.lab.forget([node])

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "lab"):
            self.lab.memory.check()
            assert self.lab.memory.device_peak <= self.budget
            assert buffer_of(self.lab.memory).peak <= buffer_of(self.lab.memory).tokens


TestSplit = pytest.mark.slow(Split.TestCase)
TestSplit.settings = settings(max_examples=15, stateful_step_count=20, deadline=None)


def test_a_forward_that_fails_leaves_everything_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Lab(build("llama"))
    (wanted,) = plain.sprout([(plain.plant().root, 1)], GREEDY)
    lab = lab_of("llama")
    tree = lab.plant(16)
    calls: list[int] = []
    right = StagingBuffer.load

    def load(self: StagingBuffer, layer: int, records: Any, **kind: bool) -> None:
        calls.append(layer)
        if len(calls) % 7 == 3:
            raise RuntimeError("a copy has failed")
        right(self, layer, records, **kind)

    with monkeypatch.context() as patched:
        patched.setattr(StagingBuffer, "load", load)
        with pytest.raises(RuntimeError, match="a copy has failed"):
            lab.sprout([(tree.root, 3)])
    lab.memory.check()
    assert not lab.memory.pending
    (child,) = lab.sprout([(tree.root, 1)], GREEDY)
    assert child.tokens == wanted.tokens


def given_blocks(lab: Lab, slots: int, counts: Sequence[int]) -> tuple[list[Node], Tensor]:
    """Blocks whose first tokens are given, so many each, and their answers to a question."""
    tree = lab.plant(slots)
    growths = [
        Growth(3, GREEDY, StopRule(Words(), BlockLimits((), count + 4, 8), ())) for count in counts
    ]
    blocks = [
        GivenBlock(tree.root, [20 + (place + at) % 60 for at in range(count)], growth)
        for place, (count, growth) in enumerate(zip(counts, growths, strict=True))
    ]
    operation = lab.begin_given(blocks)
    while not operation.done:
        lab.step()
    nodes = operation.result()
    return nodes, lab.ask(nodes, [QUESTIONS[0]] * len(nodes))


@functools.cache
def given_in_full(counts: tuple[int, ...]) -> tuple[list[list[int]], Tensor]:
    nodes, answers = given_blocks(Lab(build("llama"), share="off"), 4096, counts)
    return [node.tokens for node in nodes], answers


def find_given(slots: int, staging: int, counts: Sequence[int]) -> None:
    lab = lab_of("llama", staging)
    nodes, answers = given_blocks(lab, slots + staging, counts)
    tokens, wanted = given_in_full(tuple(counts))
    assert [node.tokens for node in nodes] == tokens
    assert relative_error(answers, wanted) < 1e-4
    assert lab.memory.device_peak <= slots + staging


@pytest.mark.parametrize(
    "counts",
    [
        pytest.param((10, 10, 10), id="more together than the device holds"),
        pytest.param((9, 9, 15), id="the last one in parts"),
        pytest.param((16, 5), id="more in one than a forward computes"),
    ],
)
def test_given_tokens_are_all_computed_before_a_block_goes_on(counts: tuple[int, ...]) -> None:
    find_given(24, 16, counts)


# Lossy mode: what is left of a path is read wherever it lies


def hierarchy(every: int = 8, ratio: float = 0.3) -> Policy:
    return replace(
        policy := POLICIES["hierarchy"],
        allocator=replace(policy.allocator, ratio=ratio, first=2),
        protect=Protect(recent=6, prompt=True),
        trigger=Trigger(every=every),
    )


def destroying(slots: int, staging: int = 4, **given: Any) -> tuple[Lab, Node]:
    """A lab in lossy mode, and a block of 60 tokens that it has decoded."""
    room = LowerRoom(200, staging=staging, inexact=True)
    more: dict[str, Any] = {"policy": hierarchy(), "backend": RowwiseAttention()} | given
    lab = Lab(
        build("llama"),
        mode="lossy",
        rehydrate="off",
        share="off",
        lower=room,
        debug=True,
        **more,
    )
    tree = lab.plant(slots)
    (block,) = lab.sprout([(tree.root, 1)], GREEDY, 60)
    return lab, block


@pytest.mark.parametrize("slots", every(3, [12, 20, 40]))
def test_a_token_reads_what_was_not_destroyed_wherever_it_lies(
    slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = recorded(monkeypatch)
    lab, block = destroying(slots)

    want = masked_logits(build("llama"), block, seen, None)
    assert want[len(PROMPT) - 1 : -1].argmax(-1).tolist() == block.tokens
    assert relative_error(lab.state.logits[block.row], want[-1]) < 1e-4
    gone = ~block.span.present
    assert 0 < gone.sum() <= 0.3 * (60 - 8)
    assert block.span.attended.any() and lab.memory.device_peak == slots
    assert not block.span.exact[int(np.flatnonzero(gone)[0]) + 20 :].any()


def test_a_part_of_the_budget_stays_free_though_the_policy_destroys_tokens() -> None:
    early = replace(hierarchy(), trigger=Trigger(every=8, above=0.5))
    (plain, found), (lab, block) = destroying(40), destroying(40, policy=early)

    assert block.tokens == found.tokens
    assert (block.span.present == found.span.present).all()
    assert plain.memory.device_peak == 40
    assert lab.memory.device_peak <= 20 + 8 + 4, "the tokens of 8 steps, and the buffer"


# Searches


def solved(budget: Any, controller: Any = "chain", **given: Any) -> tuple[Any, list[Any]]:
    """Metrics of a search, and every block of its tree with its numbers, to the last bit."""
    heard: list[Event] = []
    with Solver(
        controller=controller, budget=budget, deterministic=True, listeners=[heard.append], **given
    ) as solver:
        metrics = solver.solve(PUZZLE).metrics
        replay = Replay()
        for event in heard:
            replay(event)
        assert replay.problems == []
        tree = solver.engine.tree
        return metrics, [(tuple(n.tokens), n.value, n.logprob, n.confidence, n.top1) for n in tree]


THROUGH = {"host": "9999tok", "staging": "12tok", "fetch": "always"}


def test_every_split_gives_the_same_tree_where_a_part_is_destroyed() -> None:
    policy = "hierarchy,ratio=0.3,every=4,recent=4,first=2"
    lossy: dict[str, Any] = {"mode": "lossy", "policy": policy}
    plain, wanted = solved("full", **lossy)
    assert plain.evicted_tokens > 0
    trees = []
    for budget in ("full", "40tok", "24tok"):
        metrics, tree = solved(budget, **lossy, **THROUGH)
        trees.append(tree)
        gone = metrics.evicted_tokens - metrics.tokens_stored + metrics.tokens_discarded
        assert gone == plain.evicted_tokens
    assert trees[1] == trees[0] == trees[2]
    assert [tokens for tokens, *_ in trees[0]] == [tokens for tokens, *_ in wanted]


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"staging": "8tok"}, "Give host too"),
        ({**THROUGH, "mode": "lossy", "rehydrate": "span"}, "with none"),
        ({"staging": "many", "host": "1MiB"}, "tier-size"),
        ({**THROUGH, "disk": "1MiB"}, "Leave out disk"),
        ({**THROUGH, "mode": "lossy", "rehydrate": "selective"}, "with none"),
        ({**THROUGH, "rehydrate": "span"}, "selective"),
        ({**THROUGH, "keep_kv": "kv"}, "or keep_kv"),
        ({**THROUGH, "mode": "lossy", "share": "similar"}, "as share=similar asks"),
        ({**THROUGH, "host_bits": 8, "mode": "lossy", "rehydrate": "selective"}, "with none"),
        ({**THROUGH, "host_bits": 8}, "lossless mode promises exact KV"),
    ],
)
def test_settings_that_contradict_a_buffer_are_refused(given: dict[str, Any], found: str) -> None:
    with pytest.raises(UsageError, match=found):
        Solver(**given)
