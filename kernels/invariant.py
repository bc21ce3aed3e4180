"""Element-wise functions whose result does not depend on the element's place in a tensor.

On a CPU torch computes the body of a tensor with vector instructions and its last elements one by
one, with other formulas for the functions below: in float32 the sigmoid of the last of 50 elements
is another float than that of the same number among the first 32. Rows of widths that are not a
multiple of the vector thus depend on their place in the batch, and with several threads every
thread has last elements of its own. `row_invariant` pads: every element is computed in the body.

On CUDA every element is computed alike; there the order of summation in a row's mean depends on the
number of rows: torch gives a row more threads where there are few. `row_invariant` sums in a fixed
order. Layer norm and softmax give a row a thread block or a warp by its width, and need nothing.

Products of libraries depend on the number of rows too; `in_chunks` keeps it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

# Functions of one tensor that are not rounded exactly, by their names in torch; those with an
# in-place variant have the same name and an underscore there. Sums, products, quotients, square
# roots, minima and conversions are exact to the last bit in either form.
FUNCTIONS = [
    "acos",
    "acosh",
    "asin",
    "asinh",
    "atan",
    "atanh",
    "celu",
    "cos",
    "cosh",
    "elu",
    "erf",
    "erfc",
    "erfinv",
    "exp",
    "exp2",
    "expm1",
    "gelu",
    "hardsigmoid",
    "hardswish",
    "lgamma",
    "log",
    "log10",
    "log1p",
    "log2",
    "mish",
    "pow.Tensor_Scalar",
    "rsqrt",
    "selu",
    "sigmoid",
    "silu",
    "sin",
    "sinh",
    "softplus",
    "tan",
    "tanh",
]
IN_PLACE = {"pow.Tensor_Scalar": "pow_.Scalar"}

# Elements of two of the widest vectors (512 bits) of half precision: the step of torch's loop.
LANES = 64
# Torch divides a tensor among its threads from 32768 elements on.
PIECE = 1 << 14
ALIGNMENT_BYTES = 64
CHUNK_ROWS = 16  # of a product whose bits would depend on their number
# Dispatch keys of devices that are not here: one for each kind of device that is.
KEYS = {"cpu": "AutocastIPU", "cuda": "AutocastHPU"}

Handler = Callable[..., Any]


@contextmanager
def row_invariant(device: torch.device) -> Iterator[None]:
    """Within, a model's element-wise functions and row reductions do not depend on the batch.

    Args:
        device: of the model. Other threads are not affected.

    Example:
        >>> from arbor.kernels.invariant import row_invariant
        >>> rows = torch.linspace(-3, 3, 250).view(5, 50)
        >>> with row_invariant(torch.device("cpu")):
        ...     torch.equal(rows.sigmoid()[4:], rows[4:].sigmoid())
        True
    """
    with _interception("cuda" if device.type == "cuda" else "cpu")(True):
        yield


@contextmanager
def plain(device: torch.device) -> Iterator[None]:
    """Within `row_invariant`, torch's own functions: for tensors that hold one row alone.

    Args:
        device: of the model.
    """
    with _interception("cuda" if device.type == "cuda" else "cpu")(False):
        yield


def by_padding(function: Handler, x: Tensor, *settings: Any, **named: Any) -> Tensor:
    """An element-wise function of a tensor on a CPU, every element computed in the vector body.

    Args:
        function: of `x` and the settings; gives a new tensor of the same shape.

    Example:
        >>> by_padding(torch.sigmoid, torch.zeros(2, 3))
        tensor([[0.5000, 0.5000, 0.5000],
                [0.5000, 0.5000, 0.5000]])
    """
    count = x.numel()
    if not x.is_cpu or count == 0:
        return function(x, *settings, **named)  # type: ignore[no-any-return]
    divided = count > PIECE and torch.get_num_threads() > 1
    if (
        not divided
        and count % LANES == 0
        and x.is_contiguous()
        and x.data_ptr() % ALIGNMENT_BYTES == 0
    ):
        return function(x, *settings, **named)  # type: ignore[no-any-return]
    padded = x.new_empty(-(-count // LANES) * LANES)
    padded[:count].view(x.shape).copy_(x)
    padded[count:].zero_()
    pieces = padded.split(PIECE) if divided else (padded,)
    parts = [function(piece, *settings, **named) for piece in pieces]
    whole = parts[0] if len(parts) == 1 else torch.cat(parts)
    return whole[:count].view(x.shape)


def _handlers(kind: str) -> dict[str, Handler]:
    """What replaces each operator of torch, by its name with the overload."""
    if kind == "cuda":
        return REDUCTIONS
    found: dict[str, Handler] = {}
    for name in FUNCTIONS:
        function = _operator(name)
        found[name] = functools.partial(by_padding, function)
        in_place = IN_PLACE.get(name, f"{name}_")
        if hasattr(torch.ops.aten, in_place.partition(".")[0]):
            found[in_place] = functools.partial(_into_itself, function)
    return found


def _into_itself(function: Handler, x: Tensor, *settings: Any, **named: Any) -> Tensor:
    return x.copy_(by_padding(function, x, *settings, **named))


def _operator(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


class _Dispatch(TorchDispatchMode):
    """Interception of every operator: for any torch, at 5 to 10 us an operator."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self._handlers = {_operator(name): given for name, given in _handlers(kind).items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._handlers.get(func, func)(*args, **(kwargs or {}))


@functools.cache
def _interception(kind: str) -> Callable[[bool], Any]:
    """A context in which `_handlers` replace torch's operators, or (False) do not, in this thread.

    The handlers are kernels of a dispatch key that no device uses; other operators fall through it
    at no cost. Where this torch has no such key: `_Dispatch`.
    """
    try:
        return _by_key(KEYS[kind], _handlers(kind))
    except (AttributeError, RuntimeError):
        return lambda active: _Dispatch(kind) if active else nullcontext()


def _by_key(name: str, handlers: dict[str, Handler]) -> Callable[[bool], Any]:
    """A context that adds a dispatch key, with the handlers as its kernels, to every call.

    Raises:
        AttributeError, RuntimeError: this torch does not do that.
    """
    key = getattr(torch._C.DispatchKey, name)
    include = torch._C._dispatch_tls_set_dispatch_key_included
    exclude = torch._C._dispatch_tls_set_dispatch_key_excluded
    is_included = torch._C._dispatch_tls_is_dispatch_key_included

    @contextmanager
    def active(now: bool) -> Iterator[None]:
        before = is_included(key)
        include(key, now)
        exclude(key, not now)
        try:
            yield
        finally:
            include(key, before)
            exclude(key, not before)

    def kernel(handler: Handler) -> Handler:
        def replaced(*arguments: Any, **named: Any) -> Any:
            include(key, False)
            exclude(key, True)
            try:
                return handler(*arguments, **named)
            finally:
                include(key, True)
                exclude(key, False)

        return replaced

    fallback = torch.library.Library("_", "IMPL", name)
    fallback.fallback(torch.library.fallthrough_kernel, name)
    library = torch.library.Library("aten", "IMPL", name)
    for operator, handler in handlers.items():
        library.impl(operator, kernel(handler), name)
    _LIBRARIES.extend((fallback, library))
    with active(True):  # tried once: the handlers of a later torch may not be reached
        if not is_included(key):
            raise RuntimeError(f"{name} cannot be included")
    return active


_LIBRARIES: list[Any] = []  # kernels last as long as their library


# Products that `_batched_product` holds at once.
LARGEST_PRODUCT = 1 << 26


def row_sum(x: Tensor) -> Tensor:
    """The sum over the last dimension in float32; a row's bits depend on the row alone."""
    from arbor.kernels.invariant_triton import row_sum as by_triton

    return by_triton(x)


def applies(x: Tensor) -> bool:
    """Whether torch's reduction of a tensor may depend on the number of its rows: not of one
    without any, nor of a single number."""
    sums = x.is_cuda and x.dtype in (torch.float32, torch.float16, torch.bfloat16)
    return sums and x.dim() > 0 and x.numel() > 0


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


def _mean_of_rows(rows: Tensor) -> Tensor:
    return row_sum(rows) / rows.shape[-1]


def _summed(name: str, of_rows: Callable[[Tensor], Tensor]) -> Handler:
    """A sum or mean of torch by a function of rows."""

    def replaced(
        x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
    ) -> Any:
        if not applies(x):
            return _operator(name)(x, dim, keepdim, dtype=dtype)
        return _reduced(of_rows, x, dim, keepdim).to(dtype or x.dtype)

    return replaced


def _varied(name: str, of_variance: Callable[[Tensor], Tensor]) -> Handler:
    """A variance or deviation of torch by a function of the variances of rows."""

    def replaced(
        x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False
    ) -> Any:
        if not applies(x):
            return _operator(name)(x, dim, correction=correction, keepdim=keepdim)
        lost = 1.0 if correction is None else float(correction)

        def of_rows(rows: Tensor) -> Tensor:
            centred = rows.float() - _mean_of_rows(rows).unsqueeze(-1)
            return of_variance(row_sum(centred * centred) / (rows.shape[-1] - lost))

        return _reduced(of_rows, x, dim, keepdim).to(x.dtype)

    return replaced


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
    if (
        not (applies(left) and applies(right)) or depth == 1
    ):  # one product per element has one rounding
        return torch.ops.aten.bmm(left, right)
    batch, rows, columns = left.shape[0], left.shape[1], right.shape[2]
    step = max(1, LARGEST_PRODUCT // (rows * columns * depth))
    parts = []
    for first in range(0, batch, step):
        some, others = left[first : first + step], right[first : first + step]
        products = some.float().unsqueeze(2) * others.float().transpose(1, 2).unsqueeze(1)
        parts.append(row_sum(products))
    return torch.cat(parts).to(left.dtype)


REDUCTIONS: dict[str, Handler] = {
    "sum.dim_IntList": _summed("sum.dim_IntList", row_sum),
    "mean.dim": _summed("mean.dim", _mean_of_rows),
    "var.correction": _varied("var.correction", lambda variance: variance),
    "std.correction": _varied("std.correction", torch.sqrt),
    "linalg_vector_norm": _norm,
    "bmm": _batched_product,
}


def in_chunks(rows: Tensor, product: Callable[[Tensor], Tensor]) -> Tensor:
    """A product of rows [M, in] in chunks of exactly `CHUNK_ROWS`, padded with zeros.

    A row's bits do not depend on the other rows.
    """
    count = len(rows)
    padding = -count % CHUNK_ROWS
    if padding:
        rows = torch.cat([rows, rows.new_zeros(padding, rows.shape[1])])
    parts = [product(_aligned(chunk)) for chunk in rows.contiguous().split(CHUNK_ROWS)]
    return (parts[0] if len(parts) == 1 else torch.cat(parts))[:count]


def _aligned(rows: Tensor) -> Tensor:
    """The rows, each at an address where all begin alike: libraries choose loops by it."""
    width, whole = rows.shape[1], ALIGNMENT_BYTES // rows.itemsize
    padding = -width % whole
    if not padding:
        return rows if rows.data_ptr() % ALIGNMENT_BYTES == 0 else rows.clone()
    return F.pad(rows, (0, padding))[:, :width]
