"""KV packed in few bits: quantised once, accounted for as rounded, and only in lossy mode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.models import build
from support.run_cli import in_process
from support.trees import Lab, grown, planted_again, relative_error

from arbor import Solver
from arbor.controllers.tot import ToT
from arbor.errors import UsageError
from arbor.events import Event, Evicted, Header
from arbor.memory import KVMemory
from arbor.memory.packed_store import PackedStore
from arbor.memory.packing import Scales, pack, packed_width, unpack
from arbor.memory.pool import LayerKV
from arbor.memory.records import GroupedRecords, Tokens
from arbor.memory.stores import LowerRoom
from arbor.run.tier_sizes import TierSizes
from arbor.support.packed_size import GROUP, group_bytes, packed_bytes, packed_tokens
from arbor.trace import read_trace
from arbor.trace.fold import Replay
from arbor.tree import NO_RECORD, NO_SLOT, Node, ThoughtTree, Tier

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


# Codes


@given(st.integers(1, 40), st.sampled_from(BITS), st.integers(0, 99))
def test_codes_come_back_from_their_bytes(count: int, bits: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(2**bits, (3, count), generator=generator).to(torch.uint8)
    packed = pack(codes, bits)
    assert packed.shape == (3, packed_width(count, bits))
    assert torch.equal(unpack(packed, count, bits), codes)


@given(
    st.lists(st.floats(-6e4, 6e4, width=16), min_size=1, max_size=12),
    st.sampled_from(BITS),
)
def test_a_number_changes_by_at_most_half_a_step(values: list[float], bits: int) -> None:
    x = torch.tensor(values).unsqueeze(1)
    if float(x.max() - x.min()) > 6e4:
        x = x / 4
    scales = Scales.of(x, 0, bits)
    codes = scales.encode(x)
    assert int(codes.max()) < 2**bits
    error = (scales.decode(codes) - x).abs()
    assert float(error.max()) <= 0.5001 * float(scales.step.max()) + 1e-30


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


def test_the_large_channel_of_k_costs_the_others_nothing() -> None:
    rows = random_rows(GROUP)
    store = store_of(GROUP, 4)
    store.write(numbers(0, GROUP), rows)
    got, _ = store.read(numbers(0, GROUP), CPU)
    off = (got - rows).abs()[:, :KEYS].amax(0)
    assert off[17] > 1 > 0.3 > off[torch.arange(KEYS) != 17].max()


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


def test_what_was_read_before_is_read_again_bit_for_bit() -> None:
    store = store_of(2 * GROUP, 4)
    store.write(numbers(0, 2 * GROUP), random_rows(2 * GROUP))
    first, _ = store.read(numbers(5, 40), CPU)
    assert torch.equal(store.read(numbers(5, 40), CPU)[0], first)


def test_a_last_group_may_have_fewer_tokens() -> None:
    rows = random_rows(GROUP + 5)
    store = store_of(GROUP + 5)
    store.write(numbers(0, GROUP + 5), rows)
    got, intact = store.read(numbers(GROUP, GROUP + 5), CPU)
    assert intact.all() and 0 < float((got - rows[GROUP:]).abs().max()) < 0.5


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


def test_another_failure_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_of(GROUP)

    def fail(*args: Any) -> None:
        raise RuntimeError("something else")

    monkeypatch.setattr(store, "_quantise", fail)
    with pytest.raises(RuntimeError, match="something else"):
        store.write(numbers(0, GROUP), random_rows(GROUP))


def test_a_host_without_so_much_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError(OUT_OF_MEMORY)

    monkeypatch.setattr(torch, "empty", fail)
    with pytest.raises(UsageError, match=r"host-memory.*Lower --host"):
        store_of(1 << 20)


# Sizes


@given(
    st.integers(0, 1 << 22),
    st.integers(1, 9),
    st.integers(1, 70),
    st.integers(1, 70),
    st.sampled_from(BITS),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_a_store_holds_no_more_bytes_than_its_size(
    size: int, heads: int, keys: int, values: int, bits: int, dtype: torch.dtype
) -> None:
    count = heads * (keys + values)
    tokens = packed_tokens(size, count, dtype.itemsize, bits)
    assert packed_tokens(size + group_bytes(count, bits), count, dtype.itemsize, bits) in (
        tokens,
        tokens + GROUP,
    )
    if tokens:
        store = PackedStore(min(tokens, 999), heads * keys, count, dtype, bits)
        assert store.nbytes <= packed_bytes(min(tokens, 999), count, dtype.itemsize, bits)
        assert packed_bytes(tokens, count, dtype.itemsize, bits) <= size


def test_sizes_in_bytes_count_codes_scales_and_what_waits() -> None:
    sizes = TierSizes.parse("8MiB", host_bits=8)
    assert sizes.tokens(12288, 4) == ((8388608 - 32 * 12288) // (32 * 3072 + 4 * 3103) * 32, 0)
    assert sizes.host_token_bytes(12288, 4) == 3460
    assert TierSizes.parse("8MiB", host_bits=4).tokens(12288, 4)[0] > 4100
    assert TierSizes.parse("100tok", host_bits=8).tokens(12288, 4) == (100, 0)
    assert TierSizes.parse("300KiB", host_bits=8).tokens(12288, 4) == (0, 0)


# Records


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


def test_an_open_group_that_is_given_up_begins_again() -> None:
    table = GroupedRecords(8, 4)
    first = table.take(some_tokens(2))
    table.release(first)
    assert table.free == 8
    assert table.take(some_tokens(5)).tolist() == [0, 1, 2, 3, 4]


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
    assert span.rounded.tolist() == span.settled.tolist() == [False, True, True, False]
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
def test_what_waits_comes_back_exact() -> None:
    memory, tree = memory_of(8)
    rows = place(memory, tree.root, 0, 1, 2, 3)
    memory.evict(tree.root, np.arange(3))
    memory.fetch({tree.root: np.array([1])})
    assert tree.root.span.exact.tolist() == [False, True, False, True]
    assert (tree.root.span.origin == NO_RECORD).all()
    assert torch.equal(memory.pool.gather(tree.root.span.slot[[1]]), rows[[1]])
    assert memory.lower.used(Tier.COMPRESSED) == 2


@pytest.mark.usefixtures("small_groups")
def test_what_is_computed_after_rounded_tokens_is_stored_too() -> None:
    memory, tree = memory_of(8)
    place(memory, tree.root, 0, 1)
    place(memory, tree.root, 2, exact=False, rounded=True)
    place(memory, tree.root, 3, exact=False)
    assert tree.root.span.settled.tolist() == [True, True, True, False]
    memory.evict(tree.root, np.arange(4))
    assert tiers(tree.root) == "ccc-", "what was computed over a gap is not"


@pytest.mark.usefixtures("small_groups")
@pytest.mark.parametrize("how", ["release", "rewrite", "doubt", "drop"])
def test_a_record_is_free_once_its_token_is_another_one(how: str) -> None:
    memory, tree = memory_of(8)
    place(memory, tree.root, 0, 1, 2, 3)
    memory.evict(tree.root, np.arange(4))
    memory.fetch({tree.root: np.arange(4)})
    memory.lower.take_moves()
    if how == "release":
        memory.release([tree.root])
    elif how == "drop":
        memory.drop(tree)
    elif how == "doubt":
        memory.doubt(tree.root, 0)
    else:
        memory.rewrite(tree.root, np.arange(4), exact=True, depth=2)
        memory.commit()
        assert tree.root.span.exact.all()
    memory.check()
    assert memory.lower.used(Tier.COMPRESSED) == 0
    assert not memory.lower.take_moves().lost, "they were on the device"


@pytest.mark.usefixtures("small_groups")
def test_a_full_store_gives_up_groups_that_nobody_is_about_to_need() -> None:
    memory, tree = memory_of(8, slots=16)
    child = tree.fork(tree.root)
    for token in range(8):
        tree.append(child, token)
    place(memory, tree.root, 0, 1, 2, 3)
    place(memory, child, *range(8))
    memory.evict(tree.root, np.arange(4))
    memory.evict(child, np.arange(4))
    memory.fetch({tree.root: np.array([2])})
    memory.evict(child, np.arange(4, 8))
    assert tiers(tree.root) == "ccdc", "its group has a token on the device"
    assert tiers(child) == "----cccc"
    assert memory.lower.take_moves().lost == {child: 4}


@pytest.mark.usefixtures("small_groups")
def test_a_write_that_is_cut_off_leaves_no_record(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, tree = memory_of(8)
    place(memory, tree.root, 0, 1, 2, 3)
    memory.evict(tree.root, np.array([0]))
    (shelf,) = memory.lower

    def fail(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(shelf.store, "_quantise", fail)
        memory.evict(tree.root, np.array([1, 2, 3]))
    memory.check()
    assert tiers(tree.root) == "cddd"
    memory.evict(tree.root, np.array([1, 2, 3]))
    assert memory.fetch({tree.root: np.array([1, 2, 3])}) == {tree.root: 3}


@pytest.mark.usefixtures("small_groups")
def test_check_finds_an_origin_of_another_token() -> None:
    memory, tree = memory_of(8)
    place(memory, tree.root, 0, 1, 2, 3)
    memory.evict(tree.root, np.arange(4))
    memory.fetch({tree.root: np.arange(4)})
    tree.root.span.origin[[0, 1]] = tree.root.span.origin[[1, 0]]
    with pytest.raises(AssertionError, match="an origin of another"):
        memory.check()


# The engine


def lab_of(bits: int | None, host: int = 4096, policy: str = "lru") -> Lab:
    return Lab(
        build("llama"),
        mode="lossy",
        policy=policy,
        lower=LowerRoom(host, host_bits=bits),
        debug=True,
    )


def held(lab: Lab, node: Node, which: Any) -> torch.Tensor:
    return lab.memory.pool.gather(node.span.slot[which])


@pytest.mark.usefixtures("small_groups")
def test_the_ledger_says_what_is_exact() -> None:
    lab = lab_of(4)
    tree, _ = grown(lab, 64)
    for leaf in [node for node in tree if not node.children]:
        lab.extend(leaf)
        path = leaf.path
        assert all(node.span.settled.all() for node in path), "nothing is computed again"
    full = planted_again(build("llama"), tree)
    exact, rounded, off = 0, 0, 0.0
    for node in tree:
        same = np.flatnonzero(node.span.exact)
        other = np.flatnonzero(node.span.rounded)
        for which in (same, other):
            if not len(which):
                continue
            want = held(full, full.tree[node.id], which)
            error = relative_error(held(lab, node, which), want)
            if which is same:
                assert error < 1e-5
            else:
                off = max(off, error)
                assert error < 0.5
        exact, rounded = exact + len(same), rounded + len(other)
    assert exact and rounded and off > 1e-3
    assert not lab.memory.lower.used(Tier.HOST)


def test_tokens_after_a_rounded_one_are_not_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PackedStore, "group", 1)
    lab = lab_of(8)
    tree = lab.plant(100)
    root = tree.root
    memory = lab.memory
    memory.evict(root, np.array([3]))
    lab.state.report_evicted({root: 1}, "pressure")
    lab.extend(root)
    assert np.flatnonzero(root.span.rounded).tolist() == [3]
    assert root.span.exact.sum() == len(root.tokens) - 1, "what was there before is what it was"
    (child,) = lab.sprout([(root, 1)])
    assert child.span.rounded.all() and not child.span.exact.any()
    memory.evict(child, np.arange(len(child.tokens)))
    lab.state.report_evicted({child: len(child.tokens)}, "pressure")
    lab.extend(child)
    assert child.span.rounded.all()
    assert (child.span.origin[:-1] != NO_RECORD).all(), "the last one ran again for its logits"


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


def test_a_small_store_is_never_exceeded() -> None:
    solution, heard = solved(budget="115tok", host="64tok", host_bits=8, fetch="always")
    most = max(event.kv.compressed for event in heard if isinstance(event, Evicted))
    assert 0 < most <= 64
    assert solution.metrics.tokens_discarded > 0


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"host": "1GiB"}, "mode=lossy with rehydrate=selective"),
        ({"host": "1GiB", "mode": "lossy"}, "rehydrate=selective"),
        (REVERSIBLE, "Give --host 8GiB too"),
        ({"host": "1GiB", "disk": "1GiB", **REVERSIBLE}, "Leave out disk"),
        ({"host": "1GiB", "kv_dtype": "int8", **REVERSIBLE}, "or kv_dtype"),
        ({"host": "1GiB", "host_bits": 3, **REVERSIBLE}, "Take 8"),
    ],
)
def test_bits_that_break_a_promise_are_refused(settings: dict[str, Any], found: str) -> None:
    with pytest.raises(UsageError, match=found):
        Solver(**{"host_bits": 8} | settings)


def test_the_command_shows_the_bits(capsys: pytest.CaptureFixture[str]) -> None:
    arbor = in_process(capsys)
    options = ("solve", PUZZLE, "--budget", "0.5", "--host", "2MiB", "--set", "host_bits=8")
    wrong = arbor(*options)
    assert wrong.code == 2 and "[host-bits]" in wrong.err
    right = (*options, "--mode", "lossy", "--rehydrate", "selective", "--dry-run")
    plan = arbor(*right, "--json").document
    assert plan["host_tokens"] == packed_tokens(2 << 20, 3072, 4, 8)
    assert (plan["host_bits"], plan["host_token_bytes"]) == (8, 3460)
    assert "8 bits, lossy" in arbor(*right).out


def test_by_default_nothing_is_said_of_bits() -> None:
    with Solver(controller=SMALL, host="1MiB") as solver:
        assert "host_bits" not in solver.config
        assert "host_bits" not in solver.plan(PUZZLE).to_dict()


def test_no_slot_is_named_by_what_is_packed() -> None:
    memory, tree = memory_of(8)
    place(memory, tree.root, 0, 1, 2, 3)
    memory.evict(tree.root, np.arange(4))
    assert (tree.root.span.slot == NO_SLOT).all() and memory.used == 0
