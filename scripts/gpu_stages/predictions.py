"""What the check predicts, written before anything ran on a GPU; never changed after a run.

Estimates count launches, Python calls and bytes of the sources; floors assume an H200 (4.3 TB/s,
790 TFLOP/s). Ratios are goals.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Range:
    """What a number is predicted to be."""

    low: float = -math.inf
    high: float = math.inf

    def __str__(self) -> str:
        if math.isinf(self.low):
            return f"at most {self.high:g}"
        if math.isinf(self.high):
            return f"at least {self.low:g}"
        return f"{self.low:g} to {self.high:g}"

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


# Cells are named MODEL TREE LEAVES VARIANT, see `decode.Cell`.
CELLS: Mapping[str, Mapping[str, Range]] = {
    "llama-3.1-8b config-s 64 shipped": {
        "wall_ms": Range(18, 30),
        "busy_ms": Range(6, 8),
        "floor_ms": Range(3.8, 4.0),
        "launches": Range(800, 1_700),
    },
    "llama-3.1-8b config-s 64 shipped+unfused": {
        "floor_ms": Range(3.8, 4.0),
        "launches": Range(1_300, 2_200),  # 487 more: 7 of each norm, 1 of each gated activation
    },
    "llama-3.1-8b config-s 64 shipped+graphs": {
        "wall_ms": Range(high=5.9),
        "floor_ms": Range(3.8, 4.0),
        "of_floor": Range(high=1.5),
    },
    "llama-3.1-8b config-l 256 shipped": {
        "wall_ms": Range(30, 43),
        "floor_ms": Range(5.1, 5.3),
    },
    "llama-3.1-8b config-l 256 shipped+graphs": {
        "wall_ms": Range(high=8.3),
        "floor_ms": Range(5.1, 5.3),
        "of_floor": Range(high=1.6),
    },
    "llama-3.1-8b config-s 1 shipped+graphs": {"wall_ms": Range(high=4.6)},  # a goal
}

# How many times as fast as FlashInfer's cascade, see `trees`: a goal.
TREE_RATIO = Range(low=1.25)

# Ratios of two cells, see `report.COMPARISONS`.
RATIOS: Mapping[str, Range] = {
    "sharing off / on, config-s 64, graphs": Range(low=1.4),
    "sharing off / on, config-l 256, graphs": Range(low=2.0),
    "sharing off / on, config-s 64": Range(1.0, 1.2),  # hidden behind the host's work
    "separate / fused norms and activations, config-s 64, graphs": Range(1.1, 1.4),
    "attention statistics / none, config-s 64": Range(high=1.05),
    "transformers / arbor with graphs, 64 leaves": Range(low=5.0),
}

# Parts of a step on the host in ms, by cell: without graphs.
HOST: Mapping[str, Mapping[str, Range]] = {
    "llama-3.1-8b config-s 64 shipped": {
        "plan_ms": Range(2, 4),
        "backend_plan_ms": Range(0.5, 1.5),
        "model_ms": Range(10, 20),
        "attention_ms": Range(3, 4),
        "sampling_ms": Range(1, 1.5),
    },
    "llama-3.1-8b config-l 256 shipped": {
        "plan_ms": Range(10, 14),
        "backend_plan_ms": Range(1, 3.5),
        "model_ms": Range(10, 20),
        "attention_ms": Range(3, 4),
        "sampling_ms": Range(3, 4),
    },
}

# Of a GPU whose name contains the key.
PEAKS: Mapping[str, Mapping[str, Range]] = {
    "H200": {"copy_tb_per_s": Range(4.1, 4.4), "matmul_tflop_per_s": Range(750, 820)},
    "H100": {"copy_tb_per_s": Range(2.8, 3.1), "matmul_tflop_per_s": Range(750, 820)},
}


def peaks(device: str) -> Mapping[str, Range]:
    """Predicted bandwidth and peak of a device by its name."""
    return next((found for name, found in PEAKS.items() if name in device), {})
