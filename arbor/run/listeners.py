"""Listeners: what takes the events of a run, and how a listener ends the search.

    class Count(Callback):
        def on_rehydrate(self, event: Rehydrated) -> None:
            self.times += 1

Any function that takes an event is a listener too; `Callback` only spares the ``isinstance``.
"""

from __future__ import annotations

import logging
import pickle
import time
import zlib
from collections.abc import Callable, Iterable, Iterator

from arbor.errors import UsageError
from arbor.events import Ended, Event, Listener

logger = logging.getLogger(__name__)

PACK_EVENTS = 256  # packed together
LEVEL = 1  # of compression; 5 takes twice as long for a tenth less
MOST_BYTES = 32 * 2**20  # of packed events; about a million events of the built-in model


class StopSearch(Exception):
    """Raised in a listener: the search ends after its current forward, with its best so far."""


class Callback:
    """A listener that calls ``on_event``, then the event's own method if it has one.

    The methods are named after the events in the trace: ``on_boundary``, ``on_evict``,
    ``on_rehydrate``, ``on_answer``. An exception in a callback ends the run and reaches the caller,
    so that no event passes as counted when it was not.
    """

    def __call__(self, event: Event) -> None:
        """Hands an event to the methods it concerns."""
        self.on_event(event)
        method = getattr(self, f"on_{event.name}", None)
        if method is not None:
            method(event)

    def on_event(self, event: Event) -> None:
        """Takes every event."""


class Broadcast:
    """Hands the events of one run to its listeners, each event to all of them in order.

    Args:
        listeners: called with every event; an exception in one ends the run.
        stop: called where a listener raises `StopSearch`; the others still get the event.

    Raises:
        UsageError: a listener raised `StopIteration`, which would end the loops of the search.
    """

    def __init__(self, listeners: Iterable[Listener], stop: Callable[[], None]) -> None:
        self._listeners = tuple(listeners)
        self._stop = stop

    def __call__(self, event: Event) -> None:
        for listener in self._listeners:
            try:
                listener(event)
            except StopSearch:
                self._stop()
            except StopIteration as error:
                raise UsageError(
                    "listener-raised",
                    f"a listener raised StopIteration at '{event.name}', which would end a loop of the search.",
                    "Give next() a second argument there, or raise StopSearch.",
                ) from error

    def fail(self, end: Ended) -> None:
        """Hands out the end of a failed run.

        An exception in a listener is logged here: the first failure is the one to raise.
        """
        for listener in self._listeners:
            try:
                listener(end)
            except StopSearch:
                pass
            except Exception:
                logger.warning("a callback failed at the end of a failed search", exc_info=True)


class RecordedEvents:
    """Keeps every event with its second, packed, up to a limit of bytes.

    An event takes 20 to 150 bytes and a few microseconds. Beyond the limit nothing is kept: part of
    a search cannot be replayed.

    Args:
        most_bytes: of packed events.
        clock: seconds; only differences count.

    Attributes:
        events: number of events received.
        bytes: of the packed events.
        whole: whether all of them are kept.
    """

    def __init__(
        self, most_bytes: int = MOST_BYTES, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.most_bytes = most_bytes
        self.events = 0
        self.bytes = 0
        self.whole = True
        self._clock: Callable[[], float] | None = clock
        self._start: float | None = None
        self._waiting: list[tuple[float, Event]] = []
        self._packs: list[bytes] = []

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
        packs, waiting = tuple(self._packs), tuple(self._waiting)
        for pack in packs:
            yield from pickle.loads(zlib.decompress(pack))
        yield from waiting

    def _pack(self) -> None:
        pack = zlib.compress(pickle.dumps(self._waiting, pickle.HIGHEST_PROTOCOL), LEVEL)
        self._waiting = []
        self._packs.append(pack)
        self.bytes += len(pack)
        if self.bytes > self.most_bytes:
            self.whole = False
            self._packs, self.bytes = [], 0
