"""CUDA graphs of the draws of decode steps: tens of small kernels as one launch."""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from dataclasses import dataclass

import torch
from torch import Tensor

from arbor.engine.sampling import FIELDS, drawn
from arbor.kernels.attention.fixed import ROWS
from arbor.model.graphs import MOST_GRAPHS, PATIENCE, Recorder, Recording
from arbor.model.sampling_params import Sampling

logger = logging.getLogger(__name__)

# Largest relative difference of a number from that of the draw without a graph: sorting and summing
# another number of rows may take another order.
TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True)
class DrawBucket:
    """What draws of one graph have in common.

    Attributes:
        rows: of the padded batch.
        vocabulary, dtype: of the logits.
        sampling: how tokens are chosen.
        width: most probable tokens that are examined.
    """

    rows: int
    vocabulary: int
    dtype: torch.dtype
    sampling: Sampling
    width: int

    def __str__(self) -> str:
        return f"{self.rows} rows of {self.vocabulary:,} logits with {self.sampling}"


class _Draw:
    """The buffers and the recording of one bucket's draws.

    Args:
        logits: [rows, V], of buffers that other buckets may share.
        uniform: [rows, 1] float64, likewise.
    """

    def __init__(self, bucket: DrawBucket, logits: Tensor, uniform: Tensor) -> None:
        self.recording: Recording | None = None
        self._bucket = bucket
        self._logits = logits
        self._uniform = uniform
        with torch.inference_mode(False):  # written to in every mode
            self._out = torch.empty(FIELDS, bucket.rows, dtype=torch.float64, device=logits.device)

    def run(self) -> None:
        """The padded draw."""
        bucket = self._bucket
        self._out.copy_(drawn(self._logits, self._uniform, bucket.sampling, bucket.width))

    def replay(self, logits: Tensor, uniform: Tensor) -> Tensor:
        """Run the recording for these rows: [6, n] float64, valid until the next replay."""
        assert self.recording is not None
        rows = len(logits)
        self._logits[:rows].copy_(logits)
        self._uniform[:rows].copy_(uniform)
        self.recording.replay()
        return self._out[:, :rows]

    def clear(self) -> None:
        """Forget the last results."""
        self._out.fill_(torch.nan)


class SamplingGraphs:
    """Runs draws by graphs where that gives what `drawn` gives.

    A draw is padded to a number of rows that graphs are made for; rows do not depend on each other.
    On a bucket's first use the draw runs without a graph as well, and both are compared. A bucket
    that fails is never used, and a capture that fails ends the use of graphs; one warning says so.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._off = False
        self._draws: OrderedDict[DrawBucket, _Draw] = OrderedDict()
        self._met: Counter[DrawBucket] = Counter()
        self._refused: set[DrawBucket] = set()
        self._logits: list[Tensor] = []
        self._uniform: Tensor | None = None

    @property
    def buckets(self) -> tuple[DrawBucket, ...]:
        """Buckets with a graph, the least recently used one first."""
        return tuple(self._draws)

    def draw(self, logits: Tensor, uniform: Tensor, sampling: Sampling, width: int) -> Tensor:
        """As `drawn`; the result is valid until the next call."""
        rows, vocabulary = logits.shape
        padded = next((size for size in ROWS if size >= rows), None)
        if self._off or padded is None or not rows:
            return drawn(logits, uniform, sampling, width)
        bucket = DrawBucket(padded, vocabulary, logits.dtype, sampling, width)
        known = self._draws.get(bucket)
        if known is not None:
            self._draws.move_to_end(bucket)
            return known.replay(logits, uniform)
        self._met[bucket] += 1
        if bucket in self._refused or self._met[bucket] <= PATIENCE:
            return drawn(logits, uniform, sampling, width)
        return self._begin(bucket, logits, uniform)

    def _begin(self, bucket: DrawBucket, logits: Tensor, uniform: Tensor) -> Tensor:
        """First use of a bucket."""
        wanted = drawn(logits, uniform, bucket.sampling, bucket.width)
        try:
            draw = _Draw(bucket, *self._buffers(bucket, logits))
            draw.recording = self._recorder.record(draw.run)
            draw.clear()  # so that only a replay that writes the results passes
            got = draw.replay(logits, uniform)
        except Exception as error:  # compilers and CUDA fail in many ways
            self._off = True
            self._draws.clear()
            lines = str(error).strip().splitlines()
            reason = lines[0] if lines else type(error).__name__
            logger.warning("tokens are drawn without CUDA graphs: %s", reason)
            return wanted
        if not torch.allclose(got, wanted, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True):
            self._refused.add(bucket)
            logger.warning("draws of %s run without a CUDA graph: the results differ.", bucket)
            return wanted
        self._draws[bucket] = draw
        while len(self._draws) > MOST_GRAPHS:
            self._draws.popitem(last=False)
        return got

    def _buffers(self, bucket: DrawBucket, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Buffers of logits and of numbers; those of fewer rows are parts of those of more.

        Numbers of rows are powers of two: all buffers together take less than twice the largest.
        """
        with torch.inference_mode(False):
            if self._uniform is None:
                size = (ROWS[-1], 1)
                self._uniform = torch.zeros(size, dtype=torch.float64, device=logits.device)
            for buffer in self._logits:
                alike = buffer.dtype is bucket.dtype and buffer.shape[1] == bucket.vocabulary
                if alike and len(buffer) >= bucket.rows:
                    break
            else:
                rows = 1 << (bucket.rows - 1).bit_length()
                buffer = logits.new_zeros(rows, bucket.vocabulary)
                self._logits.append(buffer)
        return buffer[: bucket.rows], self._uniform[: bucket.rows]
