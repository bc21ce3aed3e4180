"""The native library in a process of its own: for another machine, run by an emulator.

A `RunnerLibrary` stands in for the loaded library: it copies a job and all the memory that the job
points to into `native_runner.cpp`, which calls the library there, and copies back what the kernels
may write. So every test of the native kernels can run over it.
"""

from __future__ import annotations

import ctypes
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import Structure, c_int32, c_int64
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from arbor.kernels import native
from arbor.kernels.int8 import stored_width
from arbor.kernels.native import (
    BLOCKS,
    INT8,
    AttentionJob,
    ChoiceJob,
    DecodeJob,
    GatedJob,
    HeadSelectJob,
    HeadShareJob,
    LevelStruct,
    LinearJob,
    LogitSumsJob,
    NormJob,
    RotaryJob,
    StoreJob,
)

SOURCE = Path(__file__).with_suffix(".cpp")
BYTES = {0: 4, 1: 2}  # of a `Number`
PANEL, PADDED_INPUTS = 16, 32


def build_runner(compiler: str, output: Path) -> None:
    """Compile the runner for the compiler's machine."""
    command = [compiler, "-std=c++17", "-O1", str(SOURCE), "-o", str(output), "-ldl", "-pthread"]
    subprocess.run(command, check=True)


@dataclass
class Memory:
    """What a job needs of this process's memory.

    Attributes:
        parts: [address, bytes, whether the kernels write there]; the first is the job.
        pointers: (part that holds the pointer, byte in it, part that it points to).
    """

    parts: list[tuple[int, int, bool]] = field(default_factory=list)
    pointers: list[tuple[int, int, int]] = field(default_factory=list)

    def add(self, address: int, size: int, writes: bool = False) -> int:
        """A part; its number."""
        self.parts.append((address, size, writes))
        return len(self.parts) - 1

    def follow(self, job: Structure, name: str, size: int, writes: bool = False) -> int | None:
        """What a field of a job, which was added first, points to; None if it is null."""
        return self.follow_from(0, job, name, size, writes)

    def follow_from(
        self, part: int, holder: Structure, name: str, size: int, writes: bool = False
    ) -> int | None:
        """What a field of a structure in a part points to."""
        value = getattr(holder, name)
        address = ctypes.cast(value, ctypes.c_void_p).value if value else None
        if address is None:
            return None
        at = ctypes.addressof(holder) - self.parts[part][0] + getattr(type(holder), name).offset
        found = self.add(address, size, writes)
        self.pointers.append((part, at, found))
        return found


def extent(*dimensions: tuple[int, int]) -> int:
    """Numbers from the first to the last of a strided tensor, of (count, stride) per dimension."""
    if any(count == 0 for count, _ in dimensions):
        return 0
    return 1 + sum((count - 1) * stride for count, stride in dimensions)


def attention_memory(job: AttentionJob, memory: Memory) -> None:
    """Levels with their lists, pools up to the last slot that is read, queries and results."""
    heads, rows, wide = job.kv_heads * job.group, job.row_count, BYTES[job.number]
    levels = memory.follow(job, "levels", job.level_count * ctypes.sizeof(LevelStruct))
    keys, slots = 0, 0
    for i in range(job.level_count):
        level = job.levels[i]
        ends = ctypes.cast(level.keys, ctypes.POINTER(c_int32))
        count = ends[level.requests]
        assert levels is not None
        memory.follow_from(levels, level, "rows", 4 * (level.requests + 1))
        memory.follow_from(levels, level, "keys", 4 * (level.requests + 1))
        memory.follow_from(levels, level, "slots", 4 * count)
        if count:
            listed = np.ctypeslib.as_array(
                ctypes.cast(level.slots, ctypes.POINTER(c_int32)), (count,)
            )
            slots = max(slots, int(listed.max()) + 1)
        keys += count
    query = extent((rows, job.q_row), (heads, job.q_head), (job.dim_qk, 1))
    memory.follow(job, "q", wide * query)
    for name, dim in (("k", job.dim_qk), ("v", job.dim_vo)):
        coded = job.kv_number == INT8
        strides = getattr(job, f"{name}_slot"), getattr(job, f"{name}_head")
        width = stored_width(dim) if coded else dim
        numbers = extent((slots, strides[0]), (job.kv_heads, strides[1]), (width, 1))
        memory.follow(job, name, numbers * (1 if coded else wide))
    memory.follow(job, "sinks", 4 * heads)
    memory.follow(job, "out", wide * rows * heads * job.dim_vo, True)
    memory.follow(job, "lse", 4 * rows * heads, True)
    memory.follow(job, "mass", 4 * job.kv_heads * keys, True)
    memory.follow(job, "counted", 4 * rows)


def linear_memory(job: LinearJob, memory: Memory) -> None:
    """Rows, the packed weight, the bias and the result."""
    wide = BYTES[job.number]
    memory.follow(job, "x", wide * extent((job.rows, job.x_row), (job.inputs, 1)))
    panels = -(-job.outputs // PANEL)
    if job.packed_number >= BLOCKS:
        panels, size = job.outputs, job.packed_row
    else:
        padded = job.inputs if wide == 4 else -(-job.inputs // PADDED_INPUTS) * PADDED_INPUTS
        size = wide * padded * PANEL
    memory.follow(job, "packed", panels * size)
    memory.follow(job, "bias", 4 * job.outputs)
    out = extent((job.rows, job.out_row), (job.outputs, 1))
    memory.follow(job, "out", wide * out, True)


def decode_memory(job: DecodeJob, memory: Memory) -> None:
    """A weight in blocks, which of its rows, and these rows."""
    memory.follow(job, "packed", job.packed_row * slots_of(job.ids, job.rows))
    memory.follow(job, "ids", 8 * job.rows)
    memory.follow(job, "out", BYTES[job.number] * job.rows * job.inputs, True)


def norm_memory(job: NormJob, memory: Memory) -> None:
    """Rows, the weight and the result."""
    wide = BYTES[job.number]
    memory.follow(job, "x", wide * extent((job.rows, job.x_row), (job.width, 1)))
    memory.follow(job, "weight", wide * job.width)
    memory.follow(job, "out", wide * job.rows * job.width, True)


def gated_memory(job: GatedJob, memory: Memory) -> None:
    """Both factors and the result."""
    wide = BYTES[job.number]
    for name, row in (("gate", job.gate_row), ("up", job.up_row)):
        memory.follow(job, name, wide * extent((job.rows, row), (job.width, 1)))
    memory.follow(job, "out", wide * job.rows * job.width, True)


def slots_of(address: int | None, rows: int) -> int:
    """One more than the largest of a list of slots; rows without one."""
    if not address or not rows:
        return rows
    listed = ctypes.cast(address, ctypes.POINTER(ctypes.c_int64))
    return int(np.ctypeslib.as_array(listed, (rows,)).max()) + 1


def store_memory(job: StoreJob, memory: Memory) -> None:
    """Numbers, slots and the pool."""
    numbers = extent((job.rows, job.x_row), (job.heads, job.x_head), (job.dim, 1))
    memory.follow(job, "x", BYTES[job.number] * numbers)
    memory.follow(job, "slots", 8 * job.rows)
    slots = slots_of(job.slots, job.rows)
    shape = (slots, job.pool_slot), (job.heads, job.pool_head), (stored_width(job.dim), 1)
    memory.follow(job, "pool", extent(*shape), True)


def rotary_memory(job: RotaryJob, memory: Memory) -> None:
    """Heads, tables, slots, and what is written."""
    wide, rows, dim = BYTES[job.number], job.rows, job.dim_qk
    table = job.rotated // 2 if job.one_angle else job.rotated
    for name, row in (("cos", job.cos_row), ("sin", job.sin_row)):
        memory.follow(job, name, BYTES[job.table_number] * extent((rows, row), (table, 1)))
    memory.follow(job, "slots", 8 * rows)
    slots = slots_of(job.slots, rows)
    for name, heads, width in (
        ("q", job.q_heads, dim),
        ("k", job.kv_heads, dim),
        ("v", job.kv_heads, job.dim_vo),
    ):
        strides = getattr(job, f"{name}_row"), getattr(job, f"{name}_head")
        numbers = extent((rows, strides[0]), (heads, strides[1]), (width, 1))
        memory.follow(job, name, wide * numbers)
    memory.follow(job, "q_out", wide * rows * job.q_heads * dim, True)
    for name, width in (("k_out", dim), ("v_out", job.dim_vo)):
        strides = getattr(job, f"{name}_slot"), getattr(job, f"{name}_head")
        numbers = extent((slots, strides[0]), (job.kv_heads, strides[1]), (width, 1))
        memory.follow(job, name, wide * numbers, True)


def head_memory(job: HeadSelectJob, memory: Memory) -> None:
    """Scores, blocks, bits of what leaves, and the moves where they are asked for."""
    memory.follow(job, "scores", 4 * extent((job.heads, job.row), (job.tokens, 1)))
    memory.follow(job, "guard", job.tokens)
    memory.follow(job, "sizes", 8 * job.blocks)
    memory.follow(job, "lose", 8 * job.blocks)
    memory.follow(job, "gone", 8 * job.heads * job.words, True)
    memory.follow(job, "left", 8 * job.words, True)
    memory.follow(job, "leaving", job.tokens, True)
    memory.follow(job, "moved", 8, True)
    moves = ctypes.c_int64.from_address(job.moved).value if job.head else 0
    for name in ("head", "source", "target"):
        memory.follow(job, name, 4 * moves, True)


def share_memory(job: HeadShareJob, memory: Memory) -> None:
    """Scores, holders, blocks, room to work in, and the moves where they are asked for."""
    cells, counts = job.heads * job.tokens, 8 * job.heads * job.blocks
    memory.follow(job, "holders", (4 if job.wide else 2) * cells)
    memory.follow(job, "sizes", 8 * job.blocks)
    memory.follow(job, "held", counts, True)
    if not job.scores:
        return  # they are counted only
    memory.follow(job, "scores", 4 * extent((job.heads, job.row), (job.tokens, 1)))
    memory.follow(job, "guard", job.tokens)
    memory.follow(job, "lose", 8 * job.blocks)
    memory.follow(job, "counts", counts)
    longest = max((c_int64 * job.blocks).from_address(job.sizes))
    held = max((c_int64 * (job.heads * job.blocks)).from_address(job.held))
    each = job.heads // job.layers
    memory.follow(job, "keys", 4 * job.heads * (64 * job.words + 16))
    memory.follow(job, "listed", 4 * (longest * (job.heads if job.holders else each) + 16))
    memory.follow(job, "rest", 4 * (max(held, longest * each * job.competes) + 16))
    memory.follow(job, "gone", 8 * job.heads * job.words, True)
    memory.follow(job, "left", 8 * job.words, True)
    memory.follow(job, "leaving", job.tokens, True)
    memory.follow(job, "moved", 8, True)
    moves = c_int64.from_address(job.moved).value + 8 if job.cell else 0
    for name in ("cell", "source", "into", "target"):
        memory.follow(job, name, 4 * moves, True)


def choice_memory(job: ChoiceJob, memory: Memory) -> None:
    """Rows of logits, a number for each, and what is chosen."""
    memory.follow(job, "numbers", 8 * job.rows)
    logits_memory(job, 5, memory)


def sums_memory(job: LogitSumsJob, memory: Memory) -> None:
    """Rows of logits, and their sums."""
    logits_memory(job, 4, memory)


def logits_memory(job: ChoiceJob | LogitSumsJob, fields: int, memory: Memory) -> None:
    """Rows of logits, and as many results for each."""
    logits = extent((job.rows, job.row), (job.vocabulary, 1))
    memory.follow(job, "logits", BYTES[job.number] * logits)
    memory.follow(job, "out", 8 * fields * job.rows, True)


# In the order of CALLS in the runner.
CALLS: dict[str, tuple[type[Structure], Callable[[Any, Memory], None]]] = {
    "attention": (AttentionJob, attention_memory),
    "linear": (LinearJob, linear_memory),
    "norm": (NormJob, norm_memory),
    "gated": (GatedJob, gated_memory),
    "store": (StoreJob, store_memory),
    "rotary": (RotaryJob, rotary_memory),
    "select_heads": (HeadSelectJob, head_memory),
    "list_moves": (HeadSelectJob, head_memory),
    "count_held": (HeadShareJob, share_memory),
    "share_cells": (HeadShareJob, share_memory),
    "list_shared": (HeadShareJob, share_memory),
    "decode": (DecodeJob, decode_memory),
    "choose": (ChoiceJob, choice_memory),
    "sum_logits": (LogitSumsJob, sums_memory),
}


class RunnerLibrary(native.Library):
    """The library as the runner has loaded it.

    Args:
        command: the runner with the emulator before it, if any.
        library: the shared library.
        name: of an instruction set; "": the best.

    Raises:
        RuntimeError: the runner failed; its message is on the standard error.
    """

    def __init__(self, command: list[str], library: Path, name: str = "") -> None:
        arguments = [*command, str(library), *([name] if name else [])]
        self._runner = subprocess.Popen(
            arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        self.layout, letters = struct.unpack("<qi", self._read(12))
        self.calls = 0
        self._lock = threading.Lock()
        functions = {f"arbor_native_{call}": partial(self._call, call) for call in CALLS}
        functions["arbor_native_run"] = partial(self._run)
        super().__init__(_Functions(functions), self._read(letters).decode())

    def close(self) -> int:
        """End the process; its exit status."""
        assert self._runner.stdin is not None and self._runner.stdout is not None
        self._runner.stdin.close()
        status = self._runner.wait()
        self._runner.stdout.close()
        return status

    def _read(self, size: int) -> bytearray:
        data, begin = bytearray(size), 0
        assert self._runner.stdout is not None
        while begin < size:
            count = self._runner.stdout.readinto(memoryview(data)[begin:])  # type: ignore[attr-defined]
            if not count:
                raise RuntimeError(f"the runner ended with {self.close()}")
            begin += count
        return data

    def _run(self, calls: int, count: int, threads: int) -> None:
        """Jobs in their order, each sent by itself."""
        names = {kind: name for name, (kind, _) in CALLS.items()}
        for call in (native.Call * count).from_address(calls):
            self._call(names[native.CALLS[call.kind]], call.job, threads)

    def _call(self, call: str, address: int, threads: int = 0) -> None:
        kind, find = CALLS[call]
        memory = Memory()
        memory.add(address, ctypes.sizeof(kind), False)
        find(kind.from_address(address), memory)
        regions, places = _merged(memory.parts)
        number = list(CALLS).index(call)
        message = [struct.pack("<4i", number, threads, len(regions), len(memory.pointers))]
        for start, size, writes in regions:
            message += [struct.pack("<2q", size, writes), ctypes.string_at(start, size)]
        for part, at, target in memory.pointers:
            (region, begin), (to_region, to_byte) = places[part], places[target]
            message.append(struct.pack("<2i2q", region, begin + at, to_region, to_byte))
        with self._lock:
            self._write(b"".join(message))
            for start, size, writes in regions:
                if writes:
                    ctypes.memmove(start, bytes(self._read(size)), size)
            self.calls += 1

    def _write(self, message: bytes) -> None:
        view = memoryview(message)
        assert self._runner.stdin is not None
        while view:
            view = view[self._runner.stdin.write(view) :]


class _Functions:
    """Named functions as ctypes gives them: their types may be set."""

    def __init__(self, functions: dict[str, Callable[..., None]]) -> None:
        vars(self).update(functions)


def _merged(
    parts: list[tuple[int, int, bool]],
) -> tuple[list[tuple[int, int, bool]], list[tuple[int, int]]]:
    """The job, then parts that overlap as one region each; and the (region, byte) of every part."""
    order = sorted(range(1, len(parts)), key=lambda i: parts[i][0])
    regions, places = [parts[0]], [(0, 0)] * len(parts)
    for i in order:
        address, size, writes = parts[i]
        start, length, written = regions[-1]
        if len(regions) > 1 and address < start + length:
            end = max(start + length, address + size)
            regions[-1] = start, end - start, written or writes
        else:
            regions.append(parts[i])
        places[i] = len(regions) - 1, address - regions[-1][0]
    return regions, places


@contextmanager
def in_use(library: native.Library) -> Iterator[None]:
    """Within, the kernels are those of this library."""
    before = native._load
    native._load = lambda: (library, "")  # type: ignore[assignment]
    try:
        yield
    finally:
        native._load = before
