"""KV packed in few bits: quantised once, accounted for as rounded, and only in lossy mode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from arbor import Solver
from arbor.controllers.tot import ToT
from arbor.events import Event, Header
from arbor.memory import KVMemory
from arbor.memory.packed_store import PackedStore
from arbor.memory.pool import LayerKV
from arbor.memory.records import GroupedRecords, Tokens
from arbor.memory.stores import LowerRoom
from arbor.support.packed_size import GROUP, packed_tokens
from arbor.trace import read_trace
from arbor.trace.fold import Replay
from arbor.tree import NO_RECORD, Node, ThoughtTree, Tier

pytestmark = pytest.mark.usefixtures("loaded_once")

CPU = torch.device("cpu")
LAYERS = [LayerKV(1, 32, 16), LayerKV(2, 16, 24)]
KEYS, VALUES = 64, 64
NUMBERS = KEYS + VALUES
BITS = (8, 4)
PUZZLE = "4 5 6 10"
SMALL = ToT(beam=3, width=4)
REVERSIBLE: dict[str, Any] = {"mode": "lossy", "rehydrate": "selective"}
OUT_OF_MEMORY = "DefaultCPUAllocator: can't allocate memory"


def store_of(records: int, bits: int = 8, dtype: torch.dtype = torch.float32) -> PackedStore:
    return PackedStore(records, KEYS, NUMBERS, dtype, bits)


def random_rows(count: int, seed: int = 0) -> torch.Tensor:
    """K with a few large channels, as models have them, and V."""
    rows = torch.randn(count, NUMBERS, generator=torch.Generator().manual_seed(seed))
    rows[:, 3] += 40
    rows[:, 17] *= 25
    return rows


def some_tokens(count: int, row: int = 0) -> Tokens:
    return Tokens(np.full(count, row), np.arange(count), np.full(count, 2))


def numbers(first: int, end: int) -> Any:
    return np.arange(first, end, dtype=np.int32)


# The store


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_k_is_rounded_by_channel_and_v_by_token(bits: int, dtype: torch.dtype) -> None:
    rows = random_rows(GROUP).to(dtype)
    store = store_of(2 * GROUP, bits, dtype)
    store.write(numbers(0, GROUP), rows)
    got, intact = store.read(numbers(0, GROUP), CPU)
    assert intact.all() and got.dtype == dtype

    most = 2**bits - 1
    keys, values = rows[:, :KEYS].float(), rows[:, KEYS:].float().unflatten(1, (-1, GROUP))
    spacing = torch.finfo(dtype).eps
    by_channel = (keys.amax(0) - keys.amin(0)) / most
    by_token = (values.amax(2) - values.amin(2)) / most
    off = (got.float() - rows.float()).abs()
    slack = rows.float().abs().amax() * (2e-3 / most + spacing)
    assert (off[:, :KEYS] <= 0.51 * by_channel + slack).all()
    assert (off[:, KEYS:].unflatten(1, (-1, GROUP)) <= 0.51 * by_token.unsqueeze(2) + slack).all()
    assert off.max() > 0


def test_numbers_beyond_float16_become_its_largest() -> None:
    rows = random_rows(GROUP).to(torch.bfloat16)
    rows[5, KEYS + 2], rows[7, 1] = -7e4, 1e30
    store = store_of(2 * GROUP, 8, torch.bfloat16)
    store.write(numbers(0, GROUP), rows)

    got, intact = store.read(numbers(0, GROUP), CPU)

    assert intact.all() and got.isfinite().all()
    assert got[5, KEYS + 2] < -6e4 and got[7, 1] > 6e4


def test_channels_of_v_that_fill_no_group_have_a_scale_of_their_own() -> None:
    rows = random_rows(GROUP)[:, : KEYS + GROUP + GROUP // 4]
    rows[:, -GROUP // 4 :] *= 0.01
    store = PackedStore(2 * GROUP, KEYS, rows.shape[1], rows.dtype, 8)
    store.write(numbers(0, GROUP), rows)
    got, intact = store.read(numbers(0, GROUP), CPU)
    assert intact.all()
    last = slice(KEYS + GROUP, None)
    assert (got - rows)[:, last].abs().max() < rows[:, last].abs().max() / 100


def test_tokens_wait_in_full_precision_until_their_group_is_there() -> None:
    rows = random_rows(GROUP + 3)
    store = store_of(3 * GROUP, 2)
    for first in range(0, GROUP - 1):
        store.write(numbers(first, first + 1), rows[first : first + 1])
    got, intact = store.read(numbers(0, GROUP - 1), CPU)
    assert intact.all() and torch.equal(got, rows[: GROUP - 1])

    store.write(numbers(GROUP - 1, GROUP + 3), rows[GROUP - 1 :])
    got, intact = store.read(numbers(0, GROUP + 3), CPU)
    assert intact.all()
    assert not torch.equal(got[:GROUP], rows[:GROUP])
    assert torch.equal(got[GROUP:], rows[GROUP:])
    again = store_of(GROUP, 2)
    again.write(numbers(0, GROUP), rows[:GROUP])
    assert torch.equal(again.read(numbers(0, GROUP), CPU)[0], got[:GROUP]), "in one write or many"


def test_a_group_that_could_not_be_quantised_is_not_stored_and_then_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = random_rows(3 * GROUP)
    store = store_of(3 * GROUP)
    store.write(numbers(0, 4), rows[:4])

    def fail(*args: Any) -> None:
        raise RuntimeError(OUT_OF_MEMORY)

    with monkeypatch.context() as patched:
        patched.setattr(store, "_quantise", fail)
        assert not store.write(numbers(4, GROUP), rows[4:GROUP]).any()
    got, intact = store.read(numbers(0, 4), CPU)
    assert intact.all() and torch.equal(got, rows[:4]), "they still wait"
    assert store.write(numbers(GROUP, 2 * GROUP), rows[GROUP : 2 * GROUP]).all()
    assert not store.read(numbers(0, 4), CPU)[1].any()
    assert store.read(numbers(GROUP, 2 * GROUP), CPU)[1].all()


@given(
    st.integers(1, 20),
    st.lists(st.tuples(st.integers(1, 7), st.lists(st.integers(0, 30), max_size=8)), max_size=25),
)
def test_records_are_free_as_a_whole_group(size: int, history: list[tuple[int, list[int]]]) -> None:
    table = GroupedRecords(size, 4)
    held: list[int] = []
    for count, released in history:
        count = min(count, table.free)
        records = table.take(some_tokens(count)).tolist()
        assert not set(records) & set(held) and records == list(dict.fromkeys(records))
        for group in {record // 4 for record in records}:
            mine = [record for record in records if record // 4 == group]
            assert mine == list(range(mine[0], mine[0] + len(mine)))
            before = [record for record in held if record // 4 == group]
            assert not before or max(before) < mine[0]
            assert before or table._written[mine[0]]
        held += records
        gone = list({held[place % len(held)] for place in released}) if held else []
        held = [record for record in held if record not in gone]
        table.release(np.array(gone, np.int32))
        assert table.used == len(held)
        assert sorted(np.flatnonzero(table.in_use).tolist()) == sorted(held)
        busy = {record // 4 for record in held}
        whole = sum(min(4, size - 4 * group) for group in range(-(-size // 4)) if group not in busy)
        assert whole <= table.free <= size - len(held)


def test_the_oldest_groups_go_whole_and_none_that_is_spared_or_lent() -> None:
    table = GroupedRecords(16, 4)
    for row in range(4):
        table.take(some_tokens(4, row))
    none = np.empty(0, np.int32)
    assert table.oldest(1, none).tolist() == [0, 1, 2, 3]
    assert table.oldest(5, none).tolist() == list(range(8))
    assert table.oldest(99, none).tolist() == list(range(16))
    table.lent[2] = True
    assert table.oldest(1, np.array([5], np.int32)).tolist() == [8, 9, 10, 11]
    table.release(np.array([8, 9, 11], np.int32))
    assert table.free == 0
    assert table.oldest(1, np.array([5], np.int32)).tolist() == [10]
    table.release(np.array([10], np.int32))
    assert table.free == 4
    assert table.take(some_tokens(4, 9)).tolist() == [8, 9, 10, 11]
    assert table.oldest(1, np.array([5], np.int32)).tolist() == [12, 13, 14, 15]


def test_the_group_that_fills_now_makes_free_what_is_in_use_of_it() -> None:
    table = GroupedRecords(8, 4)
    for records in [table.take(some_tokens(4, 0)) for _ in range(2)]:
        table.release(records)
    table.take(some_tokens(6, 0))
    assert table.free == 2

    table.release(table.oldest(4, np.empty(0, np.int32)))

    assert table.free >= 6


# Sizes


# Records


# The memory


def memory_of(host: int, slots: int = 12, bits: int = 8) -> tuple[KVMemory, ThoughtTree]:
    lower = LowerRoom(host, host_bits=bits)
    memory = KVMemory(LAYERS, slots, torch.float32, CPU, lower=lower, debug=True)
    tree = ThoughtTree(range(4))
    memory.adopt(tree)
    return memory, tree


def place(memory: KVMemory, node: Node, *offsets: int, **ledger: bool) -> torch.Tensor:
    slots = memory.place(node, np.array(offsets, np.int64), **{"exact": True} | ledger, depth=2)
    rows = torch.randn(len(slots), memory.pool.numbers)
    memory.pool.scatter(slots, rows)
    memory.commit()
    return rows


def tiers(node: Node) -> str:
    return "".join("dhczf-"[tier] for tier in node.span.tier).replace("f", "-")


@pytest.fixture
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PackedStore, "group", 4)


@pytest.mark.usefixtures("small_groups")
def test_what_comes_back_is_rounded_and_returns_to_its_record() -> None:
    memory, tree = memory_of(8)
    rows = place(memory, tree.root, 0, 1, 2, 3)
    memory.evict(tree.root, np.arange(4))
    records = tree.root.span.record.tolist()
    assert memory.lower.take_moves().stored == {tree.root: 4}
    assert memory.lower.used_by(Tier.COMPRESSED, 0) == 4

    assert memory.fetch({tree.root: np.array([1, 2])}) == {tree.root: 2}
    span = tree.root.span
    assert span.rounded.tolist() == span.certain.tolist() == [False, True, True, False]
    assert not span.exact.any()
    assert span.origin.tolist() == [NO_RECORD, records[1], records[2], NO_RECORD]
    assert memory.lower.used_by(Tier.COMPRESSED, 0) == 2, "a token is in one place"
    assert memory.lower.used(Tier.COMPRESSED) == 4, "and its record is still taken"
    back = memory.pool.gather(span.slot[[1, 2]])
    assert 0 < float((back - rows[[1, 2]]).abs().max()) < 0.05

    (shelf,) = memory.lower
    writes: list[int] = []
    shelf.store.write = lambda records, rows: writes.append(1)  # type: ignore[method-assign, assignment, return-value]
    memory.evict(tree.root, np.array([1, 2]))
    assert not writes and span.record.tolist() == records
    assert memory.lower.take_moves().stored == {tree.root: 2}
    memory.fetch({tree.root: np.array([1, 2])})
    assert torch.equal(memory.pool.gather(tree.root.span.slot[[1, 2]]), back), "rounded once"


@pytest.mark.usefixtures("small_groups")
@pytest.mark.parametrize("how", ["release", "rewrite", "doubt", "drop"])
def test_a_record_is_free_once_its_token_is_another_one(how: str) -> None:
    memory, tree = memory_of(8)
    place(memory, tree.root, 0, 1, 2, 3)
    memory.evict(tree.root, np.arange(4))
    memory.fetch({tree.root: np.arange(4)})
    memory.lower.take_moves()
    if how == "release":
        memory.free_blocks([tree.root])
    elif how == "drop":
        memory.free_tree(tree)
    elif how == "doubt":
        memory.invalidate(tree.root, 0)
    else:
        memory.rewrite(tree.root, np.arange(4), exact=True, depth=2)
        memory.commit()
        assert tree.root.span.exact.all()
    memory.check()
    assert memory.lower.used(Tier.COMPRESSED) == 0
    assert not memory.lower.take_moves().lost, "they were on the device"


@pytest.mark.usefixtures("small_groups")
def test_a_write_that_is_cut_off_leaves_no_record(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, tree = memory_of(8)
    place(memory, tree.root, 0, 1, 2, 3)
    memory.evict(tree.root, np.array([0]))
    (shelf,) = memory.lower

    def fail(*args: Any) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patched, pytest.raises(ZeroDivisionError):
        patched.setattr(shelf.store, "_quantise", fail)
        memory.evict(tree.root, np.array([1, 2, 3]))
    memory.check()
    assert tiers(tree.root) == "cddd"
    memory.evict(tree.root, np.array([1, 2, 3]))
    assert memory.fetch({tree.root: np.array([1, 2, 3])}) == {tree.root: 3}


# The engine


# Searches


def solved(trace: Path | None = None, **settings: Any) -> tuple[Any, list[Event]]:
    heard: list[Event] = []
    with Solver(
        controller=SMALL, listeners=(heard.append,), debug=True, **REVERSIBLE, **settings
    ) as solver:
        solution = solver.solve(PUZZLE, trace=trace)
    replay = Replay()
    for event in heard:
        replay(event)
    assert replay.problems == []
    return solution, heard


@pytest.mark.slow
def test_a_search_fetches_what_was_packed_and_repeats_itself(tmp_path: Path) -> None:
    path = tmp_path / "run.arbor.jsonl"
    costs = "compressed=10+1;key=0.1;forward=1:900,64:3000"
    settings = {"budget": "115tok", "host": "2MiB", "host_bits": 4, "fetch": costs}
    first, heard = solved(path, **settings)
    metrics = first.metrics
    assert metrics.tokens_fetched > 0 and metrics.peak_compressed_tokens > 0
    assert metrics.peak_host_tokens == metrics.peak_disk_tokens == 0
    (header,) = (event for event in heard if isinstance(event, Header))
    assert header.config["host_bits"] == 4 and header.config["host"] == "2MiB"
    assert header.kv["host_bits"] == 4
    assert header.kv["host_tokens"] == packed_tokens(2 << 20, 3072, 4, 4)
    assert header.kv["host_token_bytes"] == 1924
    assert Replay.of(read_trace(path)).problems == []
    with Solver.from_config(header.config) as again:
        assert again.config == header.config
        second = again.solve(PUZZLE)
    assert second.answer == first.answer
    assert second.metrics.tokens_fetched == metrics.tokens_fetched
