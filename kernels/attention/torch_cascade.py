"""Cascade attention in plain torch: shared spans are read once, contiguous slots never copied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from arbor.kernels.attention.base import (
    AttentionShape,
    CascadeLayout,
    apply_sinks,
    attention_logits,
    matmul_float32,
)
from arbor.kernels.attention.decoded_cascade import DecodedCascade, DecodedPlan
from arbor.kernels.attention.mass_work import MassKernel, MassWork, mass_work
from arbor.kernels.attention.torch_tasks import (
    JOINED_KEYS,
    AttentionTask,
    TaskPiece,
    fusable,
    level_tasks,
)
from arbor.kernels.int8 import is_stored

# The fused CPU kernel (q, k, v, dropout, is_causal, mask, scale); private, but the only one that
# returns the logsumexp. Keys of length 0 end the process, a fully masked row reports lse 0, and
# `is_causal` aligns top-left; the plan avoids all three.
_flash: Callable[..., tuple[Tensor, Tensor]] = torch._scaled_dot_product_flash_attention_for_cpu

# Logits that exist at once where they are materialised: without the fused kernel, and for mass. At
# 32 heads and 8,192 keys, 64 rows. Keys or values of a batch, copied by its matmul, keep to it too.
LOGIT_BYTES = 64 << 20


@dataclass(slots=True)
class CascadePlan:
    """The calls of one forward for one shape.

    Layers run one after the other, so they share masks and gather buffers, made at first use.

    Attributes:
        shape: of the layers.
        layout: as given.
        tasks: level after level; none before they are needed where mass alone is planned.
        tiles: groups of tasks that cover every row once, in order; merged with each other at once.
        rest: the other tasks; merged into their rows one after the other.
        masks: the fused kernel's additive masks by (task, dtype, joined).
        piece_masks: the matmuls' additive masks by task, where one piece is the whole task.
        indices: slots of a task's keys, where they are gathered or mass is added to a batch; on the
            pool's device.
        lengths: the tasks' key counts of each request, on the pool's device.
        buffers: gathered keys and values by (task, 0 or 1); a fresh block per layer would cost more
            in page faults than the copy itself.
        mass_work: of the mass kernel, once it has run.
        decoded: the pieces in which 8-bit KV is decoded, once it has been read.
    """

    shape: AttentionShape
    layout: CascadeLayout
    tasks: tuple[AttentionTask, ...] = ()
    tiles: tuple[tuple[int, ...], ...] = ()
    rest: tuple[int, ...] = ()
    masks: dict[tuple[int, torch.dtype, bool], Tensor | None] = field(default_factory=dict)
    piece_masks: dict[int, Tensor | None] = field(default_factory=dict)
    indices: dict[int, Tensor] = field(default_factory=dict)
    lengths: dict[int, Tensor] = field(default_factory=dict)
    buffers: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    mass_work: MassWork | None = None
    decoded: DecodedPlan | None = None

    @property
    def rows(self) -> int:
        """T."""
        return self.layout.rows


class TorchCascade:
    """The `AttentionBackend` for CPUs (on any other torch device it runs by matmuls).

    Rows are kept as [T * G, H_kv, d]: the query heads of a group become rows that read one KV head,
    so K and V are never repeated, and this is also the order in which the fused kernel writes.

    Equal to `ReferenceAttention` up to rounding: the softmax and all merging are in float32
    (float64 for float64 inputs), products of float16 and bfloat16 are summed in float32.

    8-bit KV is decoded in pieces of bounded size (`DecodedCascade`).

    Args:
        fused: run the fused CPU kernel where it computes the shape; False = matmuls everywhere, as
            on other devices.
        logit_bytes: logits that matmuls make at once, at most; a single row may have more.

    Example:
        Two rows share slots 0 .. 2, and each has one key of its own (float32; 1 head, D = 2):

        >>> from arbor.kernels.attention.base import CascadeLevel
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

    def __init__(self, *, fused: bool = True, logit_bytes: int = LOGIT_BYTES) -> None:
        self._may_fuse = fused
        self._logit_bytes = logit_bytes
        self._mass_kernel = MassKernel()
        self._decoding = DecodedCascade(self)
        self._foreign: dict[tuple[int, int, torch.dtype], Tensor] = {}

    def plan(self, layout: CascadeLayout, shape: AttentionShape) -> CascadePlan:
        """Turns key lists into slices of the pool; see `AttentionTask`."""
        plan = self.plan_mass(layout, shape)
        _add_calls(plan)
        return plan

    def plan_mass(self, layout: CascadeLayout, shape: AttentionShape) -> CascadePlan:
        """A plan for `mass` alone, whose calls are only made where no kernel computes it."""
        return CascadePlan(shape, layout)

    def run(
        self,
        plan: CascadePlan,
        q: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        sinks: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See `AttentionBackend.run`. A row without keys gives 0 and -inf."""
        if is_stored(k_pool):
            return self._decoding.run(self._decoded(plan), q, k_pool, v_pool, sinks)
        shape = plan.shape
        work = torch.promote_types(q.dtype, torch.float32)
        group, kv_heads = shape.group, shape.num_kv_heads
        folded = q.view(plan.rows, kv_heads, group, shape.head_dim_qk).transpose(1, 2).contiguous()
        may_fuse = self._may_fuse and q.device.type == "cpu"
        attend = self._fused if may_fuse and fusable(shape) else self._matmul
        parts = (
            _concatenate([attend(plan, i, folded, k_pool, v_pool) for i in tile])
            for tile in plan.tiles
        )
        if plan.tiles and may_fuse:
            out, lse = _merge_tiles(list(parts), work)
        elif plan.tiles:
            out, lse = next(parts)
            for part in parts:  # one after the other: at most two exist at once
                _merge_into(out, lse, *part)
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
        *,
        by_head: bool = False,
    ) -> Tensor:
        """See `AttentionBackend.mass`. Reads K once more, as the cascade does, and no V.

        On CUDA by a Triton kernel, if triton is installed; by matmuls elsewhere, by head, in
        float32 and float64, and where torch is asked for deterministic algorithms.
        """
        if is_stored(k_pool):
            return self._decoding.mass(self._decoded(plan), q, k_pool, lse, heads, by_head=by_head)
        if not by_head and self._mass_kernel.runs(q):
            if plan.mass_work is None:
                plan.mass_work = mass_work(plan.layout, plan.shape, q.device)
            summed = self._mass_kernel(plan.mass_work, q, k_pool, lse, heads)
            if summed is not None:
                return summed
        if not plan.tasks:
            _add_calls(plan)
        shape = plan.shape
        group, kv_heads = shape.group, shape.num_kv_heads
        work = torch.promote_types(q.dtype, torch.float32)
        folded = q.view(plan.rows, kv_heads, group, shape.head_dim_qk).transpose(1, 2).contiguous()
        row_lse = lse.view(plan.rows, kv_heads, group).transpose(1, 2).contiguous().to(work)
        counted = kv_heads if heads is None else len(heads)
        size = (counted, k_pool.shape[0]) if by_head else (k_pool.shape[0],)
        mass = torch.zeros(size, dtype=work, device=q.device)
        most = self._most(counted, group, shape.head_dim_qk, work)
        for number, task in enumerate(plan.tasks):
            queries = _queries(task, folded)
            keys = self._slots(plan, number, 0, k_pool)
            part_lse = row_lse[task.first_row : task.end_row]
            part_lse = part_lse.view(task.batch, task.rows * group, kv_heads).transpose(1, 2)
            if heads is not None:
                queries, keys, part_lse = queries[:, heads], keys[:, heads], part_lse[:, heads]
            for piece in task.pieces(*most):
                piece_lse = _rows_of(task, piece, group, part_lse)
                logits = self._logits(plan, number, piece, queries, keys)
                weights = logits.sub_(piece_lse.unsqueeze(-1)).exp_()  # [B, H_kv, m * G, n]
                received = weights.sum(2) if by_head else weights.sum((1, 2))
                if task.index is None and task.batch == 1:
                    first = task.start + piece.first_key
                    mass[..., first : first + received.shape[-1]].add_(received[0])
                else:
                    slots = self._key_slots(plan, number, piece, q.device)
                    mass.index_add_(-1, slots, received.movedim(0, -2).flatten(-2))
        return mass.float()

    def _decoded(self, plan: CascadePlan) -> DecodedPlan:
        if plan.decoded is None:
            plan.decoded = self._decoding.plan(plan.layout, plan.shape)
        return plan.decoded

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
        queries = _queries(task, folded)
        keys = self._slots(plan, number, 0, k_pool)
        values = self._slots(plan, number, 1, v_pool)
        work = torch.promote_types(folded.dtype, torch.float32)
        parts = []
        most_dims = max(shape.head_dim_qk, shape.head_dim_vo)
        most = self._most(shape.num_kv_heads, shape.group, most_dims, work)
        for piece in task.pieces(*most):
            logits = self._logits(plan, number, piece, queries, keys)
            top = logits.amax(-1, keepdim=True)
            weights = logits.sub_(top).exp_()
            total = weights.sum(-1, keepdim=True)
            part = matmul_float32(weights, _keys_of(task, piece, values)).div_(total)
            rows = part.shape[0] * part.shape[2]
            parts.append(
                (
                    part.transpose(1, 2).reshape(rows, shape.num_kv_heads, shape.head_dim_vo),
                    total.log_().add_(top).squeeze(-1).transpose(1, 2).reshape(rows, -1),
                )
            )
        return _concatenate(parts)

    def _most(self, kv_heads: int, group: int, dims: int, work: torch.dtype) -> tuple[int, int]:
        """Pairs of a row and a key whose logits fit the limit, and keys whose copies do."""
        limit = self._logit_bytes // (kv_heads * work.itemsize)
        return limit // group, limit // dims

    def _logits(
        self, plan: CascadePlan, number: int, piece: TaskPiece, queries: Tensor, keys: Tensor
    ) -> Tensor:
        """Logits [B, H_kv, m * G, n] of a piece in at least float32; -inf for hidden keys.

        Args:
            plan, number: the task.
            piece: of the task.
            queries: of the whole task, [B, H_kv, m * G, D_k].
            keys: of the whole task, [B, H_kv, n, D_k].
        """
        task, shape = plan.tasks[number], plan.shape
        logits = attention_logits(
            _rows_of(task, piece, shape.group, queries), _keys_of(task, piece, keys), shape
        )
        mask = self._piece_mask(plan, number, piece, queries.device)
        return logits if mask is None else logits.add_(mask)

    def _piece_mask(
        self, plan: CascadePlan, number: int, piece: TaskPiece, device: torch.device
    ) -> Tensor | None:
        """Additive mask [B or 1, 1, m * G, n] of a piece, made on the device, or None.

        Kept for the other layers where the piece is the whole task.
        """
        task = plan.tasks[number]
        whole = piece == task.whole
        if whole and number in plan.piece_masks:
            return plan.piece_masks[number]
        if task.lengths is not None and number not in plan.lengths:
            plan.lengths[number] = task.lengths.to(device)
        hidden = task.hidden(piece, device, plan.lengths.get(number))
        mask = None
        if hidden is not None:
            hidden = hidden.repeat_interleave(plan.shape.group, dim=1)
            mask = torch.where(hidden, -torch.inf, 0.0).unsqueeze(1)
        if whole:
            plan.piece_masks[number] = mask
        return mask

    def _key_slots(
        self, plan: CascadePlan, number: int, piece: TaskPiece, device: torch.device
    ) -> Tensor:
        """int64 [B * n] slots of the keys of a piece, on the device."""
        task = plan.tasks[number]
        if number not in plan.indices:
            plan.indices[number] = task.slots(device)
        slots = plan.indices[number]
        if piece == task.whole:
            return slots
        slots = slots.view(task.batch, task.keys)[piece.first_request : piece.end_request]
        return slots[:, piece.first_key : piece.end_key].reshape(-1)

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
        """The fused kernel's additive mask of a task in the dtype of `like`, on the CPU, or None.

        [B or 1, 1, m * G, n]; joined [B or 1, 1, m * G * H_kv, n * H_kv], the head varying fastest
        in both.
        """
        name = (number, like.dtype, joined)
        if name not in plan.masks:
            task, shape = plan.tasks[number], plan.shape
            hidden = task.hidden(task.whole, torch.device("cpu"), task.lengths)
            if hidden is not None:
                hidden = hidden.repeat_interleave(shape.group, dim=1)
            if joined:
                if hidden is None:
                    plan.masks[name] = self._foreign_heads(shape, task.keys, like)
                    return plan.masks[name]
                heads = shape.num_kv_heads
                foreign = self._foreign_heads(shape, task.keys, like)[0] < 0
                hidden = hidden.repeat_interleave(heads, 1).repeat_interleave(heads, 2) | foreign
            mask = None
            if hidden is not None:
                mask = torch.zeros(hidden.shape, dtype=like.dtype)
                mask = mask.masked_fill_(hidden, -torch.inf).unsqueeze(1)
            plan.masks[name] = mask
        return plan.masks[name]

    def _foreign_heads(self, shape: AttentionShape, keys: int, like: Tensor) -> Tensor:
        """Additive mask [1, 1, G * H_kv, n * H_kv] of a row: query heads see their KV head."""
        name = (shape.group, shape.num_kv_heads, like.dtype)
        if name not in self._foreign:
            foreign = ~torch.eye(shape.num_kv_heads, dtype=torch.bool).repeat(
                shape.group, JOINED_KEYS
            )
            mask = torch.zeros(foreign.shape, dtype=like.dtype).masked_fill_(foreign, -torch.inf)
            self._foreign[name] = mask.view(1, 1, *mask.shape)
        return self._foreign[name][..., : keys * shape.num_kv_heads]


def _add_calls(plan: CascadePlan) -> None:
    tasks: list[AttentionTask] = []
    tiles: list[tuple[int, ...]] = []
    rest: list[int] = []
    for level in plan.layout.levels:
        found = level_tasks(level, plan.shape)
        level_tiles, level_rest = _tiles(found, len(tasks), plan.rows)
        tasks += found
        tiles += level_tiles
        rest += level_rest
    plan.tasks, plan.tiles, plan.rest = tuple(tasks), tuple(tiles), tuple(rest)


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


def _rows_of(task: AttentionTask, piece: TaskPiece, group: int, x: Tensor) -> Tensor:
    """A piece's rows of [B, H_kv, m * G, ...], a view."""
    if piece.end_request - piece.first_request != task.batch:
        x = x[piece.first_request : piece.end_request]
    if piece.end_row - piece.first_row != task.rows:
        x = x[:, :, piece.first_row * group : piece.end_row * group]
    return x


def _keys_of(task: AttentionTask, piece: TaskPiece, x: Tensor) -> Tensor:
    """A piece's keys of [B, H_kv, n, D], a view."""
    if piece.end_request - piece.first_request != task.batch:
        x = x[piece.first_request : piece.end_request]
    if piece.end_key - piece.first_key != task.keys:
        x = x[:, :, piece.first_key : piece.end_key]
    return x


def _join(x: Tensor) -> Tensor:
    """[B, H_kv, n, D] -> [B, 1, n * H_kv, D], a view where tokens lie without gaps."""
    return x.transpose(1, 2).flatten(1, 2).unsqueeze(1)


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
