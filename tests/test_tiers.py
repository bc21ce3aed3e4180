"""Lower tiers: KV that has left the device comes back bit for bit, or is given up."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.run_cli import in_process
from support.slow_cases import every

from arbor import Solver
from arbor.controllers.tot import ToT
from arbor.errors import UsageError
from arbor.events import Discarded, Event, Evicted, Header, Rehydrated
from arbor.memory import KVMemory
from arbor.memory.pool import KVPool, LayerKV
from arbor.memory.records import RecordTable, Tokens
from arbor.memory.stores import DiskStore, HostStore, LowerRoom, Store
from arbor.run.tier_sizes import TierSizes
from arbor.trace import read_trace
from arbor.trace.fold import Replay
from arbor.tree import NO_RECORD, NO_SLOT, Node, ThoughtTree, Tier

pytestmark = pytest.mark.usefixtures("loaded_once")

CPU = torch.device("cpu")
LAYERS = [LayerKV(1, 2, 1), LayerKV(2, 3, 5)]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PUZZLE = "4 5 6 10"
SMALL = ToT(beam=3, width=4)


def pool_of(slots: int, dtype: torch.dtype = torch.float32) -> KVPool:
    """A pool in which every number is another one."""
    pool = KVPool(LAYERS, slots, dtype, CPU)
    for place, part in enumerate((*pool.k, *pool.v)):
        part.copy_(torch.randn(part.shape, generator=torch.Generator().manual_seed(place)))
    return pool


def store_of(kind: str, records: int, pool: KVPool) -> Store:
    kinds: dict[str, Any] = {"host": HostStore, "disk": DiskStore}
    store: Store = kinds[kind](records, pool.numbers, pool.dtype)
    return store


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


# Stores


@pytest.mark.parametrize("kind", ["host", "disk"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_read_is_what_was_written_bit_for_bit(kind: str, dtype: torch.dtype) -> None:
    pool = pool_of(12, dtype)
    before = [part.clone() for part in (*pool.k, *pool.v)]
    store = store_of(kind, 9, pool)
    slots, records = np.array([7, 2, 11, 3], np.int32), np.array([8, 0, 3, 5], np.int32)

    assert store.write(records, pool.gather(slots)).all()
    pool.poison(slots)
    rows, intact = store.read(records[::-1], CPU)
    assert intact.all()
    pool.scatter(slots[::-1].copy(), rows)

    for part, was in zip((*pool.k, *pool.v), before, strict=True):
        assert bits(part) == bits(was)
    store.close()


def test_a_row_holds_every_layer() -> None:
    pool = pool_of(3)
    row = pool.gather(np.array([1], np.int32))
    assert row.shape == (1, pool.numbers)
    assert pool.numbers * 4 == pool.bytes_per_token
    assert row[0].tolist() == torch.cat([p[1].flatten() for p in (*pool.k, *pool.v)]).tolist()


def test_a_full_disk_keeps_what_was_written_before(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pool = pool_of(8)
    store = DiskStore(8, pool.numbers, pool.dtype)
    right, written = os.pwrite, []

    def pwrite(file: int, data: Any, place: int) -> int:
        written.append(place)
        if len(written) >= 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return right(file, data, place)

    monkeypatch.setattr(os, "pwrite", pwrite)
    records = np.arange(5, dtype=np.int32)
    stored = store.write(records, pool.gather(records))
    assert stored.tolist() == [True, True, False, False, False]
    store.write(records[3:], pool.gather(records[3:]))
    assert [each.getMessage() for each in caplog.records] == [
        "KV on disk: No space left on device; what is lost is computed again"
    ]
    assert store.read(records[:2], CPU)[1].all()


def test_a_torn_write_is_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pool_of(4)
    store = DiskStore(4, pool.numbers, pool.dtype)
    right = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, place: right(file, data[:5], place))
    assert not store.write(np.array([1], np.int32), pool.gather(np.array([1], np.int32))).any()


@pytest.mark.parametrize("place", [0, 13, -1])
def test_a_flipped_bit_is_found(place: int) -> None:
    pool = pool_of(4)
    store = DiskStore(4, pool.numbers, pool.dtype)
    records = np.arange(4, dtype=np.int32)
    store.write(records, pool.gather(records))
    at = 2 * pool.bytes_per_token + place % pool.bytes_per_token
    (byte,) = os.pread(store._file, 1, at)
    os.pwrite(store._file, bytes([byte ^ 64]), at)
    assert store.read(records, CPU)[1].tolist() == [True, True, False, True]


def test_a_file_that_became_shorter_is_found() -> None:
    pool = pool_of(4)
    store = DiskStore(4, pool.numbers, pool.dtype)
    records = np.arange(4, dtype=np.int32)
    store.write(records, pool.gather(records))
    os.ftruncate(store._file, 3 * pool.bytes_per_token - 1)
    assert store.read(records, CPU)[1].tolist() == [True, True, False, False]


def test_a_device_that_cannot_read_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pool = pool_of(2)
    store = DiskStore(2, pool.numbers, pool.dtype)
    store.write(np.array([0], np.int32), pool.gather(np.array([0], np.int32)))

    def fail(*args: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    assert not store.read(np.array([0], np.int32), CPU)[1].any()
    assert "Input/output error" in caplog.text


def test_nothing_is_left_on_disk_however_the_process_ends(tmp_path: Path) -> None:
    program = (
        "import os, sys, signal, torch; from pathlib import Path\n"
        "from arbor.memory.stores import DiskStore\n"
        "import numpy as np\n"
        "store = DiskStore(4, 8, torch.float32, folder=Path(sys.argv[1]))\n"
        "assert store.write(np.arange(4, dtype=np.int32), torch.ones(4, 8)).all()\n"
        "print(os.listdir(sys.argv[1]), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True
    )
    assert ended.returncode == -9, ended.stderr
    assert ended.stdout == "[]\n"
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_named() -> None:
    with pytest.raises(UsageError, match=r"disk-store.*/proc"):
        DiskStore(1, 1, torch.float32, folder=Path("/proc"))


# Records


def some_tokens(count: int, row: int = 0) -> Tokens:
    return Tokens(np.full(count, row), np.arange(count), np.full(count, 2))


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 5)), max_size=20))
def test_records_are_given_once_until_they_are_released(history: list[tuple[int, int]]) -> None:
    table = RecordTable(12)
    held: list[int] = []
    for count, released in history:
        count = min(count, table.free)
        records = table.take(some_tokens(count)).tolist()
        assert not set(records) & set(held)
        held += records
        gone, held = held[:released], held[released:]
        table.release(np.array(gone, np.int32))
        assert table.used == len(held)
        assert sorted(np.flatnonzero(table.in_use).tolist()) == sorted(held)


def test_the_oldest_are_those_written_first_and_last_tokens_before_first() -> None:
    table = RecordTable(9)
    first = table.take(some_tokens(3, row=1))
    second = table.take(some_tokens(3, row=2))
    table.release(first[:1])
    third = table.take(some_tokens(2, row=3))
    none = np.empty(0, np.int32)

    assert table.oldest(3, none).tolist() == [first[2], first[1], second[2]]
    assert table.oldest(3, first).tolist() == [second[2], second[1], second[0]]
    assert table.oldest(99, none).tolist()[-2:] == [third[1], third[0]]
    assert len(table.oldest(99, none)) == 7


# The memory


def memory_of(host: int, disk: int = 0, slots: int = 12) -> tuple[KVMemory, ThoughtTree]:
    lower = LowerRoom(host, disk)
    memory = KVMemory(LAYERS, slots, torch.float32, CPU, lower=lower, debug=True)
    tree = ThoughtTree(range(4))
    memory.adopt(tree)
    return memory, tree


def place(memory: KVMemory, node: Node, *offsets: int, exact: bool = True) -> torch.Tensor:
    """Give tokens slots and write them; returns what was written."""
    slots = memory.place(node, np.array(offsets, np.int64), exact=exact, depth=2)
    rows = torch.randn(len(slots), memory.pool.numbers)
    memory.pool.scatter(slots, rows)
    memory.commit()
    return rows


def tiers(node: Node) -> str:
    return "".join("dhzf-"[tier] for tier in node.span.tier)


def test_what_leaves_goes_down_and_what_comes_back_is_the_same() -> None:
    memory, tree = memory_of(8)
    rows = place(memory, tree.root, 0, 1, 2, 3)

    freed = memory.evict(tree.root, np.array([1, 3]))
    assert freed == 2
    assert tiers(tree.root) == "dhdh"
    assert (tree.root.span.slot[[1, 3]] == NO_SLOT).all()
    assert not tree.root.span.exact[[1, 3]].any()
    assert memory.lower.used_by(Tier.HOST, tree.number) == 2
    assert memory.lower.take_moves().stored == {tree.root: 2}

    assert memory.fetch({tree.root: np.array([1, 3])}) == {tree.root: 2}
    assert tiers(tree.root) == "dddd"
    assert tree.root.span.exact.all()
    assert (tree.root.span.record == NO_RECORD).all()
    assert memory.lower.used(Tier.HOST) == 0
    assert torch.equal(memory.pool.gather(tree.root.span.slot), rows)
    assert not memory.lower.take_moves().lost, "what came back was not given up"


def test_a_copy_that_is_cut_off_leaves_everything_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory, tree = memory_of(host=1, disk=8)
    rows = place(memory, tree.root, 0, 1, 2, 3)

    def cut_off(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(DiskStore, "write", cut_off)
        with pytest.raises(KeyboardInterrupt):
            memory.evict(tree.root, np.array([1, 3]))
    memory.check()
    assert tiers(tree.root) == "dddd" and memory.lower.used(Tier.HOST) == 0
    memory.evict(tree.root, np.array([1, 3]))
    assert sorted(tiers(tree.root)) == ["d", "d", "f", "h"]
    with monkeypatch.context() as patched:
        patched.setattr(DiskStore, "read", cut_off)
        with pytest.raises(KeyboardInterrupt):
            memory.fetch({tree.root: np.array([1, 3])})
    memory.check()
    assert memory.fetch({tree.root: np.array([1, 3])}) == {tree.root: 2}
    assert torch.equal(memory.pool.gather(tree.root.span.slot), rows)


def test_only_exact_tokens_are_stored() -> None:
    memory, tree = memory_of(8)
    place(memory, tree.root, 0, 1)
    place(memory, tree.root, 2, 3, exact=False)
    memory.evict(tree.root, np.array([1, 2]))
    assert tiers(tree.root) == "dh-d"


def test_a_full_host_gives_the_oldest_to_the_disk_and_a_full_disk_gives_them_up() -> None:
    memory, tree = memory_of(2, 2)
    rows = place(memory, tree.root, 0, 1, 2, 3)
    for offset in (0, 1, 2):
        memory.evict(tree.root, np.array([offset]))
    assert tiers(tree.root) == "fhhd"
    memory.evict(tree.root, np.array([3]))
    assert tiers(tree.root) == "ffhh"
    assert not memory.lower.take_moves().lost

    child = tree.fork(tree.root)
    for token in range(3):
        tree.append(child, token)
    place(memory, child, 0, 1, 2)
    memory.evict(child, np.array([0]))
    assert tiers(tree.root) == "-ffh", "the oldest on disk is given up"
    assert memory.lower.take_moves().lost == {tree.root: 1}
    assert memory.fetch({tree.root: np.array([1, 2, 3])}) == {tree.root: 3}
    assert torch.equal(memory.pool.gather(tree.root.span.slot[1:]), rows[1:])


def test_more_than_a_tier_holds_is_stored_as_far_as_it_fits() -> None:
    memory, tree = memory_of(3)
    place(memory, tree.root, 0, 1, 2, 3)
    memory.evict(tree.root, np.arange(4))
    assert tiers(tree.root) == "hhh-"


def test_records_that_are_about_to_be_read_stay() -> None:
    memory, tree = memory_of(2)
    place(memory, tree.root, 0, 1, 2, 3)
    memory.evict(tree.root, np.array([0, 1]))
    memory.lower.spare(tree.root.span.begin + np.array([0]))
    memory.evict(tree.root, np.array([2, 3]))
    assert tiers(tree.root) == "h-h-"
    memory.lower.spare(np.empty(0, np.int64))
    place(memory, tree.root, 3)
    memory.evict(tree.root, np.array([3]))
    assert tiers(tree.root) == "--hh"


def test_what_is_computed_again_or_given_up_has_no_record() -> None:
    memory, tree = memory_of(8)
    place(memory, tree.root, 0, 1, 2, 3)
    memory.evict(tree.root, np.array([0, 2]))
    place(memory, tree.root, 2)
    assert tiers(tree.root) == "hddd"
    assert memory.lower.take_moves().lost == {tree.root: 1}
    assert memory.release([tree.root]) == 3
    assert tiers(tree.root) == "----"
    assert memory.lower.used(Tier.HOST) == 0
    assert memory.lower.take_moves().lost == {tree.root: 1}


def test_a_dropped_tree_leaves_no_record() -> None:
    memory, tree = memory_of(8)
    other = ThoughtTree(range(4))
    memory.adopt(other)
    for each in (tree, other):
        place(memory, each.root, 0, 1, 2, 3)
        memory.evict(each.root, np.array([0, 2]))
    memory.drop(tree)
    memory.check()
    assert memory.lower.used(Tier.HOST) == memory.lower.used_by(Tier.HOST, other.number) == 2
    assert memory.fetch({other.root: np.array([0, 2])}) == {other.root: 2}


def test_what_a_tier_has_lost_is_dropped_and_the_rest_comes_back() -> None:
    memory, tree = memory_of(0, 8)
    rows = place(memory, tree.root, 0, 1, 2, 3)
    memory.evict(tree.root, np.arange(4))
    memory.lower.take_moves()
    (shelf,) = memory.lower
    assert isinstance(shelf.store, DiskStore)
    record = int(tree.root.span.record[2])
    os.pwrite(shelf.store._file, b"\x55", record * memory.pool.bytes_per_token)

    assert memory.fetch({tree.root: np.arange(4)}) == {tree.root: 3}
    assert tiers(tree.root) == "dd-d"
    assert memory.used == 3 and memory.lower.used(Tier.DISK) == 0
    assert memory.lower.take_moves().lost == {tree.root: 1}
    kept = [0, 1, 3]
    assert torch.equal(memory.pool.gather(tree.root.span.slot[kept]), rows[kept])


def test_a_fetch_that_fails_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, tree = memory_of(4, 4)
    place(memory, tree.root, 0, 1, 2, 3)
    memory.evict(tree.root, np.array([1, 2]))

    def fail(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(memory.pool, "scatter", fail)
        memory.fetch({tree.root: np.array([1, 2])})
    memory.check()
    assert tiers(tree.root) == "dhhd"
    assert memory.fetch({tree.root: np.array([1, 2])}) == {tree.root: 2}


@pytest.mark.parametrize("name", ["row", "offset"])
def test_check_finds_a_record_of_another_token(name: str) -> None:
    memory, tree = memory_of(4)
    place(memory, tree.root, 0, 1)
    memory.evict(tree.root, np.array([1]))
    (shelf,) = memory.lower
    getattr(shelf.table, name)[tree.root.span.record[1]] += 1
    with pytest.raises(AssertionError, match="a record of another"):
        memory.check()


# Sizes


def test_sizes_are_bytes_or_tokens() -> None:
    assert TierSizes.parse("1MiB", "20tok").tokens(1024, 4) == (1024, 20)
    assert TierSizes.parse(None, "0").tokens(1024, 4) == (0, 0)
    assert not TierSizes.parse() and not TierSizes.parse(0, "0")
    assert TierSizes.parse(disk="1tok")
    assert TierSizes.parse("1B").tokens(1024, 4) == (0, 0)
    assert LowerRoom().stores(pool_of(1)) == []


@pytest.mark.parametrize("given", ["0.5", "full", "8", "many", "-1tok", "8 GB/s"])
def test_what_is_no_size_is_refused(given: str) -> None:
    with pytest.raises(UsageError, match=r"tier-size.*host=.*8GiB or 20000tok"):
        Solver(host=given)


def test_a_folder_needs_a_size_and_to_exist(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="disk=50GiB"):
        Solver(disk_dir=tmp_path)
    with pytest.raises(UsageError, match="Create it first"):
        Solver(disk="1GiB", disk_dir=tmp_path / "none")


def test_tiers_that_nothing_comes_back_from_are_refused() -> None:
    with pytest.raises(UsageError, match="tier-unused"):
        Solver(mode="lossy", host="1MiB")
    Solver(mode="lossy", rehydrate="selective", host="1MiB")


def test_a_host_without_so_much_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(torch, "empty", fail)
    with pytest.raises(UsageError, match=r"host-memory.*Lower --host"):
        HostStore(1 << 50, 1 << 20, torch.float32)


# Searches


def solved(budget: Any, trace: Path | None = None, **settings: Any) -> tuple[Any, list[Event]]:
    """A solution and its events, with the trace checked."""
    heard: list[Event] = []
    with Solver(
        controller=SMALL, budget=budget, listeners=(heard.append,), debug=True, **settings
    ) as solver:
        solution = solver.solve(PUZZLE, trace=trace)
    replay = Replay()
    for event in heard:
        replay(event)
    assert replay.problems == []
    return solution, heard


def outcome(solution: Any) -> Any:
    return solution.answer, solution.metrics.nodes, solution.metrics.tokens_generated


@pytest.mark.parametrize(
    "lower",
    every(2, [{"host": "9999tok"}, {"host": "60tok", "disk": "9999tok"}, {"disk": "9999tok"}]),
    ids=["host", "both", "disk"],
)
def test_a_search_with_room_below_computes_nothing_again(lower: dict[str, str]) -> None:
    full, _ = solved("full")
    dropped, _ = solved("70tok")
    assert dropped.metrics.tokens_recomputed > 50

    tiered, heard = solved("70tok", fetch="always", **lower)

    assert outcome(tiered) == outcome(dropped) == outcome(full)
    metrics = tiered.metrics
    assert metrics.tokens_fetched > 50
    assert metrics.tokens_recomputed < 0.1 * dropped.metrics.tokens_recomputed
    assert metrics.tokens_stored >= metrics.tokens_fetched + metrics.tokens_discarded
    assert max(metrics.peak_host_tokens, metrics.peak_disk_tokens) > 0
    back = [event for event in heard if isinstance(event, Rehydrated) and event.mode == "fetch"]
    assert sum(count for event in back for _, count in event.nodes) == metrics.tokens_fetched
    gone = [event for event in heard if isinstance(event, Discarded)]
    assert sum(count for event in gone for _, count in event.nodes) == metrics.tokens_discarded
    stored = [event.stored for event in heard if isinstance(event, Evicted)]
    assert sum(count for each in stored for _, count in each) == metrics.tokens_stored
    if "host" in lower and "disk" in lower:
        assert metrics.peak_host_tokens == 60 and metrics.peak_disk_tokens > 0


def test_a_small_tier_is_never_exceeded() -> None:
    solution, heard = solved("115tok", host="50tok", fetch="always")
    held = [event.kv.host for event in heard if isinstance(event, Evicted | Discarded)]
    assert max(held) <= 50
    assert solution.metrics.tokens_recomputed > 0 < solution.metrics.tokens_fetched


def texts(solver: Solver) -> list[tuple[str, float, float]]:
    """Every block of the tree of the last search, with the logarithms of its probability."""
    return [(node.text, node.value, node.logprob) for node in solver.engine.tree]


@pytest.mark.parametrize("deterministic", [True, False])
def test_every_split_gives_the_same_tree(deterministic: bool) -> None:
    trees = []
    for budget, lower in (
        ("full", {}),
        ("150tok", {"host": "9999tok"}),
        ("115tok", {"host": "9999tok"}),
        ("109tok", {"host": "40tok", "disk": "9999tok"}),
    ):
        with Solver(
            controller=SMALL, budget=budget, deterministic=deterministic, fetch="always", **lower
        ) as solver:
            solver.solve(PUZZLE)
            trees.append(texts(solver))
    for other in trees[1:]:
        if deterministic:
            assert other == trees[0], "to the last bit"
        else:
            assert [text for text, *_ in other] == [text for text, *_ in trees[0]]


def test_the_settings_are_in_the_header_and_repeat_the_run(tmp_path: Path) -> None:
    costs = "host=100+1;key=0.1;forward=1:900,64:3000"
    path = tmp_path / "run.arbor.jsonl"
    first, heard = solved("115tok", path, host="1MiB", fetch=costs)
    (header,) = (event for event in heard if isinstance(event, Header))
    assert header.config["host"] == "1MiB"
    assert header.config["fetch"] == costs
    assert header.kv["host_tokens"] == (1 << 20) // header.kv["bytes_per_token"]
    assert "disk" not in header.config and "disk_tokens" not in header.kv

    with Solver.from_config(header.config) as again:
        assert again.config == header.config
        assert again.solve(PUZZLE).metrics.tokens_fetched == first.metrics.tokens_fetched > 0
    assert Replay.of(read_trace(path)).problems == []


def test_by_default_nothing_is_said_of_tiers() -> None:
    with Solver(controller=SMALL, budget="115tok") as solver:
        assert not {"host", "disk", "fetch"} & solver.config.keys()
        solution = solver.solve(PUZZLE)
    assert "tokens_stored" not in solution.metrics.to_dict()


def test_several_problems_share_the_tiers() -> None:
    puzzles = [PUZZLE, "1 3 4 6", "2 3 7 11"]
    with Solver(controller=SMALL) as solver:
        alone = [outcome(each) for each in solver.solve_batch(puzzles, concurrency=1)]
    with Solver(
        controller=SMALL, budget="130tok", host="300tok", disk="300tok", fetch="always", debug=True
    ) as solver:
        together = solver.solve_batch(puzzles, concurrency=3)
    assert [outcome(each) for each in together] == alone
    assert sum(each.metrics.tokens_fetched for each in together) > 0


def test_the_command_shows_the_tiers(capsys: pytest.CaptureFixture[str]) -> None:
    arbor = in_process(capsys)
    options = ("solve", PUZZLE, "--budget", "0.25", "--host", "2MiB")
    assert arbor(*options, "--dry-run", "--json").document["host_tokens"] == (2 << 20) // 12288
    shown = arbor(*options, "--dry-run").out
    assert "host" in shown and "of what has left the device" in shown
    wrong = arbor("solve", PUZZLE, "--host", "0.5")
    assert wrong.code == 2 and "[tier-size]" in wrong.err
    wrong = arbor(*options, "--set", "fetch=often")
    assert wrong.code == 2 and "auto, always" in wrong.err


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda e: replace(e, stored=()) if isinstance(e, Evicted) else e, "lower tiers"),
        (lambda e: None if isinstance(e, Discarded) else e, "tokens_discarded"),
        (
            lambda e: replace(e, nodes=((e.nodes[0][0], 99),)) if isinstance(e, Discarded) else e,
            "lower tiers would hold -",
        ),
    ],
    ids=["not stored", "not given up", "too much given up"],
)
def test_a_trace_whose_tiers_do_not_add_up_is_found(change: Any, found: str) -> None:
    _, heard = solved("115tok", host="50tok", fetch="always")
    replay = Replay()
    for event in filter(None, map(change, heard)):
        replay(event)
    assert any(found in problem for problem in replay.problems)
