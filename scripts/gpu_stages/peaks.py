"""Stage 3: what the GPU moves and multiplies, for the floors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from gpu_stages.predictions import peaks
from gpu_stages.rows import Job

COPY_BYTES = 1 << 32
SIDE = 8192
REPEATS = 20


def run(job: Job) -> None:
    """Time a large copy and a large bfloat16 product of random numbers."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=job.device).random_()
    target = torch.empty_like(source)
    copy_s = seconds(partial(target.copy_, source))
    left = torch.randn(SIDE, SIDE, dtype=torch.bfloat16, device=job.device)
    right = torch.randn_like(left)
    product_s = seconds(partial(torch.mm, left, right))
    bytes_per_s, flop_per_s = 2 * COPY_BYTES / copy_s, 2.0 * SIDE**3 / product_s
    job.row(
        "bandwidth and peak",
        predicted=peaks(torch.cuda.get_device_name()),
        bytes_per_s=bytes_per_s,
        flop_per_s=flop_per_s,
        copy_tb_per_s=bytes_per_s / 1e12,
        matmul_tflop_per_s=flop_per_s / 1e12,
    )


def seconds(call: Callable[[], object]) -> float:
    """Seconds of a call, by CUDA events over several after a warm-up."""
    for _ in range(3):
        call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(REPEATS):
        call()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / REPEATS
