"""The KV probe: from how many rows on reading a shared span once pays, measured on this machine.

RKSC's probe (arXiv 2606.09937, section 2.2) compares recomputing a prefix with sharing it, once per
64 tokens of its length, by the minimum of three timings. In arbor what paths share is never
computed twice nor copied, so what is left to decide is whether rows read a shared span together, as
a level of the cascade, or each by itself: a level saves reads and costs a launch and a merge per
layer.

Measurements are kept in the cache folder (`arbor.support.cache_dir`) per model and machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from arbor.errors import UsageError
from arbor.memory.pool import KVPool
from arbor.model.level_rule import BUCKET, NEVER, LevelRule
from arbor.model.measurement_file import identity_of, read_measurement, write_measurement
from arbor.model.plan import ForwardPlan, Piece, Segment, plan_forward
from arbor.model.runner import ModelRunner
from arbor.support.cache_dir import cache_dir

SCHEMA = "arbor.kv-probe/2"
ROWS = (2, 4, 8, 16)  # decoding rows that share a span
BUCKETS = 16  # measured at most, up to 1,024 tokens
TIMES = 3  # of which the minimum counts
_NO_LEVELS = 1 << 60  # key reads that no span saves

Seconds = Callable[[ForwardPlan], float]


def measure(runner: ModelRunner) -> LevelRule:
    """From how many rows on a level pays, by length of the shared span.

    Each bucket is measured in its middle, for 2, 4, 8 and 16 rows that decode a token, until a
    level pays.

    Args:
        runner: the model; where its context is shorter than `BUCKETS` buckets, fewer are measured.
    """
    longest = getattr(runner.config, "max_position_embeddings", None)
    buckets = max(1, min(BUCKETS, longest // BUCKET)) if isinstance(longest, int) else BUCKETS
    pool = KVPool(runner.layer_kv, buckets * BUCKET + max(ROWS), runner.kv_dtype, runner.device)

    def seconds(plan: ForwardPlan) -> float:
        _wait(runner.device)
        began = time.perf_counter()
        runner.forward(plan, pool)
        _wait(runner.device)
        return time.perf_counter() - began

    return measured_rule(seconds, buckets)


def measured_rule(seconds: Seconds, buckets: int) -> LevelRule:
    """`measure` by any clock.

    Args:
        seconds: the time that a forward takes.
        buckets: of 64 tokens each.
    """
    found = [
        next((rows for rows in ROWS if _pays(seconds, bucket * BUCKET + BUCKET // 2, rows)), NEVER)
        for bucket in range(buckets)
    ]
    while len(found) > 1 and found[-1] == found[-2]:
        found.pop()
    return LevelRule(least_rows=tuple(found))


def _pays(seconds: Seconds, tokens: int, rows: int) -> bool:
    """Whether a level is faster than reading the span once per row."""
    slots = np.arange(tokens, dtype=np.int32)
    context = (Piece("span", slots, slots),)
    own = np.arange(tokens, tokens + rows, dtype=np.int32)
    position = np.array([tokens])
    segments = [
        Segment(context, [0], position, own[row : row + 1], own[row : row + 1], logits=1)
        for row in range(rows)
    ]
    plans = [plan_forward(segments, min_saved_reads=least) for least in (0, _NO_LEVELS)]
    for plan in plans:
        seconds(plan)  # warm up
    times = [[seconds(plan) for plan in plans] for _ in range(TIMES)]
    together, alone = (min(column) for column in zip(*times, strict=True))
    return bool(together < alone)


def level_rule(setting: str, runner: ModelRunner, model: str, backend: str) -> LevelRule | None:
    """Which shared spans rows read together.

    Args:
        setting: ``kept``: what was measured for this model on this machine; ``measure``: now.
        runner: the model.
        model: its name.
        backend: what computes attention.

    Returns:
        None: nothing was kept, or the file is damaged.
    """
    identity = identity_of(runner, model, backend)
    if setting == "kept":
        kept = read_measurement(_file, SCHEMA, identity)
        try:
            return None if kept is None else LevelRule.parse(kept)
        except UsageError:
            return None
    rule = measure(runner)
    write_measurement(_file, SCHEMA, identity, str(rule))
    return rule


def _file(identity: str) -> Path:
    return cache_dir() / "kv_probe" / f"{identity}.json"


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
