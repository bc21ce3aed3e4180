"""The native kernels: a shared library of plain C++, loaded where it was built and can run.

`kernels/csrc` has the sources; installing arbor builds them where a compiler is found, and
`make native` builds them in a checkout. Without the library everything runs in torch.
``ARBOR_NATIVE=off`` leaves it out, and ``ARBOR_NATIVE=avx2`` (or another name of `SETS`) takes less
than the CPU can do; both are read once, when the library is first asked for.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import POINTER, Structure, c_char_p, c_double, c_float, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

LAYOUT_VERSION = 7  # as in native.h
# Instruction sets of the kernels, of x86-64 and of aarch64, each from the least to the best.
SETS = (
    *("avx2", "avx_vnni", "avx512", "avx512_vnni", "avx512_bf16", "amx"),
    *("neon", "neon_dot", "neon_bf16"),
)
VARIABLE = "ARBOR_NATIVE"
FILE = Path(
    os.environ.get("ARBOR_NATIVE_FILE") or Path(__file__).resolve().parent / "libarbor_native.so"
)

# `Number` of native.h, by torch's names of dtypes.
NUMBERS = {"float32": 0, "bfloat16": 1}
INT8 = 2  # of pools with 8-bit KV
BLOCKS = 64  # and ggml's number of a format: weights in blocks


# Head dimensions are multiples of the widest vector.
LANES = 16
MOST_DIM = 256


def head_dim_fits(dim: int) -> bool:
    """Whether the attention kernels compute heads of this size.

    Example:
        >>> head_dim_fits(64), head_dim_fits(24)
        (True, False)
    """
    return dim % LANES == 0 and dim <= MOST_DIM


class LevelStruct(Structure):
    """`Level` of native.h."""

    _fields_ = (
        ("rows", c_void_p),
        ("keys", c_void_p),
        ("slots", c_void_p),
        ("requests", c_int32),
        ("causal", c_int32),
    )


class AttentionJob(Structure):
    """`AttentionJob` of native.h."""

    _fields_ = (
        ("levels", POINTER(LevelStruct)),
        ("level_count", c_int32),
        ("row_count", c_int32),
        ("kv_heads", c_int32),
        ("group", c_int32),
        ("dim_qk", c_int32),
        ("dim_vo", c_int32),
        ("window", c_int32),
        ("number", c_int32),
        ("kv_number", c_int32),
        ("scaling", c_float),
        ("softcap", c_float),
        ("q", c_void_p),
        ("k", c_void_p),
        ("v", c_void_p),
        ("q_row", c_int64),
        ("q_head", c_int64),
        ("k_slot", c_int64),
        ("k_head", c_int64),
        ("v_slot", c_int64),
        ("v_head", c_int64),
        ("sinks", c_void_p),
        ("out", c_void_p),
        ("lse", c_void_p),
        ("mass", c_void_p),
        ("counted", c_void_p),
    )


class StoreJob(Structure):
    """`StoreJob` of native.h."""

    _fields_ = (
        ("x", c_void_p),
        ("pool", c_void_p),
        ("slots", c_void_p),
        ("x_row", c_int64),
        ("x_head", c_int64),
        ("pool_slot", c_int64),
        ("pool_head", c_int64),
        ("rows", c_int32),
        ("heads", c_int32),
        ("dim", c_int32),
        ("number", c_int32),
    )


class LinearJob(Structure):
    """`LinearJob` of native.h."""

    _fields_ = (
        ("x", c_void_p),
        ("packed", c_void_p),
        ("bias", c_void_p),
        ("out", c_void_p),
        ("x_row", c_int64),
        ("out_row", c_int64),
        ("packed_row", c_int64),
        ("rows", c_int32),
        ("inputs", c_int32),
        ("outputs", c_int32),
        ("number", c_int32),
        ("packed_number", c_int32),
    )


class DecodeJob(Structure):
    """`DecodeJob` of native.h."""

    _fields_ = (
        ("packed", c_void_p),
        ("ids", c_void_p),
        ("out", c_void_p),
        ("packed_row", c_int64),
        ("rows", c_int64),
        ("inputs", c_int32),
        ("number", c_int32),
        ("packed_number", c_int32),
    )


class NormJob(Structure):
    """`NormJob` of native.h."""

    _fields_ = (
        ("x", c_void_p),
        ("weight", c_void_p),
        ("out", c_void_p),
        ("x_row", c_int64),
        ("rows", c_int32),
        ("width", c_int32),
        ("number", c_int32),
        ("rounds_first", c_int32),
        ("eps", c_float),
        ("offset", c_float),
    )


class GatedJob(Structure):
    """`GatedJob` of native.h."""

    _fields_ = (
        ("gate", c_void_p),
        ("up", c_void_p),
        ("out", c_void_p),
        ("gate_row", c_int64),
        ("up_row", c_int64),
        ("rows", c_int32),
        ("width", c_int32),
        ("number", c_int32),
        ("activation", c_int32),
    )


class RotaryJob(Structure):
    """`RotaryJob` of native.h."""

    _fields_ = (
        ("q", c_void_p),
        ("k", c_void_p),
        ("v", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("q_out", c_void_p),
        ("k_out", c_void_p),
        ("v_out", c_void_p),
        ("slots", c_void_p),
        ("q_row", c_int64),
        ("q_head", c_int64),
        ("k_row", c_int64),
        ("k_head", c_int64),
        ("v_row", c_int64),
        ("v_head", c_int64),
        ("cos_row", c_int64),
        ("sin_row", c_int64),
        ("k_out_slot", c_int64),
        ("k_out_head", c_int64),
        ("v_out_slot", c_int64),
        ("v_out_head", c_int64),
        ("rows", c_int32),
        ("q_heads", c_int32),
        ("kv_heads", c_int32),
        ("dim_qk", c_int32),
        ("dim_vo", c_int32),
        ("rotated", c_int32),
        ("interleaved", c_int32),
        ("one_angle", c_int32),
        ("rounds_products", c_int32),
        ("number", c_int32),
        ("table_number", c_int32),
    )


class AddJob(Structure):
    """`AddJob` of native.h."""

    _fields_ = (
        ("x", c_void_p),
        ("y", c_void_p),
        ("count", c_int64),
        ("number", c_int32),
        ("factor", c_float),
    )


class HeadNormJob(Structure):
    """`HeadNormJob` of native.h."""

    _fields_ = (("heads", NormJob), ("row", c_int64), ("rows", c_int32))


class HeadSelectJob(Structure):
    """`HeadSelectJob` of native.h."""

    _fields_ = (
        ("scores", c_void_p),
        ("guard", c_void_p),
        ("sizes", c_void_p),
        ("lose", c_void_p),
        ("gone", c_void_p),
        ("left", c_void_p),
        ("leaving", c_void_p),
        ("moved", c_void_p),
        ("head", c_void_p),
        ("source", c_void_p),
        ("target", c_void_p),
        ("row", c_int64),
        ("heads", c_int32),
        ("tokens", c_int32),
        ("blocks", c_int32),
        ("words", c_int32),
    )


class HeadShareJob(Structure):
    """`HeadShareJob` of native.h."""

    _fields_ = (
        ("scores", c_void_p),
        ("guard", c_void_p),
        ("holders", c_void_p),
        ("sizes", c_void_p),
        ("lose", c_void_p),
        ("counts", c_void_p),
        ("held", c_void_p),
        ("keys", c_void_p),
        ("listed", c_void_p),
        ("rest", c_void_p),
        ("gone", c_void_p),
        ("left", c_void_p),
        ("leaving", c_void_p),
        ("moved", c_void_p),
        ("cell", c_void_p),
        ("source", c_void_p),
        ("into", c_void_p),
        ("target", c_void_p),
        ("row", c_int64),
        ("heads", c_int32),
        ("tokens", c_int32),
        ("blocks", c_int32),
        ("words", c_int32),
        ("layers", c_int32),
        ("pools", c_int32),
        ("competes", c_int32),
        ("wide", c_int32),
    )


class ChoiceJob(Structure):
    """`ChoiceJob` of native.h."""

    _fields_ = (
        ("logits", c_void_p),
        ("numbers", c_void_p),
        ("out", c_void_p),
        ("row", c_int64),
        ("temperature", c_double),
        ("top_p", c_double),
        ("min_p", c_double),
        ("top_k", c_int32),
        ("rows", c_int32),
        ("vocabulary", c_int32),
        ("number", c_int32),
    )


class LogitSumsJob(Structure):
    """`LogitSumsJob` of native.h."""

    _fields_ = (
        ("logits", c_void_p),
        ("out", c_void_p),
        ("row", c_int64),
        ("rows", c_int32),
        ("vocabulary", c_int32),
        ("number", c_int32),
    )


class Call(Structure):
    """`Call` of native.h."""

    _fields_ = (("job", c_void_p), ("kind", c_int32))


# `Call::Kind` of native.h: the place of a structure is its number.
CALLS = (LinearJob, NormJob, HeadNormJob, RotaryJob, AttentionJob, GatedJob, AddJob)


class Library:
    """The loaded library.

    Attributes:
        name: the instruction set in use, one of `SETS`.
    """

    def __init__(self, loaded: Any, name: str) -> None:
        self.name = name
        self.attention = loaded.arbor_native_attention
        self.linear = loaded.arbor_native_linear
        self.decode = loaded.arbor_native_decode
        self.norm = loaded.arbor_native_norm
        self.gated = loaded.arbor_native_gated
        self.store = loaded.arbor_native_store
        self.rotary = loaded.arbor_native_rotary
        self.select_heads = loaded.arbor_native_select_heads
        self.list_moves = loaded.arbor_native_list_moves
        self.count_held = loaded.arbor_native_count_held
        self.share_cells = loaded.arbor_native_share_cells
        self.list_shared = loaded.arbor_native_list_shared
        self.choose = loaded.arbor_native_choose
        self.sum_logits = loaded.arbor_native_sum_logits
        self.run = loaded.arbor_native_run
        self.run.argtypes, self.run.restype = (c_void_p, c_int32, c_int32), None
        for call in (self.attention, self.linear, self.choose, self.sum_logits):
            call.argtypes, call.restype = (c_void_p, c_int32), None
        single = (self.decode, self.norm, self.gated, self.store, self.rotary)
        heads = (self.select_heads, self.list_moves)
        shared = (self.count_held, self.share_cells, self.list_shared)
        for call in (*single, *heads, *shared):
            call.argtypes, call.restype = (c_void_p,), None

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        """Copies of models share it."""
        return native_library, ()


def native_library() -> Library | None:
    """The library, loaded once; None where it is absent, switched off or cannot run."""
    return None if _OFF else _load()[0]


def native_state() -> str:
    """The instruction set in use, or why there is none; for `arbor doctor`."""
    library, reason = _load()
    return reason if library is None else library.name


_OFF: list[None] = []  # one entry per open `without_native`


@contextmanager
def without_native() -> Iterator[None]:
    """Within, what is built does without the library, as on a machine that has none.

    For tests and benchmarks; layers and backends that were built before keep it.
    """
    _OFF.append(None)
    try:
        yield
    finally:
        _OFF.pop()


def _layout() -> int:
    """The library's own number for these structures."""
    layout = LAYOUT_VERSION
    jobs = (AttentionJob, LinearJob, NormJob, GatedJob, StoreJob, RotaryJob, AddJob, HeadNormJob)
    later = (HeadSelectJob, HeadShareJob, ChoiceJob, LogitSumsJob, DecodeJob, Call)
    sent: list[Any] = [LevelStruct, *jobs, *later]
    for each in sent:
        layout = (layout * 1009 + ctypes.sizeof(each)) % (1 << 40)
    return layout


@functools.cache
def _load() -> tuple[Library | None, str]:
    wanted = os.environ.get(VARIABLE, "")
    if wanted == "off":
        return None, f"off ({VARIABLE})"
    library, reason = open_library(FILE, wanted)
    if library is None and wanted:
        logger.warning("%s=%s: %s; torch computes instead", VARIABLE, wanted, reason)
    return library, reason


def open_library(file: Path, wanted: str = "") -> tuple[Library | None, str]:
    """The library in a file; several files can be open at once, to compare builds.

    A file computes with one set for all of its users, that of its first opening; for two sets at
    once, open a copy of it.

    Args:
        wanted: the instruction set to use, one of `SETS`; empty: the best that the CPU has, or the
            one in use.

    Returns:
        The library and "", or None and why it cannot be used.
    """
    if not file.exists():
        return (
            None,
            "not built: no C++ compiler when arbor was installed, or neither x86-64 nor aarch64",
        )
    try:
        loaded = ctypes.CDLL(str(file))
        use, layout = loaded.arbor_native_use, loaded.arbor_native_layout
    except (OSError, AttributeError) as error:
        return None, f"cannot be loaded: {error}"
    layout.argtypes, layout.restype = (), c_int64
    if layout() != _layout():
        return None, "built from other sources: install arbor again, or run make native"
    use.argtypes, use.restype = (c_char_p,), c_char_p
    name = use(wanted.encode() or None)
    if name is None:
        known = not wanted or wanted in SETS
        can = f"the CPU cannot run {wanted or SETS[0]}"
        return None, can if known else f"no such set; known: off, {', '.join(SETS)}"
    if wanted and name.decode() != wanted:
        return None, f"open with {name.decode()} already: open a copy of the file with {wanted}"
    return Library(loaded, name.decode()), ""
