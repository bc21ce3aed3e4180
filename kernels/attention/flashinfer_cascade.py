"""Cascade attention on CUDA: FlashInfer's paged prefill kernels per level, merged by logsumexp."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from arbor.kernels.attention.base import AttentionShape, CascadeLayout, CascadeLevel, apply_sinks
from arbor.kernels.attention.fixed import (
    MOST_LEVELS,
    Bucket,
    bucket_of,
    key_capacity,
    pad_last,
    pad_shared,
)
from arbor.kernels.attention.torch_cascade import MassByTorch
from arbor.kernels.attention.trial import BackendUnusable, computes_a_tiny_attention, reason_of

DTYPES = (torch.float16, torch.bfloat16)
HEAD_DIMS = (64, 128, 256)
BLOCK_THREADS = 1024  # of a CUDA thread block, at most
MEBIBYTE = 1 << 20
LENGTHS_BYTES = 4 * 32768  # a buffer of every wrapper, whatever its size


@dataclass(slots=True)
class PlannedWrapper:
    """One FlashInfer wrapper and what it holds.

    Attributes:
        wrapper: a `BatchPrefillWithPagedKVCacheWrapper`.
        copied: recorded after the copies of its last plan; None before the first plan.
        level: the level it is planned for.
    """

    wrapper: Any
    copied: Any = None
    level: CascadeLevel | None = None


@dataclass(slots=True)
class FlashInferPlan:
    """The planned wrappers of one forward for one shape, until the same shape is planned again.

    Attributes:
        shape: of the layers.
        layout: as given; without levels for buffers at fixed places, which give no attention mass.
        wrappers: one per level, the last level first (the only one in which every row has keys).
        other: output and logsumexp of the level that is merged next; shared by the layers.
        by_hand: the plan of `TorchCascade`, made when attention mass is asked for.
    """

    shape: AttentionShape
    layout: CascadeLayout
    wrappers: tuple[Any, ...]
    other: tuple[Tensor, Tensor] | None = None
    by_hand: Any = None


class FlashInferCascade(MassByTorch):
    """FlashInfer's `BatchPrefillWithPagedKVCacheWrapper` at page size 1, one call per level.

    `MultiLevelCascadeAttentionWrapper` does the same with a fixed number of levels and keeps no
    logsumexp, which attention mass and sinks need; so the levels are called one by one here. The
    backend is always ``fa2``: ``fa3`` takes no page-size-1 tables as fast and has let NaN of unused
    memory through.

    Equal to `RowwiseAttention` up to rounding in `dtype`; logits are float32.

    Args:
        device: a CUDA device.
        dtype: of queries and pool: float16 or bfloat16 (float32 stays with `TorchCascade`).

    Raises:
        BackendUnusable: flashinfer cannot be imported (``pip install 'arbor-search[cuda]'``).
        ValueError: a dtype FlashInfer has no kernels for.

    Example:
        Needs a GPU; `TorchCascade` has an example of these calls for any machine::

            backend = FlashInferCascade(torch.device("cuda"), torch.bfloat16)
            plan = backend.plan(layout, AttentionShape(32, 8, 128, 128, scaling=128**-0.5))
            out, lse = backend.run(plan, q, k_pool, v_pool)  # [T, 32, 128], [T, 32]
    """

    most_shared_levels = MOST_LEVELS - 1

    def __init__(self, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        if dtype not in DTYPES:
            raise ValueError(f"FlashInfer runs float16 and bfloat16, not {dtype}.")
        try:
            self._flashinfer = importlib.import_module("flashinfer")
        except Exception as error:  # a damaged installation fails in any way
            module = getattr(error, "name", None) or "flashinfer"
            raise BackendUnusable(
                f"flashinfer cannot be imported ({reason_of(error)}).", name=module
            ) from error
        self.device = device
        self.dtype = dtype
        # Partial results of one run. Runs of a stream come one after the other, so all wrappers
        # share it, as those of FlashInfer's own cascade wrapper do; what is planned is kept in a
        # buffer of each wrapper.
        self._workspace: Tensor | None = None
        self._wrappers: dict[tuple[AttentionShape, int], PlannedWrapper] = {}
        self._placed: list[tuple[CascadeLevel, Tensor]] = []
        self._fixed_workspaces: list[Tensor] = []
        self._fixed_indices: dict[tuple[AttentionShape, int], IndexBuffer] = {}
        self._last_planned: PlannedWrapper | None = None

    def probe(self, shapes: Iterable[AttentionShape]) -> None:
        """Load and try the kernels of these shapes, and size the workspace for all of them.

        Every variant (head dimensions, window, soft cap) computes a tiny attention over two keys,
        in two levels where levels are used, so that each module is found, loaded and run once.

        Raises:
            BackendUnusable: a module is missing, cannot be built, or computes something else.
            ValueError: a head dimension FlashInfer has no kernel for.
        """
        distinct = tuple(dict.fromkeys(shapes))
        for shape in distinct:
            _check_head_dims(shape)
        # heads may be read one by one too, as rows with one KV head (`CellAttention`)
        single = (replace(each, num_qo_heads=each.group, num_kv_heads=1) for each in distinct)
        needed = (
            workspace_bytes(shape, multiprocessors(self.device)) for shape in (*distinct, *single)
        )
        self._reserve(max(needed, default=0))
        variants = {
            (s.head_dim_qk, s.head_dim_vo, s.window is None, s.softcap is None): s for s in distinct
        }
        for shape in variants.values():
            name = _variant_name(shape, self.dtype)
            try:
                right = computes_a_tiny_attention(self, shape, self.dtype, self.device)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # compilers, loaders and CUDA fail in many ways
                module = getattr(getattr(error, "spec", None), "name", None) or name
                raise BackendUnusable(
                    f"FlashInfer has no usable kernel for {name}: "
                    f"module {module}: {type(error).__name__}: {reason_of(error)}",
                    name=module,
                ) from error
            if not right:
                raise BackendUnusable(f"FlashInfer computes {name} wrongly.", name=name)

    def plan(self, layout: CascadeLayout, shape: AttentionShape) -> FlashInferPlan:
        """Plan every level; see `AttentionBackend.plan`.

        Raises:
            ValueError: a head dimension FlashInfer has no kernel for.
        """
        _check_head_dims(shape)
        self._reserve(workspace_bytes(shape, multiprocessors(self.device)))
        wrappers = []
        # Everything FlashInfer keeps is an ordinary tensor: it writes to its buffers in later
        # plans, and a tensor made in inference mode could not be written to outside it.
        with torch.inference_mode(False):
            for index, level in enumerate(reversed(layout.levels)):
                planned = self._wrapper(shape, index)
                if planned.level is not level:  # shared levels stay while leaves decode on
                    indices = next((there for of, there in self._placed if of is level), None)
                    if indices is None:
                        indices = level.kv_indices.to(self.device, non_blocking=True)
                    self.plan_level(planned, level, shape, indices)
                wrappers.append(planned.wrapper)
        return FlashInferPlan(shape, layout, tuple(wrappers))

    def unplanned(
        self, layouts: Iterable[tuple[CascadeLayout, AttentionShape]]
    ) -> list[CascadeLevel]:
        """Levels whose key lists `plan` is going to copy to the device for these layouts."""
        found: list[CascadeLevel] = []
        for layout, shape in layouts:
            for index, level in enumerate(reversed(layout.levels)):
                planned = self._wrappers.get((shape, index))
                known = planned is not None and planned.level is level
                if not known and not any(level is other for other in found):
                    found.append(level)
        return found

    def place(self, levels: Sequence[CascadeLevel], lists: Sequence[Tensor]) -> None:
        """Key lists on the device, for the plans of the forward that follows.

        Args:
            levels: of `unplanned`.
            lists: their `kv_indices`, int32, on the device.
        """
        self._placed = list(zip(levels, lists, strict=True))

    # Buffers at fixed places

    def bucket(self, layouts: Sequence[CascadeLayout]) -> Bucket | None:
        """See `FixedBackend.bucket`."""
        return bucket_of(layouts)

    def fixed(self, shape: AttentionShape, bucket: Bucket, slots: int) -> FixedCascade | None:
        """See `FixedBackend.fixed`."""
        _check_head_dims(shape)
        levels = bucket.levels if shape.window is None else 1
        requests = [bucket.rows] + [bucket.requests] * (levels - 1)
        launches = [
            launch_of(shape, bucket.rows, count, multiprocessors(self.device)) for count in requests
        ]
        needed = max(launch.float_bytes for launch in launches)
        if needed > MOST_WORKSPACE_BYTES:
            return None
        with torch.inference_mode(False):
            workspace = self._fixed_workspace(needed)
            buffers = [self._index_buffer(shape, index, slots) for index in range(levels)]
            wrappers, own_bytes = [], 0
            for launch, count, buffer in zip(launches, requests, buffers, strict=True):
                planned, size = self._fixed_wrapper(workspace, launch, count, buffer)
                wrappers.append(planned)
                own_bytes += size
        empty = CascadeLayout(bucket.rows, ())
        plan = FlashInferPlan(shape, empty, tuple(planned.wrapper for planned in wrappers))
        return FixedCascade(self, shape, bucket, wrappers, buffers, plan, own_bytes)

    @property
    def fixed_bytes(self) -> int:
        """See `FixedBackend.fixed_bytes`."""
        indices = (buffer.slots for buffer in self._fixed_indices.values())
        return sum(each.nbytes for each in (*self._fixed_workspaces, *indices))

    def release_fixed(self) -> None:
        """See `FixedBackend.release_fixed`; the copies of their plans are waited for."""
        if self._last_planned is not None:
            _wait(self._last_planned)  # the others come before it in the same stream
            self._last_planned = None
        self._fixed_workspaces.clear()
        self._fixed_indices.clear()

    def _fixed_workspace(self, needed: int) -> Tensor:
        """A workspace of at least this size; graphs hold its address, so that none is replaced.

        Sizes are powers of two: all of them together take less than twice the largest.
        """
        for workspace in self._fixed_workspaces:
            if workspace.numel() >= needed:
                return workspace
        size = max(MEBIBYTE, 1 << (needed - 1).bit_length())
        workspace = torch.empty(size, dtype=torch.uint8, device=self.device)
        self._fixed_workspaces.append(workspace)
        return workspace

    def _index_buffer(self, shape: AttentionShape, index: int, slots: int) -> IndexBuffer:
        key = (shape, index)
        if key not in self._fixed_indices:
            capacity = key_capacity(shape, slots, last=index == 0)
            self._fixed_indices[key] = IndexBuffer(
                torch.zeros(capacity, dtype=torch.int32, device=self.device)
            )
        return self._fixed_indices[key]

    def _fixed_wrapper(
        self, workspace: Tensor, launch: Launch, requests: int, buffer: IndexBuffer
    ) -> tuple[PlannedWrapper, int]:
        """A wrapper in CUDA graph mode and the bytes of its own buffers."""
        sizes = {"qo_indptr": requests + 1, "paged_kv_indptr": requests + 1}
        sizes["paged_kv_last_page_len"] = requests
        counts = {
            f"{name}_buf": torch.zeros(size, dtype=torch.int32, device=self.device)
            for name, size in sizes.items()
        }
        wrapper = self._flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            workspace,
            "NHD",
            use_cuda_graph=True,
            paged_kv_indices_buf=buffer.slots,
            backend="fa2",
            **counts,
        )
        # it makes one of 8 MiB, on the device and in host memory, for plans of any size
        ints = torch.empty(launch.int_bytes, dtype=torch.uint8, device=self.device)
        wrapper.reset_workspace_buffer(workspace, ints)
        own = ints.nbytes + LENGTHS_BYTES + sum(count.nbytes for count in counts.values())
        return PlannedWrapper(wrapper), own

    def _reserve(self, needed: int) -> None:
        """Make the shared workspace at least this large.

        Wrappers of a smaller one are given up; plans that still hold them stay valid.
        """
        if self._workspace is not None and self._workspace.numel() >= needed:
            return
        for planned in self._wrappers.values():
            _wait(planned)  # a wrapper's staging buffer is freed with it
        self._wrappers.clear()
        with torch.inference_mode(False):
            self._workspace = torch.empty(
                max(needed, MEBIBYTE), dtype=torch.uint8, device=self.device
            )

    def _wrapper(self, shape: AttentionShape, index: int) -> PlannedWrapper:
        key = (shape, index)
        if key not in self._wrappers:
            self._wrappers[key] = PlannedWrapper(
                self._flashinfer.BatchPrefillWithPagedKVCacheWrapper(
                    self._workspace, "NHD", backend="fa2"
                )
            )
        return self._wrappers[key]

    def plan_level(
        self, planned: PlannedWrapper, level: CascadeLevel, shape: AttentionShape, indices: Tensor
    ) -> None:
        """Plan one wrapper for a level, outside inference mode or in it.

        Args:
            planned: the wrapper.
            level: requests; its own key list is not read.
            shape: of the layers.
            indices: the level's key list on the device.
        """
        assert len(level.qo_indptr) > 1, "a level has at least one request"
        lengths = level.kv_indptr[1:] - level.kv_indptr[:-1]
        # FlashInfer takes the largest of these with Python's `max` over a tensor, one element at a
        # time; its fa2 kernels use neither, so the maximum alone is passed in place of the list.
        rows = level.qo_indptr[1:] - level.qo_indptr[:-1]
        _wait(planned)
        planned.level = None  # a plan that fails leaves the wrapper undefined
        planned.wrapper.plan(
            level.qo_indptr,
            level.kv_indptr,
            indices,
            (lengths > 0).to(torch.int32),  # slots of the last page: 0 where nothing is read
            shape.num_qo_heads,
            shape.num_kv_heads,
            shape.head_dim_qk,
            1,
            head_dim_vo=shape.head_dim_vo,
            causal=level.causal,
            sm_scale=shape.scaling,
            window_left=-1 if shape.window is None or not level.causal else shape.window - 1,
            logits_soft_cap=shape.softcap,
            q_data_type=self.dtype,
            kv_data_type=self.dtype,
            non_blocking=True,
            max_token_per_sequence=int(rows.max()),
            seq_lens=lengths.max().reshape(1),
        )
        if planned.copied is None:
            planned.copied = torch.cuda.Event()
        planned.copied.record(torch.cuda.current_stream(self.device))
        planned.level = level
        self._last_planned = planned

    def run(
        self,
        plan: FlashInferPlan,
        q: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        sinks: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See `AttentionBackend.run`. FlashInfer's logsumexp is in base 2; ours is natural."""
        paged = (k_pool.unsqueeze(1), v_pool.unsqueeze(1))
        q = q.contiguous()
        first, *others = plan.wrappers
        out, lse = _state(plan.shape, q)
        first.run(q, paged, out=out, lse=lse, return_lse=True)
        if others and plan.other is None:
            with torch.inference_mode(False):
                plan.other = _state(plan.shape, q)
        for wrapper in others:
            assert plan.other is not None
            wrapper.run(q, paged, out=plan.other[0], lse=plan.other[1], return_lse=True)
            self._merge(out, lse, *plan.other)
        lse.mul_(math.log(2))
        return apply_sinks(out, lse, sinks) if sinks is not None else (out, lse)

    def _merge(self, out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
        """Merge a level into the state, in place.

        FlashInfer's kernel gives each row a thread block with all of its heads. Heads are merged
        independently, so where they are too many for a block, parts of a row pass as rows.
        """
        rows, heads, dim = out.shape
        parts = merge_parts(heads, dim)
        values, sums = (rows * parts, heads // parts, dim), (rows * parts, heads // parts)
        self._flashinfer.merge_state_in_place(
            out.view(values), lse.view(sums), other.view(values), other_lse.view(sums)
        )


def workspace_bytes(shape: AttentionShape, multiprocessors: int) -> int:
    """The largest float workspace any plan of a shape asks for.

    FlashInfer splits key lists only while the resulting pieces (query tiles times chunks of keys)
    fit a grid of two thread blocks per multiprocessor, shared among the KV heads. Every piece keeps
    a tile of float32 outputs and logsumexps per query head. A tile has up to 128 rows (rows times
    the query heads of a group), or 64 where a head has 256 values.

    Args:
        shape: of the layers.
        multiprocessors: of the device.
    """
    pieces = 2 * multiprocessors // shape.num_kv_heads
    tile = 128 if shape.head_dim_vo < 256 else 64
    states = shape.num_qo_heads * pieces * tile
    return states * (shape.head_dim_vo + 1) * torch.float32.itemsize


def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA device."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def merge_parts(heads: int, head_dim: int) -> int:
    """The smallest number of equal parts of a row's heads that each fit a thread block.

    FlashInfer's merge takes one thread per 8 values, or per 1/32 of a head if that is more.
    """
    fitting = BLOCK_THREADS // (head_dim // max(8, head_dim // 32))
    return next(
        parts for parts in range(1, heads + 1) if heads % parts == 0 and heads // parts <= fitting
    )


def _check_head_dims(shape: AttentionShape) -> None:
    if shape.head_dim_qk not in HEAD_DIMS or shape.head_dim_vo not in HEAD_DIMS:
        raise ValueError(f"FlashInfer has kernels for head_dim {HEAD_DIMS}, not {shape}.")


def _wait(planned: PlannedWrapper) -> None:
    """Wait until a wrapper's staging buffer in host memory may be overwritten or freed."""
    if planned.copied is not None:
        planned.copied.synchronize()


def _state(shape: AttentionShape, q: Tensor) -> tuple[Tensor, Tensor]:
    """Uninitialised output and logsumexp of all rows; kernels write every row, empty ones too."""
    rows = q.shape[0]
    out = q.new_empty(rows, shape.num_qo_heads, shape.head_dim_vo)
    return out, q.new_empty(rows, shape.num_qo_heads, dtype=torch.float32)


def _variant_name(shape: AttentionShape, dtype: torch.dtype) -> str:
    dims = " and ".join(map(str, dict.fromkeys((shape.head_dim_qk, shape.head_dim_vo))))
    extras = ["a window"] if shape.window is not None else []
    extras += ["a soft cap"] if shape.softcap is not None else []
    with_extras = f" with {' and '.join(extras)}" if extras else ""
    return f"{str(dtype).removeprefix('torch.')} heads of {dims}{with_extras}"


MOST_WORKSPACE_BYTES = 256 << 20


@dataclass(slots=True)
class IndexBuffer:
    """The key lists of one level of one shape, used by the wrappers of all buckets in turn.

    Attributes:
        slots: int32, on the device.
        owner: the wrapper whose lists it holds.
    """

    slots: Tensor
    owner: Any = None


class FixedCascade:
    """`FixedAttention` by FlashInfer in its CUDA graph mode.

    In that mode a wrapper's number of requests and of rows is constant, it copies what is planned
    into the buffers it was given, and grid, query tile and places in its workspaces follow from
    these two numbers alone. Requests may have no rows and no keys.

    Args:
        planner: plans and runs.
        shape, bucket: see `FixedBackend.fixed`.
        wrappers: `PlannedWrapper`s, the last level first.
        buffers: of their key lists.
        plan: a `FlashInferPlan` of the wrappers.
        own_bytes: device memory of the wrappers.
    """

    def __init__(
        self,
        planner: FlashInferCascade,
        shape: AttentionShape,
        bucket: Bucket,
        wrappers: Sequence[PlannedWrapper],
        buffers: Sequence[IndexBuffer],
        plan: FlashInferPlan,
        own_bytes: int,
    ) -> None:
        self._planner = planner
        self._shape = shape
        self._bucket = bucket
        self._wrappers = tuple(wrappers)
        self._buffers = tuple(buffers)
        self._plan = plan
        self._due: list[tuple[int, CascadeLevel, CascadeLevel]] = []
        self.own_bytes = own_bytes

    def prepare(self, layout: CascadeLayout, trash: int) -> list[Tensor] | None:
        """See `FixedAttention.prepare`; levels that are planned already need nothing."""
        assert len(layout.levels) == len(self._wrappers), "a layout of another bucket"
        self._due = []
        for index, level in enumerate(reversed(layout.levels)):
            planned, buffer = self._wrappers[index], self._buffers[index]
            if planned.level is level and buffer.owner is planned:
                continue
            if index == 0:
                padded = pad_last(level, self._bucket, trash)
            else:
                padded = pad_shared(level, self._bucket)
            if len(padded.kv_indices) > len(buffer.slots):
                return None
            self._due.append((index, level, padded))
        return [padded.kv_indices for _, _, padded in self._due]

    def plan(self, lists: Sequence[Tensor]) -> None:
        """See `FixedAttention.plan`."""
        for (index, level, padded), indices in zip(self._due, lists, strict=True):
            planned, buffer = self._wrappers[index], self._buffers[index]
            buffer.owner = None
            with torch.inference_mode(False):
                self._planner.plan_level(planned, padded, self._shape, indices)
            planned.level, buffer.owner = level, planned
        self._due = []

    def run(
        self, q: Tensor, k_pool: Tensor, v_pool: Tensor, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """See `FixedAttention.run`."""
        return self._planner.run(self._plan, q, k_pool, v_pool, sinks)


@dataclass(frozen=True, slots=True)
class Launch:
    """What FlashInfer launches in its CUDA graph mode, for any plan of the same size.

    Attributes:
        tile: rows of a query tile (rows times the query heads of a group).
        pieces: query tiles times chunks of keys, padded.
        float_bytes: of the float workspace.
        int_bytes: of the integer workspace, at most.
    """

    tile: int
    pieces: int
    float_bytes: int
    int_bytes: int


def launch_of(shape: AttentionShape, rows: int, requests: int, multiprocessors: int) -> Launch:
    """The launch of a wrapper with fixed buffers.

    The tile is for the longest request that so many rows and requests allow; splitting is always
    on. (`PrefillSplitQOKVIndptr` and `PrefillPlanImpl` of FlashInfer 0.6.18.)

    Args:
        shape: of the layers.
        rows: of the batch.
        requests: at most `rows`.
        multiprocessors: of the device.
    """
    longest = (rows - requests + 1) * shape.group
    tile = 64 if longest > 16 else 16
    if longest > 64 and shape.head_dim_vo < 256:
        tile = 128
    tiles = -(-rows * shape.group // tile) + requests - 1
    pieces = max(2 * multiprocessors // shape.num_kv_heads, tiles)
    states = shape.num_qo_heads * pieces * tile
    return Launch(
        tile=tile,
        pieces=pieces,
        float_bytes=states * (shape.head_dim_vo + 1) * torch.float32.itemsize,
        int_bytes=13 * pieces + 4 * (requests + rows) + 256,
    )
