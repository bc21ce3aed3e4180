"""Linear layers faster than `F.linear` on CPUs, and rows that do not depend on the batch.

Weights are packed once, for the native kernels, MKL or oneDNN. Measured, one thread, `F.linear` /
packed (above 1 = packing wins), rows 1 / 8 / 32 / 64 / 512:

    float32, Intel AVX-512, MKL
        768 -> 768     1.0  2.5  1.5  1.3  1.1
        768 -> 2048    1.1  2.3  1.5  1.3  1.2
        768 -> 32000   1.1  2.7  1.5  1.4
        256 -> 256     1.0  1.2  1.3  1.2  1.1
    float32, Intel AVX-512, oneDNN
        768 -> 768     0.7  1.4  1.2  1.1  1.0
        256 -> 256     0.3  0.4  0.6  0.9  0.9
    float32, AMD Zen 5, oneDNN
        768 -> 768     1.7  2.0  2.0
        768 -> 2048    1.9  2.4  2.3
        768 -> 32000   1.8  3.3  2.7
        256 -> 512     1.7  2.0  2.0
        256 -> 256     0.4  0.8  2.1
        256 -> 128     0.3  0.6  1.3
    bfloat16, AMD Zen 5, oneDNN
        768 -> 768     2.1  1.8  1.3
        256 -> 256     1.5  1.3  1.2
    bfloat16 without bf16 instructions: 1.0; such a CPU runs bfloat16 3-5x slower than float32

    whole 100M model (12 x 768, tied 32k head), float32, Intel, MKL:  0.95  1.9  1.5  1.3
    whole 5M model (6 x 256, tied 4k head), same:                     0.9   1.1  1.1  1.0  1.0

The native kernels (`kernels/csrc/linear.h`), Intel AVX-512 and AMX, what the rule below would take
without them / native, rows 1 / 8 / 32 / 128 / 512:

    float32, against MKL
        768 -> 768     1.2  1.4  1.2  0.9  0.9
        768 -> 2048    1.3  1.7  1.2  0.9  0.9
        768 -> 32000   1.2  1.6  1.1  0.8  0.9
        256 -> 256     1.3  1.6  1.2  0.9  0.9
    bfloat16, against oneDNN, which takes the large ones only; small ones against dense
        768 -> 768     1.7  1.5  1.6  1.2  0.9
        768 -> 2048    1.4  1.4  1.5  1.0  0.7
        768 -> 32000   1.0  1.1  1.1  0.9  1.2
        256 -> 256     3.2  2.9  2.7  1.6  0.9

On AMD with AVX-512 BF16 they are level with oneDNN and 1.2 times as fast as MKL from 128 to 2,048
rows (docs/experiments/linear_rows.csv).

They are the rule where they are built, although MKL is up to a seventh faster from 128 rows on and
oneDNN up to a third (2048 -> 768 at 512 rows): two packed copies would cost twice the memory,
decoding has fewer rows, and a row that changed libraries with the size of its batch would change
its bits. Else float32 goes to MKL on Intel and to oneDNN elsewhere, bfloat16 to oneDNN where the
CPU has instructions for it, and oneDNN (which costs 30 us a call on Intel, 10 on AMD) only takes
layers large enough. No timing at run time: what is chosen decides the last bits of
the logits and must not depend on the load of the machine. oneDNN's weights go on large pages
(`on_huge_pages`; EXPERIMENTS.md has what that is worth).
"""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from arbor.kernels.hugepages import on_huge_pages
from arbor.kernels.invariant import in_chunks
from arbor.kernels.linear.blocks import (
    NUMBER_OF,
    RUN,
    BlockEmbedding,
    BlockLinear,
    encode_q8_0,
    native_linear,
)
from arbor.kernels.linear.experts import BlockExperts
from arbor.kernels.native import Library, native_library

Packing = Literal["native", "mkl", "onednn", "dense"]
PANEL = 16  # outputs of a panel of the native kernels

# Smaller weights lose more to oneDNN's call than its layout gains.
ONEDNN_ELEMENTS = {"GenuineIntel": 1 << 19}
ONEDNN_ELEMENTS_ELSEWHERE = 1 << 16
# Packed for many rows, MKL is as fast with few; packed for few, it is slow with many.
MKL_ROWS = 512
DENSE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
CODES = (torch.int8, torch.uint8, torch.int16, torch.int32)  # of quantized weights


class PackedLinear(nn.Module):
    """An `nn.Linear` for inference whose weight lies in the layout of a matmul library.

    `weight` still has the shape, dtype and device that models look at, but holds NaN (and no
    memory) once packed: a product with it shows the mistake at once. Not part of the state dict;
    load the checkpoint first.

    Equal to ``F.linear(x, weight, bias)`` up to rounding, for x [..., in_features] of the weight's
    dtype.

    Args:
        linear: the layer to replace; its weight is not kept unless `packing` is "dense".
        packing: see `packing`.
        deterministic: a row's result does not depend on the batch: always so by the native
            kernels, in chunks of one size (`in_chunks`) by others on a CPU, by
            `arbor.kernels.invariant_triton` on CUDA.
        compute: dtype of the matmul, if not the weight's; input and output keep the weight's dtype.

    Example:
        >>> linear = nn.Linear(8, 4)
        >>> packed, x = PackedLinear(linear, "dense", deterministic=True), torch.ones(20, 8)
        >>> torch.equal(packed(x)[:3], packed(x[:3]))
        True
        >>> torch.allclose(packed(x), linear(x))
        True
    """

    def __init__(
        self,
        linear: nn.Linear,
        packing: Packing,
        deterministic: bool = False,
        compute: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.packing = packing
        self.deterministic = deterministic
        weight = linear.weight.detach()
        self.dtype = weight.dtype
        self.compute = compute or weight.dtype
        added = torch.float32 if packing == "native" else self.compute
        bias = linear.bias
        self.bias = None if bias is None else bias.detach().to(added).contiguous()
        self.weight: Tensor = weight
        self._ghost = weight
        self._packed: Tensor | None = None
        self._library = native_library() if packing == "native" else None
        if packing != "dense":
            self._packed = _pack(weight.to(self.compute), packing)
            self.weight = weight.new_full((1, 1), torch.nan).expand(weight.shape)
            self._ghost = self.weight[:1, :1].to(self.compute).expand(weight.shape)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]."""
        if self.compute != self.dtype:
            return self._forward(x.to(self.compute)).to(self.dtype)
        return self._forward(x)

    def _forward(self, x: Tensor) -> Tensor:
        if self.packing == "native":
            rows = x.reshape(-1, self.in_features)
            packed = cast(Tensor, self._packed)
            size = self.in_features, self.out_features
            out = _native(self._library, rows, packed, size, self.bias)
            return out.view(*x.shape[:-1], self.out_features)
        if self.packing == "mkl" and not self.deterministic and x.numel():
            count = x.numel() // self.in_features
            found: Tensor = torch.ops.mkl._mkl_linear(
                x, self._packed, self._ghost, self.bias, count
            )
            return found
        return self._general(x)

    def _general(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features)
        count = rows.shape[0]
        if count == 0:
            return x.new_empty(*x.shape[:-1], self.out_features)
        if not self.deterministic:
            out = self._rows(rows)
        elif x.is_cuda:
            out = _by_triton(rows, self.weight, self.bias)
        else:
            out = in_chunks(rows, self._rows)
        return out.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """As `nn.Linear` prints it."""
        bias = self.bias is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={bias}, packing={self.packing}"

    def _rows(self, rows: Tensor) -> Tensor:
        if self._packed is None:
            return F.linear(rows, self.weight, self.bias)
        return _apply(rows, self._packed, self._ghost, self.bias, self.packing)


class JointLinear:
    """Packed linear layers of one input as one product.

    Its weight holds those of the layers, which become parts of it: they compute alone as before,
    no memory is added, and an output has the same bits either way.

    Args:
        layers: as `joint_linear` accepts them.

    Example:
        >>> from arbor.kernels.linear.layers import PackedLinear, joint_linear, packing
        >>> layers = [nn.Linear(8, 16), nn.Linear(8, 32)]
        >>> kinds = {packing(each.weight, torch.float32) for each in layers}
        >>> packed, x = [PackedLinear(each, "native") for each in layers], torch.ones(3, 8)
        >>> joint = joint_linear(packed) if kinds == {"native"} else None
        >>> joint is None or torch.equal(joint(x)[:, 16:], packed[1](x))
        True
    """

    def __init__(self, layers: Sequence[PackedLinear]) -> None:
        self.layers = tuple(layers)
        self.out_features = sum(each.out_features for each in layers)
        weights = [cast(Tensor, each._packed) for each in layers]
        self._packed = _joined(weights)
        for layer, part in zip(layers, self._packed.split([len(w) for w in weights]), strict=True):
            layer._packed = part
        biases = [each.bias for each in layers if each.bias is not None]
        self._bias = torch.cat(biases) if biases else None
        self._library = layers[0]._library

    @property
    def hooked(self) -> bool:
        """Whether a layer has hooks, which a joint product does not run."""
        return any(each._forward_hooks or each._forward_pre_hooks for each in self.layers)

    def __call__(self, rows: Tensor) -> Tensor:
        """[M, in] -> [M, out of all layers], in the order of the layers."""
        size = self.layers[0].in_features, self.out_features
        return _native(self._library, rows, self._packed, size, self._bias)


def joint_linear(layers: Sequence[nn.Module]) -> JointLinear | None:
    """Layers as one product; None unless all are packed for the native kernels, alike."""
    if not all(isinstance(each, PackedLinear) and each.packing == "native" for each in layers):
        return None
    packed = cast(Sequence[PackedLinear], layers)
    kinds = {(each.in_features, each.dtype, each.compute, each.bias is None) for each in packed}
    whole = all(each.out_features % PANEL == 0 for each in packed)
    if len(kinds) > 1 or not whole or packed[0].compute != packed[0].dtype:
        return None
    return JointLinear(packed)


class DenseJoint:
    """Linear layers of one input as one product, on a device whose library packs no weights.

    Its weight holds those of the layers, which become parts of it: they compute and are trained as
    before and no memory is added. A library may round a product of another size differently.

    Args:
        layers: as `dense_joint` accepts them.

    Example:
        >>> layers = [nn.Linear(8, 16), nn.Linear(8, 32)]
        >>> joint, x = dense_joint(layers), torch.ones(3, 8)
        >>> joint is not None and torch.allclose(joint(x)[:, 16:], layers[1](x))
        True
    """

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self.layers = tuple(layers)
        self.out_features = sum(each.out_features for each in layers)
        self._weight = _made_parts([each.weight for each in layers])
        biases = [each.bias for each in layers if each.bias is not None]
        self._bias = _made_parts(biases) if biases else None
        self._places = self._parameters()

    def _parameters(self) -> list[int]:
        parts = (part for each in self.layers for part in (each.weight, each.bias))
        return [part.data_ptr() for part in parts if part is not None]

    @property
    def hooked(self) -> bool:
        """Whether a layer has hooks, which a joint product does not run, or other weights by now:
        a model that was moved or copied."""
        hooks = (each._forward_hooks or each._forward_pre_hooks for each in self.layers)
        return any(hooks) or self._parameters() != self._places

    def __call__(self, rows: Tensor) -> Tensor:
        """[M, in] -> [M, out of all layers], in the order of the layers."""
        return F.linear(rows, self._weight, self._bias)


def _made_parts(parameters: Sequence[Tensor]) -> Tensor:
    """One tensor of the numbers of parameters, next to each other; they become its parts."""
    # whatever the caller's mode: numbers made in inference mode cannot be trained
    with torch.inference_mode(False), torch.no_grad():
        whole = torch.cat([each.data for each in parameters])
        for each, part in zip(parameters, whole.split([*map(len, parameters)]), strict=True):
            each.data = part
    return whole


def dense_joint(layers: Sequence[nn.Module]) -> DenseJoint | None:
    """Layers as one product; None unless all are torch's own, alike, and with weights of their
    own."""
    if not all(type(each) is nn.Linear for each in layers):
        return None
    plain = cast(Sequence[nn.Linear], layers)
    kinds = {
        (each.in_features, each.weight.dtype, each.weight.device, each.bias is None)
        for each in plain
    }
    places = {each.weight.data_ptr() for each in plain}
    if len(kinds) > 1 or len(places) < len(plain):
        return None
    return DenseJoint(plain)


@dataclass(frozen=True, slots=True)
class Product:
    """A product of the native kernels: a matrix as they read it, and a bias.

    Attributes:
        packed: the weight in panels, or in blocks.
        bias: float32 [outputs], or None.
        inputs, outputs: numbers of a row.
        number: of the rows' dtype, as in `NUMBER_OF`.
        packed_number: likewise of the weight's; of one in blocks its own number.
        packed_row: bytes of an output's weights, if in blocks.
    """

    packed: Tensor
    bias: Tensor | None
    inputs: int
    outputs: int
    number: int
    packed_number: int
    packed_row: int = 0


def native_products(
    layers: Sequence[nn.Module | JointLinear | DenseJoint],
) -> tuple[Product, ...] | None:
    """What the native kernels multiply an input of some layers by, for their outputs in order.

    None unless every layer is one of theirs and computes in its own dtype.
    """
    found: list[Product] = []
    for layer in layers:
        if isinstance(layer, BlockLinear) and layer.dtype in NUMBER_OF:
            found += [
                Product(
                    weight.data,
                    bias,
                    weight.inputs,
                    weight.outputs,
                    NUMBER_OF[layer.dtype],
                    weight.number,
                    weight.data.shape[1],
                )
                for weight, bias in layer.parts
            ]
            continue
        if isinstance(layer, JointLinear):
            first, packed, bias = layer.layers[0], layer._packed, layer._bias
        elif isinstance(layer, PackedLinear) and layer.packing == "native":
            first, packed, bias = layer, cast(Tensor, layer._packed), layer.bias
        else:
            return None
        if first.compute != first.dtype:
            return None
        number, inputs = NUMBER_OF[first.dtype], first.in_features
        found.append(Product(packed, bias, inputs, layer.out_features, number, number))
    return tuple(found)


def _joined(weights: Sequence[Tensor]) -> Tensor:
    """Packed weights one after the other: a view where they lie so, else a copy."""
    first = weights[0]
    ends = [each.data_ptr() + each.nbytes for each in weights]
    storages = {each.untyped_storage().data_ptr() for each in weights}
    if len(storages) == 1 and ends[:-1] == [each.data_ptr() for each in weights[1:]]:
        return first.as_strided((sum(map(len, weights)),), (1,))
    joint = first.new_empty(sum(map(len, weights)))
    on_huge_pages(joint.data_ptr(), joint.nbytes, filled=False)
    return torch.cat(tuple(weights), out=joint)


def _by_triton(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    from arbor.kernels.invariant_triton import linear

    return linear(rows, weight, bias)


def weight_bytes(model: nn.Module) -> int:
    """Bytes of a model's weights: packed ones without the padding of their layout, and once those
    in blocks that several layers share.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 16, bias=False))  # float32
        >>> before = weight_bytes(model)
        >>> _ = pack_linears(model)
        >>> before, weight_bytes(model)
        (512, 512)
    """
    found = {each.data_ptr(): each.nbytes for each in model.parameters()}
    packed = 0
    for module in model.modules():
        if isinstance(module, PackedLinear):
            parts = [module.bias]
            if module.packing == "dense":
                parts.append(module.weight)
            else:
                packed += module._ghost.numel() * module.compute.itemsize
            found |= {each.data_ptr(): each.nbytes for each in parts if each is not None}
        elif isinstance(module, BlockLinear | BlockEmbedding | BlockExperts):
            found |= {each.data_ptr(): each.nbytes for each in module.tensors}
    return sum(found.values()) + packed


def pack_linears(
    model: nn.Module,
    *,
    deterministic: bool = False,
    choose: Packing | None = None,
) -> None:
    """Replaces every plain `nn.Linear` of a loaded model by a `PackedLinear`, in place.

    Dense weights are dropped one by one while packing, so the peak is one layer above the model. A
    weight that an embedding (or another layer) shares stays for it: packing it as well costs its
    size once more, and is worth it (the largest matmul of the model runs 2.7x faster at 8 rows,
    1.4x at 64). Subclasses of `nn.Linear` and quantized layers are left alone. Where the CPU has no
    bfloat16 instructions, bfloat16 weights are packed as float32 (2-4x faster, twice the weights'
    bytes) if that takes at most half of the machine's memory.

    Args:
        model: on the CPU, weights loaded; on other devices only `deterministic` has an effect.
        deterministic: results bitwise independent of the batch; every layer is replaced, packed or
            not, and those that an earlier call packed compute so too from now on (`batch_dependent`
            names the other layers).
        choose: a packing for all layers instead of the rule of `packing`; layers it cannot do stay
            dense.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        >>> pack_linears(model, deterministic=True, choose="dense")
        >>> type(model[0]).__name__
        'PackedLinear'
    """
    if deterministic:
        for module in model.modules():
            if isinstance(module, PackedLinear):
                module.deterministic = True
        _transpose(model)
    upcast = 2 * 4 * sum(p.numel() for p in model.parameters()) <= _memory_bytes()
    for _, parent, child_name in _linears(model):
        linear = getattr(parent, child_name)
        if isinstance(linear, BlockLinear):
            continue
        weight = linear.weight
        emulated = (
            weight.dtype == torch.bfloat16
            and weight.is_cpu
            and not _bfloat16_instructions()
            and _supported("native", weight, weight.dtype) == "dense"
        )
        compute = torch.float32 if emulated and upcast else weight.dtype
        kind = packing(weight, compute) if choose is None else _supported(choose, weight, compute)
        if kind == "dense":
            compute = weight.dtype
            if not deterministic:
                continue
        replacement = PackedLinear(linear, kind, deterministic, compute)
        replacement.train(linear.training)
        setattr(parent, child_name, replacement)
        del linear, weight


def encode_linears(model: nn.Module) -> tuple[str, ...]:
    """Replaces every plain `nn.Linear` of a loaded model by one in 8 bits (Q8_0), in place.

    So is a `BlockLinear` of plain numbers. Layers whose inputs are not whole blocks of `RUN` stay,
    and so do subclasses and quantized layers.

    Returns:
        Names of the layers replaced.

    Raises:
        ValueError: a weight is not finite; names the layer.

    Example:
        >>> model = nn.Sequential(nn.Linear(32, 8), nn.Linear(8, 8))
        >>> encode_linears(model), type(model[0]).__name__
        (('0',), 'BlockLinear')
    """
    _transpose(model)
    found = []
    for name, parent, child_name in _linears(model):
        linear = getattr(parent, child_name)
        if linear.in_features % RUN:
            continue
        blocks = linear.weights if isinstance(linear, BlockLinear) else ()
        weights = [each.dense(torch.float32) for each in blocks] or [linear.weight.detach()]
        try:
            coded = [encode_q8_0(each) for each in weights]
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        layer = BlockLinear(coded, linear.bias, linear.weight.dtype)
        setattr(parent, child_name, layer.train(linear.training))
        found.append(name)
    return tuple(found)


def batch_dependent(model: nn.Module) -> dict[str, str]:
    """Modules with matrices outside linear layers, such as the experts of a mixture.

    `pack_linears` cannot make their rows independent of the batch.

    Returns:
        name -> class, in the model's order; empty if deterministic linear layers make the whole
        model deterministic.

    Example:
        >>> batch_dependent(nn.Sequential(nn.Linear(8, 8), nn.Bilinear(8, 8, 4)))
        {'1': 'Bilinear'}
    """
    return {
        name: type(module).__name__
        for name, module in model.named_modules()
        if _is_quantized(module)
        or (
            not isinstance(module, nn.Linear | PackedLinear | nn.Embedding)
            and not _is_transposed(module)
            and any(weight.dim() > 1 for weight in module.parameters(recurse=False))
        )
    }


def packing(weight: Tensor, compute: torch.dtype) -> Packing:
    """How to pack a weight [out, in] on this machine for matmuls in `compute`; see the module.

    Example:
        >>> packing(torch.zeros(768, 768, dtype=torch.float64), torch.float64)
        'dense'
    """
    if _supported("native", weight, compute) == "native":
        return "native"
    large = weight.numel() >= ONEDNN_ELEMENTS.get(_vendor(), ONEDNN_ELEMENTS_ELSEWHERE)
    if compute == torch.float32:
        if _vendor() == "GenuineIntel":
            return _supported("mkl", weight, compute)
        if large:
            return _supported("onednn", weight, compute)
    if compute == torch.bfloat16 and large and _bfloat16_instructions():
        return _supported("onednn", weight, compute)
    return "dense"


def _supported(kind: Packing, weight: Tensor, compute: torch.dtype) -> Packing:
    """`kind` if it works for the weight's device and a dtype, else "dense"."""
    if kind == "native" and native_library() is None:
        return "dense"
    return kind if weight.is_cpu and _works(kind, compute) else "dense"


@functools.cache
def _works(kind: Packing, dtype: torch.dtype) -> bool:
    """Whether a packing equals `F.linear`: its private ops may change with any torch.

    The numbers are small integers, so that every order of summation gives exactly the same result.
    """
    if kind == "dense":
        return True
    if kind == "mkl" and dtype != torch.float32:
        return False
    if kind == "native" and (native_library() is None or dtype not in NUMBER_OF):
        return False
    grid = torch.arange(48 * 80) * 7919
    weight = (grid % 7 - 3).view(48, 80).to(dtype)
    bias = torch.arange(48).to(dtype)
    try:
        packed = _pack(weight, kind)
        ghost = weight.new_full((1, 1), torch.nan).expand(weight.shape)
        for rows in (1, 2, 7, 64):
            x = (grid[: rows * 80 // 2].repeat(2) % 5 - 2).view(rows, 80).to(dtype)
            for b in (None, bias):
                if not torch.equal(_apply(x, packed, ghost, b, kind), F.linear(x, weight, b)):
                    return False
    except (RuntimeError, AttributeError, NotImplementedError, TypeError):
        return False
    return True


PADDED_INPUTS = 32  # bfloat16 is padded to a multiple of so many inputs


def _native_panels(weight: Tensor) -> Tensor:
    """A weight [out, in] as kernels/csrc/linear.h reads it: flat, padded with zeros."""
    outputs, inputs = weight.shape
    panels = -(-outputs // PANEL)
    pair = 2 if weight.dtype == torch.bfloat16 else 1
    padded = -(-inputs // PADDED_INPUTS) * PADDED_INPUTS if pair == 2 else inputs
    packed = torch.empty(panels * PANEL * padded, dtype=weight.dtype)
    on_huge_pages(packed.data_ptr(), packed.nbytes, filled=False)
    packed.zero_()
    view = packed.view(panels, padded // pair, PANEL, pair)
    for panel in range(panels):  # one at a time: no second copy of the weight
        rows = weight[panel * PANEL : (panel + 1) * PANEL]
        whole = rows.new_zeros(PANEL, padded)
        whole[: len(rows), :inputs] = rows
        view[panel] = whole.view(PANEL, padded // pair, pair).transpose(0, 1)
    return packed


def _native(
    library: Library | None,
    rows: Tensor,
    packed: Tensor,
    size: tuple[int, int],
    bias: Tensor | None,
) -> Tensor:
    """[M, in] -> [M, out] by the native kernels; `size` is (in, out), `bias` float32."""
    assert library is not None, "weights were packed for the native kernels"
    return native_linear(library, rows, packed, bias, size, NUMBER_OF[packed.dtype])


def _pack(weight: Tensor, kind: Packing) -> Tensor:
    if kind == "native":
        return _native_panels(weight)
    if kind == "mkl":
        packed: Tensor = torch.ops.mkl._mkl_reorder_linear_weight(weight.contiguous(), MKL_ROWS)
    else:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        size = torch.ops.mkldnn._nbytes(packed)
        on_huge_pages(torch.ops.mkldnn.data_ptr(packed), size, filled=True)
    return packed


def _apply(
    rows: Tensor, packed: Tensor, ghost: Tensor, bias: Tensor | None, kind: Packing
) -> Tensor:
    """[M, in] -> [M, out].

    `ghost` has the weight's shape. MKL's op reads it only where the row counts differ; passing the
    batch's own count avoids that, as its packed weights serve any number of rows.
    """
    if kind == "native":
        added = None if bias is None else bias.float()
        outputs, inputs = ghost.shape
        return _native(native_library(), rows, packed, (inputs, outputs), added)
    if kind == "mkl":
        out: Tensor = torch.ops.mkl._mkl_linear(rows, packed, ghost, bias, rows.shape[0])
    else:
        out = torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")
    return out


def _linears(model: nn.Module) -> list[tuple[str, Any, str]]:
    """(name, parent, name in the parent) of every linear layer of plain numbers, once for each
    parent."""
    found = []
    for name, module in model.named_modules():
        for child_name, child in module.named_children():
            plain = isinstance(child, BlockLinear) and child.is_plain
            if plain or is_plain(child):
                found.append((f"{name}.{child_name}".lstrip("."), module, child_name))
    return found


def is_plain(module: nn.Module) -> bool:
    """Whether a module is a linear layer of dense weights with its class's own forward.

    Quantized layers are not: their weights are tensors of another class or dtype, they have scales,
    or their forward was replaced.
    """
    if type(module) is not nn.Linear or "forward" in vars(module):
        return False
    weight = getattr(module, "weight", None)
    dense = type(weight) in (nn.Parameter, Tensor) and cast(Tensor, weight).dtype in DENSE
    kept = {*dict(module.named_parameters()), *dict(module.named_buffers())}
    return dense and kept <= {"weight", "bias"}


def _is_quantized(module: nn.Module) -> bool:
    """Whether a module multiplies by quantized weights, as far as its tensors show."""
    if isinstance(module, nn.Linear):
        return not is_plain(module)
    return any(each.dim() > 1 and each.dtype in CODES for each in module.buffers(recurse=False))


def _is_transposed(module: nn.Module) -> bool:
    """Whether it is the linear layer of GPT-2, which keeps its weight as [in, out]."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def _transpose(model: nn.Module) -> None:
    """Replace the linear layers of GPT-2 by plain ones over the same weights, in place."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if _is_transposed(child):
                weight: Any = child.weight
                inputs, outputs = weight.shape
                linear = nn.Linear(inputs, outputs, device="meta", dtype=weight.dtype)
                linear.weight = nn.Parameter(weight.detach().t(), requires_grad=False)
                linear.bias = cast(nn.Parameter, child.bias)
                setattr(parent, name, linear.train(child.training))


@functools.cache
def _vendor() -> str:
    """The CPU's vendor as it calls itself, "" if unknown."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("vendor_id"):
                return line.partition(":")[2].strip()
    return "GenuineIntel" if "GenuineIntel" in platform.processor() else ""


def _memory_bytes() -> int:
    """The machine's memory; 0 if unknown."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 0


@functools.cache
def _bfloat16_instructions() -> bool:
    """Whether the CPU multiplies bfloat16 natively (AVX-512 BF16 or AMX), without emulation."""
    checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, check, lambda: False)() for check in checks)
