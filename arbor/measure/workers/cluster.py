"""Cluster: where workers live, and the news that they send."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from arbor.errors import ArborError
from arbor.measure.outcomes import Job, Outcome


@dataclass(frozen=True, slots=True)
class Delivered:
    """An outcome with the bytes of its trace, which lay on the worker's machine."""

    outcome: Outcome
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
