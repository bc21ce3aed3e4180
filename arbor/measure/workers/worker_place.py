"""WorkerPlace: how many workers are wanted, and where."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

from arbor.engine.mode_names import SIMILAR
from arbor.errors import UsageError

RUNNING = "ray"  # the cluster that runs already, as a user writes it
_NUMBER = re.compile(r"[1-9][0-9]{0,3}")
_ADDRESS = re.compile(r"ray|ray://\S+:[0-9]{1,5}|[^\s/@]+:[0-9]{1,5}")


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
        number, at, address = str(text).strip().partition("@")
        if not at and not _NUMBER.fullmatch(number):
            number, address = "", number
        if isinstance(text, bool) or (at and not number):
            raise _wrong(text)
        if number and not _NUMBER.fullmatch(number):
            raise _wrong(text)
        if (at or not number) and not _ADDRESS.fullmatch(address):
            raise _wrong(text)
        return cls(int(number) if number else None, address or None)

    def __str__(self) -> str:
        parts = (None if self.number is None else str(self.number), self.address)
        return "@".join(each for each in parts if each is not None)


def check_workers(share: str, device: str) -> None:
    """Refuse settings that mean nothing, or something else, with several engines.

    Args:
        share, device: as in `Solver`.

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
    if device.startswith("cuda:"):
        raise UsageError(
            "workers",
            f"--device {device} with --workers: Ray gives each worker a GPU of its own.",
            "Take --device cuda; CUDA_VISIBLE_DEVICES selects GPUs.",
        )


def _wrong(text: object) -> UsageError:
    return UsageError(
        "workers",
        f"--workers {text}: neither a number of workers nor a Ray cluster.",
        "As in --workers 2, --workers ray, --workers ray://head:10001, or --workers 8@ray.",
    )
