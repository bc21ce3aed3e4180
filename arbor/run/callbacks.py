"""Callbacks: listeners with a method per event, a way to end the search, and one that may fail.

    class Count(Callback):
        def on_rehydrate(self, event: Rehydrated) -> None:
            self.times += 1

Any function that takes an event is a listener too; `Callback` only spares the ``isinstance``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from arbor.events import Ended, Event, Listener

logger = logging.getLogger(__name__)


class StopSearch(Exception):
    """Raised in a listener: the search ends after its current forward, with its best so far."""


class Callback:
    """A listener that calls ``on_event``, then ``on_<name of the event>`` where there is such a method.

    The names are those in the trace: ``on_boundary``, ``on_evict``, ``on_rehydrate``, ``on_answer``. What a callback
    raises ends the run and reaches the caller: a number that was not counted must not look counted.
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
    """A listener whose failures are logged, the first of them only, and otherwise ignored; `StopSearch` still counts.

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


def tell_failed(listeners: Iterable[Listener], end: Ended) -> None:
    """Tell every listener that the search has failed; what one raises now is logged, for the first failure is the one that
    counts."""
    for listener in listeners:
        try:
            listener(end)
        except StopSearch:
            pass
        except Exception:
            logger.warning("a callback failed at the end of a failed search", exc_info=True)
