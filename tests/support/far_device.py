"""A stand-in for a GPU's tensors: no mixing with tensors of the CPU, counted transfers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

# What brings values to the CPU, each time by a synchronisation.
_READS = {
    Tensor.cpu,
    Tensor.tolist,
    Tensor.item,
    Tensor.__float__,
    Tensor.__int__,
    Tensor.__bool__,
}
# What waits for a GPU because the shape of its result depends on values.
_WAITS = {Tensor.nonzero, torch.nonzero, Tensor.masked_select, torch.masked_select}
_INDEXING = {Tensor.__getitem__, Tensor.__setitem__}


class FarTensor(Tensor):
    """A tensor that only scalars and indices of the CPU may meet in an operation.

    Attributes:
        transfers: how often values, or a number of them, were brought to the CPU, of all such
            tensors.
    """

    transfers: ClassVar[int] = 0

    @classmethod
    def of(cls, tensor: Tensor) -> FarTensor:
        """The same values, far away; nothing is counted yet."""
        cls.transfers = 0
        return tensor.as_subclass(cls)

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _READS:
            FarTensor.transfers += 1
            with torch._C.DisableTorchFunctionSubclass():
                return func(args[0].as_subclass(Tensor), *args[1:], **(kwargs or {}))
        if func is Tensor.numpy:
            raise TypeError("can't convert a far tensor to numpy; use Tensor.cpu() first.")
        if func in _WAITS or (func in _INDEXING and _has_mask(args[1])):
            FarTensor.transfers += 1
        if func not in _INDEXING:
            for each in _tensors([args, kwargs or {}]):
                if not isinstance(each, FarTensor) and each.dim():
                    raise RuntimeError(
                        f"{func.__name__}: Expected all tensors to be on the same device."
                    )
        return super().__torch_function__(func, types, args, kwargs)


def _tensors(thing: Any) -> Iterator[Tensor]:
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, Mapping):
        yield from _tensors(list(thing.values()))
    elif isinstance(thing, Sequence) and not isinstance(thing, str):
        for part in thing:
            yield from _tensors(part)


def _has_mask(index: Any) -> bool:
    return any(each.dtype == torch.bool for each in _tensors([index]))
