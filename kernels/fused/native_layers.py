"""A decoder's layers as one call of the native kernels: the jobs of all of them, in their order."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from arbor.kernels.attention.base import AttentionShape
from arbor.kernels.attention.native_cascade import NativePlan
from arbor.kernels.fused.parts import ACTIVATIONS, Activation, NormForm
from arbor.kernels.fused.rotary import RotaryForm
from arbor.kernels.linear.layers import Product
from arbor.kernels.native import (
    CALLS,
    AddJob,
    AttentionJob,
    Call,
    GatedJob,
    HeadNormJob,
    Library,
    LinearJob,
    NormJob,
    RotaryJob,
)

MOST_ROWS = 128  # of a call: with more, a layer's own calls cost little next to its products


Products = Sequence[Product]  # of one input, their outputs side by side


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMS norm: its weight [width], the number under the root, and its form."""

    weight: Tensor
    eps: float
    form: NormForm


@dataclass(frozen=True, slots=True)
class LayerParts:
    """A decoder layer: attention and a gated part, each added to what it was given.

    Attributes:
        shape: of the attention; heads of q, k and v are equally wide.
        projections: of q, k and v.
        head_norms: of queries and of keys, before position embedding; None without.
        whole: whether these norm all heads of a row together, else each head.
        rotary: position embedding; None without.
        output: of the attention.
        gate_up: of the gate and of what it is multiplied with.
        activation: of the gate.
        down: of the gated part.
        before: norms of the inputs of the attention and of the gated part; None without.
        after: norms of their results, before these are added; None without.
        factor: of the results, once they are normed.
    """

    shape: AttentionShape
    projections: Products
    head_norms: tuple[Norm, Norm] | None
    whole: bool
    rotary: RotaryForm | None
    output: Products
    gate_up: Products
    activation: Activation
    down: Products
    before: tuple[Norm | None, Norm | None]
    after: tuple[Norm | None, Norm | None]
    factor: float = 1.0


class NativeLayers:
    """All layers of a decoder for up to `MOST_ROWS` rows.

    The bits are those of the same kernels called one by one. The buffers between the jobs are made
    once, for `MOST_ROWS` rows; not for several threads at a time.

    Args:
        library: with the kernels.
        layers: of the decoder, of one dtype.
        dtype: float32 or bfloat16.

    Attributes:
        shapes: of the layers' attention.
    """

    def __init__(self, library: Library, layers: Sequence[LayerParts], dtype: torch.dtype) -> None:
        self._library = library
        self._layers = tuple(layers)
        self._number = layers[0].projections[0].number
        self.shapes = [each.shape for each in layers]
        self._linears: list[LinearJob] = []
        self._norms: list[NormJob] = []
        self._head_norms: list[HeadNormJob] = []
        self._gated: list[GatedJob] = []
        self._adds: list[AddJob] = []
        self._rotaries: list[RotaryJob] = []
        self._attentions: list[AttentionJob] = []
        self._jobs: list[Any] = []
        self._rows = 0
        self._observed: tuple[int, ...] = ()
        self._pools: tuple[int, int, int] | None = None
        self._tables: list[tuple[int, torch.dtype]] = []  # numbers of a row of each, and their kind
        self._width = layers[0].projections[0].inputs
        heads = [each.shape.num_qo_heads * each.shape.head_dim_qk for each in layers]
        sizes = {
            "hidden": self._width,
            "normed": max(self._width, *(_outputs(each.down) for each in layers)),
            "qkv": max(_outputs(each.projections) for each in layers),
            "queries": max(heads),
            "attended": max(heads),
            "result": self._width,
            "both": max(_outputs(each.gate_up) for each in layers),
            "gated": max(each.down[0].inputs for each in layers),
        }
        self._buffers = {
            name: torch.empty(MOST_ROWS * size, dtype=dtype) for name, size in sizes.items()
        }
        self._at = {name: each.data_ptr() for name, each in self._buffers.items()}
        heads_most = max(shape.num_qo_heads for shape in self.shapes)
        self._lse = torch.empty(MOST_ROWS * heads_most, dtype=torch.float32)
        self._hidden = self._buffers["hidden"].view(MOST_ROWS, self._width)
        for each in layers:
            self._add_layer(each)
        self._of_shape: dict[AttentionShape, list[AttentionJob]] = {}
        for shape, attention in zip(self.shapes, self._attentions, strict=True):
            self._of_shape.setdefault(shape, []).append(attention)
        self._calls = (Call * len(self._jobs))()
        for call, job in zip(self._calls, self._jobs, strict=True):
            call.job, call.kind = ctypes.addressof(job), CALLS.index(type(job))

    def run(
        self,
        hidden: Tensor,
        tables: Sequence[tuple[Tensor, Tensor]],
        slots: Tensor,
        pools: tuple[Sequence[Tensor], Sequence[Tensor]],
        plan_of: Callable[[AttentionShape], NativePlan],
        received: Mapping[int, Tensor] = MappingProxyType({}),
        counted: Tensor | None = None,
    ) -> Tensor:
        """What the last layer returns; K and V of all layers are in their slots.

        Args:
            hidden: [T, d], T at most `MOST_ROWS`, what the first layer is given.
            tables: cos and sin of the rows, [T, numbers] each, in the dtype of the layers or
                float32; for each layer, or one for all.
            slots: int64 [T], where K and V of a row are written.
            pools: K and V of each layer, [slots, H_kv, D], in the dtype of the layers.
            plan_of: the plan of a layer's attention, one for each shape.
            received: of layers that are observed, what their attention mass is added to,
                `NativeCascade.received`.
            counted: float32 [T], what a row counts for there; None: 1.

        Returns:
            [T, d], a new tensor.
        """
        count = len(hidden)
        if count != self._rows:
            self._set_rows(count)
        place = (pools[0][0].data_ptr(), pools[1][-1].data_ptr(), len(pools[0][0]))
        if place != self._pools:
            self._set_pools(pools)
            self._pools = place
        slots = slots.contiguous()
        at_slots = slots.data_ptr()
        dense: list[tuple[Tensor, Tensor]] = []
        places: list[tuple[int, int, int, int]] = []
        kinds: list[tuple[int, torch.dtype]] = []
        for cos, sin in tables:
            cos, sin = cos.contiguous(), sin.contiguous()
            dense.append((cos, sin))
            places.append((cos.data_ptr(), sin.data_ptr(), cos.stride(0), sin.stride(0)))
            kinds.append((cos.shape[-1], cos.dtype))
        if kinds != self._tables:
            self._set_tables(dense)
            self._tables = kinds
        several = len(dense) > 1
        for index, job in enumerate(self._rotaries):
            job.cos, job.sin, job.cos_row, job.sin_row = places[index if several else 0]
            job.slots = at_slots
        plans: list[NativePlan] = []  # which own what their jobs point to
        for shape, attentions in self._of_shape.items():
            plan = plan_of(shape)
            plans.append(plan)
            given = plan.job
            assert given is not None, "of a shape that the kernels compute"
            levels, count_of_levels = given.levels, given.level_count
            for attention in attentions:
                attention.levels, attention.level_count = levels, count_of_levels
        for layer in self._observed:
            self._attentions[layer].mass = self._attentions[layer].counted = None
        for layer, mass in received.items():
            self._attentions[layer].mass = mass.data_ptr()
            self._attentions[layer].counted = None if counted is None else counted.data_ptr()
        self._observed = tuple(received)
        state = self._hidden[:count]
        state.copy_(hidden)
        calls = len(self._jobs)
        self._library.run(ctypes.addressof(self._calls), calls, torch.get_num_threads())
        return state.clone()

    def _set_rows(self, count: int) -> None:
        for job in (*self._linears, *self._norms, *self._head_norms, *self._gated):
            job.rows = count
        for job in self._rotaries:
            job.rows = count
        for job in self._attentions:
            job.row_count = count
        for job in self._adds:
            job.count = count * self._width
        self._rows = count

    def _set_tables(self, tables: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Tell the jobs of tables like these, one for each layer or one for all."""
        for index, (each, job) in enumerate(zip(self._layers, self._rotaries, strict=True)):
            cos, _ = tables[index if len(tables) > 1 else 0]
            job.table_number = 0 if cos.dtype == torch.float32 else 1
            job.rotated = 0 if each.rotary is None else each.rotary.rotated(cos)

    def _set_pools(self, pools: tuple[Sequence[Tensor], Sequence[Tensor]]) -> None:
        jobs = zip(*pools, self._rotaries, self._attentions, strict=True)
        for k, v, rotary, attention in jobs:
            rotary.k_out, rotary.v_out = k.data_ptr(), v.data_ptr()
            rotary.k_out_slot, rotary.k_out_head, _ = k.stride()
            rotary.v_out_slot, rotary.v_out_head, _ = v.stride()
            attention.k, attention.v = k.data_ptr(), v.data_ptr()
            attention.k_slot, attention.k_head, _ = k.stride()
            attention.v_slot, attention.v_head, _ = v.stride()

    def _add_layer(self, layer: LayerParts) -> None:
        first, second = layer.before
        read = self._add_norm(first)
        self._add_linear(layer.projections, read, "qkv")
        self._add_attention(layer)
        self._add_linear(layer.output, "attended", "result")
        self._add_residual(layer.after[0], layer.factor)
        read = self._add_norm(second)
        self._add_linear(layer.gate_up, read, "both")
        width = layer.down[0].inputs
        job = GatedJob(
            gate=self._at["both"],
            up=self._place("both", width),
            out=self._at["gated"],
            gate_row=2 * width,
            up_row=2 * width,
            width=width,
            number=self._number,
            activation=ACTIVATIONS.index(layer.activation),
        )
        self._gated.append(job)
        self._jobs.append(job)
        self._add_linear(layer.down, "gated", "result")
        self._add_residual(layer.after[1], layer.factor)

    def _add_attention(self, layer: LayerParts) -> None:
        shape, row = layer.shape, _outputs(layer.projections)
        dim, queries, keys = shape.head_dim_qk, shape.num_qo_heads, shape.num_kv_heads
        if layer.head_norms is not None:
            for norm, start, heads in zip(
                layer.head_norms, (0, queries * dim), (queries, keys), strict=True
            ):
                width, count = (heads * dim, 1) if layer.whole else (dim, heads)
                place = self._place("qkv", start)
                each = self._norm_job(norm, place, place, width)
                each.rows = count
                head_norm = HeadNormJob(heads=each, row=row)
                self._head_norms.append(head_norm)
                self._jobs.append(head_norm)
        rotary = RotaryJob(
            q=self._at["qkv"],
            k=self._place("qkv", queries * dim),
            v=self._place("qkv", (queries + keys) * dim),
            q_out=self._at["queries"],
            q_row=row,
            q_head=dim,
            k_row=row,
            k_head=dim,
            v_row=row,
            v_head=dim,
            q_heads=queries,
            kv_heads=keys,
            dim_qk=dim,
            dim_vo=dim,
            number=self._number,
        )
        if layer.rotary is not None:
            rotary.interleaved = layer.rotary.interleaved
            rotary.one_angle = layer.rotary.one_angle
            rotary.rounds_products = layer.rotary.rounds_products
        attention = AttentionJob(
            kv_heads=keys,
            group=shape.group,
            dim_qk=dim,
            dim_vo=dim,
            window=shape.window or 0,
            number=self._number,
            kv_number=self._number,
            scaling=shape.scaling,
            softcap=shape.softcap or 0.0,
            q=self._at["queries"],
            q_row=queries * dim,
            q_head=dim,
            out=self._at["attended"],
            lse=self._lse.data_ptr(),
        )
        self._rotaries.append(rotary)
        self._attentions.append(attention)
        self._jobs += [rotary, attention]

    def _add_linear(self, products: Products, source: str, target: str) -> None:
        start, row = 0, _outputs(products)
        for product in products:
            job = LinearJob(
                x=self._at[source],
                packed=product.packed.data_ptr(),
                bias=None if product.bias is None else product.bias.data_ptr(),
                out=self._place(target, start),
                x_row=product.inputs,
                out_row=row,
                packed_row=product.packed_row,
                inputs=product.inputs,
                outputs=product.outputs,
                number=product.number,
                packed_number=product.packed_number,
            )
            self._linears.append(job)
            self._jobs.append(job)
            start += product.outputs

    def _add_norm(self, norm: Norm | None) -> str:
        """A norm of the state; the name of the buffer to read on from."""
        if norm is None:
            return "hidden"
        job = self._norm_job(norm, self._at["hidden"], self._at["normed"], self._width)
        self._norms.append(job)
        self._jobs.append(job)
        return "normed"

    def _add_residual(self, norm: Norm | None, factor: float) -> None:
        source = self._at["result"]
        if norm is not None:
            job = self._norm_job(norm, source, self._at["normed"], self._width)
            self._norms.append(job)
            self._jobs.append(job)
            source = self._at["normed"]
        added = AddJob(x=source, y=self._at["hidden"], number=self._number, factor=factor)
        self._adds.append(added)
        self._jobs.append(added)

    def _norm_job(self, norm: Norm, source: int, target: int, width: int) -> NormJob:
        return NormJob(
            x=source,
            weight=norm.weight.data_ptr(),
            out=target,
            x_row=width,
            width=width,
            number=self._number,
            rounds_first=norm.form.rounds_first,
            eps=norm.eps,
            offset=norm.form.offset,
        )

    def _place(self, name: str, number: int) -> int:
        """The address of a number of a buffer."""
        return self._at[name] + number * self._buffers[name].itemsize


def _outputs(products: Products) -> int:
    return sum(each.outputs for each in products)
