"""Ranks: the processes that hold one model together, and what they agree on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from hashlib import blake2b

import torch
import torch.distributed
from torch import Tensor

from arbor.errors import WorkerError
from arbor.model.parallel.shards import check_started
from arbor.model.plan import ForwardPlan

PATIENCE = timedelta(seconds=60)  # most time that a rank waits for another one
LOADING = timedelta(hours=1)  # likewise, while weights are read


class Ranks:
    """The processes that hold one model together; this one is `number` of `count`.

    Every rank runs the same search. What could differ by rounding or by time is rank 0's on all of
    them: the logits, and whether to stop. All else follows from these and the seed.

    Args:
        count: processes that ``torchrun`` has started.

    Raises:
        UsageError: this process is not one of so many.
    """

    def __init__(self, count: int) -> None:
        check_started(count)
        self.count = count
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group("gloo", timeout=PATIENCE)
        self.number: int = torch.distributed.get_rank()
        self._digest = blake2b(digest_size=8)
        self._forwards = 0

    def same(self, values: Tensor) -> Tensor:
        """Rank 0's values on all ranks, in place of these; of one shape and dtype everywhere."""
        values = values.contiguous()
        with self.together():
            torch.distributed.broadcast(values, src=0)
        return values

    def stops(self, stops: bool) -> bool:
        """Whether rank 0 stops; asked by all ranks between the same forwards."""
        return bool(self.same(torch.tensor([stops], dtype=torch.uint8))[0])

    def check(self, plan: ForwardPlan) -> None:
        """Compare what the ranks have computed so far, and compute next.

        Args:
            plan: of the next forward; its tokens, positions and slots count.

        Raises:
            WorkerError: they are different things.
        """
        for each in (plan.ids, plan.positions, plan.write):
            self._digest.update(each.numpy().tobytes())
        self._forwards += 1
        mine = torch.frombuffer(bytearray(self._digest.digest()), dtype=torch.uint8)
        everywhere = [torch.empty_like(mine) for _ in range(self.count)]
        with self.together():
            torch.distributed.all_gather(everywhere, mine)
        if not all(torch.equal(each, mine) for each in everywhere):
            raise WorkerError(
                "ranks-differ",
                f"the {self.count} processes that hold the model are about to compute different "
                f"things in forward {self._forwards:,}.",
                "Give all of them the same problems, settings and versions.",
                forward=self._forwards,
            )

    def loaded(self) -> None:
        """Wait until every rank has read its weights.

        Raises:
            WorkerError: one has died, or has not done so for `LOADING`.
        """
        with self.together():
            torch.distributed.monitored_barrier(timeout=LOADING)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Within, all ranks compute.

        Raises:
            WorkerError: another rank has died, or has kept this one waiting for `PATIENCE`.
        """
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, torch.distributed.DistError) or "gloo" in str(error).lower():
                raise WorkerError(
                    "rank-lost",
                    f"another of the {self.count} processes that hold the model has died, or has "
                    f"not answered for {PATIENCE.seconds} seconds.",
                    "See its own message, and start all of them again.",
                    rank=self.number,
                ) from error
            raise
