"""Callbacks: a listener with a method per event, one that may fail, and a way to end the search.

    class Count(Callback):
        def on_rehydrate(self, event: Rehydrated) -> None:
            self.times += 1

Any function that takes an event is a listener too; `Callback` only spares the ``isinstance``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from arbor.events import Ended, Event, Listener

logger = logging.getLogger(__name__)


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


class SafeCallback:
    """A listener whose first failure is logged and whose failures are otherwise ignored.

    `StopSearch` still ends the search.

    Args:
        listener: what may fail.
    """

    def __init__(self, listener: Listener) -> None:
        self.listener = listener
        self.failures = 0

    def __call__(self, event: Event) -> None:
        """Hands an event on."""
        try:
            self.listener(event)
        except StopSearch:
            raise
        except Exception:
            self.failures += 1
            if self.failures == 1:
                logger.warning(
                    "a callback failed at '%s'; the search goes on", event.name, exc_info=True
                )


class Broadcast:
    """Hands the events of one run to its listeners, each event to all of them in order.

    Args:
        listeners: called with every event; an exception in one ends the run.
        stop: called where a listener raises `StopSearch`; the others still get the event.
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
