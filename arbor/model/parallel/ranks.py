"""Ranks: the processes that hold one model together, and what they add up or put together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed
from torch import Tensor
from torch._C._distributed_c10d import FileStore
from torch.distributed.distributed_c10d import _set_pg_timeout

PATIENCE = timedelta(seconds=30)  # most time that a rank waits for another one in a forward
LOADING = timedelta(hours=1)  # likewise, while weights are read


class Ranks:
    """The processes that hold one model together; this one is `number` of `count`.

    The ranks compute every forward together, the first one decides what is computed (`Followers`).
    Sums have one order, that of the ranks, so that no bit depends on the rest of the batch.

    Args:
        number: of this process; that of the first is 0.
        count: of processes.
        meeting: a file in which they find each other.
        loaded: called when this one has read its weights; returns when all have.

    Attributes:
        has_heads: each rank has some of the heads of every layer; else all of them.
        sent_bytes: by this one, in sums and parts.
    """

    def __init__(self, number: int, count: int, meeting: str, loaded: Callable[[], None]) -> None:
        self.sent_bytes = 0
        self.number, self.count, self.loaded = number, count, loaded
        self.has_heads = True
        self._is_alone = False
        torch.distributed.init_process_group(
            "gloo",
            store=FileStore(meeting, count),
            rank=number,
            world_size=count,
            timeout=LOADING,
        )

    def hurry(self) -> None:
        """From now on wait `PATIENCE` for another rank; all have loaded."""
        group = torch.distributed.group.WORLD
        assert group is not None, "it was made above"
        _set_pg_timeout(PATIENCE, group)

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
        if self.number and not self._is_alone:
            self.sent_bytes += x.nbytes
            torch.distributed.gather(x, dst=0)
            return x.new_zeros(()).expand(*x.shape[:-1], sum(sizes))
        if not self._is_alone:
            parts = [torch.empty_like(x) for _ in sizes]
            torch.distributed.gather(x, parts, dst=0)
        return torch.cat([part[..., :size] for part, size in zip(parts, sizes, strict=True)], -1)

    def mean(self, x: Tensor) -> Tensor:
        """The mean over the ranks."""
        return self.summed(x) / self.count

    def _from_all(self, x: Tensor) -> list[Tensor]:
        if self._is_alone:
            return [x] * self.count
        x = x.contiguous()
        found = [torch.empty_like(x) for _ in range(self.count)]
        self.sent_bytes += x.nbytes * (self.count - 1)
        torch.distributed.all_gather(found, x)
        return found


def _padded(x: Tensor, size: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, size - x.shape[-1])) if x.shape[-1] < size else x
