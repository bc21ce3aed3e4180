"""CUDA graphs of small steps: captured per bucket, checked on first use, replayed afterwards."""

from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from arbor.kernels.attention.base import AttentionBackend, AttentionShape
from arbor.kernels.attention.fixed import Bucket, FixedAttention, FixedBackend
from arbor.kernels.staging import Staging
from arbor.memory.pool import KVPool
from arbor.model.attention import Attend, AttentionCall, written
from arbor.model.plan import ForwardPlan
from arbor.support.garbage import no_collection

logger = logging.getLogger(__name__)

# Steps of a bucket that run without a graph before one is captured: a capture costs about as much
# as ten steps, and many buckets are met for a few steps only.
PATIENCE = 8
MOST_GRAPHS = 40  # the least recently used one leaves; as many buckets as Triton's attention has
HALF = (torch.float16, torch.bfloat16)
# Largest difference of a row's attention from that without padding, relative to its size: keys are
# split at other places. One layer shows it; a missing key among some tens shows as well.
ATTENTION_TOLERANCE, HALF_ATTENTION_TOLERANCE = 1e-4, 0.02
# Likewise of a row's logits: matrix products of another number of rows round differently, and the
# layers add to it (a random model of 32 layers in bfloat16: 0.06).
TOLERANCE, HALF_TOLERANCE = 1e-3, 0.25

# Runs the model: ids, positions and logit rows on the device, and the answer to attention calls;
# the logits of the logit rows, [n, V].
RunModel = Callable[[Tensor, Tensor, Tensor, Attend], Tensor]


@dataclass(frozen=True, slots=True)
class Recording:
    """A captured step.

    Attributes:
        replay: runs it again on the same buffers; does not wait for the device.
        device_bytes: device memory it reserved.
    """

    replay: Callable[[], None]
    device_bytes: int = 0


class Recorder(Protocol):
    """Captures work on a device."""

    def record(self, step: Callable[[], None]) -> Recording:
        """Capture a step that has run before; what it allocates is valid until the next replay.

        Raises:
            RuntimeError: the step waits for the device, or its memory is exhausted.
        """
        ...


class CudaRecorder:
    """CUDA graphs that share one memory pool, as only one of them runs at a time.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None
        self._stream: Any = None
        self._turn = threading.Lock()  # engines in several threads capture one after the other

    def record(self, step: Callable[[], None]) -> Recording:
        """See `Recorder.record`; other threads may go on using the device."""
        with self._turn, torch.cuda.device(self._device):
            if self._stream is None:
                self._stream = torch.cuda.Stream(self._device)
                self._pool = torch.cuda.graph_pool_handle()
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            try:
                with torch.cuda.stream(self._stream):  # libraries prepare themselves for the stream
                    step()
            finally:  # what the step has written is read by the current stream, whole or not
                current.wait_stream(self._stream)
            before = torch.cuda.memory_reserved()
            graph = torch.cuda.CUDAGraph()
            try:
                with (
                    no_collection(),  # a graph that is freed meanwhile would end the capture
                    torch.cuda.graph(
                        graph,
                        pool=self._pool,
                        stream=self._stream,
                        capture_error_mode="thread_local",
                    ),
                ):
                    step()
            except BaseException:
                self._stream = self._pool = None  # the pool takes no other capture
                raise
            reserved = max(0, torch.cuda.memory_reserved() - before)
        return Recording(graph.replay, reserved)


class GraphBackend(AttentionBackend, FixedBackend, Protocol):
    """An attention backend that can keep its buffers where they are."""


class _Step:
    """The buffers and the recording of one bucket's steps.

    Args:
        bucket: of the steps.
        trash: the slot of no token.
        attentions: of every shape in the model.
        staging: copies a step's integers.
        output: [rows, V] float32, written by every run.
    """

    def __init__(
        self,
        bucket: Bucket,
        trash: int,
        attentions: Mapping[AttentionShape, FixedAttention],
        staging: Staging,
        output: Tensor,
    ) -> None:
        self.recording: Recording | None = None
        self._bucket = bucket
        self._trash = trash
        self._attentions = attentions
        self._staging = staging
        self._output = output
        with torch.inference_mode(False):  # written to in every mode
            self._inputs = torch.zeros(3, bucket.rows, dtype=torch.int64, device=staging.device)
            self._logit_rows = torch.arange(bucket.rows, device=staging.device)

    def over(self, pool: KVPool, run_model: RunModel) -> Callable[[], None]:
        """The padded step over a pool; the step itself keeps no pool alive."""
        ids, positions, write = self._inputs.unbind()

        def attend(call: AttentionCall) -> Tensor:
            k_pool, v_pool = pool.k[call.layer], pool.v[call.layer]
            q = written(call, pool, write)
            return self._attentions[call.shape].run(q, k_pool, v_pool, call.sinks)[0]

        def run() -> None:
            self._output.copy_(run_model(ids, positions, self._logit_rows, attend))

        return run

    def attention(self, shape: AttentionShape, q: Tensor, kv: tuple[Tensor, Tensor]) -> Tensor:
        """Attention of the padded rows over one layer's K and V, [rows, H_q, D_v]."""
        return self._attentions[shape].run(q, *kv, None)[0]

    def load(self, plan: ForwardPlan) -> bool:
        """Fill the buffers for a step; False if it is too large for them."""
        inputs = np.zeros((3, self._bucket.rows), np.int64)
        inputs[2] = self._trash
        for row, numbers in zip(inputs, (plan.ids, plan.positions, plan.write), strict=True):
            row[: plan.rows] = numbers.numpy()
        due = []
        for shape, attention in self._attentions.items():
            lists = attention.prepare(plan.layout(shape.window), self._trash)
            if lists is None:
                return False
            due.append(lists)
        host = [torch.from_numpy(inputs), *(each for lists in due for each in lists)]
        there, *rest = self._staging.send(host)
        self._inputs.copy_(there)
        if plan.ids_there is not None:
            self._inputs[0, : plan.rows].copy_(plan.ids_there)
        for attention, lists in zip(self._attentions.values(), due, strict=True):
            attention.plan(rest[: len(lists)])
            rest = rest[len(lists) :]
        return True

    @property
    def own_bytes(self) -> int:
        """Device memory that no other step uses."""
        recorded = 0 if self.recording is None else self.recording.device_bytes
        return recorded + sum(attention.own_bytes for attention in self._attentions.values())

    def clear(self) -> None:
        """Forget the logits of the last run."""
        self._output.fill_(torch.nan)

    def output(self, plan: ForwardPlan) -> Tensor:
        """The logits of the last run, [n, V] float32, in memory of their own."""
        if len(plan.logit_rows) == plan.rows:
            return self._output[: plan.rows].clone()
        return self._output[plan.logit_rows.to(self._output.device)]

    def replay(self, plan: ForwardPlan) -> Tensor:
        """Run the loaded step: logits [n, V] float32 of the plan's logit rows."""
        assert self.recording is not None
        self.recording.replay()
        return self.output(plan)


class DecodeGraphs:
    """Runs small steps of one model by graphs where that gives what the model gives.

    A step decodes, and where the backend has a bucket for them reads a few tokens of prompts,
    questions and paths as well. It is padded to its bucket: rows added read and write the trash
    slot. A bucket's first use runs the step without a graph, then padded, then captured, and
    compares: the logits, replayed and padded, must be equal in every bit, and in every row they and
    the attention of each shape must be those without padding up to rounding. Each run writes the
    same K/V to the same slots before it reads them, so that the last one counts; before the replay,
    both logits and K/V are overwritten. A bucket that fails is never used, which one warning
    reports; a capture that fails ends the use of graphs.

    Graphs belong to the addresses of a pool; a pool elsewhere begins anew.

    Args:
        backend: of the model; can keep buffers at fixed places.
        shapes: of the model's layers, in their order.
        recorder: captures steps.
        staging: copies a step's integers.
        run_model: runs the model.
        dtype: that it computes in.

    Attributes:
        recorder: as given; other steps of the same thread may share it.
    """

    def __init__(
        self,
        backend: GraphBackend,
        shapes: Sequence[AttentionShape],
        recorder: Recorder,
        staging: Staging,
        run_model: RunModel,
        dtype: torch.dtype,
    ) -> None:
        self._backend = backend
        self._dtype = dtype
        self._shapes = {shape: shapes.index(shape) for shape in shapes}  # and a layer of each
        self.recorder = recorder
        self._staging = staging
        self._run_model = run_model
        self._windows = tuple(dict.fromkeys(shape.window for shape in self._shapes))
        self._off = False
        self._place: tuple[int, int] | None = None  # address and slots of the pool
        self._steps: OrderedDict[Bucket, _Step] = OrderedDict()
        self._bytes: dict[Bucket, int] = {}
        self._outputs: list[Tensor] = []
        self._met: Counter[Bucket] = Counter()
        self._refused: set[Bucket] = set()

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """Buckets with a graph, the least recently used one first."""
        return tuple(self._steps)

    @property
    def device_bytes(self) -> int:
        """Device memory of buffers and graphs; what graphs gave up stays with their common pool."""
        outputs = sum(output.nbytes for output in self._outputs)
        return sum(self._bytes.values()) + outputs + self._backend.fixed_bytes

    def run(self, plan: ForwardPlan, pool: KVPool, eager: Callable[[], Tensor]) -> Tensor:
        """The logits of a forward, [n, V] float32; its K/V are in the pool.

        Args:
            plan: the batch.
            pool: of the K/V.
            eager: the same forward without a graph; may be run several times.
        """
        bucket = None if self._off else self._bucket(plan)
        if bucket is None or bucket in self._refused:
            return eager()
        self._follow(pool)
        step = self._steps.get(bucket)
        if step is None:
            if not len(plan.logit_rows):
                return eager()  # nothing would be compared
            self._met[bucket] += 1
            if self._met[bucket] <= PATIENCE:
                return eager()
            return self._begin(bucket, plan, pool, eager)
        self._steps.move_to_end(bucket)
        try:
            loaded = step.load(plan)
        except Exception as error:  # the planner of the backend fails in many ways
            self._end(error)
            loaded = False
        return step.replay(plan) if loaded else eager()

    def _bucket(self, plan: ForwardPlan) -> Bucket | None:
        return self._backend.bucket([plan.layout(window) for window in self._windows])

    def _follow(self, pool: KVPool) -> None:
        """Forget what belongs to another pool."""
        place = (pool.k[0].data_ptr(), pool.slots)
        if place != self._place:
            self._forget()
            self._place = place

    def _forget(self) -> None:
        self._backend.release_fixed()
        self._steps.clear()
        self._bytes.clear()
        self._outputs.clear()
        self._met.clear()

    def _end(self, error: Exception) -> None:
        """Use no graph any more."""
        self._off = True
        self._forget()
        lines = str(error).strip().splitlines()
        reason = lines[0] if lines else type(error).__name__
        logger.warning("steps run without CUDA graphs: %s", reason)

    def _begin(
        self, bucket: Bucket, plan: ForwardPlan, pool: KVPool, eager: Callable[[], Tensor]
    ) -> Tensor:
        """First use of a bucket."""
        wanted = eager()
        try:
            step = self._step(bucket, pool, wanted.shape[-1])
            if step is None or not step.load(plan):
                return wanted
            if reason := self._attention_differs(step, bucket, plan, pool):
                return self._refuse(bucket, reason, wanted)
            run = step.over(pool, self._run_model)
            run()
            padded = step.output(plan)
            step.recording = self.recorder.record(run)
            step.clear()  # so that only a replay that writes them passes
            pool.poison(plan.write.numpy().astype(np.int32))
            got = step.replay(plan)
        except Exception as error:  # models, compilers and CUDA fail in many ways
            self._end(error)
            return eager()
        reason = _difference(got, padded, wanted, self._dtype)
        if reason:
            return self._refuse(bucket, reason, eager())  # its K/V replace those of the graph
        self._steps[bucket] = step
        self._bytes[bucket] = step.own_bytes
        while len(self._steps) > MOST_GRAPHS:
            oldest, _ = self._steps.popitem(last=False)
            del self._bytes[oldest]
        logger.debug("CUDA graph for %s, %d bytes in all", bucket, self.device_bytes)
        return got

    def _refuse(self, bucket: Bucket, reason: str, logits: Tensor) -> Tensor:
        """Never use a bucket; the logits of its step without a graph."""
        self._refused.add(bucket)
        logger.warning("steps of %s run without a CUDA graph: %s", bucket, reason)
        return logits

    def _attention_differs(
        self, step: _Step, bucket: Bucket, plan: ForwardPlan, pool: KVPool
    ) -> str:
        """What is wrong with the padded attention of a loaded step; empty if nothing is.

        One layer of each shape, over the keys and values in the pool and random queries.
        """
        generator = torch.Generator(pool.device).manual_seed(0)
        for shape, layer in self._shapes.items():
            size = (bucket.rows, shape.num_qo_heads, shape.head_dim_qk)
            made: dict[str, Any] = {"dtype": torch.float32, "device": pool.device}
            q = torch.randn(size, generator=generator, **made).to(self._dtype)
            kv = pool.k[layer], pool.v[layer]
            plain = self._backend.plan(plan.layout(shape.window), shape)
            wanted, _ = self._backend.run(plain, q[: plan.rows], *kv)
            got = step.attention(shape, q, kv)[: plan.rows]
            error = _largest_error(got.float().flatten(1), wanted.float().flatten(1))
            if not error <= (HALF_ATTENTION_TOLERANCE if q.dtype in HALF else ATTENTION_TOLERANCE):
                return f"a row's padded attention differs by {error:.2g} of its size."
        return ""

    def _step(self, bucket: Bucket, pool: KVPool, vocabulary: int) -> _Step | None:
        """The buffers of a bucket; None, and never asked for again, if they would be too large."""
        attentions: dict[AttentionShape, FixedAttention] = {}
        for shape in self._shapes:
            attention = self._backend.fixed(shape, bucket, pool.slots)
            if attention is None:
                self._refused.add(bucket)
                logger.debug("no CUDA graph for %s", bucket)
                return None
            attentions[shape] = attention
        output = self._output(bucket.rows, vocabulary)
        return _Step(bucket, pool.trash, attentions, self._staging, output)

    def _output(self, rows: int, vocabulary: int) -> Tensor:
        """A buffer of at least so many rows, [rows, V] float32, which all graphs may share.

        Numbers of rows are powers of two: all buffers together take less than twice the largest.
        """
        for output in self._outputs:
            if len(output) >= rows:
                return output[:rows]
        with torch.inference_mode(False):
            output = torch.empty(
                (1 << (rows - 1).bit_length(), vocabulary),
                dtype=torch.float32,
                device=self._staging.device,
            )
        self._outputs.append(output)
        return output[:rows]


def _difference(got: Tensor, padded: Tensor, wanted: Tensor, dtype: torch.dtype) -> str:
    """What is wrong with a graph's logits; empty if nothing is.

    Args:
        got: by the graph.
        padded: by the same padded step without it.
        wanted: by the step as it is.
        dtype: that the model computes in.
    """
    if not torch.equal(got, padded):
        return "replayed and captured steps differ."
    error = _largest_error(got, wanted)
    if not error <= (HALF_TOLERANCE if dtype in HALF else TOLERANCE):
        return f"a row's logits differ by {error:.2g} of their size."
    return ""


def _largest_error(got: Tensor, wanted: Tensor) -> float:
    """Of rows, the largest length of a difference by that of the row; NaN if any is."""
    return float(((got - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max())
