"""Stage 8: tree attention of several backends in one run, over the shapes that FastTree measured.

A tree is written as FastTree does: nodes of each level, and tokens of a node on each. A call is one
layer, captured in a CUDA graph, with the cache overwritten before each; planning is timed apart.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from gpu_stages.attention import ERROR, built
from gpu_stages.decode import machine_of
from gpu_stages.floors import BYTES, Machine
from gpu_stages.predictions import TREE_RATIO
from gpu_stages.rows import Job, NotAvailable
from gpu_stages.table import REPEATS

from arbor.kernels.attention.base import (
    AttentionBackend,
    AttentionShape,
    CascadeLayout,
    CascadeLevel,
)
from arbor.kernels.attention.flashinfer_cascade import FlashInferCascade, PlannedWrapper

CACHE_BYTES = 256 << 20  # more than any cache holds
DECODE_BYTES = 128 << 20  # workspace of FlashInfer's decode wrapper
DECODE_GROUPS = (1, 2, 3, 4, 8)  # query heads of a KV head that its kernel has
PLANS = 5
HEADS = ((32, 8), (32, 32), (16, 1))
TREES = (
    *("1,2,64/8,256,32", "1,4,256/8,256,32", "1,4,8,256/8,256,256,32", "1,256/256,32"),
    *("1,16,64/1024,256,32", "1,4,16,512/1024,256,128,32", "1,10/4000,400", "256/1024"),
    *("1,1024/2048,32", "1,4,16,64,256,1024/256,8,256,64,32,256", "256/4096"),
    *("1,2,4,8,16,32,64,128,1024/16,16,16,16,16,16,16,16,16",),
    *("1,2,4,8,16,32,64,128,1024/256,128,64,16,16,16,16,16,16",),
    *("1,8,16,32,64,128,1024/256,128,64,16,16,16,16",),
    *("1,8,16,32,64,256,1024/256,128,64,16,16,16,16",),
    *("1,16,32,64,128,1024/256,128,64,16,16,16", "1,16,32,64,256,1024/256,128,64,16,16,16"),
)
SMALL_TREES = ("1,2,6/8,16,3", "4/5")


@dataclass(frozen=True)
class Timed:
    """What one backend gave.

    Attributes:
        out: of the call.
        us: of a call, the median.
        plan_ms: of planning, the median.
    """

    out: torch.Tensor
    us: float
    plan_ms: float


def layout_of(tree: str) -> CascadeLayout:
    """The layout of a tree's leaves; nodes lie one after the other in the pool.

    Example:
        >>> layout = layout_of("1,4/3,2")
        >>> [level.qo_indptr.tolist() for level in layout.levels]
        [[0, 4], [0, 1, 2, 3, 4]]
        >>> layout.levels[1].kv_indices.tolist()
        [3, 4, 5, 6, 7, 8, 9, 10]
    """
    counts, lengths = ([int(word) for word in part.split(",")] for part in tree.split("/"))
    first, levels = 0, []
    found: list[CascadeLevel] = []
    leaf = np.arange(counts[-1])
    for depth in range(len(counts) - 1, -1, -1):
        if depth < len(counts) - 1:
            leaf = leaf * counts[depth] // counts[depth + 1]
        levels.append(np.searchsorted(leaf, np.arange(counts[depth] + 1)))
    for rows, length in zip(reversed(levels), lengths, strict=True):
        keys = (len(rows) - 1) * length
        found.append(
            CascadeLevel(
                torch.from_numpy(rows.astype(np.int32)),
                torch.arange(0, keys + 1, length, dtype=torch.int32),
                torch.arange(first, first + keys, dtype=torch.int32),
                causal=len(found) == len(counts) - 1,
            )
        )
        first += keys
    return CascadeLayout(counts[-1], tuple(found))


class DecodeLast(FlashInferCascade):
    """FlashInfer's cascade whose last level, a row each, runs by its decode kernel on CUDA cores.

    With tensor cores its decode wrapper runs the kernel of its prefill wrapper.
    """

    def _wrapper(self, shape: AttentionShape, index: int) -> PlannedWrapper:
        if index == 0 and (shape, 0) not in self._wrappers:
            workspace = torch.empty(DECODE_BYTES, dtype=torch.uint8, device=self.device)
            wrapper = self._flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD")
            self._wrappers[shape, 0] = PlannedWrapper(_Decoding(wrapper))
        return super()._wrapper(shape, index)


class _Decoding:
    """A decode wrapper that is called as a prefill wrapper is."""

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper
        self.run = wrapper.run

    def plan(self, rows: torch.Tensor, *lists: Any, **settings: Any) -> None:
        assert (rows.diff() == 1).all(), "a request has one row"
        kept = ("sm_scale", "window_left", "logits_soft_cap", "q_data_type", "kv_data_type")
        self._wrapper.plan(*lists, **{name: settings[name] for name in kept})


def floor_us(layout: CascadeLayout, shape: AttentionShape, machine: Machine) -> float:
    """The shortest that one layer can take."""
    keys = sum(len(level.kv_indices) for level in layout.levels)
    pairs = sum(int(level.qo_indptr.diff() @ level.kv_indptr.diff()) for level in layout.levels)
    moved = 2 * keys * shape.num_kv_heads * shape.head_dim_qk * BYTES / machine.bytes_per_s
    return 1e6 * max(moved, 4 * pairs * shape.num_qo_heads * shape.head_dim_qk / machine.flop_per_s)


def timed(
    backend: AttentionBackend, layout: CascadeLayout, shape: AttentionShape, inputs: Any
) -> Timed:
    """One backend's attention over a layout."""
    plans = []
    for _ in range(PLANS):
        began = time.perf_counter()
        plan = backend.plan(layout, shape)
        plans.append(1e3 * (time.perf_counter() - began))
    call = partial(backend.run, plan, *inputs)
    out = call()[0].clone()
    times = sorted(_on_gpu(call) if out.is_cuda else _on_cpu(call))
    return Timed(out, times[len(times) // 2], sorted(plans)[PLANS // 2])


def _on_gpu(call: Callable[[], Any]) -> list[float]:
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        call()
    cache = torch.empty(CACHE_BYTES, dtype=torch.uint8, device="cuda")
    pairs = []
    for _ in range(REPEATS):
        cache.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    return [1e3 * float(start.elapsed_time(end)) for start, end in pairs]


def _on_cpu(call: Callable[[], Any]) -> list[float]:
    began = time.perf_counter()
    call()
    return [1e6 * (time.perf_counter() - began)]


def row_error(out: torch.Tensor, base: torch.Tensor) -> float:
    """Of rows, the largest difference relative to their length."""
    wanted = base.float().flatten(1)
    return float(((out.float().flatten(1) - wanted).norm(dim=1) / wanted.norm(dim=1)).max())


def by_decoding(
    job: Job,
    name: str,
    backend: AttentionBackend,
    layout: CascadeLayout,
    shape: AttentionShape,
    inputs: Any,
    base: Timed,
) -> None:
    """One tree with the last level by FlashInfer's decode kernel, where that can be had."""
    with job.checking(name, backend="flashinfer"):
        try:
            found = timed(backend, layout, shape, inputs)
        except Exception as failure:  # compilers, loaders and CUDA fail in many ways
            raise NotAvailable(f"the decode kernel: {failure}") from failure
        error = row_error(found.out, base.out)
        ok = error < 2 * ERROR
        job.row(name, backend="flashinfer", ok=ok, error=error, decode_us=found.us, base_us=base.us)


def compared(base: Timed | None, ours: Timed | None) -> dict[str, Any]:
    """The numbers of a tree by two backends, or by one where the other is missing."""
    found: dict[str, Any] = {}
    for word, each in (("base", base), ("tree", ours)):
        if each is not None:
            found |= {f"{word}_us": each.us, f"{word}_plan_ms": each.plan_ms}
    if base is not None and ours is not None:
        error = row_error(ours.out, base.out)
        found |= {"ok": error < 2 * ERROR, "error": error}  # of both
        found["times_as_fast"] = base.us / ours.us
    return found


def run(job: Job) -> None:
    """Measure every tree with the backends, one after the other, and the ratio of two."""
    device = torch.device(job.device)
    names = ("rowwise", "torch") if job.small else ("flashinfer", "triton")
    backends = built(job, names)
    todo = [
        (f"{tree} {heads}/{kv_heads}", tree, AttentionShape(heads, kv_heads, 128, 128, 128**-0.5))
        for heads, kv_heads in HEADS
        for tree in (SMALL_TREES if job.small else TREES)
        if backends
    ]
    decode = DecodeLast(device) if "flashinfer" in backends else None
    machine = machine_of(job)
    ratios = []
    while todo and job.left_s > 0:
        name, tree, shape = todo.pop(0)
        with job.checking(name, backend=names[1]), torch.inference_mode():
            layout = layout_of(tree)
            slots = sum(len(level.kv_indices) for level in layout.levels)
            q = torch.randn(layout.rows, shape.num_qo_heads, 128, device=device).bfloat16()
            kv = torch.randn(2, slots, shape.num_kv_heads, 128, device=device).bfloat16()
            times = {
                each: timed(backend, layout, shape, (q, *kv)) for each, backend in backends.items()
            }
            base, ours = map(times.get, names)
            found = compared(base, ours)
            floor = floor_us(layout, shape, machine)
            job.row(name, backend=names[1], **found, tree_floor_us=floor)
            if "times_as_fast" in found:
                ratios.append(found["times_as_fast"])
            if decode is not None and base is not None and shape.group in DECODE_GROUPS:
                by_decoding(job, f"{name}, decode kernel", decode, layout, shape, (q, *kv), base)
    if ratios:
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        job.row(
            "geometric mean",
            backend=names[1],
            predicted={"times_as_fast": TREE_RATIO},
            times_as_fast=mean,
            n=len(ratios),
        )
    job.end([name for name, *_ in todo])
