"""Cascade attention in plain torch: every shared span is read once, contiguous slots are never copied."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .base import AttentionShape, CascadeLayout, CascadeLevel, apply_sinks

# The fused CPU kernel, private but the only one that returns the logsumexp (q, k, v, dropout, is_causal, mask, scale).
# Three habits to know: keys of length 0 end the process, a fully masked row reports lse 0, and `is_causal` aligns
# top-left. The plan never lets them happen.
_flash: Callable[..., tuple[Tensor, Tensor]] = torch._scaled_dot_product_flash_attention_for_cpu

# Measured rules (scripts/bench_attention.py; EXPERIMENTS.md):
RUN_TOKENS = (
    48  # a broken key list is read run by run if its runs are this long on average, else gathered
)
MASKED_ROWS = 16  # causal requests of up to this many rows run as one masked call, longer ones as context + own
CHUNK_ROWS = 256  # rows of a masked causal request that run at once; bounds the mask and the logits
FEW_REQUESTS = 4  # uniform groups smaller than this rather join a padded gather
GATHER_ELEMENTS = (
    32768  # K and V elements of a contiguous request above which a copy costs more than a call
)
JOINED_KEYS = 48  # up to so many keys, one call per request for all KV heads beats one per head


@dataclass(slots=True)
class AttentionTask:
    """One attention call: `batch` requests of equally many rows and keys.

    Attributes:
        first_row: rows ``first_row .. first_row + batch * rows`` of the forward, request after request.
        batch: requests, B.
        rows: rows of each request, m.
        keys: keys of each request, n.
        start: first slot of the first request, if `index` is None.
        step: slots from one request's first slot to the next one's.
        index: int64 [B * n] slots to gather, for key lists that are no runs; padded with owned slots.
        lengths: int64 [B]: only the first so many of a request's keys count; None = all.
        causal: row j reads keys 0 .. n - m + j; else every row reads every key.
        window: with `causal`: only the last `window` of these.
        joined: the fused kernel takes all KV heads in one call, foreign heads masked (one short call per request
            instead of one per request and head).
    """

    first_row: int
    batch: int
    rows: int
    keys: int
    start: int = 0
    step: int = 0
    index: Tensor | None = None
    lengths: Tensor | None = None
    causal: bool = False
    window: int | None = None
    joined: bool = False

    @property
    def end_row(self) -> int:
        """One past the last row."""
        return self.first_row + self.batch * self.rows

    @property
    def square(self) -> bool:
        """Plain causal attention of rows to themselves: the fused kernel needs no mask."""
        return self.causal and self.window is None and self.rows == self.keys and self.batch == 1

    def hidden(self) -> Tensor | None:
        """True where a row must not read a key: bool [B or 1, m, n], or None."""
        if self.lengths is not None:
            return (torch.arange(self.keys) >= self.lengths[:, None]).unsqueeze(1)
        if not self.causal:
            return None
        own = torch.arange(self.rows).unsqueeze(1) + (self.keys - self.rows)
        key = torch.arange(self.keys)
        hidden = key > own
        if self.window is not None:
            hidden |= key <= own - self.window
        return hidden.unsqueeze(0)

    def slots(self) -> Tensor:
        """int64 [B * n] slots of the keys, request after request."""
        if self.index is not None:
            return self.index
        first = self.start + self.step * torch.arange(self.batch)
        return (first[:, None] + torch.arange(self.keys)).view(-1)


@dataclass(slots=True)
class CascadePlan:
    """The calls of one forward for one shape. Layers run one after the other: they share masks and gather buffers.

    Attributes:
        shape: what the layers ask.
        rows: T.
        tasks: level after level.
        tiles: groups of tasks that cover every row once, in order; merged with each other in one go.
        rest: the other tasks; merged into their rows one after the other.
        masks: additive masks by (task, dtype), made at first use.
        buffers: gathered keys and values by (task, 0 or 1), made at first use: a fresh block per layer would cost
            more in page faults than the copy itself.
    """

    shape: AttentionShape
    rows: int
    tasks: tuple[AttentionTask, ...]
    tiles: tuple[tuple[int, ...], ...]
    rest: tuple[int, ...]
    masks: dict[tuple[int, torch.dtype, bool], Tensor | None] = field(default_factory=dict)
    buffers: dict[tuple[int, int], Tensor] = field(default_factory=dict)


class TorchCascade:
    """The `AttentionBackend` for CPUs (on any other torch device it runs by matmuls).

    Rows are kept as [T * G, H_kv, d]: the query heads of a group become rows that read one KV head, so K and V are
    never repeated, and this is also the order in which the fused kernel writes.
    """

    def __init__(self) -> None:
        self._foreign: dict[tuple[int, int, torch.dtype, torch.device], Tensor] = {}

    def plan(self, layout: CascadeLayout, shape: AttentionShape) -> CascadePlan:
        """Turns key lists into slices of the pool; see `AttentionTask`."""
        tasks: list[AttentionTask] = []
        tiles: list[tuple[int, ...]] = []
        rest: list[int] = []
        for level in layout.levels:
            chain: list[int] = []
            end_row = 0
            for task in _level_tasks(level, shape):
                if chain and task.first_row != end_row:
                    rest += chain
                    chain = []
                if chain or task.first_row == 0:
                    chain.append(len(tasks))
                else:
                    rest.append(len(tasks))
                tasks.append(task)
                end_row = task.end_row
                if chain and end_row == layout.rows:
                    tiles.append(tuple(chain))
                    chain = []
            rest += chain
        return CascadePlan(shape, layout.rows, tuple(tasks), tuple(tiles), tuple(rest))

    def run(
        self,
        plan: CascadePlan,
        q: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        sinks: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See `AttentionBackend.run`. A row without keys gives 0 and -inf."""
        shape = plan.shape
        work = torch.promote_types(q.dtype, torch.float32)
        group, kv_heads = shape.group, shape.num_kv_heads
        folded = q.view(plan.rows, kv_heads, group, shape.head_dim_qk).transpose(1, 2).contiguous()
        fused = _fusable(shape) and q.device.type == "cpu"
        attend = self._fused if fused else self._matmul
        parts = [[attend(plan, i, folded, k_pool, v_pool) for i in tile] for tile in plan.tiles]
        if parts:
            out, lse = _merge_tiles([_concatenate(tile) for tile in parts], work)
        else:
            out = q.new_zeros(plan.rows * group, kv_heads, shape.head_dim_vo, dtype=work)
            lse = q.new_full((plan.rows * group, kv_heads), -torch.inf, dtype=work)
        for i in plan.rest:
            task = plan.tasks[i]
            rows = slice(task.first_row * group, task.end_row * group)
            _merge_into(out[rows], lse[rows], *attend(plan, i, folded, k_pool, v_pool))
        size = (plan.rows, shape.num_qo_heads, shape.head_dim_vo)
        out = out.view(plan.rows, group, kv_heads, shape.head_dim_vo).transpose(1, 2).reshape(size)
        lse = lse.view(plan.rows, group, kv_heads).transpose(1, 2).reshape(size[:2])
        if sinks is not None:
            out, lse = apply_sinks(out, lse, sinks)
        return _as(out, q.dtype), _as(lse, torch.float32)

    def mass(
        self,
        plan: CascadePlan,
        q: Tensor,
        k_pool: Tensor,
        lse: Tensor,
        heads: Tensor | None = None,
    ) -> Tensor:
        """See `AttentionBackend.mass`. Reads K once more, as the cascade does, and no V."""
        shape = plan.shape
        group, kv_heads = shape.group, shape.num_kv_heads
        work = torch.promote_types(q.dtype, torch.float32)
        folded = q.view(plan.rows, kv_heads, group, shape.head_dim_qk).transpose(1, 2).contiguous()
        row_lse = lse.view(plan.rows, kv_heads, group).transpose(1, 2).contiguous().to(work)
        mass = torch.zeros(k_pool.shape[0], dtype=work, device=q.device)
        for number, task in enumerate(plan.tasks):
            queries = _queries(task, folded)
            keys = self._slots(plan, number, 0, k_pool)
            part_lse = row_lse[task.first_row : task.end_row]
            part_lse = part_lse.view(task.batch, task.rows * group, kv_heads).transpose(1, 2)
            if heads is not None:
                queries, keys, part_lse = queries[:, heads], keys[:, heads], part_lse[:, heads]
            logits = _logits(shape, queries, keys, self._mask(plan, number, q))
            received = logits.sub_(part_lse.unsqueeze(-1)).exp_().sum((1, 2))
            if task.index is None and task.batch == 1:
                mass[task.start : task.start + task.keys].add_(received[0])
            else:
                mass.index_add_(0, task.slots().to(q.device), received.view(-1))
        return mass.float()

    def _fused(
        self, plan: CascadePlan, number: int, folded: Tensor, k_pool: Tensor, v_pool: Tensor
    ) -> tuple[Tensor, Tensor]:
        """One call of the fused kernel: [B * m * G, H_kv, D_v] and [B * m * G, H_kv]."""
        shape, task = plan.shape, plan.tasks[number]
        rows, kv_heads = task.batch * task.rows * shape.group, shape.num_kv_heads
        keys = self._slots(plan, number, 0, k_pool)
        values = self._slots(plan, number, 1, v_pool)
        if task.square:
            # Rows of a group would shift the diagonal, so the group is the batch here, over the same K and V.
            queries = folded[task.first_row : task.end_row].permute(1, 2, 0, 3)
            keys = keys.expand(shape.group, -1, -1, -1)
            values = values.expand(shape.group, -1, -1, -1)
            part, lse = _flash(queries, keys, values, 0.0, True, scale=shape.scaling)
            return (
                part.permute(2, 0, 1, 3).reshape(rows, kv_heads, shape.head_dim_vo),
                lse.permute(2, 0, 1).reshape(rows, kv_heads),
            )
        joined = task.joined and all(x.stride(2) == kv_heads * x.stride(1) for x in (keys, values))
        mask = self._mask(plan, number, folded, joined)
        queries = _queries(task, folded)
        if joined:
            queries, keys, values = _join(queries), _join(keys), _join(values)
        part, lse = _flash(queries, keys, values, 0.0, False, attn_mask=mask, scale=shape.scaling)
        return (
            part.transpose(1, 2).reshape(rows, kv_heads, shape.head_dim_vo),
            lse.transpose(1, 2).reshape(rows, kv_heads),
        )

    def _matmul(
        self, plan: CascadePlan, number: int, folded: Tensor, k_pool: Tensor, v_pool: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The same by two matmuls: for softcaps, unequal head dimensions and other devices."""
        shape, task = plan.shape, plan.tasks[number]
        rows, kv_heads = task.batch * task.rows * shape.group, shape.num_kv_heads
        mask = self._mask(plan, number, folded)
        logits = _logits(shape, _queries(task, folded), self._slots(plan, number, 0, k_pool), mask)
        top = logits.amax(-1, keepdim=True)
        weights = logits.sub_(top).exp_()
        total = weights.sum(-1, keepdim=True)
        values = self._slots(plan, number, 1, v_pool)
        part = torch.matmul(weights.to(values.dtype), values).to(total.dtype).div_(total)
        return (
            part.transpose(1, 2).reshape(rows, kv_heads, shape.head_dim_vo),
            total.log_().add_(top).squeeze(-1).transpose(1, 2).reshape(rows, kv_heads),
        )

    def _slots(self, plan: CascadePlan, number: int, which: int, pool: Tensor) -> Tensor:
        """K or V of a task as [B, H_kv, n, D]: a view of the pool unless its slots must be gathered."""
        task = plan.tasks[number]
        heads, dim = plan.shape.num_kv_heads, pool.shape[2]
        if task.index is None:
            slot, head, inner = pool.stride()
            return pool.as_strided(
                (task.batch, heads, task.keys, dim),
                (task.step * slot, head, slot, inner),
                pool.storage_offset() + task.start * slot,
            )
        buffer = plan.buffers.get((number, which))
        if buffer is None or buffer.dtype != pool.dtype:
            task.index = task.index.to(pool.device)
            buffer = pool.new_empty(len(task.index), heads, dim)
            plan.buffers[number, which] = buffer
        torch.index_select(pool, 0, task.index, out=buffer)
        return buffer.view(task.batch, task.keys, heads, dim).transpose(1, 2)

    def _mask(
        self, plan: CascadePlan, number: int, like: Tensor, joined: bool = False
    ) -> Tensor | None:
        """The task's additive mask in the dtype of `like`, or None.

        [B or 1, 1, m * G, n]; joined [B or 1, 1, m * G * H_kv, n * H_kv], the head varying fastest in both.
        """
        name = (number, like.dtype, joined)
        if name not in plan.masks:
            hidden, shape = plan.tasks[number].hidden(), plan.shape
            if hidden is not None:
                hidden = hidden.repeat_interleave(shape.group, dim=1)
            if joined:
                if hidden is None:
                    plan.masks[name] = self._foreign_heads(shape, plan.tasks[number].keys, like)
                    return plan.masks[name]
                heads = shape.num_kv_heads
                foreign = self._foreign_heads(shape, plan.tasks[number].keys, like)[0].cpu() < 0
                hidden = hidden.repeat_interleave(heads, 1).repeat_interleave(heads, 2) | foreign
            mask = None
            if hidden is not None:
                mask = torch.zeros(hidden.shape, dtype=like.dtype)
                mask = mask.masked_fill_(hidden, -torch.inf).unsqueeze(1).to(like.device)
            plan.masks[name] = mask
        return plan.masks[name]

    def _foreign_heads(self, shape: AttentionShape, keys: int, like: Tensor) -> Tensor:
        """Additive mask [1, 1, G * H_kv, n * H_kv] of one row that leaves every query head its own KV head."""
        name = (shape.group, shape.num_kv_heads, like.dtype, like.device)
        if name not in self._foreign:
            foreign = ~torch.eye(shape.num_kv_heads, dtype=torch.bool).repeat(
                shape.group, JOINED_KEYS
            )
            mask = torch.zeros(foreign.shape, dtype=like.dtype).masked_fill_(foreign, -torch.inf)
            self._foreign[name] = mask.view(1, 1, *mask.shape).to(like.device)
        return self._foreign[name][..., : keys * shape.num_kv_heads]


def _fusable(shape: AttentionShape) -> bool:
    """Whether the fused kernel computes this shape."""
    return shape.head_dim_qk == shape.head_dim_vo and shape.softcap is None


def _queries(task: AttentionTask, folded: Tensor) -> Tensor:
    """The task's rows of [T, G, H_kv, D] as [B, H_kv, m * G, D], a view."""
    _, group, heads, dim = folded.shape
    rows = task.rows * group
    return folded.as_strided(
        (task.batch, heads, rows, dim),
        (rows * heads * dim, dim, heads * dim, 1),
        folded.storage_offset() + task.first_row * group * heads * dim,
    )


def _join(x: Tensor) -> Tensor:
    """[B, H_kv, n, D] -> [B, 1, n * H_kv, D], a view where tokens lie without gaps."""
    return x.transpose(1, 2).flatten(1, 2).unsqueeze(1)


def _logits(shape: AttentionShape, queries: Tensor, keys: Tensor, mask: Tensor | None) -> Tensor:
    """Scaled, capped and masked logits [B, H_kv, m * G, n], at least float32."""
    logits = torch.matmul(queries, keys.transpose(-1, -2))
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).mul_(shape.scaling)
    if shape.softcap is not None:
        logits = logits.div_(shape.softcap).tanh_().mul_(shape.softcap)
    return logits if mask is None else logits.add_(mask)


def _concatenate(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Results of neighbouring rows as one."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])


def _merge_tiles(parts: list[tuple[Tensor, Tensor]], work: torch.dtype) -> tuple[Tensor, Tensor]:
    """Merges results over disjoint keys, all for the same rows: [R, H_kv, D_v] and [R, H_kv], finite lse."""
    if len(parts) == 1:
        out, lse = parts[0]
        return _as(out, work), _as(lse, work)
    lses = _as(torch.stack([lse for _, lse in parts]), work)
    shares = torch.log_softmax(lses, 0)
    lse = lses[0] - shares[0]
    outs = _as(torch.stack([out for out, _ in parts]), work)
    return outs.mul_(shares.exp_().unsqueeze(-1)).sum(0), lse


def _as(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x.to(dtype)` without the call where there is nothing to do: between two matmuls every call is a cold one."""
    return x if x.dtype == dtype else x.to(dtype)


def _merge_into(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merges one more result, of finite lse, into the rows' state in place; in the state's precision."""
    part_lse = _as(part_lse, lse.dtype)
    weight = torch.sigmoid(part_lse - lse)
    out.lerp_(_as(part, out.dtype), weight.unsqueeze(-1))
    torch.logaddexp(lse, part_lse, out=lse)


def _level_tasks(level: CascadeLevel, shape: AttentionShape) -> list[AttentionTask]:
    """The calls of one level."""
    slots: npt.NDArray[np.int64] = level.kv_indices.numpy().astype(np.int64)
    if not len(slots):
        return []
    rows: list[int] = level.qo_indptr.tolist()
    keys: list[int] = level.kv_indptr.tolist()
    uniform = _uniform_task(rows, keys, slots, level.causal, shape)
    if uniform is not None:
        return [uniform]
    # breaks[i]: places up to key i at which the slots do not go on by one
    breaks = np.zeros(len(slots), dtype=np.int64)
    np.cumsum(slots[1:] - slots[:-1] != 1, out=breaks[1:])
    tasks: list[AttentionTask] = []

    def add(first_row: int, m: int, begin: int, end: int, causal: bool, window: int | None) -> None:
        """Appends a request that reads keys begin .. end, or extends the last task by it."""
        n, runs = end - begin, int(breaks[end - 1] - breaks[begin]) + 1
        if runs > 1:
            if not causal and n >= RUN_TOKENS * runs:
                cuts = (
                    np.flatnonzero(slots[begin + 1 : end] - slots[begin : end - 1] != 1) + begin + 1
                ).tolist()
                for a, b in zip([begin, *cuts], [*cuts, end], strict=True):
                    tasks.append(AttentionTask(first_row, 1, m, b - a, int(slots[a])))
                return
            index = torch.from_numpy(slots[begin:end])
            tasks.append(
                AttentionTask(first_row, 1, m, n, index=index, causal=causal, window=window)
            )
            return
        start = int(slots[begin])
        last = tasks[-1] if tasks else None
        if (
            last is not None
            and last.end_row == first_row
            and (last.rows, last.keys, last.causal, last.window) == (m, n, causal, window)
            and last.index is None
            and not (causal and window is None and m == n)
        ):
            step = start - last.start if last.batch == 1 else last.step
            if step >= 0 and last.start + last.batch * step == start:
                last.batch += 1
                last.step = step
                return
        tasks.append(AttentionTask(first_row, 1, m, n, start, causal=causal, window=window))

    for first_row, end_row, begin, end in zip(
        rows[:-1], rows[1:], keys[:-1], keys[1:], strict=True
    ):
        m, n = end_row - first_row, end - begin
        if n == 0:
            continue
        window = (
            shape.window if level.causal and shape.window is not None and n > shape.window else None
        )
        if m == 1 or not level.causal:
            add(first_row, m, begin if window is None else end - window, end, False, None)
        elif window is None and _fusable(shape) and (m == n or m > MASKED_ROWS):
            if n > m:
                add(first_row, m, begin, end - m, False, None)
            add(first_row, m, end - m, end, True, None)
        else:
            for chunk in range(0, m, CHUNK_ROWS):
                some = min(CHUNK_ROWS, m - chunk)
                stop = end - m + chunk + some
                start = begin if window is None else max(begin, stop - some - window + 1)
                add(first_row + chunk, some, start, stop, True, window)
    tasks = _gather_ragged(tasks, shape)
    for task in tasks:
        task.joined = _joins_heads(task.rows, task.batch, task.keys, shape)
    return tasks


def _uniform_task(
    rows: list[int],
    keys: list[int],
    slots: npt.NDArray[np.int64],
    causal: bool,
    shape: AttentionShape,
) -> AttentionTask | None:
    """A whole level as one call, if its requests are equal and their runs of slots lie at a uniform distance."""
    count, m, n = len(rows) - 1, rows[1], keys[1]
    if n == 0 or (causal and m > 1):
        return None
    if rows != list(range(0, count * m + 1, m)) or keys != list(range(0, count * n + 1, n)):
        return None
    start = int(slots[0])
    step = int(slots[n]) - start if count > 1 else 0
    expected = np.arange(start, start + n) + step * np.arange(count)[:, None]
    if step < 0 or not np.array_equal(slots.reshape(count, n), expected):
        return None
    cut = max(0, n - shape.window) if causal and shape.window is not None else 0
    joined = _joins_heads(m, count, n - cut, shape)
    return AttentionTask(0, count, m, n - cut, start + cut, step, joined=joined)


def _joins_heads(rows: int, batch: int, keys: int, shape: AttentionShape) -> bool:
    """Where one call for all heads wins: MKL takes 2-5 us for the smallest product, so fewer and larger ones pay."""
    return (
        rows == 1
        and batch > 1
        and keys <= JOINED_KEYS
        and shape.num_kv_heads > 1
        and (shape.head_dim_qk <= 32 or (shape.head_dim_qk <= 64 and shape.group >= 3))
    )


def _gather_ragged(tasks: list[AttentionTask], shape: AttentionShape) -> list[AttentionTask]:
    """Turns neighbouring single-row tasks of unequal lengths or distances into one padded gather each."""
    width = shape.num_kv_heads * (shape.head_dim_qk + shape.head_dim_vo)

    def joins(task: AttentionTask) -> bool:
        if task.rows > 1:
            return False
        return task.index is not None or (
            task.batch < FEW_REQUESTS and task.keys * width <= GATHER_ELEMENTS
        )

    result: list[AttentionTask] = []
    stretch: list[AttentionTask] = []

    def flush() -> None:
        if len(stretch) < 2:
            result.extend(stretch)
        else:
            lists = [row for task in stretch for row in task.slots().view(task.batch, -1)]
            lengths = torch.tensor([len(row) for row in lists])
            index = torch.nn.utils.rnn.pad_sequence(lists, batch_first=True, padding_value=-1)
            index = torch.where(index < 0, index[:, :1], index)
            same = bool((lengths == index.shape[1]).all())
            result.append(
                AttentionTask(
                    stretch[0].first_row,
                    *(len(lists), 1, index.shape[1]),
                    index=index.reshape(-1),
                    lengths=None if same else lengths,
                )
            )
        stretch.clear()

    for task in tasks:
        if stretch and (not joins(task) or stretch[-1].end_row != task.first_row):
            flush()
        (stretch if joins(task) else result).append(task)
    flush()
    return result
