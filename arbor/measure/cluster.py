"""Cluster: where workers live, how many are wanted there, and the news that they send."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from arbor.engine.mode_names import SIMILAR
from arbor.errors import ArborError, UsageError
from arbor.measure.outcomes import Job, JobOutcome

RUNNING = "ray"  # the cluster that runs already, as a user writes it
_ADDRESS = r"ray|ray://\S+:[0-9]{1,5}|[^\s/@]+:[0-9]{1,5}"
_PLACE = re.compile(rf"(?P<number>[1-9][0-9]{{0,3}})(?:@(?P<at>{_ADDRESS}))?|(?P<only>{_ADDRESS})")


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """How many workers are wanted, and where.

    Attributes:
        number: of workers; None: one for each device of the cluster.
        address: of a Ray cluster that runs, as Ray takes it; ``ray`` is the one of this machine, or
            of ``RAY_ADDRESS``. None: processes of this machine.
    """

    number: int | None = None
    address: str | None = None

    @classmethod
    def parse(cls, text: str | int) -> Self:
        """``4``, ``ray``, ``ray://HOST:PORT``, ``HOST:PORT``, or ``4@`` before one of these.

        Raises:
            UsageError: another form.
        """
        match = _PLACE.fullmatch(str(text).strip())
        if match is None or isinstance(text, bool):
            raise UsageError(
                "workers",
                f"--workers {text}: neither a number of workers nor a Ray cluster.",
                "As in --workers 2, --workers ray, --workers ray://head:10001, or --workers 8@ray.",
            )
        number = match["number"]
        return cls(int(number) if number else None, match["at"] or match["only"])

    def __str__(self) -> str:
        parts = (None if self.number is None else str(self.number), self.address)
        return "@".join(each for each in parts if each is not None)


def check_workers(share: str, device: str, tp: int = 1) -> None:
    """Refuse settings that mean nothing, or something else, with several engines.

    Args:
        share, device, tp: as in `Solver`.

    Raises:
        UsageError: names what to use instead.
    """
    if share in SIMILAR:
        raise UsageError(
            "workers",
            f"share={share} reads prompts of earlier problems, so that a result would depend on "
            "which worker had which problem.",
            "Leave out --workers, or take --set share=exact.",
        )
    if tp > 1 and device.startswith("cuda"):
        raise UsageError(
            "workers",
            f"--device {device} with --workers and --tp {tp}: the processes of a worker hold a model on CPUs.",
            "Take --device cpu, or leave out --tp.",
        )
    if device.startswith("cuda:"):
        raise UsageError(
            "workers",
            f"--device {device} with --workers: Ray gives each worker a GPU of its own.",
            "Take --device cuda; CUDA_VISIBLE_DEVICES selects GPUs.",
        )


@dataclass(frozen=True, slots=True)
class Delivered:
    """An outcome with the bytes of its trace, which lay on the worker's machine."""

    outcome: JobOutcome
    trace: bytes | None


@dataclass(frozen=True, slots=True)
class Ready:
    """A worker has loaded its model; `where` names its process, for people."""

    worker: int
    where: str


@dataclass(frozen=True, slots=True)
class Finished:
    """A worker has finished jobs."""

    worker: int
    delivered: Sequence[Delivered]


@dataclass(frozen=True, slots=True)
class Died:
    """A worker's process has ended, or cannot be reached; `why` is one sentence."""

    worker: int
    why: str


@dataclass(frozen=True, slots=True)
class Refused:
    """A worker cannot be had for a reason that every other one would have too."""

    worker: int
    error: ArborError


@dataclass(frozen=True, slots=True)
class Broken:
    """A bug ended a worker's searches; `traceback` is the worker's."""

    worker: int
    traceback: str


News = Ready | Finished | Died | Refused | Broken


class Cluster(Protocol):
    """Where workers live."""

    def open(self) -> int:
        """Reach the cluster, once; the number of workers wanted.

        Raises:
            UsageError: it cannot be reached, or has no room for any.
        """
        ...

    def start(self) -> int:
        """Begin a worker; its number. `Ready` follows, or another news of it."""
        ...

    def give(self, worker: int, jobs: Sequence[Job], alone: bool) -> None:
        """Hand jobs to a worker; `alone` where others will follow only after them."""
        ...

    def news(self, seconds: float) -> list[News]:
        """What has happened, as soon as anything has; nothing after so many seconds."""
        ...

    def end(self, worker: int) -> None:
        """End a worker's process, and what it has in progress."""
        ...

    def lack(self) -> str | None:
        """What the cluster lacks for any worker to begin, in one sentence; None: nothing."""
        ...

    def close(self) -> None:
        """End every worker, and the cluster if `open` began it."""
        ...
