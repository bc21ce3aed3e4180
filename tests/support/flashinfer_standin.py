"""FlashInfer 0.6.18 without a GPU: the planner's arithmetic, and a package that behaves like it.

The planner decides how key lists are split and what its two workspaces must hold; it is written
here from the meaning of `PrefillPlan`, so that workspace sizes can be tested. The package computes
paged attention in torch, keeps real tensors, and fails where FlashInfer would fail.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.graph_tape import opaque
from torch import Tensor

from arbor.kernels.attention import flashinfer_cascade

MULTIPROCESSORS = 132  # an H100
INFINITY = 5e4  # FlashInfer's stand-in for infinity: the negated base-2 logsumexp of an empty row
INT_WORKSPACE_BYTES = 8 << 20
MIN_CHUNK = 128  # keys


@dataclass(frozen=True)
class Demand:
    """What one plan asks of its workspaces, in bytes, and what it launches."""

    split: bool
    float_bytes: int
    int_bytes: int
    tile: int
    pieces: int


def _pieces(length: int, size: int) -> int:
    return -(-length // size)


def _aligned(used: int, size: int) -> int:
    """`used` after one more allocation, which begins at a multiple of 16."""
    return _pieces(used, 16) * 16 + size


def tile_rows(mean_rows: int, head_dim_vo: int) -> int:
    """Rows of a query tile, from the mean of (rows times group) over the requests."""
    if mean_rows > 64 and head_dim_vo < 256:
        return 128
    return 64 if mean_rows > 16 else 16


def demand(
    qo_indptr: Sequence[int],
    kv_indptr: Sequence[int],
    heads: int,
    kv_heads: int,
    head_dim_vo: int,
    *,
    window_left: int = -1,
    multiprocessors: int = MULTIPROCESSORS,
    graph_rows: int | None = None,
) -> Demand:
    """The demand of one plan at page size 1.

    With `graph_rows`, the rows of a wrapper in CUDA graph mode: the tile is for the longest request
    of so many rows and requests, and splitting is always on.
    """
    group = heads // kv_heads
    requests = len(qo_indptr) - 1
    folded = [(b - a) * group for a, b in itertools.pairwise(qo_indptr)]
    keys = [b - a for a, b in itertools.pairwise(kv_indptr)]
    if graph_rows is None:
        tile = tile_rows(sum(folded) // requests, head_dim_vo)
    else:
        assert graph_rows >= requests, "an unsigned subtraction would wrap around"
        tile = tile_rows((graph_rows - requests + 1) * group, head_dim_vo)
    if window_left >= 0:
        keys = [min(length, window_left + tile) for length in keys]
    tiles = [_pieces(rows, tile) for rows in folded]
    keys = [max(length, 1) for length in keys]

    def total(chunk: int) -> int:
        return sum(t * _pieces(length, chunk) for t, length in zip(tiles, keys, strict=True))

    largest = max(keys)
    low, high = MIN_CHUNK, largest
    while low < high:  # the smallest chunk with which all pieces run at once
        middle = (low + high) // 2
        if total(middle) > 2 * multiprocessors // kv_heads:
            low = middle + 1
        else:
            high = middle
    split = low < largest or graph_rows is not None
    pieces = total(low)
    rows = qo_indptr[-1]
    if graph_rows is not None:
        used, rows = pieces, graph_rows
        most = _pieces(graph_rows * group, tile) + requests - 1
        pieces = max(2 * multiprocessors // kv_heads, most)
        if used > pieces:
            raise RuntimeError("new batch size should not exceed padded batch size.")

    ints = 0
    for size in (4 * pieces, 4 * pieces, 4 * pieces, 4 * (requests + 1)):
        ints = _aligned(ints, size)
    ints += 4
    if graph_rows is not None:
        ints = _aligned(ints, 4)
    floats = 0
    if split:
        states = heads * pieces * tile
        floats = _aligned(_aligned(0, states * head_dim_vo * 4), states * 4)
        ints = _aligned(_aligned(ints, 4 * (rows + 1)), pieces)
    return Demand(split, floats, ints, tile, pieces)


class Wrapper:
    """`BatchPrefillWithPagedKVCacheWrapper`: requests over page tables, end-aligned causal.

    In CUDA graph mode the number of requests is that of the buffers, the rows of the first plan are
    the most, and what is planned goes into the buffers; everything that a captured launch would
    hold, its grid and its places in the workspaces, must be the same in every plan.

    Attributes:
        planned: how often.
        settings: keyword arguments of the last plan.
        launch: of the last plan.
    """

    def __init__(
        self,
        workspace: Tensor,
        layout: str,
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
        *,
        backend: str,
    ) -> None:
        assert (layout, backend) == ("NHD", "fa2")
        assert workspace.dtype == torch.uint8
        self.workspace = workspace
        self.lengths = torch.empty(32768, dtype=torch.int32)
        self.int_workspace = torch.empty(INT_WORKSPACE_BYTES, dtype=torch.uint8)
        self.planned = 0
        self.settings: dict[str, Any] = {}
        self.launch: Demand | None = None
        self.graph_rows: int | None = None
        self.buffers: tuple[Tensor, ...] | None = None
        if use_cuda_graph:
            given = (
                qo_indptr_buf,
                paged_kv_indptr_buf,
                paged_kv_indices_buf,
                paged_kv_last_page_len_buf,
            )
            for buffer in given:
                if not isinstance(buffer, Tensor):
                    raise ValueError("the buffers should be Tensors in CUDA graph mode")
                assert buffer.dtype == torch.int32
            self.buffers = tuple(buffer for buffer in given if buffer is not None)
            rows, ends, _, last = self.buffers
            if not len(rows) == len(ends) == len(last) + 1:
                raise ValueError("The length of paged_kv_indptr_buf should be batch_size + 1.")

    def reset_workspace_buffer(self, workspace: Tensor, int_workspace: Tensor) -> None:
        assert workspace.dtype == int_workspace.dtype == torch.uint8
        self.workspace, self.int_workspace = workspace, int_workspace

    def plan(
        self,
        qo_indptr: Tensor,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        **settings: Any,
    ) -> None:
        for host in (qo_indptr, indptr, last_page_len):
            assert host.dtype == torch.int32 and host.device.type == "cpu"
        assert page_size == 1 and indices.dtype == torch.int32
        lengths = (indptr[1:] - indptr[:-1] - 1).clamp(min=0) + last_page_len
        assert (lengths == indptr[1:] - indptr[:-1]).all(), "an empty request has no last page"
        seq_lens = settings.get("seq_lens", lengths)
        assert int(seq_lens.max()) == int(lengths.max())
        rows = settings.get("max_token_per_sequence", int((qo_indptr[1:] - qo_indptr[:-1]).max()))
        assert rows == int((qo_indptr[1:] - qo_indptr[:-1]).max())
        if self.buffers is not None:
            total = int(qo_indptr[-1])
            self.graph_rows = total if self.graph_rows is None else self.graph_rows
            if total > self.graph_rows:
                raise ValueError("The total number of rows in qo_indptr in cuda graph mode")
            if len(qo_indptr) != len(self.buffers[0]):
                raise ValueError("The batch size should be fixed during the lifecycle")
            if len(indices) > len(self.buffers[2]):
                raise ValueError("The length of paged_kv_indices exceeds the allocated buffer")
        needed = demand(
            qo_indptr.tolist(),
            indptr.tolist(),
            num_qo_heads,
            num_kv_heads,
            settings["head_dim_vo"],
            window_left=settings["window_left"],
            graph_rows=self.graph_rows,
        )
        if self.buffers is not None:
            assert self.launch in (None, needed), "a captured launch would be another one"
        self.launch = needed
        if needed.float_bytes > self.workspace.numel():
            raise RuntimeError("Buffer overflow when allocating memory for batch_prefill_tmp_v")
        if needed.int_bytes > self.int_workspace.numel():
            raise RuntimeError("Buffer overflow when allocating memory for batch_prefill_o_indptr")
        self.lengths[: len(seq_lens)].copy_(seq_lens)
        self.int_workspace[: qo_indptr.nbytes].copy_(qo_indptr.view(torch.uint8))
        self.planned += 1
        self.total = int(qo_indptr[-1])
        if self.buffers is None:
            self.tables = (qo_indptr.clone(), indptr.clone(), indices)
        else:
            rows, ends, slots, last = self.buffers
            rows.copy_(qo_indptr)
            ends.copy_(indptr)
            slots[: len(indices)].copy_(indices)
            last.copy_(last_page_len)
            self.tables = (rows, ends, slots)
        self.settings = settings
        self.group = num_qo_heads // num_kv_heads

    def run(
        self,
        q: Tensor,
        paged: tuple[Tensor, Tensor],
        *,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
    ) -> tuple[Tensor, Tensor]:
        assert return_lse and q.is_contiguous()
        assert q.dtype == self.settings["q_data_type"]
        if q.shape[0] != self.total:
            raise ValueError("q.shape[0] does not match qo_indptr[-1]")
        shape = (*q.shape[:2], paged[1].shape[-1])
        out = torch.zeros(shape, dtype=q.dtype) if out is None else out
        lse = torch.empty(q.shape[:2]) if lse is None else lse
        assert out.shape == shape and out.dtype == q.dtype and out.is_contiguous()
        assert lse.shape == q.shape[:2] and lse.dtype == torch.float32 and lse.is_contiguous()
        opaque(functools.partial(self._attend, q, paged, out, lse, dict(self.settings)))
        return out, lse

    def _attend(
        self,
        q: Tensor,
        paged: tuple[Tensor, Tensor],
        out: Tensor,
        lse: Tensor,
        settings: dict[str, Any],
    ) -> None:
        """The kernel: reads the tables as they are when it runs."""
        rows, ends = self.tables[0].tolist(), self.tables[1].tolist()
        indices = self.tables[2].long()
        k_pool, v_pool = (pool.squeeze(1).float() for pool in paged)
        for i in range(len(rows) - 1):
            keys = indices[ends[i] : ends[i + 1]]
            m, n = rows[i + 1] - rows[i], len(keys)
            for j in range(m):
                row = rows[i] + j
                last = n - m + j if settings["causal"] else n - 1
                window = settings["window_left"]
                first = max(0, last - window) if window >= 0 else 0
                mine = keys[first : last + 1]
                if len(mine) == 0:
                    out[row] = 0
                    lse[row] = -INFINITY
                    continue
                k = k_pool[mine].repeat_interleave(self.group, 1)
                v = v_pool[mine].repeat_interleave(self.group, 1)
                logits = torch.einsum("hd,nhd->hn", q[row].float(), k) * settings["sm_scale"]
                cap = settings["logits_soft_cap"]
                if cap:
                    logits = cap * torch.tanh(logits / cap)
                lse[row] = torch.logsumexp(logits, -1) / math.log(2)
                out[row] = torch.einsum("hn,nhd->hd", torch.softmax(logits, -1), v).to(q.dtype)


class DecodeWrapper(Wrapper):
    """`BatchDecodeWithPagedKVCacheWrapper` on CUDA cores: a row of each request."""

    def __init__(self, workspace: Tensor, layout: str) -> None:
        super().__init__(workspace, layout, backend="fa2")

    def plan(self, indptr: Tensor, *lists: Any, **settings: Any) -> None:
        rows = torch.arange(len(indptr), dtype=torch.int32)
        dim = lists[-2]
        super().plan(rows, indptr, *lists, head_dim_vo=dim, causal=False, **settings)


def merge_state_in_place(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """One thread block per row, a thread per 8 values (or per 1/32 of a head, if more)."""
    heads, dim = out.shape[1:]
    assert all(x.is_contiguous() for x in (out, lse, other, other_lse))
    if heads * (dim // max(8, dim // 32)) > 1024:
        raise RuntimeError("MergeStateInPlace kernel launch failed: invalid argument")
    top = torch.maximum(lse, other_lse)
    mine, theirs = torch.exp2(lse - top), torch.exp2(other_lse - top)
    total = mine + theirs
    merged = out.float() * (mine / total)[..., None] + other.float() * (theirs / total)[..., None]
    out.copy_(merged)
    lse.copy_(torch.log2(total) + top)


def package(version: str = "0.6.18") -> types.ModuleType:
    """A module to put under the name ``flashinfer``."""
    module: Any = types.ModuleType("flashinfer")
    module.__version__ = version
    module.BatchPrefillWithPagedKVCacheWrapper = Wrapper
    module.BatchDecodeWithPagedKVCacheWrapper = DecodeWrapper
    module.merge_state_in_place = merge_state_in_place
    return module


class Events:
    """`torch.cuda.Event` that only notes its calls.

    Attributes:
        log: ("record" or "wait", event), and whatever else a test notes, in order.
    """

    def __init__(self) -> None:
        self.log: list[tuple[str, Any]] = []

    def event(self) -> Any:
        log = self.log

        class Event:
            def record(self, stream: Any) -> None:
                log.append(("record", self))

            def synchronize(self) -> None:
                log.append(("wait", self))

        return Event()


def install(patch: pytest.MonkeyPatch) -> tuple[types.ModuleType, Events]:
    """The stand-in as the package, with CUDA's events and the device's size; no CUDA."""
    events, module = Events(), package()
    patch.setattr(torch.cuda, "Event", events.event)
    patch.setattr(torch.cuda, "current_stream", lambda device: None)
    patch.setattr(flashinfer_cascade, "multiprocessors", lambda device: MULTIPROCESSORS)
    patch.setitem(sys.modules, "flashinfer", module)
    return module, events
