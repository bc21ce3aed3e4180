"""Recording: the events of a search in memory, packed, for a solution that wrote no trace."""

from __future__ import annotations

import pickle
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from itertools import chain

from arbor.events import Event

PACK_EVENTS = 256  # packed together
LEVEL = 1  # of compression; 5 takes twice as long for a tenth less
MOST_BYTES = 32 * 2**20  # of packed events; about a million events of the built-in model


class Recording:
    """A listener that keeps every event with its second, packed, up to a limit of bytes.

    An event takes 20 to 150 bytes and a few microseconds. Beyond the limit nothing is kept: part of
    a search cannot be replayed.

    Args:
        most_bytes: of packed events.
        clock: seconds; only differences count.

    Attributes:
        events: number of events received.
        whole: whether all of them are kept.
    """

    def __init__(
        self, most_bytes: int = MOST_BYTES, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.most_bytes = most_bytes
        self.events = 0
        self.whole = True
        self._clock: Callable[[], float] | None = clock
        self._start: float | None = None
        self._waiting: list[tuple[float, Event]] = []
        self._packs: list[bytes] = []
        self._bytes = 0

    @property
    def bytes(self) -> int:
        """Bytes of the packed events."""
        return self._bytes

    def __call__(self, event: Event) -> None:
        """Keeps one event."""
        self.events += 1
        if not self.whole or self._clock is None:
            return
        now = self._clock()
        if self._start is None:
            self._start = now
        self._waiting.append((now - self._start, event))
        if len(self._waiting) >= PACK_EVENTS:
            self._pack()

    def close(self) -> None:
        """Packs the remaining events; later ones are not kept."""
        if self._waiting:
            self._pack()
        self._clock = None

    def __iter__(self) -> Iterator[tuple[float, Event]]:
        """(seconds since the first event, event) of each event so far, in order; may be read in
        another thread while more events come."""
        return chain(_unpacked(tuple(self._packs)), tuple(self._waiting))

    def _pack(self) -> None:
        pack = zlib.compress(pickle.dumps(self._waiting, pickle.HIGHEST_PROTOCOL), LEVEL)
        self._waiting = []
        self._packs.append(pack)
        self._bytes += len(pack)
        if self._bytes > self.most_bytes:
            self.whole = False
            self._packs, self._bytes = [], 0


def _unpacked(packs: Iterable[bytes]) -> Iterator[tuple[float, Event]]:
    for pack in packs:
        yield from pickle.loads(zlib.decompress(pack))
