"""Ranks: the processes that hold one model together, and what they add up or put together."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed
from torch import Tensor
from torch._C._distributed_c10d import FileStore, Store, TCPStore
from torch.distributed.distributed_c10d import _set_pg_timeout

from arbor.model.parallel.devices import nccl_settings
from arbor.support.environment import environment

PATIENCE = timedelta(seconds=30)  # most time that a rank waits for another one in a forward
LOADING = timedelta(hours=1)  # likewise, while weights are read
CPU = torch.device("cpu")
LOCAL = "127.0.0.1"
# torch ends no process by itself, and keeps no clock: `Watch` does
UNWATCHED = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}


class Ranks:
    """The processes that hold one model together; this one is `number` of `count`.

    The ranks compute every forward together, the first one decides what is computed (`Followers`).
    Sums have one order, that of the ranks, so that no bit depends on the rest of the batch.
    Their tensors travel by NCCL between GPUs, and by gloo between CPUs.

    Args:
        number: of this process; that of the first is 0.
        count: of processes.
        meeting: a file in which they find each other; for GPUs the port of `meeting_of_gpus`.
        loaded: called when this one has read its weights; returns when all have.
        device: of this process; all are on CPUs, or all on GPUs.

    Attributes:
        device: as given.
        has_heads: each rank has some of the heads of every layer; else all of them.
        sent_bytes: by this one, in sums and parts.
    """

    def __init__(
        self,
        number: int,
        count: int,
        meeting: str,
        loaded: Callable[[], None],
        device: torch.device = CPU,
    ) -> None:
        self.sent_bytes = 0
        self.number, self.count, self.loaded, self.device = number, count, loaded, device
        self.has_heads = True
        self._is_alone = False
        if device.type == "cuda":
            os.environ |= nccl_settings(number)
        with environment(UNWATCHED):
            torch.distributed.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                store=self._store(meeting),
                rank=number,
                world_size=count,
                timeout=LOADING,
            )

    def _store(self, meeting: str) -> Store:
        if self.device.type == "cpu":
            return FileStore(meeting, self.count)
        return TCPStore(LOCAL, int(meeting), self.count, False, LOADING)

    def meet(self) -> None:
        """Compute a sum with the other ranks, so that later ones find their way; on GPUs."""
        torch.cuda.set_device(self.device)
        self.at_first(
            self.summed(torch.ones(1, dtype=torch.float32, device=self.device)), [1] * self.count
        )
        self.finish()
        self.sent_bytes = 0

    def hurry(self) -> None:
        """From now on wait `PATIENCE` for another rank; all have loaded."""
        group = torch.distributed.group.WORLD
        assert group is not None, "it was made when this began"
        if self.device.type == "cpu":  # between GPUs `Watch` waits
            _set_pg_timeout(PATIENCE, group)

    def finish(self) -> None:
        """Wait until the device has computed what it was given."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def give_up(self) -> None:
        """Let every sum between GPUs that is waited for end, with any numbers."""
        group = torch.distributed.group.WORLD
        if group is not None:  # the others have not been left meanwhile
            with suppress(RuntimeError):
                group.abort()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Within, this rank waits for no other: it takes its own part for that of each.

        For forwards whose numbers do not matter, of which the others know nothing.
        """
        self._is_alone = True
        try:
            yield
        finally:
            self._is_alone = False

    def summed(self, x: Tensor) -> Tensor:
        """The sum over the ranks."""
        first, *others = self._from_all(x)
        for each in others:
            first = first + each
        return first

    def joined(self, x: Tensor, sizes: Sequence[int] | None = None, dim: int = -1) -> Tensor:
        """Every rank's part, next to each other.

        Args:
            x: of this rank.
            sizes: of each rank's part, in the last dimension; None: they are alike.
            dim: next to each other in it.
        """
        if sizes is None:
            return torch.cat(self._from_all(x), dim)
        parts = self._from_all(_padded(x, max(sizes)))
        return torch.cat([part[..., :size] for part, size in zip(parts, sizes, strict=True)], -1)

    def at_first(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """`joined` on the first rank; zeros on the others."""
        x = _padded(x, max(sizes)).contiguous()
        parts = [x for _ in sizes]
        alone = self._is_alone or not x.numel()
        if self.number and not alone:
            self.sent_bytes += x.nbytes
            torch.distributed.gather(x, dst=0)
            return x.new_zeros(()).expand(*x.shape[:-1], sum(sizes))
        if not alone:
            parts = [torch.empty_like(x) for _ in sizes]
            torch.distributed.gather(x, parts, dst=0)
        return torch.cat([part[..., :size] for part, size in zip(parts, sizes, strict=True)], -1)

    def mean(self, x: Tensor) -> Tensor:
        """The mean over the ranks."""
        return self.summed(x) / self.count

    def _from_all(self, x: Tensor) -> list[Tensor]:
        if self._is_alone or not x.numel():
            return [x] * self.count
        x = x.contiguous()
        self.sent_bytes += x.nbytes * (self.count - 1)
        found = [torch.empty_like(x) for _ in range(self.count)]
        torch.distributed.all_gather(found, x)
        return found


def _padded(x: Tensor, size: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, size - x.shape[-1])) if x.shape[-1] < size else x


def meeting_of_gpus(count: int) -> TCPStore:
    """Where so many ranks on GPUs find each other: a port of this machine, open while it is kept.

    torch looks there for as long as the group lasts, which a file would not.
    """
    return TCPStore(LOCAL, 0, count, True, LOADING, wait_for_workers=False)
