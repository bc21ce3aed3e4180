"""Lower tiers: KV that has left the device comes back bit for bit, or is given up."""

from __future__ import annotations

import errno
import gc
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.slow_cases import every

from arbor import Solver
from arbor.controllers.tot import ToT
from arbor.errors import UsageError
from arbor.events import Discarded, Event, Evicted, Rehydrated
from arbor.memory import KVMemory, stores
from arbor.memory.host_copies import HostCopies, HostCopy
from arbor.memory.pool import KVPool, LayerKV
from arbor.memory.stores import MOST_COPIES, DiskStore, HostStore, LowerRoom, Store
from arbor.trace.fold import Replay
from arbor.tree import Node, ThoughtTree, Tier

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


class LateCopies(HostCopies):
    """Copies of a device that delivers when it is waited for, or has delivered `on_time`.

    Attributes:
        waits: copies that the host waited for before they had ended.
    """

    def __init__(self) -> None:
        self.on_time: set[int] = set()
        self.waits: list[int] = []
        self._begun = 0

    def down(self, rows: torch.Tensor) -> HostCopy:
        number, self._begun = self._begun, self._begun + 1
        target, sent = torch.full_like(rows, torch.nan), rows.clone()

        class Ended:
            def query(_) -> bool:
                return number in self.on_time

            def synchronize(_) -> None:
                if number not in self.on_time:
                    self.waits.append(number)
                target.copy_(sent)

        return HostCopy(target, Ended())


def test_what_leaves_a_device_is_waited_for_only_where_it_is_read() -> None:
    pool = pool_of(20)
    before = pool.gather(np.arange(20, dtype=np.int32))
    copies = LateCopies()
    store = HostStore(12, pool.numbers, pool.dtype, copies)
    for record in range(3):
        slots = np.array([record, 10 + record], np.int32)
        assert store.write(np.array([record, 5], np.int32), pool.gather(slots)).all()
        pool.poison(slots)  # others may have the slots at once
    assert copies.waits == []

    rows, intact = store.read(np.array([2, 5, 0], np.int32), CPU)

    assert copies.waits == [0, 1, 2] and intact.all()
    assert torch.equal(rows, before[[2, 12, 0]]), "of two writes the later one stays"


def test_a_device_that_keeps_up_is_never_waited_for_and_few_copies_are_under_way() -> None:
    pool = pool_of(20)
    copies = LateCopies()
    store = HostStore(20, pool.numbers, pool.dtype, copies)
    for record in range(2 * MOST_COPIES):
        mine = np.array([record], np.int32)
        store.write(mine, pool.gather(mine))
    assert copies.waits == list(range(MOST_COPIES)), "the oldest are waited for"

    copies.on_time = set(range(MOST_COPIES, 2 * MOST_COPIES))
    everything = np.arange(2 * MOST_COPIES, dtype=np.int32)
    assert torch.equal(store.read(everything, CPU)[0], pool.gather(everything))
    assert copies.waits == list(range(MOST_COPIES))


def test_searches_are_the_same_where_copies_come_late(monkeypatch: pytest.MonkeyPatch) -> None:
    def searched() -> tuple[Any, int]:
        with Solver(controller=SMALL, budget="90tok", host="1MiB", fetch="always") as solver:
            solution = solver.solve(PUZZLE)
            return solution.candidates, solution.metrics.tokens_fetched

    wanted, fetched = searched()
    monkeypatch.setattr(
        stores, "HostStore", lambda *given: HostStore(*given[:3], copies=LateCopies())
    )
    assert searched() == (wanted, fetched) and fetched > 0


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


def test_a_tier_that_no_machine_has_memory_for_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few: dict[str, Any] = {"controller": ToT(beam=2, width=2), "max_depth": 2, "budget": "60tok"}
    packed = {"mode": "lossy", "policy": "snapkv", "rehydrate": "selective", "host_bits": 8}
    many = {"disk": "8192TiB"}, {"host": "9" * 20 + "tok"}, {"host": "9999999TiB", **packed}
    for tiers in many:
        with (
            pytest.raises(UsageError, match=r"tier-size.*at most 2147483647tok"),
            Solver(**few, **tiers) as solver,
        ):
            solver.solve(PUZZLE)
    zeros = np.zeros

    def limited(shape: Any, *rest: Any) -> Any:
        if shape == 10**9:
            raise MemoryError
        return zeros(shape, *rest)

    monkeypatch.setattr(np, "zeros", limited)
    with (
        pytest.raises(UsageError, match=r"host-memory.*Lower host or disk"),
        Solver(**few, disk="1000000000tok") as solver,
    ):
        solver.solve(PUZZLE)


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


@pytest.mark.skipif(sys.platform != "linux", reason="lists open files in /proc")
def test_closing_a_solver_gives_the_file_on_disk_back(tmp_path: Path) -> None:
    def held() -> list[str]:
        files = [each for each in list(Path("/proc/self/fd").iterdir()) if each.is_symlink()]
        return [link for link in map(str, map(Path.readlink, files)) if str(tmp_path) in link]

    tiers = {"budget": 0.25, "host": "40tok", "disk": "1GiB", "disk_dir": tmp_path}
    gc.disable()  # which would give it back at some time
    try:
        solver = Solver(max_expansions=4, seed=3, fetch="always", **tiers)
        found = solver.solve("4 5 6 10").answer
        assert held()
        solver.close()
        assert not held()
        assert solver.solve("4 5 6 10").answer == found
        solver.close()
        assert not held()
        loop = solver.imap(["4 5 6 10"] * 2)
        next(loop)
        solver.close()
        assert held(), "the search goes on with it"
        loop.close()  # type: ignore[attr-defined]
        assert not held()
    finally:
        gc.enable()


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


def test_a_copy_that_is_cut_off_leaves_everything_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory, tree = memory_of(host=1, disk=8)
    rows = place(memory, tree.root, 0, 1, 2, 3)

    def cut_off(*_: Any) -> None:
        raise RuntimeError

    with monkeypatch.context() as patched:
        patched.setattr(DiskStore, "write", cut_off)
        with pytest.raises(RuntimeError):
            memory.evict(tree.root, np.array([1, 3]))
    memory.check()
    assert tiers(tree.root) == "dddd" and memory.lower.used(Tier.HOST) == 0
    memory.evict(tree.root, np.array([1, 3]))
    assert sorted(tiers(tree.root)) == ["d", "d", "f", "h"]
    with monkeypatch.context() as patched:
        patched.setattr(DiskStore, "read", cut_off)
        with pytest.raises(RuntimeError):
            memory.fetch({tree.root: np.array([1, 3])})
    memory.check()
    assert memory.fetch({tree.root: np.array([1, 3])}) == {tree.root: 2}
    assert torch.equal(memory.pool.gather(tree.root.span.slot), rows)


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
        raise RuntimeError

    with monkeypatch.context() as patched, pytest.raises(RuntimeError):
        patched.setattr(memory.pool, "scatter", fail)
        memory.fetch({tree.root: np.array([1, 2])})
    memory.check()
    assert tiers(tree.root) == "dhhd"
    assert memory.fetch({tree.root: np.array([1, 2])}) == {tree.root: 2}


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
    every(3, [{"host": "9999tok"}, {"host": "60tok", "disk": "9999tok"}, {"disk": "9999tok"}]),
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


def texts(solver: Solver) -> list[tuple[str, float, float]]:
    """Every block of the tree of the last search, with the logarithms of its probability."""
    return [(node.text, node.value, node.logprob) for node in solver.engine.tree]


@pytest.mark.parametrize("deterministic", every(2, [True, False]))
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


@pytest.mark.parametrize(
    ("change", "found"),
    every(
        3,
        [
            (lambda e: replace(e, stored=()) if isinstance(e, Evicted) else e, "lower tiers"),
            (lambda e: None if isinstance(e, Discarded) else e, "tokens_discarded"),
            (
                lambda e: (
                    replace(e, nodes=((e.nodes[0][0], 99),)) if isinstance(e, Discarded) else e
                ),
                "lower tiers would hold -",
            ),
        ],
    ),
    ids=["not stored", "not given up", "too much given up"],
)
def test_a_trace_whose_tiers_do_not_add_up_is_found(change: Any, found: str) -> None:
    _, heard = solved("115tok", host="50tok", fetch="always")
    replay = Replay()
    for event in filter(None, map(change, heard)):
        replay(event)
    assert any(found in problem for problem in replay.problems)
