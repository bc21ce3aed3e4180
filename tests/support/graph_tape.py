"""CUDA graphs on a CPU: the operations of a step on the very tensors it used, run again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from arbor.model.graphs import Recording

# What brings values or sizes to the host, which a capture forbids.
_WAITING = {"_local_scalar_dense", "is_nonzero", "item", "masked_select", "nonzero"}


class Tape:
    """A `Recorder`: every tensor operation of the second run is kept with its tensors.

    A replay runs the operations in their order: results go into the tensors of the recording,
    whatever Python did between them does not happen again.

    Attributes:
        recorded: steps recorded so far.
        replays: of all of them.
    """

    def __init__(self) -> None:
        self.recorded = 0
        self.replays = 0

    def record(self, step: Callable[[], None]) -> Recording:
        """See `Recorder.record`."""
        step()
        mode = _Taping()
        with mode:
            step()
        self.recorded += 1

        def replay() -> None:
            self.replays += 1
            with torch.inference_mode():
                for operation in mode.operations:
                    operation()

        return Recording(replay, device_bytes=1000)


class Broken:
    """A recorder whose replays leave something out, or do something else.

    Args:
        replay: in place of the step.
    """

    def __init__(self, replay: Callable[[Callable[[], None]], None]) -> None:
        self._replay = replay

    def record(self, step: Callable[[], None]) -> Recording:
        return Recording(lambda: self._replay(step))


def nothing(step: Callable[[], None]) -> None:
    """A replay that does nothing."""


class _Taping(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Callable[[], None]] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func.overloadpacket.__name__ in _WAITING:
            raise RuntimeError("operation not permitted when stream is capturing")
        named = dict(kwargs or {})
        output = func(*args, **named)
        places = {_place(each) for each in tree_leaves((args, named)) if isinstance(each, Tensor)}

        def again() -> None:
            for old, new in zip(
                tree_leaves(output), tree_leaves(func(*args, **named)), strict=True
            ):
                if isinstance(old, Tensor) and _place(old) not in places:
                    old.copy_(new)

        self.operations.append(again)
        return output


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def opaque(kernel: Callable[[], None]) -> None:
    """Run a kernel that is one operation for a recording; its Python runs in every replay."""
    modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    with _disable_current_modes():
        kernel()
    for mode in modes:
        if isinstance(mode, _Taping):
            mode.operations.append(kernel)
