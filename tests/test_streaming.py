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
from support.slow_cases import only
from support.trees import (
    GREEDY,
    PROMPT,
    QUESTIONS,
    SAMPLED,
    Lab,
    grown,
    leaves_of,
    own_answers,
    path_ids,
    relative_error,
)
from torch import Tensor

from arbor import Solver
from arbor.controllers.tot import ToT
from arbor.engine.operation import GivenBlock
from arbor.engine.stop_rule import StopRule
from arbor.engine.token_source import Growth
from arbor.errors import BudgetInfeasible, UsageError
from arbor.events import Discarded, Event, Evicted, Forwarded
from arbor.kernels.base import AttentionBackend, AttentionShape
from arbor.kernels.native import native_library
from arbor.kernels.native_cascade import NativeCascade
from arbor.kernels.reference import ReferenceAttention
from arbor.kernels.rowwise import RowwiseAttention
from arbor.kernels.torch_cascade import TorchCascade
from arbor.memory import KVMemory
from arbor.memory.pool import LayerKV
from arbor.memory.staging_buffer import StagingBuffer
from arbor.memory.stores import LowerRoom
from arbor.model.plan import Segment, SegmentTable
from arbor.model.sharing import Piece
from arbor.model.streaming import StreamedAttention, chunks_of
from arbor.retention.allocators.hierarchy import Hierarchy
from arbor.retention.policy import POLICIES, Policy, Protect
from arbor.retention.scorers.random_tokens import RandomTokens
from arbor.retention.trigger import Trigger
from arbor.tasks.base import BlockLimits
from arbor.trace.fold import Replay
from arbor.tree import Node, NodeState, ThoughtTree, Tier

pytestmark = pytest.mark.usefixtures("loaded_once")

CPU = torch.device("cpu")
SHAPE = AttentionShape(4, 2, 16, 16, scaling=0.25)
STAGING = 3
PUZZLE = "4 5 6 10"
BACKENDS = [ReferenceAttention, TorchCascade, RowwiseAttention] + (
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


def test_a_row_is_cut_at_fixed_positions_and_records_go_through_the_buffer() -> None:
    memory = memory_of(13, 8)
    assert memory.slots == 10 and memory.budget == 13
    assert buffer_of(memory).slots.tolist() == [10, 11, 12]
    first = buffer_of(memory).records_from
    assert first == 14, "slot 13 is the trash"
    # positions 0 .. 7: device, record 5, device | record 2, record 0, device | device, own row
    keys = [4, first + 5, 0, first + 2, first + 0, 9, 7, 1]
    assert shown(memory, segment(keys, 1)) == [
        ([0], [[4, 10, 0]], False, [5]),
        ([0], [[11, 10, 9]], False, [0, 2]),
        ([0], [[7, 1]], True, []),
    ]


def test_rows_of_a_segment_within_a_chunk_are_causal_and_those_beyond_read_all_of_it() -> None:
    memory = memory_of(13, 8)
    # 2 keys of context and 3 rows at positions 2, 3 and 4
    assert shown(memory, segment([5, 6, 0, 1, 2], 3)) == [
        ([1, 2], [[5, 6, 0]], False, []),
        ([0], [[5, 6, 0]], True, []),
        ([1, 2], [[1, 2]], True, []),
    ]


def test_rows_with_the_same_keys_are_one_request_and_read_records_once() -> None:
    memory = memory_of(13, 8)
    first = buffer_of(memory).records_from
    shared = [first + 1, 3, first + 7]
    one, other = segment([*shared, 4], 1), segment([*shared, 5], 1)
    assert shown(memory, one, other) == [
        ([0, 1], [[10, 3, 11]], False, [1, 7]),
        ([0, 1], [[4], [5]], True, []),
    ]


def test_what_does_not_fit_into_the_buffer_together_is_read_in_several_calls() -> None:
    memory = memory_of(13, 8)
    first = buffer_of(memory).records_from
    one = segment([first + 1, first + 2, 3, 4], 1)
    other = segment([first + 5, first + 6, 3, 5], 1)
    assert shown(memory, one, other) == [
        ([0], [[10, 11, 3]], False, [1, 2]),
        ([1], [[10, 11, 3]], False, [5, 6]),
        ([0, 1], [[4], [5]], True, []),
    ]


def test_a_window_cuts_each_row_by_itself() -> None:
    memory = memory_of(13, 8)
    assert shown(memory, segment([5, 6, 0, 1, 2], 2), window=2) == [
        ([0], [[0]], False, []),
        ([0, 1], [[1], [1, 2]], True, []),
    ]


def test_the_buffer_holds_no_more_than_it_has_room_for() -> None:
    memory = memory_of(13, 8)
    buffer = buffer_of(memory)
    buffer.load(0, np.arange(3, dtype=np.int32))
    assert buffer.peak == 3
    assert buffer.moved_bytes == 3 * memory.bytes_per_token
    with pytest.raises(AssertionError, match="more KV than its budget"):
        buffer.load(0, np.arange(4, dtype=np.int32))


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


def test_sinks_are_one_more_key_of_all_chunks_together() -> None:
    kv = torch.randn(7, 2, 2, 16, generator=torch.Generator().manual_seed(0))
    memory = memory_of(7 + STAGING, 7)
    pool = memory.pool
    pool.k[0][:7], pool.v[0][:7] = kv[:, 0], kv[:, 1]
    table = SegmentTable.of([segment(range(7), 1)])
    streamed = StreamedAttention(table, buffer_of(memory), ReferenceAttention())
    q, sinks = torch.randn(1, 4, 16), torch.tensor([0.5, -1.0, 2.0, 0.0])
    plain, lse = streamed.run(0, SHAPE, q, (pool.k[0], pool.v[0]), None)
    out, total = streamed.run(0, SHAPE, q, (pool.k[0], pool.v[0]), sinks)
    torch.testing.assert_close(total, torch.logaddexp(lse, sinks.expand(1, 4)))
    torch.testing.assert_close(out, plain * torch.exp(lse - total).unsqueeze(-1))


def test_rows_that_leave_between_layers_change_nothing_for_the_others() -> None:
    kv = torch.randn(9, 2, 2, 16, generator=torch.Generator().manual_seed(0))
    memory = memory_of(9 + STAGING, 9)
    pool = memory.pool
    pool.k[0][:9], pool.v[0][:9] = kv[:, 0], kv[:, 1]
    table = SegmentTable.of([segment(range(5), 3), segment([*range(4), 8], 1)])
    q = torch.randn(4, 4, 16)
    pools = pool.k[0], pool.v[0]
    all_rows = StreamedAttention(table, buffer_of(memory), RowwiseAttention())
    out, lse = all_rows.run(0, SHAPE, q, pools, None)
    some = StreamedAttention(table, buffer_of(memory), RowwiseAttention())
    left = torch.tensor([0, 2, 3])
    some.keep_rows(left)
    fewer, fewer_lse = some.run(0, SHAPE, q[left], pools, None)
    assert torch.equal(fewer, out[left]) and torch.equal(fewer_lse, lse[left])


# Engines


NAMES = (
    "llama",
    "gemma2",
    pytest.param("gpt_oss", marks=pytest.mark.slow),
    pytest.param("deepseek_v3", marks=pytest.mark.slow),
)
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


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("slots", only([16], [12, 16, 25, 60]))
def test_a_path_longer_than_the_budget_reads_like_full_attention(name: str, slots: int) -> None:
    paths, answers = roomy(name)
    lab = lab_of(name)

    tree, got = grown(lab, slots)

    assert [path_ids(leaf) for leaf in leaves_of(tree)] == paths
    assert relative_error(got, answers) < 1e-4
    memory = lab.memory
    assert memory.device_peak <= slots
    if slots < DEEPEST:
        assert memory.device_peak == slots
        assert buffer_of(memory).peak == 4, "the buffer was used, and never exceeded"
        assert max(event.peak for event in lab.events if isinstance(event, Forwarded)) == slots


@pytest.mark.parametrize(
    "policy", ["lru", "reentry", "h2o", "snapkv", "random", "kkt", "streaming"]
)
def test_every_policy_may_choose_what_leaves_the_device(policy: str) -> None:
    paths, answers = roomy("llama")
    lab = lab_of("llama", policy=policy)
    tree, got = grown(lab, 20)
    assert [path_ids(leaf) for leaf in leaves_of(tree)] == paths
    assert relative_error(got, answers) < 1e-4
    assert lab.memory.device_peak <= 20


def test_attention_that_tokens_in_host_memory_receive_is_observed() -> None:
    plain, streamed = Lab(build("llama"), policy="h2o"), lab_of("llama", policy="h2o")
    trees = [grown(lab, slots)[0] for lab, slots in ((plain, 4096), (streamed, 14))]
    for one, other in zip(*trees, strict=True):
        masses = []
        for lab, node in ((plain, one), (streamed, other)):
            rows, offsets = np.array([node.row]), np.arange(len(node.tokens))
            makers = lab.state.statistics.makers(rows, np.array([len(offsets)]), offsets)
            masses.append(makers["mass"](None))  # type: ignore[arg-type]
        np.testing.assert_allclose(*masses, rtol=1e-3, atol=1e-5)
    # some of it was received there
    assert any((node.span.tier == Tier.HOST).any() for node in trees[1])


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


@pytest.mark.slow
@settings(max_examples=25)
@given(
    slots=st.integers(14, 60),
    staging=st.integers(1, 8),
    counts=st.lists(st.integers(1, 30), min_size=1, max_size=5),
)
def test_any_split_computes_all_given_tokens(slots: int, staging: int, counts: list[int]) -> None:
    find_given(slots, staging, [min(count, slots - 8) for count in counts])


def test_blocks_that_waited_and_were_displaced_come_back_as_far_as_there_is_room() -> None:
    paths = []
    for lab, slots in ((Lab(build("llama"), share="off"), 4096), (lab_of("llama"), 28)):
        tree = lab.plant(slots)
        stop = StopRule(Words(), BlockLimits((), 20, 8), ())
        operation = lab.begin_grow([(tree.root, 2)], Growth(3, SAMPLED, stop))
        stepper = lab._parts.stepper
        while len(tree.nodes[-1].tokens) < 13:
            lab.step()
        (queue,) = stepper._schedulers.groups
        while queue.rows:
            stepper._decoding.suspend(queue.preempt())
        for node in tree.nodes[1:]:  # host memory had no room for what waits
            lab.memory.lower.forget(node.span.begin + np.arange(len(node.span)))
        lab.memory.lower.take_moves()
        stepper._changed = True
        while not operation.done:
            lab.step()
        paths.append([path_ids(node) for node in operation.result()])
    assert paths[0] == paths[1]


def test_a_key_that_lies_elsewhere_than_a_row_reads_it_is_found() -> None:
    lab = lab_of("llama")
    tree = lab.plant(60)
    root = tree.root
    slots, places = root.span.slot.copy(), np.arange(len(root.tokens), dtype=np.int32)
    lab.memory.check_reads(slots, places)
    lab.memory.evict(root, np.array([2]))
    with pytest.raises(AssertionError, match="lies elsewhere"):
        lab.memory.check_reads(slots, places)
    lab.memory.check_reads(root.span.address, places)


@pytest.mark.parametrize("seed", range(3))
def test_a_last_token_that_leaves_while_room_is_made_for_it_is_computed_again(seed: int) -> None:
    unprotected = replace(
        POLICIES["random"], scorer=RandomTokens(seed), protect=Protect(sinks=0, recent=0)
    )
    chains = []
    for lab, slots in ((Lab(build("llama")), 4096), (lab_of("llama", policy=unprotected), 13)):
        leaf = lab.plant(slots).root
        for _ in range(4):
            lab.state.logits.clear()  # the path's last token runs again
            (leaf,) = lab.sprout([(leaf, 1)], GREEDY)
        chains.append(path_ids(leaf))
        assert lab.memory.device_peak <= slots
    assert chains[0] == chains[1]


def test_records_of_running_paths_stay_when_host_memory_is_full() -> None:
    memory = KVMemory(
        [LayerKV(1, 2, 2)], 12, torch.float32, CPU, lower=LowerRoom(4, staging=2), debug=True
    )
    tree = ThoughtTree(range(4))
    memory.adopt(tree)

    def place(node: Node) -> None:
        memory.place(node, np.arange(len(node.tokens)), exact=True, depth=1)
        memory.commit()

    place(tree.root)
    child = tree.fork(tree.root)
    for token in range(3):
        tree.append(child, token)
    place(child)
    memory.evict(tree.root, np.arange(3))
    memory.lower.pin([tree.root.row])
    memory.evict(child, np.arange(3))
    assert tree.root.span.attended[:3].all(), "the oldest, and the ones that are read"
    assert np.count_nonzero(child.span.attended) == 1
    assert tree.root.span.ready.all() and not child.span.ready.all()


# Lossy mode: what is left of a path is read wherever it lies


def hierarchy(every: int = 8, ratio: float = 0.3) -> Policy:
    return replace(
        POLICIES["hierarchy"],
        allocator=Hierarchy(ratio, first=2),
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


@pytest.mark.parametrize("slots", [12, 20, 40])
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


def test_the_same_tokens_are_destroyed_at_every_split() -> None:
    found = []
    for slots in (12, 30, 100):
        lab, block = destroying(slots)
        logits = lab.state.logits[block.row]
        found.append((block.tokens, block.span.present.tolist(), logits.tolist()))
    assert all(each == found[0] for each in found[1:]), "to the last bit"


def test_what_is_destroyed_is_reported_by_tier() -> None:
    lab, block = destroying(20)
    discarded = [event for event in lab.events if isinstance(event, Discarded)]
    evicted = [event for event in lab.events if isinstance(event, Evicted)]
    lower = sum(count for event in discarded for _, count in event.nodes)
    stored = sum(count for event in evicted for _, count in event.stored)
    gone = sum(count for event in evicted for _, count in event.nodes)
    assert lower > 0 and gone - stored + lower == int((~block.span.present).sum())


def test_a_policy_that_destroys_nothing_loses_nothing_in_lossy_mode() -> None:
    _, block = destroying(14, policy="lru")
    plain = Lab(build("llama"))
    (want,) = plain.sprout([(plain.plant().root, 1)], GREEDY, 60)
    assert block.tokens == want.tokens
    assert block.span.present.all()


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


@pytest.mark.parametrize(
    "controller", ["chain", pytest.param(ToT(beam=3, width=4), marks=pytest.mark.slow)]
)
def test_every_split_gives_the_same_tree_to_the_last_bit(controller: Any) -> None:
    full, plain = solved("full", controller)
    whole, wanted = solved("full", controller, **THROUGH)
    assert not whole.streamed_bytes
    assert [tokens for tokens, *_ in wanted] == [tokens for tokens, *_ in plain]
    for part in (0.5, 0.25, 0.1):
        slots = max(8, int(part * full.peak_tokens)) + 12
        metrics, tree = solved(f"{slots}tok", controller, **THROUGH)
        assert tree == wanted
        assert metrics.peak_tokens == slots
        assert metrics.streamed_bytes > 0


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


def test_a_path_that_did_not_fit_is_searched_with_a_buffer() -> None:
    with pytest.raises(BudgetInfeasible, match="Smallest workable"):
        Solver(budget="24tok", host="9999tok").plan(PUZZLE)
    plan = Solver(budget="24tok", **THROUGH).plan(PUZZLE)
    assert plan.staging_tokens == 12
    assert plan.enough_tokens <= 24 < plan.prompt_tokens + plan.step_tokens
    with pytest.raises(BudgetInfeasible, match=r"12 staging \+ the newest tokens"):
        Solver(budget="14tok", **THROUGH).plan(PUZZLE)


def test_several_problems_read_through_one_buffer() -> None:
    puzzles = [PUZZLE, "1 3 4 6", "2 3 7 11"]

    def answers(**given: Any) -> list[Any]:
        with Solver(controller="chain", **given) as solver:
            return [
                (each.answer, each.metrics.tokens_generated) for each in solver.solve_batch(puzzles)
            ]

    assert answers(budget="40tok", debug=True, **THROUGH) == answers()


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"staging": "8tok"}, "--host"),
        ({**THROUGH, "mode": "lossy", "rehydrate": "span"}, "with none"),
        ({"staging": "many", "host": "1MiB"}, "tier-size"),
        ({**THROUGH, "disk": "1MiB"}, "Leave out disk"),
        ({**THROUGH, "mode": "lossy", "rehydrate": "selective"}, "with none"),
        ({**THROUGH, "rehydrate": "span"}, "selective"),
        ({**THROUGH, "keep_kv": "kv"}, "or keep_kv"),
        ({**THROUGH, "host_bits": 8, "mode": "lossy", "rehydrate": "selective"}, "with none"),
        ({**THROUGH, "host_bits": 8}, "lossless mode promises exact KV"),
    ],
)
def test_settings_that_contradict_a_buffer_are_refused(given: dict[str, Any], found: str) -> None:
    with pytest.raises(UsageError, match=found):
        Solver(**given)


def test_host_memory_has_room_for_the_longest_path() -> None:
    with pytest.raises(UsageError, match=r"host has room for 20 tokens.*109") as caught:
        Solver(budget="40tok", host="20tok", staging="12tok").plan(PUZZLE)
    assert "host=109tok" in str(caught.value)


def test_the_header_repeats_the_run() -> None:
    heard: list[Any] = []
    with Solver(controller="chain", budget="30tok", listeners=[heard.append], **THROUGH) as solver:
        first = solver.solve(PUZZLE)
    header = heard[0]
    assert header.config["staging"] == "12tok"
    assert header.kv["staging_tokens"] == 12
    with Solver.from_config(header.config) as again:
        assert again.config == header.config
        assert again.solve(PUZZLE).metrics.streamed_bytes == first.metrics.streamed_bytes > 0
