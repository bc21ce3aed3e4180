"""Stage 5: decode steps over trees of given shapes, with random weights, against their floors.

Each cell fills the paths of its leaves, decodes some steps to warm up, times the next ones by the
clock, and profiles a few more for the time and number of kernels. The paths are as long as the
blocks of the tree at the end of the timed steps.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from gpu_stages.engines import (
    Variant,
    backend_name,
    captured,
    make_engine,
    plant,
    random_model,
    token,
)
from gpu_stages.floors import (
    BYTES,
    CONFIG_L,
    CONFIG_S,
    H200,
    LLAMA_8B,
    MODELS,
    QWEN_7B,
    SMALL,
    TINY,
    TREES,
    Machine,
    ModelShape,
    TreeShape,
    tree_floor_ms,
)
from gpu_stages.predictions import CELLS
from gpu_stages.rows import Job, NotAvailable, read
from random_llama import fixed_length
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from transformers import DynamicCache

from arbor.engine.operation import Growth
from arbor.kernels.int8 import stored_width
from arbor.model.sampling_params import Sampling

WARM, TIMED, PROFILED = 20, 40, 5  # steps
WARM_SMALL, TIMED_SMALL = 2, 4
GIB = 1 << 30
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cudaMemcpy", "cudaMemset")


@dataclass(frozen=True)
class Cell:
    """One measurement.

    Attributes:
        model, tree: names of their shapes.
        leaves: how many decode.
        variant: of the engine; None: transformers, with a batch of copied caches.
    """

    model: str
    tree: str
    leaves: int
    variant: Variant | None

    @property
    def name(self) -> str:
        """``llama-3.1-8b config-s 64 shipped+graphs``."""
        how = "transformers" if self.variant is None else self.variant.name
        return f"{self.model} {self.tree} {self.leaves} {how}"


@dataclass(frozen=True)
class Steps:
    """How many steps a cell takes."""

    warm: int
    timed: int
    profiled: int

    @property
    def total(self) -> int:
        """Steps in all, and some to spare."""
        return self.warm + self.timed + self.profiled + 3


def cells(part: str, small: bool) -> list[Cell]:
    """The cells of a part in order of value."""
    shipped, graphs = Variant(), Variant(graphs=True)
    on, off = Variant("on"), Variant("off")
    on_graphs, off_graphs = Variant("on", graphs=True), Variant("off", graphs=True)
    if part == "transformers":
        chosen = [(4, SMALL)] if small else [(64, CONFIG_S), (8, CONFIG_S)]
        model = TINY if small else LLAMA_8B
        return [Cell(model.name, tree.name, leaves, None) for leaves, tree in chosen]
    if small:
        extras = (Variant(deterministic=True), Variant(statistics=True), Variant(int8=True))
        return [
            Cell(TINY.name, SMALL.name, 4, variant)
            for variant in (shipped, graphs, on, off, *extras)
        ]
    model = LLAMA_8B if part == "llama" else QWEN_7B
    first = [shipped, graphs, on_graphs, off_graphs, on, off]
    # attention in two launches or level by level, also of 8-bit KV, and steps that wait
    launches = (
        graphs,
        replace(graphs, flashinfer=True),
        replace(graphs, waits=True),
        replace(graphs, int8=True),
    )
    found = [
        (tree, leaves, variant)
        for tree, leaves in ((CONFIG_S, 64), (CONFIG_L, 256), (CONFIG_S, 1))
        for variant in launches
    ]
    found += [(tree, leaves, shipped) for tree, leaves in ((CONFIG_S, 64), (CONFIG_L, 256))]
    found += [(CONFIG_S, 64, variant) for variant in first[2:]]
    found += [(CONFIG_L, 256, variant) for variant in first[2:]]
    for base in (shipped, graphs):
        found.append((CONFIG_S, 64, Variant(graphs=base.graphs, statistics=True)))
        found.append((CONFIG_S, 64, Variant(graphs=base.graphs, unfused=True)))
        found.append((CONFIG_S, 64, Variant(graphs=base.graphs, deterministic=True)))
    for variants in (first[:2], first[2:]):
        for leaves in (8, 1, 64, 256):
            for tree in (CONFIG_S, CONFIG_L):
                found += [(tree, leaves, variant) for variant in variants]
    return list(dict.fromkeys(Cell(model.name, tree.name, n, v) for tree, n, v in found))


class Stopwatch:
    """Times the steps of a decode: the engine asks it after every step whether to stop.

    Args:
        steps: how many of each part.
        cuda: whether there are kernels to wait for and to profile.
    """

    def __init__(self, steps: Steps, cuda: bool) -> None:
        self._steps = steps
        self._cuda = cuda
        self._count = -1  # it is asked once before the first step
        self._last = 0.0
        self._profile: Any = None
        self.wall_ms: list[float] = []
        self.kernels: dict[str, Any] = {}

    def __call__(self) -> bool:
        self._count += 1
        warm, end = self._steps.warm, self._steps.warm + self._steps.timed
        if self._cuda and self._count in (warm, end, end + self._steps.profiled):
            torch.cuda.synchronize()
        if self._cuda and self._count == warm:
            torch.cuda.reset_peak_memory_stats()
        now = time.perf_counter()
        if warm < self._count <= end:
            self.wall_ms.append(1e3 * (now - self._last))
        if self._count == end and self._cuda and self._steps.profiled:
            self._profile = profile(activities=[ProfilerActivity.CUDA])
            self._profile.start()
        if self._count == end + self._steps.profiled and self._profile is not None:
            self._profile.stop()
            self.kernels = kernels(self._profile.events(), self._steps.profiled)
        self._last = time.perf_counter()
        return False


def kernels(events: Iterable[Any], steps: int) -> dict[str, Any]:
    """Time of all kernels and copies of a step, their number, launches, and the longest kinds."""
    busy: Counter[str] = Counter()
    count = launches = 0
    for event in events:
        if event.device_type == DeviceType.CUDA:
            busy[event.name[:60]] += event.time_range.elapsed_us()
            count += 1
        else:
            launches += event.name.startswith(LAUNCHES)
    return {
        "busy_ms": sum(busy.values()) / 1e3 / steps,
        "kernels": round(count / steps),
        "launches": round(launches / steps),
        "longest": [[name, round(us / 1e3 / steps, 3)] for name, us in busy.most_common(16)],
    }


def run(job: Job) -> None:
    """Measure the cells of the part; after each its row is on disk."""
    device = torch.device(job.device)
    machine = machine_of(job)
    steps = Steps(WARM_SMALL, TIMED_SMALL, 0) if job.small else Steps(WARM, TIMED, PROFILED)
    todo = cells(job.part, job.small)
    model: Any = None
    while todo and job.left_s > 0:
        cell = todo.pop(0)
        fresh = job.small or cell.variant is None or cell.variant.deterministic
        with job.checking(cell.name):
            if model is None or fresh:  # the settings change a model in place
                model = None
                model = random_model(MODELS[cell.model], device)
            found = measure(cell, model, steps, device)
            own = TREES[cell.tree].block - steps.timed / 2
            shape, part = MODELS[cell.model], 1.0
            if cell.variant is not None and cell.variant.int8:
                part = stored_width(shape.head_dim) / (BYTES * shape.head_dim)
            floor = tree_floor_ms(shape, TREES[cell.tree], cell.leaves, machine, own, part)
            job.row(
                cell.name,
                predicted=CELLS.get(cell.name),
                floor_ms=floor,
                of_floor=found["wall_ms"] / floor,
                **found,
            )
        if fresh:
            model = None
        release(device)
    job.end([cell.name for cell in todo])


def release(device: torch.device) -> None:
    """Give back the memory of the last cell; an error's traceback may have held it."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def machine_of(job: Job) -> Machine:
    """What stage 3 measured in the same file; an H200's figures without it."""
    rows = read(job.out) if job.out.exists() else []
    for row in reversed(rows):
        if row["stage"] == "peaks" and "bytes_per_s" in row:
            return Machine(row["bytes_per_s"], row["flop_per_s"])
    return H200


def measure(cell: Cell, model: Any, steps: Steps, device: torch.device) -> dict[str, Any]:
    """The times of one cell."""
    shape, tree = MODELS[cell.model], TREES[cell.tree]
    own = tree.block - steps.warm - steps.timed
    watch = Stopwatch(steps, device.type == "cuda")
    if cell.variant is None:
        about = batched(model, shape, tree, cell.leaves, own, steps, watch)
    else:
        engine = make_engine(model, cell.variant)
        children = plant(
            engine, tree, cell.leaves, own, steps.total, shape.vocabulary, interrupted=watch
        )
        growth = Growth(0, Sampling(), fixed_length(steps.total))
        engine.decode(children, growth)
        about = {"backend": backend_name(engine), "graphs": captured(engine)}
        if cell.variant.graphs and about["graphs"] == 0:
            raise NotAvailable("no step was captured as a graph")
    times = sorted(watch.wall_ms)
    found = {
        "wall_ms": sum(times) / len(times),
        "wall_ms_median": times[len(times) // 2],
        "wall_ms_p90": times[9 * len(times) // 10],
        "steps": len(times),
        **about,
        **watch.kernels,
    }
    if device.type == "cuda":
        found["peak_gib"] = torch.cuda.max_memory_allocated() / GIB
    return found


@torch.inference_mode()
def batched(
    model: Any,
    shape: ModelShape,
    tree: TreeShape,
    leaves: int,
    own: int,
    steps: Steps,
    watch: Stopwatch,
) -> dict[str, Any]:
    """Greedy decoding with transformers' own forward: a path's cache, copied for every leaf."""
    length = tree.path_tokens - tree.block + own
    path = [[token(place, shape.vocabulary) for place in range(length)]]
    cache = DynamicCache()
    model(torch.tensor(path, device=model.device), past_key_values=cache, logits_to_keep=1)
    cache.batch_repeat_interleave(leaves)
    ids = torch.arange(5, 5 + leaves, device=model.device)[:, None]
    watch()
    for _ in range(steps.total - 3):
        logits = model(ids, past_key_values=cache, logits_to_keep=1).logits
        ids = logits[:, -1:].argmax(-1)
        ids.tolist()  # the tokens decide where a text ends
        watch()
    return {"backend": "transformers"}
