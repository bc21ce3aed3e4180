"""Weights in blocks, as GGUF files have them: matrices, linear layers and embeddings over them.

A format packs 32 or 256 weights of a row into a block of codes, scales and offsets (the layouts are
ggml's; `gguf.quants` defines what each weight is). The matrix stays in its bytes, most often those
of a mapped file. The native kernels decode it where it is multiplied (kernels/csrc/block_linear.h);
without them torch multiplies by the rows that `gguf.quants` decodes.

No weight is rounded to bfloat16, as a converted model has it: codes are multiplied exactly, and
sums of a scale's weights are scaled in float32. Only matrices in F16 and F32 are rounded, where the
CPU multiplies pairs of bfloat16 and the model is in bfloat16. As codes meet x before the scale, on
x86 numbers of x beyond 1e35 may give infinity where the scaled sum would be finite.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from arbor.kernels.invariant import in_chunks
from arbor.kernels.native import BLOCKS, NUMBERS, DecodeJob, Library, LinearJob, native_library

# Weights and bytes of a block, and ggml's number, by ggml's name of the format.
KINDS: dict[str, tuple[int, int, int]] = {
    "F32": (1, 4, 0),
    "F16": (1, 2, 1),
    "Q4_0": (32, 18, 2),
    "Q4_1": (32, 20, 3),
    "Q5_0": (32, 22, 6),
    "Q5_1": (32, 24, 7),
    "Q8_0": (32, 34, 8),
    "Q2_K": (256, 84, 10),
    "Q3_K": (256, 110, 11),
    "Q4_K": (256, 144, 12),
    "Q5_K": (256, 176, 13),
    "Q6_K": (256, 210, 14),
    "IQ4_NL": (32, 18, 20),
    "BF16": (1, 2, 30),
}
RUN = 32  # inputs are a multiple of it
MOST_SCALE = 127  # codes of Q8_0
# `Number` of native.h of the dtypes in which the kernels compute.
NUMBER_OF = {getattr(torch, name): number for name, number in NUMBERS.items()}
_PART = 4096  # rows that torch decodes at a time where there are no kernels


@dataclass(frozen=True, slots=True)
class BlockWeight:
    """A matrix in blocks.

    Attributes:
        data: uint8 [outputs, bytes of a row], rows one after the other.
        kind: a name of `KINDS`.
        inputs: weights of a row, a multiple of `RUN` and of the block.

    Raises:
        ValueError: the bytes are not those of such rows.
    """

    data: Tensor
    kind: str
    inputs: int

    def __post_init__(self) -> None:
        """Refuses what the kernels would read past its end."""
        if self.kind not in KINDS:
            raise ValueError(f"no format {self.kind}; there are {', '.join(KINDS)}")
        numbers, size, _ = KINDS[self.kind]
        if self.inputs <= 0 or self.inputs % max(numbers, RUN):
            raise ValueError(f"{self.inputs} inputs are not whole blocks of {max(numbers, RUN)}")
        row = self.inputs // numbers * size
        given = (self.data.dtype, self.data.dim(), self.data.shape[-1], self.data.is_contiguous())
        if given != (torch.uint8, 2, row, True):
            raise ValueError(f"{self.kind} of {self.inputs} inputs takes rows of {row} bytes")

    def __deepcopy__(self, memo: Any) -> BlockWeight:
        """Itself: copies of a model share what it maps."""
        return self

    @property
    def outputs(self) -> int:
        """Rows."""
        return self.data.shape[0]

    @property
    def number(self) -> int:
        """The format, as the native kernels know it."""
        return BLOCKS + KINDS[self.kind][2]

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows of the matrix, decoded.

        Args:
            ids: int64, any shape; each below `outputs`.
            dtype: floating point.

        Returns:
            [*ids.shape, inputs].

        Raises:
            IndexError: there is no such row.
        """
        flat = ids.reshape(-1).long()
        if flat.numel() and not 0 <= int(flat.min()) <= int(flat.max()) < self.outputs:
            raise IndexError(f"a row is not below {self.outputs}")
        library = native_library()
        if library is None or dtype not in NUMBER_OF:
            return decoded(self.data[flat], self.kind).to(dtype).view(*ids.shape, self.inputs)
        flat = flat.contiguous()
        out = torch.empty(len(flat), self.inputs, dtype=dtype)
        job = DecodeJob(
            self.data.data_ptr(),
            flat.data_ptr(),
            out.data_ptr(),
            self.data.shape[1],
            len(flat),
            self.inputs,
            NUMBER_OF[dtype],
            self.number,
        )
        library.decode(ctypes.addressof(job))
        return out.view(*ids.shape, self.inputs)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The whole matrix, [outputs, inputs]."""
        return self.rows(torch.arange(self.outputs), dtype)


def decoded(data: Tensor, kind: str) -> Tensor:
    """Rows of bytes as float32, by the package `gguf`.

    Args:
        data: uint8 [..., bytes of a row].
        kind: ggml's name of any format that the package decodes.
    """
    from gguf import GGMLQuantizationType, quants

    found = quants.dequantize(data.contiguous().numpy(), GGMLQuantizationType[kind])
    return torch.tensor(found)  # a copy, where torch begins tensors


def in_single_blocks(weight: Tensor) -> BlockWeight:
    """A matrix in blocks of one number each, as they are.

    Args:
        weight: [outputs, inputs], float32, bfloat16 or float16; inputs a multiple of 32.

    Example:
        >>> in_single_blocks(torch.full((1, 32), 0.1)).dense(torch.float32)[0, 0]
        tensor(0.1000)
    """
    kinds = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
    data = weight.contiguous().view(torch.uint8)
    return BlockWeight(data, kinds[weight.dtype], weight.shape[1])


def encode_q8_0(weight: Tensor) -> BlockWeight:
    """A matrix in 8 bits: codes, and for each 32 inputs a float16 scale, the largest / 127.

    Args:
        weight: [outputs, inputs], any floating-point dtype; inputs a multiple of 32.

    Raises:
        ValueError: the inputs are not whole blocks, or a weight is not finite or beyond float16's
            scales.

    Example:
        >>> encode_q8_0(torch.tensor([[0.0, 1.0, -2.0, 254.0] * 8])).dense(torch.float32)[0, :4]
        tensor([  0.,   0.,  -2., 254.])
    """
    outputs, inputs = weight.shape
    if inputs % RUN:
        raise ValueError(f"{inputs} inputs are not whole blocks of {RUN}")
    data = torch.empty(outputs, inputs // RUN, KINDS["Q8_0"][1], dtype=torch.uint8)
    for first in range(0, outputs, _PART):  # no second copy of the weight
        groups = weight[first : first + _PART].float().unflatten(1, (-1, RUN))
        scales = groups.abs().amax(-1) / MOST_SCALE
        if not bool(scales.half().isfinite().all()):
            raise ValueError("a weight is NaN, infinite or beyond what a scale of float16 holds")
        codes = (groups / scales.where(scales > 0, 1.0)[..., None]).round()
        part = data[first : first + _PART]
        part[..., :2] = scales.half()[..., None].view(torch.uint8)
        part[..., 2:] = codes.to(torch.int8).view(torch.uint8)
    return BlockWeight(data.flatten(1), "Q8_0", inputs)


def multiply(x: Tensor, weight: BlockWeight, bias: Tensor | None) -> Tensor:
    """x times a matrix in blocks, plus a bias; a row's bits do not depend on the other rows.

    Args:
        x: [rows, inputs], on the CPU.
        bias: float32 [outputs], contiguous, or None.

    Returns:
        [rows, outputs] in x's dtype.

    Raises:
        RuntimeError: x is of another width than the matrix, or on another device.
    """
    library = native_library()
    if library is None or x.dtype not in NUMBER_OF:
        return _multiply_by_torch(x, weight, bias)
    size, packed_row = (weight.inputs, weight.outputs), weight.data.shape[1]
    return native_linear(library, x, weight.data, bias, size, weight.number, packed_row)


def native_linear(
    library: Library,
    rows: Tensor,
    packed: Tensor,
    bias: Tensor | None,
    size: tuple[int, int],
    packed_number: int,
    packed_row: int = 0,
) -> Tensor:
    """A product of the native kernels.

    Args:
        library: with the kernels.
        rows: [M, inputs], float32 or bfloat16.
        packed: a weight in panels (kernels/csrc/linear.h) or in blocks.
        bias: float32 [outputs], contiguous, or None.
        size: inputs and outputs of the weight.
        packed_number: its `Number`, or `BLOCKS` and its format.
        packed_row: bytes of an output's weights, if in blocks.

    Returns:
        [M, outputs] in the dtype of the rows.

    Raises:
        RuntimeError: the rows are of another width or on another device, or of another dtype than
            a weight in panels.
    """
    inputs, outputs = size
    if rows.shape[1] != inputs or not rows.is_cpu:
        raise RuntimeError(
            f"rows of {rows.shape[1]} numbers on {rows.device}: the weight takes {inputs} on cpu"
        )
    if not packed_row and rows.dtype != packed.dtype:
        raise RuntimeError(
            f"rows of {rows.dtype}: the weight was packed as {packed.dtype}; convert the rows, or"
            " compute outside torch.autocast, which does not reach packed weights"
        )
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    out = rows.new_empty(rows.shape[0], outputs)
    job = LinearJob(
        x=rows.data_ptr(),
        packed=packed.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        out=out.data_ptr(),
        x_row=rows.stride(0),
        out_row=outputs,
        packed_row=packed_row,
        rows=rows.shape[0],
        inputs=inputs,
        outputs=outputs,
        number=NUMBER_OF[rows.dtype],
        packed_number=packed_number,
    )
    library.linear(ctypes.addressof(job), torch.get_num_threads())
    return out


def _multiply_by_torch(x: Tensor, weight: BlockWeight, bias: Tensor | None) -> Tensor:
    """In float32 or wider, some outputs at a time, in chunks of a fixed number of rows."""
    wide = torch.promote_types(x.dtype, torch.float32)

    def product(rows: Tensor) -> Tensor:
        parts = weight.data.split(_PART)
        return torch.cat(
            [F.linear(rows, decoded(each, weight.kind).to(wide)) for each in parts], dim=1
        )

    out = in_chunks(x.to(wide), product)
    return (out if bias is None else out + bias).to(x.dtype)


class BlockLinear(nn.Module):
    """An `nn.Linear` for inference over one or more matrices in blocks, their outputs in order.

    `weight` has the shape and dtype that models look at, but holds NaN and no memory; a product
    with it shows the mistake at once. Not part of the state dict.

    Args:
        weights: of equal inputs.
        bias: [outputs of all], or None.
        dtype: of the model.

    Example:
        >>> layer = BlockLinear([encode_q8_0(torch.eye(32) * 127)], None, torch.float32)
        >>> layer(torch.arange(32.0)[None])[0, :3]
        tensor([  0., 127., 254.])
    """

    def __init__(
        self, weights: Sequence[BlockWeight], bias: Tensor | None, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.weights = tuple(weights)
        self.in_features = self.weights[0].inputs
        self.out_features = sum(each.outputs for each in self.weights)
        self.dtype = dtype
        self.bias = None if bias is None else bias.detach().float().contiguous()
        nothing = torch.full((1, 1), torch.nan, dtype=dtype)
        self.weight: Tensor = nothing.expand(self.out_features, self.in_features)

    @property
    def is_plain(self) -> bool:
        """Whether its blocks are single numbers, which nothing has rounded together."""
        return all(KINDS[each.kind][0] == 1 for each in self.weights)

    @property
    def tensors(self) -> list[Tensor]:
        """What it keeps in memory, or maps."""
        bias = [] if self.bias is None else [self.bias]
        return [*(each.data for each in self.weights), *bias]

    @property
    def parts(self) -> list[tuple[BlockWeight, Tensor | None]]:
        """Each matrix, and its part of the bias."""
        biases: Sequence[Tensor | None] = [None] * len(self.weights)
        if self.bias is not None:
            biases = self.bias.split([each.outputs for each in self.weights])
        return list(zip(self.weights, biases, strict=True))

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]."""
        rows = x.reshape(-1, self.in_features)
        parts = [multiply(rows, weight, bias) for weight, bias in self.parts]
        out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return out.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """As `nn.Linear` prints it."""
        kinds = ", ".join(each.kind for each in self.weights)
        bias = self.bias is not None
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={bias},"
            f" blocks={kinds}"
        )


class BlockEmbedding(nn.Module):
    """An `nn.Embedding` for inference whose rows are decoded when they are looked up.

    Args:
        table: a row for each token.
        dtype: of the model.
        scale: what rows are multiplied by, in `dtype`, as some models do; None: nothing.
        padding_idx: as models look at it.

    Example:
        >>> table = encode_q8_0(torch.eye(32) * 127)
        >>> BlockEmbedding(table, torch.float32)(torch.tensor([1]))[0, :3]
        tensor([  0., 127.,   0.])
    """

    def __init__(
        self,
        table: BlockWeight,
        dtype: torch.dtype,
        scale: Tensor | None = None,
        padding_idx: int | None = None,
    ) -> None:
        super().__init__()
        self.table, self.dtype, self.scale = table, dtype, scale
        self.num_embeddings, self.embedding_dim = table.outputs, table.inputs
        self.padding_idx = padding_idx
        nothing = torch.full((1, 1), torch.nan, dtype=dtype)
        self.weight: Tensor = nothing.expand(table.outputs, table.inputs)

    @property
    def tensors(self) -> list[Tensor]:
        """What it keeps in memory, or maps."""
        return [self.table.data]

    def forward(self, ids: Tensor) -> Tensor:
        """int [...] -> [..., embedding_dim]."""
        found = self.table.rows(ids, self.dtype)
        return found if self.scale is None else found * self.scale.to(self.dtype)
