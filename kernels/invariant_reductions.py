"""Row reductions on CUDA in a fixed order, for `row_invariant`.

Torch's CUDA sums give a row more threads where there are few rows, so the bits of a norm depend on
their number. Its layer norm and softmax give every row one thread block, or one warp, selected by
the width alone, and need no replacement.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

# Products that `_batched_product` holds at once.
LARGEST_PRODUCT = 1 << 26


def row_sum(x: Tensor) -> Tensor:
    """The sum over the last dimension in float32; a row's bits depend on the row alone."""
    from arbor.kernels.invariant_triton import row_sum as by_triton

    return by_triton(x)


def applies(x: Tensor) -> bool:
    """Whether torch's reduction of a tensor may depend on the number of its rows."""
    return x.is_cuda and x.dtype in (torch.float32, torch.float16, torch.bfloat16)


def _reduced(
    function: Callable[[Tensor], Tensor], x: Tensor, dim: int | Sequence[int] | None, keepdim: bool
) -> Tensor:
    """A function of rows over several dimensions at once, float32."""
    wanted = range(x.dim()) if dim is None or dim == [] else [dim] if isinstance(dim, int) else dim
    places = sorted(each % x.dim() for each in wanted)
    others = [each for each in range(x.dim()) if each not in places]
    rows = x.permute(*others, *places).reshape(*(x.shape[each] for each in others), -1)
    found = function(rows)
    for each in places if keepdim else ():
        found = found.unsqueeze(each)
    return found


def _sum(
    x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    if not applies(x):
        return torch.ops.aten.sum.dim_IntList(x, dim, keepdim, dtype=dtype)
    return _reduced(row_sum, x, dim, keepdim).to(dtype or x.dtype)


def _mean(
    x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    if not applies(x):
        return torch.ops.aten.mean.dim(x, dim, keepdim, dtype=dtype)
    return _reduced(_mean_of_rows, x, dim, keepdim).to(dtype or x.dtype)


def _mean_of_rows(rows: Tensor) -> Tensor:
    return row_sum(rows) / rows.shape[-1]


def _squares(correction: float, rows: Tensor) -> Tensor:
    centred = rows.float() - _mean_of_rows(rows).unsqueeze(-1)
    return row_sum(centred * centred) / (rows.shape[-1] - correction)


def _variance(
    x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False
) -> Tensor:
    if not applies(x):
        return torch.ops.aten.var.correction(x, dim, correction=correction, keepdim=keepdim)
    free = 1.0 if correction is None else float(correction)
    return _reduced(lambda rows: _squares(free, rows), x, dim, keepdim).to(x.dtype)


def _deviation(
    x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False
) -> Tensor:
    if not applies(x):
        return torch.ops.aten.std.correction(x, dim, correction=correction, keepdim=keepdim)
    free = 1.0 if correction is None else float(correction)
    return _reduced(lambda rows: _squares(free, rows).sqrt(), x, dim, keepdim).to(x.dtype)


def _norm(
    x: Tensor,
    order: float = 2,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    if not applies(x) or order != 2:
        return torch.ops.aten.linalg_vector_norm(x, order, dim, keepdim, dtype=dtype)

    def length(rows: Tensor) -> Tensor:
        return row_sum(rows.float() ** 2).sqrt()

    return _reduced(length, x, dim, keepdim).to(dtype or x.dtype)


def _batched_product(left: Tensor, right: Tensor) -> Tensor:
    """``bmm`` as row sums of products: small ones only, such as mixtures of residual streams."""
    depth = left.shape[-1]
    if not applies(left) or depth == 1:  # one product per element has one rounding
        return torch.ops.aten.bmm(left, right)
    batch, rows, columns = left.shape[0], left.shape[1], right.shape[2]
    step = max(1, LARGEST_PRODUCT // (rows * columns * depth))
    parts = []
    for first in range(0, batch, step):
        some, others = left[first : first + step], right[first : first + step]
        products = some.float().unsqueeze(2) * others.float().transpose(1, 2).unsqueeze(1)
        parts.append(row_sum(products))
    return torch.cat(parts).to(left.dtype)


REDUCTIONS: dict[str, Callable[..., Any]] = {
    "sum.dim_IntList": _sum,
    "mean.dim": _mean,
    "var.correction": _variance,
    "std.correction": _deviation,
    "linalg_vector_norm": _norm,
    "bmm": _batched_product,
}
