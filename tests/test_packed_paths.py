"""The compressed tier inside a path (T2): attention reads KV in few bits where it lies, decoded in
the staging buffer, and no token is quantised twice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models import build
from support.policies import POLICIES
from support.trees import GREEDY, Lab
from torch import Tensor

from arbor import Solver
from arbor.errors import UsageError
from arbor.events import Event
from arbor.kernels.attention.base import AttentionShape
from arbor.kernels.attention.rowwise import RowwiseAttention
from arbor.memory import KVMemory
from arbor.memory.packed_store import PackedStore
from arbor.memory.pool import LayerKV
from arbor.memory.stores import HostStore, LowerRoom
from arbor.model.plan import Segment, SegmentTable
from arbor.model.sharing import Piece
from arbor.model.streaming import StreamedAttention
from arbor.retention.policy import Policy, Protect, Trigger
from arbor.support.packed_size import BITS, GROUP
from arbor.trace.fold import Replay
from arbor.tree import NO_RECORD, NO_SLOT, Node, ThoughtTree, Tier

pytestmark = pytest.mark.usefixtures("loaded_once")

CPU = torch.device("cpu")
SHAPE = AttentionShape(4, 2, 16, 16, scaling=0.25)
TOGETHER = 4  # tokens that are packed together
PUZZLE = "4 5 6 10"


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PackedStore, "group", TOGETHER)


# By the definition, without the store's code


def grid(x: Tensor, dim: int, bits: int) -> Tensor:
    """Numbers on a grid of 2 ** bits values from the least to the largest along a dimension; both
    ends of the grid in half precision, rounded outwards."""
    values = x.double().numpy()
    least, most = values.min(dim, keepdims=True), values.max(dim, keepdims=True)
    low = least.astype(np.float16)
    low = np.where(low.astype(float) > least, np.nextafter(low, np.float16(-np.inf)), low)
    wanted = ((most - low.astype(float)).astype(np.float32) / (2**bits - 1)).astype(np.float32)
    step = wanted.astype(np.float16)
    step = np.where(step.astype(np.float32) < wanted, np.nextafter(step, np.float16(np.inf)), step)
    low, step = low.astype(float), step.astype(float)
    codes = np.rint((values - low) / np.where(step == 0, 1, step))
    return torch.from_numpy(low + step * codes).to(x.dtype)


def packed_rows(rows: Tensor, keys: int, bits: int) -> Tensor:
    """Rows of whole groups as they are read back: K on a grid per channel of a group of tokens, V
    on one for each 32 channels of a token."""
    result = rows.clone()
    for first in range(0, len(rows), TOGETHER):
        group = slice(first, first + TOGETHER)
        result[group, :keys] = grid(rows[group, :keys], 0, bits)
    for channel in range(keys, rows.shape[1], GROUP):
        part = slice(channel, min(channel + GROUP, rows.shape[1]))
        result[:, part] = grid(rows[:, part], 1, bits)
    return result


# Attention


def memory_of(layers: int, slots: int, host: int, bits: int, staging: int = 3) -> KVMemory:
    room = LowerRoom(host, host_bits=bits, staging=staging, inexact=True)
    return KVMemory(
        [LayerKV(2, 16, 16)] * layers, slots, torch.float32, CPU, lower=room, debug=True
    )


def stores_of(memory: KVMemory) -> tuple[HostStore, PackedStore]:
    first, second = (shelf.store for shelf in memory.lower)
    assert isinstance(first, HostStore) and isinstance(second, PackedStore)
    return first, second


def attention_by_definition(q: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
    """One row over all keys at once: out [H, D] and log-sum-exp [H]; kv [n, 2, H_kv, D]."""
    k, v = (kv[:, part].repeat_interleave(2, dim=1).double() for part in (0, 1))
    scores = torch.einsum("hd,nhd->hn", q.double(), k) * SHAPE.scaling
    lse = scores.logsumexp(1)
    return torch.einsum("hn,nhd->hd", (scores - lse[:, None]).exp(), v), lse


@pytest.mark.parametrize("bits", BITS)
@settings(max_examples=25)
@given(
    tiers=st.lists(st.sampled_from([0, 1, 2]), min_size=1, max_size=24),
    staging=st.integers(1, 9),
    layer=st.integers(0, 1),
    data=st.data(),
)
def test_attention_over_all_tiers_is_attention_over_the_packed_numbers_at_once(
    bits: int, tiers: list[int], staging: int, layer: int, data: st.DataObject
) -> None:
    count = len(tiers)
    memory = memory_of(2, count + staging, 32, bits, staging)
    assert memory.staging is not None
    host, store = stores_of(memory)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    rows = torch.randn(count, memory.pool.numbers, generator=generator)
    rows[:, 3] *= 30  # a large channel of K
    where = np.array(tiers)
    slots = np.arange(count, dtype=np.int32)[::-1]
    device, exact, packed = (np.flatnonzero(where == tier) for tier in range(3))
    memory.pool.scatter(slots[device].copy(), rows[torch.from_numpy(device)])
    host.write(np.arange(len(exact), dtype=np.int32), rows[torch.from_numpy(exact)])
    for place, token in enumerate(packed):  # one by one, as they might come
        store.write(np.array([place], np.int32), rows[token : token + 1])
    whole = packed[: len(packed) // TOGETHER * TOGETHER]  # the others wait, exact
    read = rows.clone()
    keys = 2 * 2 * 16
    if len(whole):
        at = torch.from_numpy(whole)
        read[at] = packed_rows(rows[at], keys, bits)
        assert not torch.equal(read, rows)

    address = slots.copy()
    address[exact] = memory.staging.firsts[Tier.HOST] + np.arange(len(exact))
    address[packed] = memory.staging.firsts[Tier.COMPRESSED] + np.arange(len(packed))
    own, places = address[-1:], np.arange(count)
    context = Piece(0, address[:-1], places[:-1].astype(np.int32))
    segment = Segment((context,) if count > 1 else (), [0], places[-1:], own, own)
    streamed = StreamedAttention(SegmentTable.of([segment]), memory.staging, RowwiseAttention())
    q = torch.randn(1, 4, 16, generator=generator)
    pools = memory.pool.k[layer], memory.pool.v[layer]
    out, lse = streamed.run(layer, SHAPE, q, pools, None)

    columns = memory.pool.columns(layer)
    kv = torch.stack([read[:, each].unflatten(1, (2, 16)) for each in columns], dim=1)
    want, want_lse = attention_by_definition(q[0], kv)
    torch.testing.assert_close(out[0].double(), want, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(lse[0].double(), want_lse, rtol=1e-4, atol=1e-4)
    assert memory.staging.peak <= staging


@pytest.mark.parametrize("bits", BITS)
def test_the_bytes_copied_are_those_of_codes_and_scales(bits: int) -> None:
    memory = memory_of(2, 20, 16, bits, staging=8)
    buffer = memory.staging
    assert buffer is not None
    _, store = stores_of(memory)
    rows = torch.randn(10, memory.pool.numbers)
    store.write(np.arange(10, dtype=np.int32), rows)
    first = 16  # after the exact records
    buffer.load(1, np.arange(first, first + 6, dtype=np.int32))
    codes = 6 * 64 * bits // 8  # K and V of a layer: 32 numbers each
    scales = 2 * (2 * 2 * 32 + 2 * 6)  # float16: K of two groups by channel, V of six tokens
    assert buffer.moved_bytes == codes + scales
    # the two that wait are exact, and counted so
    buffer.load(1, np.arange(first + 8, first + 10, dtype=np.int32))
    assert buffer.moved_bytes == codes + scales + 2 * 64 * 4
    pool = memory.pool
    got = pool.gather(buffer.slots[:2])
    for columns in pool.columns(1):
        assert torch.equal(got[:, columns], rows[8:10, columns])


# Tiers


class Ledger:
    """The numbers of every token of a tree, as they may be read.

    A token is exact until it is read rounded; from then on it has the same bits for ever.
    """

    def __init__(self, memory: KVMemory, bits: int) -> None:
        self.memory = memory
        self.bits = bits
        self.exact: dict[tuple[int, int], Tensor] = {}
        self.rounded: dict[tuple[int, int], Tensor] = {}

    def check(self, nodes: Sequence[Node]) -> None:
        memory = self.memory
        host, store = stores_of(memory)
        memory.check()
        assert memory.device_peak <= memory.budget
        for node in nodes:
            span = node.span
            assert (span.present == ((span.slot != NO_SLOT) ^ (span.record != NO_RECORD))).all()
            for offset in np.flatnonzero(span.present).tolist():
                record = span.record[[offset]]
                if span.slot[offset] != NO_SLOT:
                    row = memory.pool.gather(span.slot[[offset]])[0]
                elif span.tier[offset] == Tier.HOST:
                    row = host.read(record, CPU)[0][0]
                else:
                    rows, intact = store.read(record, CPU)
                    assert intact.all()
                    row = rows[0]
                key = node.id, offset
                if key in self.rounded:
                    assert torch.equal(row, self.rounded[key]), "a token was quantised twice"
                elif not torch.equal(row, self.exact[key]):
                    assert span.tier[offset] == Tier.COMPRESSED, "rounded without being packed"
                    self.rounded[key] = row


@settings(max_examples=40)
@given(bits=st.sampled_from(BITS), data=st.data())
def test_any_assignment_keeps_a_partition_and_quantises_once(
    bits: int, data: st.DataObject
) -> None:
    memory = memory_of(1, 24, 24, bits)
    tree = ThoughtTree(range(9))
    memory.adopt(tree)
    child = tree.fork(tree.root)
    for token in range(8):
        tree.append(child, token)
    nodes = [tree.root, child]
    ledger = Ledger(memory, bits)
    for node in nodes:
        offsets = np.arange(len(node.tokens))
        rows = torch.randn(len(offsets), memory.pool.numbers)
        memory.receive(node, offsets, rows, depth=1)
        ledger.exact.update({(node.id, at): rows[at] for at in offsets.tolist()})
    promoted = 0
    for _ in range(data.draw(st.integers(1, 14))):
        node = data.draw(st.sampled_from(nodes))
        span = node.span
        change = data.draw(st.sampled_from(["pack", "pack", "demote", "promote", "evict_for_good"]))
        where = span.slot != NO_SLOT if change == "demote" else span.present
        if change == "promote":
            at = node.span.begin + np.arange(len(span))
            where = span.attended & memory.lower.may_rise(at)
        able = np.flatnonzero(where).tolist()
        some = data.draw(st.lists(st.sampled_from(able), unique=True)) if able else []
        some_at = np.array(sorted(some[: memory.free] if change == "promote" else some), np.int64)
        before = span.present.copy()
        if change == "pack":
            memory.pack([node], [some_at])
            assert memory.is_packed(node.span.begin + some_at).all(), "there was room"
        elif change == "demote":
            memory.evict(node, some_at)
        elif change == "promote" and len(some_at):
            packed = memory.is_packed(node.span.begin + some_at)
            assert memory.fetch({node: some_at}) == {node: len(some_at)}
            assert (span.slot[some_at] != NO_SLOT).all()
            assert (span.origin[some_at] != NO_RECORD).tolist() == packed.tolist()
            promoted += len(some_at)
        elif change == "evict_for_good":
            memory.evict_for_good([node], [some_at])
            before[some_at] = False
        assert (span.present == before).all(), "a token was lost, or came back"
        memory.lower.take_moves()
        ledger.check(nodes)


def test_what_full_precision_has_no_room_for_is_packed_and_what_is_packed_never_lost() -> None:
    memory = KVMemory(
        [LayerKV(2, 16, 16)],
        24,
        torch.float32,
        CPU,
        lower=LowerRoom(8, host_bits=8, staging=3, inexact=True),
        debug=True,
    )
    tree = ThoughtTree(range(6))
    memory.adopt(tree)
    children = [tree.fork(tree.root) for _ in range(2)]
    for child in children:
        for token in range(6):
            tree.append(child, token)
    for node in (tree.root, *children):
        offsets = np.arange(6)
        memory.receive(node, offsets, torch.randn(6, memory.pool.numbers), depth=1)
    memory.evict(children[0], np.arange(6))
    memory.lower.pin([tree.root.row, children[1].row])
    memory.evict(children[1], np.arange(6))
    assert (children[1].span.tier == Tier.HOST).all(), "a running path stays exact"
    assert np.count_nonzero(children[0].span.tier == Tier.COMPRESSED) == 4
    assert children[0].span.present.all(), "the oldest went down, and is still read"


# Engines


def hierarchy(packed: float, ratio: float = 0.0, every: int = 8, **protect: Any) -> Policy:
    return replace(
        policy := POLICIES["hierarchy"],
        allocator=replace(policy.allocator, ratio=ratio, first=2, packed=packed),
        protect=Protect(**({"recent": 6, "prompt": True} | protect)),
        trigger=Trigger(every=every),
    )


def decoded(
    slots: int, bits: int = 8, packed: float = 0.6, staging: int = 4, **given: Any
) -> tuple[Lab, Node]:
    """A lab in lossy mode, and a block of 60 tokens that it has decoded."""
    more: dict[str, Any] = {"policy": hierarchy(packed), "backend": RowwiseAttention()} | given
    lab = Lab(
        build("llama"),
        mode="lossy",
        rehydrate="off",
        share="off",
        lower=LowerRoom(100, host_bits=bits, staging=staging, inexact=True),
        debug=True,
        **more,
    )
    tree = lab.plant(slots)
    (block,) = lab.sprout([(tree.root, 1)], GREEDY, 60)
    return lab, block


# Searches


def solved(budget: Any, **given: Any) -> tuple[Any, list[Any]]:
    """Metrics of a search, and every block of its tree with its numbers, to the last bit."""
    heard: list[Event] = []
    settings: dict[str, Any] = {
        "controller": "chain",
        "mode": "lossy",
        "host": "999tok",
        "host_bits": 8,
        "staging": "12tok",
        "fetch": "always",
        "policy": "hierarchy,ratio=0.1,every=4,recent=4,first=2,packed=0.5",
    }
    with Solver(
        budget=budget, deterministic=True, listeners=[heard.append], **(settings | given)
    ) as solver:
        metrics = solver.solve(PUZZLE).metrics
        replay = Replay()
        for event in heard:
            replay(event)
        assert replay.problems == []
        return metrics, [(tuple(n.tokens), n.value, n.logprob) for n in solver.engine.tree]


def test_a_search_has_the_same_bits_at_every_split_with_a_packed_tier() -> None:
    found = []
    for budget in ("full", "40tok", "24tok"):
        metrics, tree = solved(budget)
        found.append(tree)
        assert metrics.peak_tokens <= metrics.budget_tokens
        assert metrics.peak_compressed_tokens > 0
    assert found[1] == found[0] == found[2]


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"mode": "lossless", "policy": "lru"}, "lossless mode promises exact KV"),
        ({"mode": "lossless"}, "lossless mode promises exact KV"),
        ({"staging": None}, "never comes back"),
        ({"host_bits": None}, "packs tokens"),
        ({"policy": "hierarchy,packed=2"}, "packed=2"),
    ],
)
def test_settings_that_contradict_a_packed_tier_are_refused(
    given: dict[str, Any], found: str
) -> None:
    with pytest.raises(UsageError, match=found):
        solved("full", **given)
