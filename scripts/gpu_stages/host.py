"""Stage 6: what the host does in a decode step: planning, the model's Python, sampling.

Parts are exclusive: time in a part within another counts for the inner one only. The GPU is waited
for before sampling, so that waiting is a part of its own.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from gpu_stages.decode import Cell, Steps, Stopwatch, release
from gpu_stages.engines import Variant, backend_name, make_engine, plant, random_model
from gpu_stages.floors import CONFIG_L, CONFIG_S, LLAMA_8B, MODELS, SMALL, TINY, TREES
from gpu_stages.predictions import HOST
from gpu_stages.rows import Job
from random_llama import NoText, fixed_length
from torch import Tensor

from arbor.engine import forward_pass
from arbor.engine.operation import Growth, Row
from arbor.engine.sampling_graphs import SamplingGraphs
from arbor.engine.token_source import ModelSampler
from arbor.model.plan import ForwardPlan
from arbor.model.sampling_params import Sampling

# Functions that plan a forward.
PLANNING: tuple[tuple[Any, str], ...] = (
    (forward_pass, "plan_table"),
    (forward_pass.DecodeBatch, "plan"),
    (ForwardPlan, "layout"),
)


class Clock:
    """Exclusive wall-clock time of nested parts."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._open: list[str] = []
        self._since = time.perf_counter()

    def around(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function whose time counts for a part."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._turn()
            self._open.append(part)
            try:
                return function(*args, **kwargs)
            finally:
                self._turn()
                self._open.pop()

        return timed

    def reset(self) -> None:
        """Forget what was counted so far."""
        self._turn()
        self.seconds.clear()

    def _turn(self) -> None:
        now = time.perf_counter()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now


class TimedSampler(ModelSampler):
    """The model's sampler on a clock; waits for the GPU first."""

    def __init__(self, clock: Clock, cuda: bool, graphs: SamplingGraphs | None) -> None:
        super().__init__(NoText(), graphs=graphs)
        wait: Callable[[], object] = torch.cuda.synchronize if cuda else bool
        self._wait = clock.around("waiting", wait)
        self._sample = clock.around("sampling", super().choose)

    def choose(self, rows: Sequence[Row], logits: Tensor) -> list[int]:
        self._wait()
        tokens: list[int] = self._sample(rows, logits)
        return tokens


class Watch(Stopwatch):
    """A stopwatch that begins the clock's count with the timed steps, and takes it at their end."""

    def __init__(self, steps: Steps, cuda: bool, clock: Clock) -> None:
        super().__init__(steps, cuda)
        self._clock = clock
        self.parts: dict[str, float] = {}

    def __call__(self) -> bool:
        super().__call__()
        if self._count == self._steps.warm:
            self._clock.reset()
        if self._count == self._steps.warm + self._steps.timed:
            per_step = 1e3 / self._steps.timed
            self.parts = {name: s * per_step for name, s in self._clock.seconds.items()}
        return False


def run(job: Job) -> None:
    """Time the parts of a step at 64 and 256 leaves, without and with graphs."""
    device = torch.device(job.device)
    if job.small:
        todo = [Cell(TINY.name, SMALL.name, 4, Variant())]
    else:
        todo = [
            Cell(LLAMA_8B.name, tree.name, leaves, Variant(graphs=graphs))
            for graphs in (False, True)
            for tree, leaves in ((CONFIG_S, 64), (CONFIG_L, 256))
        ]
    steps = Steps(2, 4, 0) if job.small else Steps(10, 20, 0)
    model: Any = None
    while todo and job.left_s > 0:
        cell = todo.pop(0)
        with job.checking(cell.name):
            if model is None:
                model = random_model(MODELS[cell.model], device)
            found = host_parts(cell, model, steps, device)
            job.row(cell.name, predicted=HOST.get(cell.name), **found)
        release(device)
    job.end([cell.name for cell in todo])


def host_parts(cell: Cell, model: Any, steps: Steps, device: torch.device) -> dict[str, Any]:
    """Milliseconds of a step by part; ``other_ms`` is the engine's own work."""
    assert cell.variant is not None
    clock = Clock()
    watch = Watch(steps, device.type == "cuda", clock)
    shape, tree = MODELS[cell.model], TREES[cell.tree]
    engine = make_engine(model, cell.variant)
    steps_by_graph = engine.runner.graphs
    draws_by_graph = None if steps_by_graph is None else SamplingGraphs(steps_by_graph.recorder)
    engine._source = TimedSampler(clock, device.type == "cuda", draws_by_graph)
    places = [(*place, "plan") for place in PLANNING]
    places.append((engine.runner.backend, "plan", "backend_plan"))
    places.append((engine.runner.backend, "run", "attention"))
    places.append((engine.runner, "forward", "model"))
    undo = [put_on(clock, *place) for place in places]
    try:
        own = tree.block - steps.warm - steps.timed
        children = plant(
            engine, tree, cell.leaves, own, steps.total, shape.vocabulary, interrupted=watch
        )
        engine.decode(children, Growth(0, Sampling(), fixed_length(steps.total)))
    finally:
        for back in undo:
            back()
    wall_ms = sum(watch.wall_ms) / len(watch.wall_ms)
    found = {f"{name}_ms": value for name, value in watch.parts.items()}
    return {
        "wall_ms": wall_ms,
        **found,
        "other_ms": wall_ms - sum(found.values()),
        "backend": backend_name(engine),
    }


def put_on(clock: Clock, owner: Any, name: str, part: str) -> Callable[[], None]:
    """Put a function of a module, class or object on the clock; what takes it off again."""
    function = getattr(owner, name)
    change = setattr if isinstance(owner, type | ModuleType) else object.__setattr__
    change(owner, name, clock.around(part, function))
    return lambda: change(owner, name, function)
