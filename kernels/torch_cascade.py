"""Cascade attention in plain torch: shared spans are read once, contiguous slots never copied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .base import AttentionShape, CascadeLayout, apply_sinks
from .logits import attention_logits, matmul_float32
from .torch_tasks import JOINED_KEYS, AttentionTask, fusable, level_tasks

# The fused CPU kernel (q, k, v, dropout, is_causal, mask, scale); private, but the only one that
# returns the logsumexp. Keys of length 0 end the process, a fully masked row reports lse 0, and
# `is_causal` aligns top-left; the plan avoids all three.
_flash: Callable[..., tuple[Tensor, Tensor]] = torch._scaled_dot_product_flash_attention_for_cpu


@dataclass(slots=True)
class CascadePlan:
    """The calls of one forward for one shape.

    Layers run one after the other, so they share masks and gather buffers, made at first use.

    Attributes:
        shape: of the layers.
        rows: T.
        tasks: level after level.
        tiles: groups of tasks that cover every row once, in order; merged with each other at once.
        rest: the other tasks; merged into their rows one after the other.
        masks: additive masks by (task, dtype, joined).
        indices: slots to gather by task, on the pool's device.
        buffers: gathered keys and values by (task, 0 or 1); a fresh block per layer would cost more
            in page faults than the copy itself.
    """

    shape: AttentionShape
    rows: int
    tasks: tuple[AttentionTask, ...]
    tiles: tuple[tuple[int, ...], ...]
    rest: tuple[int, ...]
    masks: dict[tuple[int, torch.dtype, bool], Tensor | None] = field(default_factory=dict)
    indices: dict[int, Tensor] = field(default_factory=dict)
    buffers: dict[tuple[int, int], Tensor] = field(default_factory=dict)


class TorchCascade:
    """The `AttentionBackend` for CPUs (on any other torch device it runs by matmuls).

    Rows are kept as [T * G, H_kv, d]: the query heads of a group become rows that read one KV head,
    so K and V are never repeated, and this is also the order in which the fused kernel writes.

    Equal to `ReferenceAttention` up to rounding: the softmax and all merging are in float32
    (float64 for float64 inputs), products of float16 and bfloat16 are summed in float32.

    Example:
        Two rows share slots 0 .. 2, and each has one key of its own (float32; 1 head, D = 2):

        >>> from arbor.kernels.base import CascadeLevel
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

    def __init__(self) -> None:
        self._foreign: dict[tuple[int, int, torch.dtype, torch.device], Tensor] = {}

    def plan(self, layout: CascadeLayout, shape: AttentionShape) -> CascadePlan:
        """Turns key lists into slices of the pool; see `AttentionTask`."""
        tasks: list[AttentionTask] = []
        tiles: list[tuple[int, ...]] = []
        rest: list[int] = []
        for level in layout.levels:
            found = level_tasks(level, shape)
            level_tiles, level_rest = _tiles(found, len(tasks), layout.rows)
            tasks += found
            tiles += level_tiles
            rest += level_rest
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
        fused = fusable(shape) and q.device.type == "cpu"
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
            logits = _masked_logits(shape, queries, keys, self._mask(plan, number, q))
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
            # Rows of a group would shift the diagonal: the group is the batch, over the same K, V.
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
        keys = self._slots(plan, number, 0, k_pool)
        logits = _masked_logits(shape, _queries(task, folded), keys, mask)
        top = logits.amax(-1, keepdim=True)
        weights = logits.sub_(top).exp_()
        total = weights.sum(-1, keepdim=True)
        values = self._slots(plan, number, 1, v_pool)
        part = matmul_float32(weights, values).div_(total)
        return (
            part.transpose(1, 2).reshape(rows, kv_heads, shape.head_dim_vo),
            total.log_().add_(top).squeeze(-1).transpose(1, 2).reshape(rows, kv_heads),
        )

    def _slots(self, plan: CascadePlan, number: int, which: int, pool: Tensor) -> Tensor:
        """K or V of a task as [B, H_kv, n, D]: a view of the pool, or gathered slots."""
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
            plan.indices[number] = task.index.to(pool.device)
            buffer = pool.new_empty(len(task.index), heads, dim)
            plan.buffers[number, which] = buffer
        torch.index_select(pool, 0, plan.indices[number], out=buffer)
        return buffer.view(task.batch, task.keys, heads, dim).transpose(1, 2)

    def _mask(
        self, plan: CascadePlan, number: int, like: Tensor, joined: bool = False
    ) -> Tensor | None:
        """The task's additive mask in the dtype of `like`, or None.

        [B or 1, 1, m * G, n]; joined [B or 1, 1, m * G * H_kv, n * H_kv], the head varying fastest
        in both.
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
        """Additive mask [1, 1, G * H_kv, n * H_kv] of a row: query heads see their KV head."""
        name = (shape.group, shape.num_kv_heads, like.dtype, like.device)
        if name not in self._foreign:
            foreign = ~torch.eye(shape.num_kv_heads, dtype=torch.bool).repeat(
                shape.group, JOINED_KEYS
            )
            mask = torch.zeros(foreign.shape, dtype=like.dtype).masked_fill_(foreign, -torch.inf)
            self._foreign[name] = mask.view(1, 1, *mask.shape).to(like.device)
        return self._foreign[name][..., : keys * shape.num_kv_heads]


def _tiles(
    tasks: Sequence[AttentionTask], number: int, rows: int
) -> tuple[list[tuple[int, ...]], list[int]]:
    """The tasks of a level by number: groups that cover rows 0 .. rows once, in order; the others.

    Args:
        tasks: in order of their first rows.
        number: of the first task.
        rows: T.
    """
    tiles: list[tuple[int, ...]] = []
    rest: list[int] = []
    chain: list[int] = []
    end_row = 0
    for index, task in enumerate(tasks, number):
        if chain and task.first_row != end_row:
            rest += chain
            chain = []
        if chain or task.first_row == 0:
            chain.append(index)
        else:
            rest.append(index)
        end_row = task.end_row
        if chain and end_row == rows:
            tiles.append(tuple(chain))
            chain = []
    return tiles, rest + chain


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


def _masked_logits(
    shape: AttentionShape, queries: Tensor, keys: Tensor, mask: Tensor | None
) -> Tensor:
    """Logits [B, H_kv, m * G, n] in at least float32; -inf where the mask hides a key."""
    logits = attention_logits(queries, keys, shape)
    return logits if mask is None else logits.add_(mask)


def _concatenate(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Results of neighbouring rows as one."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])


def _merge_tiles(parts: list[tuple[Tensor, Tensor]], work: torch.dtype) -> tuple[Tensor, Tensor]:
    """Merges results over disjoint keys for the same rows: [R, H_kv, D_v], finite lse [R, H_kv]."""
    if len(parts) == 1:
        out, lse = parts[0]
        return _as(out, work), _as(lse, work)
    lses = _as(torch.stack([lse for _, lse in parts]), work)
    shares = torch.log_softmax(lses, 0)
    lse = lses[0] - shares[0]
    outs = _as(torch.stack([out for out, _ in parts]), work)
    return outs.mul_(shares.exp_().unsqueeze(-1)).sum(0), lse


def _as(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x.to(dtype)`, without a call (a cold one between two matmuls) where nothing is to do."""
    return x if x.dtype == dtype else x.to(dtype)


def _merge_into(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merges another result, of finite lse, into the rows' state in place, in its precision."""
    part_lse = _as(part_lse, lse.dtype)
    weight = torch.sigmoid(part_lse - lse)
    out.lerp_(_as(part, out.dtype), weight.unsqueeze(-1))
    torch.logaddexp(lse, part_lse, out=lse)
