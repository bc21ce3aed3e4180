"""Cascade attention in plain torch, by matmuls: a shared span is read once for all of its rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from arbor.kernels.attention.base import (
    AttentionShape,
    CascadeLayout,
    CascadeLevel,
    apply_sinks,
    attention_logits,
    empty_mass,
    matmul_float32,
)
from arbor.kernels.attention.mass_work import MassKernel, MassWork, mass_work
from arbor.kernels.int8 import is_stored, read_slots

# Logits of a task, and its keys or values, as float32. At 32 heads and 8,192 keys, 64 rows.
TASK_BYTES = 64 << 20
# K and V elements of a single row's run of slots above which a copy costs more than products.
GATHER_ELEMENTS = 32768
# Causal rows of a task: keys after the last one's own are left out.
CAUSAL_ROWS = 128

Slots = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class AttentionTask:
    """Rows and keys that meet in one product: B requests of m rows each, which read n keys.

    Attributes:
        first_row: rows ``first_row .. first_row + B * m`` of the forward, request after request.
        rows: m.
        slots: int64 [B, n] of the keys; a shorter list repeats its first slot, unread.
        start: the first slot, where each request's slots are a run; None: they are gathered.
        step: then, from one request's first slot to the next one's.
        first: int64 [B, m], each row reads keys ``first .. end``; None: every row reads every key.
        end: int64 [B, m], likewise.
    """

    first_row: int
    rows: int
    slots: Tensor
    start: int | None = None
    step: int = 0
    first: Tensor | None = None
    end: Tensor | None = None

    @property
    def own_rows(self) -> slice:
        """Its rows of the batch."""
        return slice(self.first_row, self.first_row + len(self.slots) * self.rows)

    def on(self, device: torch.device) -> AttentionTask:
        """The same with its numbers on a device."""
        first, end = self.first, self.end
        if first is not None and end is not None:
            first, end = first.to(device), end.to(device)
        return replace(self, slots=self.slots.to(device), first=first, end=end)

    def read(self, pool: Tensor, dim: int, work: torch.dtype) -> Tensor:
        """K or V as [B, H_kv, n, dim]: a view of the pool, a copy, or decoded to `work`."""
        batch, keys = self.slots.shape
        if self.start is not None and not is_stored(pool):
            slot, head, one = pool.stride()
            place = pool.storage_offset() + self.start * slot
            size = (batch, pool.shape[1], keys, dim)
            return pool.as_strided(size, (self.step * slot, head, slot, one), place)
        read = read_slots(pool, self.slots.view(-1), dim)
        if is_stored(pool):
            read = read.to(work)
        return read.view(batch, keys, -1, dim).transpose(1, 2)

    def hidden(self) -> Tensor | None:
        """True where a row must not read a key, bool [B, m, n]; None: nowhere."""
        if self.first is None or self.end is None:
            return None
        key = torch.arange(self.slots.shape[1], device=self.slots.device)
        return (key < self.first.unsqueeze(-1)) | (key >= self.end.unsqueeze(-1))


@dataclass
class CascadePlan:
    """The tasks of one forward for one shape.

    Attributes:
        shape: of the layers.
        layout: as given.
        most_pairs, most_keys: of a task, see `level_tasks`.
        mass_work: of the mass kernel, once it has run.
    """

    shape: AttentionShape
    layout: CascadeLayout
    most_pairs: int
    most_keys: int
    mass_work: MassWork | None = None

    @cached_property
    def tasks(self) -> list[AttentionTask]:
        """Tasks of all levels; each row meets each of its keys in exactly one."""
        return [
            task
            for level in self.layout.levels
            for task in level_tasks(level, self.shape, self.most_pairs, self.most_keys)
        ]

    def tasks_on(self, device: torch.device) -> list[AttentionTask]:
        """The tasks with their numbers on a device, where they stay for the other layers."""
        if self.tasks and self.tasks[0].slots.device != device:
            self.tasks = [task.on(device) for task in self.tasks]
        return self.tasks


class TorchCascade:
    """The `AttentionBackend` for every torch device.

    Equal to `RowwiseAttention` up to rounding: logits, the softmax and all merging are in float32
    (float64 for float64 inputs), products of float16 and bfloat16 are summed in float32. 8-bit KV
    is decoded a task at a time.

    Args:
        task_bytes: logits, keys or values of a task, at most, as float32; a row may have more
            logits.

    Example:
        Two rows share slots 0 .. 2, and each has one key of its own (float32; 1 head, D = 2):

        >>> ints = lambda *values: torch.tensor(values, dtype=torch.int32)
        >>> shared = CascadeLevel(ints(0, 2), ints(0, 3), ints(0, 1, 2), causal=False)
        >>> own = CascadeLevel(ints(0, 1, 2), ints(0, 1, 2), ints(3, 4), causal=True)
        >>> backend, shape = TorchCascade(), AttentionShape(1, 1, 2, 2, scaling=1.0)
        >>> plan = backend.plan(CascadeLayout(2, (shared, own)), shape)
        >>> k_pool, v_pool = torch.zeros(5, 1, 2), torch.arange(10.0).view(5, 1, 2)
        >>> out, lse = backend.run(plan, torch.ones(2, 1, 2), k_pool, v_pool)
        >>> out.squeeze(1)  # the mean of the values at slots 0 1 2 3 and 0 1 2 4
        tensor([[3.0000, 4.0000],
                [3.5000, 4.5000]])
        >>> lse.exp()  # four equal keys
        tensor([[4.],
                [4.]])
    """

    def __init__(self, task_bytes: int = TASK_BYTES) -> None:
        self._numbers = task_bytes // torch.float32.itemsize
        self._mass_kernel = MassKernel()

    def plan(self, layout: CascadeLayout, shape: AttentionShape) -> CascadePlan:
        """See `AttentionBackend.plan`; tasks are made at first use."""
        widest = shape.num_kv_heads * max(shape.head_dim_qk, shape.head_dim_vo)
        most_keys = max(1, self._numbers // widest)
        return CascadePlan(shape, layout, self._numbers // shape.num_qo_heads, most_keys)

    def run(
        self,
        plan: CascadePlan,
        q: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        sinks: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See `AttentionBackend.run`. A row without keys gives 0 and -inf."""
        shape, work = plan.shape, torch.promote_types(q.dtype, torch.float32)
        rows, heads = q.shape[:2]
        least = torch.finfo(work).min  # finite, so that what reads nothing gives 0, and not nan
        out = q.new_zeros(rows, heads, shape.head_dim_vo, dtype=work)
        lse = q.new_full((rows, heads), -torch.inf, dtype=work)
        for task in plan.tasks_on(q.device):
            own = task.own_rows
            logits = _logits(task, q[own], k_pool, shape)
            top = logits.amax(-1, keepdim=True).clamp_min_(least)  # of rows that read nothing
            weights = logits.sub_(top).exp_()
            total = weights.sum(-1, keepdim=True)
            values = task.read(v_pool, shape.head_dim_vo, work)
            part = _by_row(
                matmul_float32(weights, values).div_(total.clamp_min(torch.finfo(work).tiny)),
                task.rows,
            )
            part_lse = _by_row(total.log_().add_(top), task.rows).squeeze(-1)
            merged = torch.logaddexp(lse[own], part_lse)
            share = (part_lse - merged.clamp_min(least)).exp_()
            out[own].lerp_(part, share.unsqueeze(-1))
            lse[own] = merged
        if sinks is not None:
            out, lse = apply_sinks(out, lse, sinks)
        return out.to(q.dtype), lse.float()

    def mass(
        self,
        plan: CascadePlan,
        q: Tensor,
        k_pool: Tensor,
        lse: Tensor,
        heads: Tensor | None = None,
        *,
        by_head: bool = False,
    ) -> Tensor:
        """See `AttentionBackend.mass`. Reads K once more, as `run` does, and no V.

        On CUDA by a Triton kernel, if triton is installed; by matmuls elsewhere, by head, of 8-bit
        KV, in float32 and float64, and where torch is asked for deterministic algorithms.
        """
        if not by_head and not is_stored(k_pool) and self._mass_kernel.runs(q):
            if plan.mass_work is None:
                plan.mass_work = mass_work(plan.layout, plan.shape, q.device)
            summed = self._mass_kernel(plan.mass_work, q, k_pool, lse, heads)
            if summed is not None:
                return summed
        mass = empty_mass(plan.shape, k_pool, heads, by_head)
        for task in plan.tasks_on(q.device):
            own = task.own_rows
            logits = _logits(task, q[own], k_pool, plan.shape)
            sums = _grouped(lse[own].unsqueeze(-1), task.rows, plan.shape.num_kv_heads)
            weights = logits.sub_(sums).exp_().sum(2)  # [B, H_kv, n]
            chosen = weights if heads is None else weights[:, heads]
            received = chosen.transpose(0, 1).flatten(1).float()
            mass.index_add_(-1, task.slots.view(-1), received if by_head else received.sum(0))
        return mass


class PlanWithMass(Protocol):
    """The plan of a backend that derives from `MassByTorch`.

    Attributes:
        shape, layout: as given.
        by_hand: the plan of `TorchCascade`, made when attention mass is asked for.
    """

    shape: AttentionShape
    layout: CascadeLayout
    by_hand: Any


class MassByTorch:
    """The attention mass of backends whose kernels return no sums: that of `TorchCascade`."""

    def __init__(self) -> None:
        self._torch = TorchCascade()

    def mass(
        self,
        plan: PlanWithMass,
        q: Tensor,
        k_pool: Tensor,
        lse: Tensor,
        heads: Tensor | None = None,
        *,
        by_head: bool = False,
    ) -> Tensor:
        """See `AttentionBackend.mass`."""
        if plan.by_hand is None:
            plan.by_hand = self._torch.plan(plan.layout, plan.shape)
        return self._torch.mass(plan.by_hand, q, k_pool, lse, heads, by_head=by_head)


def level_tasks(
    level: CascadeLevel, shape: AttentionShape, most_pairs: int, most_keys: int
) -> Iterator[AttentionTask]:
    """A level's requests as tasks, in order of their rows; requests without keys have none.

    Neighbouring requests with as many rows are joined, unless their slots are a long run.

    Args:
        level: requests and their key lists.
        shape: of the layers; decides about windows, and what a copy costs.
        most_pairs: pairs of a row and a key in a task of several rows.
        most_keys: keys of a task.

    Example:
        Two requests of one row are joined; six causal rows after two keys are cut, at 24 pairs:

        >>> ints = lambda *values: torch.tensor(values, dtype=torch.int32)
        >>> slots = torch.cat([ints(9, 10, 50), torch.arange(20, 28).int()])
        >>> level = CascadeLevel(ints(0, 1, 2, 8), ints(0, 2, 3, 11), slots, causal=True)
        >>> tasks = level_tasks(level, AttentionShape(1, 1, 64, 64, 0.125), 24, 100)
        >>> [(task.first_row, task.rows, task.slots.tolist()) for task in tasks][:2]
        [(0, 1, [[9, 10], [50, 50]]), (2, 3, [[20, 21, 22, 23, 24]])]
    """
    rows, ends = level.qo_indptr.tolist(), level.kv_indptr.tolist()
    slots: Slots = level.kv_indices.numpy().astype(np.int64)
    short = GATHER_ELEMENTS // (shape.num_kv_heads * (shape.head_dim_qk + shape.head_dim_vo))
    some: list[Slots] = []  # keys of neighbours with `each` rows, up to row `at`
    at = each = longest = 0
    for (row, end_row), (begin, end) in zip(pairwise(rows), pairwise(ends), strict=True):
        count, keys = end_row - row, slots[begin:end]
        if count == 1 and level.causal and shape.window is not None:
            keys = keys[-shape.window :]
        joins = len(keys) > 0 and (count == 1 or not level.causal)
        joins &= len(keys) <= short or (len(keys) <= most_keys and not _is_run(keys))
        longest = max(longest, len(keys))
        most = (len(some) + 1) * longest
        fits = (row, count) == (at, each) and most * count <= most_pairs and most <= most_keys
        if some and not (joins and fits):
            yield _joined(at - len(some) * each, each, some)
            some, longest = [], len(keys)
        if joins:
            some.append(keys)
            at, each = end_row, count
        elif len(keys):
            window = shape.window if level.causal else None
            yield from _cut(row, count, keys, level.causal, window, most_pairs, most_keys)
    if some:
        yield _joined(at - len(some) * each, each, some)


def _joined(first_row: int, rows: int, lists: list[Slots]) -> AttentionTask:
    """Neighbouring requests of so many rows each, all of which read the request's list."""
    lengths = np.array([len(keys) for keys in lists])
    longest = int(lengths.max())
    if (lengths == longest).all():
        slots = np.stack(lists)
        start, step = int(slots[0, 0]), int(slots[-1, 0] - slots[0, 0]) // max(1, len(lists) - 1)
        runs = start + step * np.arange(len(lists))[:, None] + np.arange(longest)
        spaced = step >= 0 and bool((slots == runs).all())
        return AttentionTask(
            first_row, rows, torch.from_numpy(slots), start if spaced else None, step
        )
    slots = np.stack([np.concatenate([k, np.full(longest - len(k), k[0])]) for k in lists])
    end = torch.from_numpy(lengths)[:, None].expand(-1, rows)
    return AttentionTask(
        first_row, rows, torch.from_numpy(slots), first=torch.zeros_like(end), end=end
    )


def _cut(
    first_row: int,
    count: int,
    keys: Slots,
    causal: bool,
    window: int | None,
    most_pairs: int,
    most_keys: int,
) -> Iterator[AttentionTask]:
    """One request, some of its rows and of the keys that any of them reads at a time."""
    ends = np.full(count, len(keys)) - (np.arange(count)[::-1] if causal else 0)
    firsts = np.zeros_like(ends) if window is None else np.maximum(ends - window, 0)
    together = max(1, most_pairs // min(len(keys), most_keys))
    if causal:
        together = min(together, CAUSAL_ROWS)
    for row in range(0, count, together):
        first, end = firsts[row : row + together], ends[row : row + together]
        for begin in range(int(first[0]), int(end[-1]), most_keys):
            slots = keys[begin : min(begin + most_keys, int(end[-1]))]
            task = AttentionTask(
                first_row + row,
                len(first),
                torch.from_numpy(slots).unsqueeze(0),
                int(slots[0]) if _is_run(slots) else None,
            )
            if (first > begin).any() or (end < begin + len(slots)).any():
                bounds = (torch.from_numpy(each - begin).unsqueeze(0) for each in (first, end))
                task = replace(task, first=next(bounds), end=next(bounds))
            yield task


def _is_run(slots: Slots) -> bool:
    return bool((slots[1:] - slots[:-1] == 1).all())


def _logits(task: AttentionTask, q: Tensor, k_pool: Tensor, shape: AttentionShape) -> Tensor:
    """Logits [B, H_kv, m * G, n] of a task in at least float32; -inf for hidden keys.

    Args:
        q: [B * m, H_q, D_k], of its rows.
    """
    keys = task.read(k_pool, shape.head_dim_qk, torch.promote_types(q.dtype, torch.float32))
    queries = _grouped(q.to(keys.dtype), task.rows, shape.num_kv_heads)
    logits = attention_logits(queries, keys, shape)
    hidden = task.hidden()
    if hidden is not None:
        by_row = logits.view(*logits.shape[:2], task.rows, -1, logits.shape[-1])
        by_row.masked_fill_(hidden[:, None, :, None], -torch.inf)
    return logits


def _grouped(x: Tensor, rows: int, kv_heads: int) -> Tensor:
    """[B * m, H_q, d] as [B, H_kv, m * G, d]: the query heads of a group are rows too."""
    return (
        x.reshape(-1, rows, kv_heads, x.shape[1] // kv_heads, x.shape[2])
        .transpose(1, 2)
        .flatten(2, 3)
    )


def _by_row(x: Tensor, rows: int) -> Tensor:
    """[B, H_kv, m * G, d] as [B * m, H_q, d]."""
    return x.unflatten(2, (rows, -1)).transpose(1, 2).flatten(2, 3).flatten(0, 1)
