"""An estimate of a search's time, from the bytes of the weights and this machine's memory."""

from __future__ import annotations

import time

from arbor.model.model_info import ModelInfo
from arbor.model.names import BYTES_OF
from arbor.support.units import duration_text
from arbor.tasks.base import BlockLimits

WORTH_SAYING_S = 10.0  # of a path; a shorter one is not announced
_SAMPLE = 2**26  # bytes that are read to measure the memory
_READS = 3


def step_seconds(info: ModelInfo) -> float:
    """Seconds of a decode step of few rows on a CPU: the weights are read once, by one core.

    Measures the memory, which takes some hundredths of a second. An int8 weight counts as a byte.
    """
    memory = b"\0" * _SAMPLE  # written, so that it is in memory
    best = min(_seconds_of_a_read(memory) for _ in range(_READS))
    width = 1 if info.weights != "auto" else BYTES_OF[info.dtype]
    return info.parameters * width * best / _SAMPLE


def _seconds_of_a_read(memory: bytes) -> float:
    begun = time.perf_counter()
    memory.find(b"\1")  # is nowhere, so that all of it is read
    return time.perf_counter() - begun


def estimate_line(blocks: int, boundary: BlockLimits, info: ModelInfo, device: str) -> str:
    """How large the search may become, and about how long a path takes; empty where that is a
    moment, or for a GPU, whose memory is not measured.

    Args:
        blocks: thoughts at most.
        boundary: of the search.
        info: of the model.
        device: that is asked for; ``auto`` is taken for a CPU.
    """
    if device.startswith("cuda"):
        return ""
    seconds, most = step_seconds(info), min(boundary.longest_path, blocks * boundary.max_tokens)
    if seconds * most < WORTH_SAYING_S:
        return ""
    return (
        f"at most {blocks:,} thoughts, {most:,} tokens a path · estimate: {seconds:.2g} s a "
        f"token, {duration_text(seconds * most)} for the longest path on this CPU; its siblings decode with it"
    )
