"""Linear layers of which each rank has some rows or columns."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from arbor.kernels.linear.blocks import KINDS, RUN, BlockLinear, BlockWeight
from arbor.model.parallel.ranks import Ranks
from arbor.model.parallel.shards import (
    COLUMNS,
    GATHERED,
    ROWS,
    SPLIT,
    WHOLE,
    Division,
    cuts,
    starred,
)

LINEAR = (COLUMNS, GATHERED, ROWS, SPLIT, WHOLE)


class Summed(nn.Module):
    """A linear layer whose inputs are divided: the ranks' products are added, then its bias.

    Args:
        part: over this rank's inputs, without a bias.
        bias: [outputs], or None.
        ranks: that have the other parts.
        inputs: where this rank's inputs begin and end in those it is given; None: it is given
            its own.
    """

    def __init__(
        self, part: nn.Module, bias: Tensor | None, ranks: Ranks, inputs: tuple[int, int] | None
    ) -> None:
        super().__init__()
        self.part, self.bias = part, bias
        self._ranks, self._inputs = ranks, inputs

    @property
    def weight(self) -> Any:
        """This rank's part, at whose dtype models look."""
        return self.part.weight

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs of this rank, or all] -> [..., outputs]."""
        if self._inputs is not None:
            begin, end = self._inputs
            x = x[..., begin:end]
        out = self._ranks.summed(self.part(x))
        return out if self.bias is None else out + self.bias


class Gathered(nn.Module):
    """A linear layer whose outputs are divided, and put together again.

    Args:
        part: this rank's outputs.
        ranks: that have the others.
        sizes: outputs of each rank.
        first: whether the first rank alone gets them; the others then give zeros.
    """

    def __init__(self, part: nn.Module, ranks: Ranks, sizes: Sequence[int], first: bool) -> None:
        super().__init__()
        self.part = part
        self._ranks, self._sizes, self._first = ranks, tuple(sizes), first

    @property
    def weight(self) -> Any:
        """This rank's part, at whose dtype models look."""
        return self.part.weight

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] -> [..., outputs of all]."""
        if self._first:
            return self._ranks.at_first(self.part(x), self._sizes)
        return self._ranks.joined(self.part(x), self._sizes)


def divide(model: nn.Module, division: Division, ranks: Ranks) -> None:
    """Replaces linear layers by this rank's part of them, in place.

    Those that transformers has read in part become plain layers of that part, and those that it
    has read whole are cut. Between two blocks of a quantised format there is no cut: the parts of
    a layer differ by a block, or its columns become dense.
    """
    styles = _styles(model, division)
    whole: dict[str, dict[str, str]] = defaultdict(dict)  # parent -> layer -> style
    for name, style in styles.items():
        linear: Any = model.get_submodule(name)
        if isinstance(getattr(linear, "weight", None), DTensor):
            model.set_submodule(name, _read_in_part(linear, style, ranks, name))
        elif style == WHOLE:
            if not isinstance(linear, BlockLinear):  # without what transformers has put around it
                model.set_submodule(name, _rows_of(linear, 0, linear.out_features))
        else:
            whole[name.rpartition(".")[0]][name] = style
    for layers in whole.values():
        _cut_together(model, layers, division, ranks)
    for module in model.modules():
        group = getattr(module, "num_key_value_groups", None)
        if division.copies > 1 and isinstance(group, int):
            module.num_key_value_groups = group // division.copies  # type: ignore[assignment]


def put_on(model: Any, device: torch.device) -> None:
    """Moves a divided model to its device, matrix by matrix.

    Linear layers in blocks become numbers, which GPUs multiply; a head that reads the rows of the
    embedding still does.
    """
    for name, module in list(model.named_modules()):
        if isinstance(module, BlockLinear):
            bias = None if module.bias is None else module.bias.to(device, module.dtype)
            parts = [each.dense(module.dtype).to(device) for each in module.weights]
            weight = parts[0] if len(parts) == 1 else torch.cat(parts)
            model.set_submodule(name, _plain(weight, bias))
        elif isinstance(module, Summed) and module.bias is not None:
            module.bias = nn.Parameter(module.bias.to(device, module.weight.dtype), False)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    head = head.part if isinstance(head, Gathered) else head
    before, rows = embedding.weight, None
    if isinstance(head, nn.Linear) and _address(head.weight) == _address(before):
        begin = (head.weight.storage_offset() - before.storage_offset()) // before.stride(0)
        rows = slice(begin, begin + len(head.weight))
    embedding.to(device)
    if rows is not None:
        head.weight = nn.Parameter(embedding.weight.data[rows], requires_grad=False)
    model.to(device)


def _address(weight: Tensor) -> int:
    return weight.untyped_storage().data_ptr()


def _styles(model: nn.Module, division: Division) -> dict[str, str]:
    """The style of each linear layer that the plan names."""
    found = {}
    for name, module in model.named_modules():
        style = division.plan.get(starred(name))
        if style in LINEAR and isinstance(module, nn.Linear | BlockLinear):
            found[name] = style
    return found


def _read_in_part(linear: Any, style: str, ranks: Ranks, name: str) -> nn.Module:
    """A layer over the part that transformers has read."""
    weight = linear.weight
    outputs, inputs = weight.shape
    bias = None if linear.bias is None else linear.bias.data
    if isinstance(bias, DTensor):
        bias = bias.to_local()
    by_row = style in (ROWS, SPLIT)
    part = _plain(weight.data.to_local(), None if by_row else bias)
    each = -(-(inputs if by_row else outputs) // ranks.count)  # as torch divides
    begin = min(each * ranks.number, inputs)
    if by_row:
        own = (begin, min(begin + each, inputs)) if style == SPLIT else None
        return Summed(part, bias, ranks, own)
    if style == COLUMNS:
        return part
    places = [min(each * rank, outputs) for rank in range(ranks.count + 1)]
    return Gathered(part, ranks, _sizes(places), first="." not in name)


def _cut_together(
    model: nn.Module, layers: dict[str, str], division: Division, ranks: Ranks
) -> None:
    """Cut the layers of one module that are whole: the inputs of one are the outputs of others."""
    parts: dict[str, Any] = {name: model.get_submodule(name) for name in layers}
    narrow = [name for name, style in layers.items() if style == ROWS]
    inner = {int(parts[name].in_features) for name in narrow}
    keys = {name for name in layers if name.rpartition(".")[2] in ("k_proj", "v_proj")}
    grain = max((_grain(parts[name]) for name in narrow), default=1)
    for name, style in layers.items():
        linear = parts[name]
        by_row = style in (ROWS, SPLIT)
        size = int(linear.in_features if by_row else linear.out_features)
        own = _grain(linear) if style == SPLIT else 1
        places = cuts(size, ranks.count, grain if size in inner and not keys else own)
        begin, end = places[ranks.number], places[ranks.number + 1]
        if name in keys and division.copies > 1:  # each has the KV head of its queries
            head, width = ranks.number // division.copies, size // division.kv_heads
            begin, end = head * width, (head + 1) * width
        if style == COLUMNS:
            changed: nn.Module = _rows_of(linear, begin, end)
        elif style == GATHERED:
            first = "." not in name
            changed = Gathered(_rows_of(linear, begin, end), ranks, _sizes(places), first)
        else:
            given = (begin, end) if style == SPLIT else None
            changed = Summed(_columns_of(linear, begin, end), linear.bias, ranks, given)
        model.set_submodule(name, changed)


def _rows_of(linear: Any, begin: int, end: int) -> nn.Module:
    """A layer of some of the outputs of another."""
    bias = None if linear.bias is None else linear.bias.data[begin:end]
    if not isinstance(linear, BlockLinear):
        return _plain(linear.weight.data[begin:end], bias)
    weights, first = [], 0
    for each in linear.weights:
        part = each.data[max(0, begin - first) : max(0, end - first)]
        if len(part):
            weights.append(BlockWeight(part, each.kind, each.inputs))
        first += each.outputs
    return BlockLinear(weights, bias, linear.dtype)


def _columns_of(linear: Any, begin: int, end: int) -> nn.Module:
    """A layer of some of the inputs of another, without its bias; dense where a cut is within a
    block."""
    if not isinstance(linear, BlockLinear):
        return _plain(linear.weight.data[:, begin:end].clone(), None)
    if begin % _grain(linear) or end % _grain(linear):
        dense = torch.cat([each.dense(linear.dtype)[:, begin:end] for each in linear.weights])
        return _plain(dense, None)
    weights = []
    for each in linear.weights:
        numbers, size, _ = KINDS[each.kind]
        data = each.data[:, begin // numbers * size : end // numbers * size].contiguous()
        weights.append(BlockWeight(data, each.kind, end - begin))
    return BlockLinear(weights, None, linear.dtype)


def _grain(linear: Any) -> int:
    """Inputs of the largest block of a layer; 1: of numbers one by one."""
    if not isinstance(linear, BlockLinear):
        return 1
    return max(max(KINDS[each.kind][0], RUN) for each in linear.weights)


def _plain(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    outputs, inputs = weight.shape
    with torch.device("meta"):
        linear = nn.Linear(inputs, outputs, bias=bias is not None)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear


def _sizes(places: Sequence[int]) -> tuple[int, ...]:
    return tuple(after - before for before, after in pairwise(places))
