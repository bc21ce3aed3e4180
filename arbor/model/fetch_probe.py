"""The fetch probe: what copying KV back and computing it again take on this machine."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from arbor.errors import UsageError
from arbor.memory.pool import KVPool
from arbor.memory.stores import LowerRoom, Store
from arbor.model.fetch_costs import FetchCosts
from arbor.model.measurement_file import identity_of, read_measurement, write_measurement
from arbor.model.plan import ForwardPlan, Piece, Segment, plan_forward
from arbor.model.runner import ModelRunner
from arbor.support.cache_dir import fetch_costs_file

logger = logging.getLogger(__name__)

SCHEMA = "arbor.fetch-costs/1"
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # of the forwards that are measured
CONTEXT = 512  # tokens before the recomputed ones, where their reads are measured
FEW, MANY = 1, 256  # tokens of the fetches that are measured
TIMES = 3  # of which the minimum counts
LONGEST_US = 100_000  # forwards with more rows than one that takes longer are not measured


def measure(runner: ModelRunner, room: LowerRoom) -> FetchCosts:
    """Measure fetches from each tier, and forwards by their rows.

    Args:
        runner: the model.
        room: of the tiers.
    """
    longest = getattr(runner.config, "max_position_embeddings", None)
    limit = longest if isinstance(longest, int) else max(ROWS) + CONTEXT
    rows = [count for count in ROWS if count <= limit]
    context = max(0, min(CONTEXT, limit - rows[-1]))
    pool = KVPool(runner.layer_kv, context + max(rows[-1], MANY), runner.kv_dtype, runner.device)

    def forward(plan: ForwardPlan) -> float:
        return _least(lambda: runner.forward(plan, pool), runner.device)

    alone: list[tuple[int, float]] = []
    for count in rows:
        alone.append((count, forward(_plan(0, count))))
        if alone[-1][1] > LONGEST_US:  # a large model on a CPU: the rest is as steep
            break
    count, least = alone[-1]
    longer = forward(_plan(context, count)) - least if context else 0.0
    key = max(0.0, longer) / max(1, count * context)
    tiers = []
    small = replace(room, host=room.host and MANY, disk=room.disk and MANY)
    whole = np.arange(MANY, dtype=np.int32)
    for store in small.stores(pool):
        store.write(whole, pool.gather(whole))
        few, many = (_fetch(store, pool, tokens) for tokens in (FEW, MANY))
        token = max(0.0, many - few) / (MANY - FEW)
        tiers.append((store.tier.name.lower(), max(0.0, few - token * FEW), token))
        store.close()
    return FetchCosts(tuple(tiers), key, tuple(alone))


def _plan(context: int, rows: int) -> ForwardPlan:
    """A run of tokens after a context, as a rehydration computes it."""
    slots = np.arange(context, dtype=np.int32)
    own = np.arange(context, context + rows, dtype=np.int32)
    before = (Piece("context", slots, slots),) if context else ()
    positions = np.arange(context, context + rows)
    return plan_forward([Segment(before, [0] * rows, positions, own, own, logits=0)])


def _fetch(store: Store, pool: KVPool, tokens: int) -> float:
    """Microseconds to fetch the first tokens of a store."""
    slots = np.arange(tokens, dtype=np.int32)
    return _least(lambda: pool.scatter(slots, store.read(slots, pool.device)[0]), pool.device)


def _least(work: Callable[[], object], device: torch.device) -> float:
    """The least of several times, in microseconds: of the thread where nothing else computes, so
    that other processes do not count."""
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.thread_time if alone else time.perf_counter
    work()
    times = []
    for _ in range(TIMES):
        _wait(device)
        began = clock()
        work()
        _wait(device)
        times.append(1e6 * (clock() - began))
    return min(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def chosen_costs(
    fetch: str, runner: ModelRunner, room: LowerRoom, model: str, backend: str
) -> FetchCosts | None:
    """The costs that a setting asks for, see `FetchSettings`; None: what can be fetched is."""
    if fetch == "always":
        return None
    if fetch != "auto":
        return FetchCosts.parse(fetch)
    costs = costs_for(runner, room, model, backend)
    logger.info("costs of fetching and recomputing, in microseconds: %s", costs)
    return costs


def costs_for(runner: ModelRunner, room: LowerRoom, model: str, backend: str) -> FetchCosts:
    """What was measured for this model and these tiers on this machine, or is now.

    Args:
        runner: the model.
        room: of the tiers.
        model: its name.
        backend: what computes attention.
    """
    tiers = [name for name in ("host", "disk") if getattr(room, name)]
    tiers += [f"{room.host_bits} bits"] if room.host_bits else []
    identity = identity_of(runner, model, backend) | {"tiers": tiers, "folder": str(room.folder)}
    kept = read_measurement(fetch_costs_file, SCHEMA, identity)
    if kept is not None:
        try:
            return FetchCosts.parse(kept)
        except UsageError:
            pass
    costs = FetchCosts.parse(str(measure(runner, room)))  # rounded, as the next run reads it
    write_measurement(fetch_costs_file, SCHEMA, identity, str(costs))
    return costs
