"""ForwardPasses: the model's forwards over one tree, observed, committed and reported."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from arbor.engine.nvtx import nvtx_range
from arbor.engine.stopwatch import Stopwatch
from arbor.engine.tree_state import TreeState
from arbor.errors import ArborError
from arbor.events import Forwarded, ForwardKind
from arbor.memory.out_of_memory import forward_too_large, is_out_of_memory
from arbor.model.plan import ForwardPlan, Segment, plan_forward, visibility
from arbor.model.runner import ModelRunner
from arbor.tree import Node, NodeState

OBSERVE_EVERY = 4  # attention is observed in every fourth layer, the last of each four


@dataclass(slots=True)
class _Steps:
    """Decode steps that were not reported yet."""

    steps: int = 0
    rows: int = 0
    read: int = 0
    unique: int = 0
    held: int = 0


class ForwardPasses:
    """Runs the model over one tree.

    Args:
        state: of the tree.
        runner: the model.
        observes: whether attention is observed.
        min_saved_reads: see `plan_forward`.
    """

    def __init__(
        self, state: TreeState, runner: ModelRunner, *, observes: bool, min_saved_reads: int
    ) -> None:
        self.runner = runner
        self._state = state
        self._memory = state.memory
        self._observes = observes
        self.min_saved_reads = min_saved_reads
        self._unreported = _Steps()
        self._stopwatch = Stopwatch(runner.device)  # of the unreported steps

    def run(
        self, kind: ForwardKind, segments: Sequence[Segment], computed: Sequence[Node]
    ) -> Tensor:
        """One forward of its own, reported at once.

        Args:
            kind: its purpose.
            segments: the tokens to compute.
            computed: blocks that count as computed from now on.

        Returns:
            logits [n, V] float32 where the segments ask for them.
        """
        self.report_steps()
        stopwatch = Stopwatch(self.runner.device)
        with stopwatch.running():
            plan = plan_forward(segments, min_saved_reads=self.min_saved_reads)
            with nvtx_range(kind), self.explaining_out_of_memory(kind, plan.rows):
                logits = self._forward(plan)
        self._memory.commit()
        self._state.mark_computed(computed)
        once = _Steps(1, plan.rows, plan.read_tokens, plan.unique_read_tokens, self._memory.used)
        self._report(kind, once, stopwatch.take())
        return logits

    def timing(self) -> AbstractContextManager[None]:
        """Count the work within as part of the decode steps that are reported next."""
        return self._stopwatch.running()

    def step(self, plan: ForwardPlan) -> Tensor:
        """One decode step, reported together with those after it; logits [n, V] float32."""
        with self.explaining_out_of_memory("decode", plan.rows):
            logits = self._forward(plan)
        self._memory.commit()
        self._unreported.steps += 1
        self._unreported.rows += plan.rows
        self._unreported.read += plan.read_tokens
        self._unreported.unique += plan.unique_read_tokens
        self._unreported.held += self._memory.used
        return logits

    def report_steps(self) -> None:
        """Report the decode steps since the last forward of another kind."""
        if self._unreported.steps:
            steps, self._unreported = self._unreported, _Steps()
            self._report("decode", steps, self._stopwatch.take())

    def _report(self, kind: ForwardKind, what: _Steps, elapsed_s: float) -> None:
        self._state.emit(
            Forwarded(
                kind=kind,
                rows=what.rows,
                steps=what.steps,
                read_tokens=what.read,
                unique_read_tokens=what.unique,
                kv=self._state.kv,
                peak=self._memory.peak,
                elapsed_s=elapsed_s,
                held=what.held,
            )
        )

    def _forward(self, plan: ForwardPlan) -> Tensor:
        if not self._observes or bool(plan.again.all()):
            return self.runner.forward(plan, self._memory.pool).logits
        layers = range(self.runner.layer_count)
        watched = [i for i in layers if i % OBSERVE_EVERY == OBSERVE_EVERY - 1] or [layers[-1]]
        result = self.runner.forward(plan, self._memory.pool, mass=dict.fromkeys(watched))
        if result.mass is None:  # a replay knows of no attention
            return result.logits
        shapes = [self.runner.specs[i].shape for i in watched]
        windows = [shape.window for shape in shapes if shape.window is not None]
        window = max(windows) if len(windows) == len(shapes) else None
        slots, queries = visibility(plan, self._memory.pool.trash, window)
        heads = sum(shape.num_qo_heads for shape in shapes)
        mass = result.mass[torch.from_numpy(slots).to(result.mass.device)] / heads
        self._state.observe(slots, mass.cpu().numpy(), queries)
        return result.logits

    @contextmanager
    def explaining_out_of_memory(self, kind: ForwardKind, rows: int = 0) -> Iterator[None]:
        """Turn an out-of-memory error within into one that names what holds the memory, and a
        budget that leaves room."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if isinstance(error, ArborError) or not is_out_of_memory(error):
                raise
            alive = [node for node in self._state.tree if node.state is not NodeState.PRUNED]
            raise forward_too_large(
                error,
                self.runner.device,
                f"{kind} of {rows:,} tokens" if rows else kind,
                weights=self.runner.weight_bytes,
                slots=self._memory.slots,
                bytes_per_token=self._memory.bytes_per_token,
                least=max(node.end for node in alive) + max(rows, 1),
            ) from error
