"""SearchStream: a search in progress, event by event."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from arbor.events import Event, Listener
from arbor.solution import Solution

if TYPE_CHECKING:
    from arbor.session import Status


class SearchStream:
    """A search in progress: iterate over its events; the search runs in a thread of its own.

        for event in (stream := solver.stream("4 5 6 10")):
            ...
        stream.solution

    Args:
        search: runs it, calls a listener with every event, and returns the solution.
        stop: asks the search to end after its current forward.
    """

    def __init__(
        self, search: Callable[[Listener], Solution], stop: Callable[[Status], None]
    ) -> None:
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._solution: Solution | None = None
        self._error: BaseException | None = None
        self._stop_search = stop
        self._stopped: Status | None = None

        def listen(event: Event) -> None:
            if self._stopped is not None:
                stop(self._stopped)
            self._events.put(event)

        def work() -> None:
            try:
                self._solution = search(listen)
            except BaseException as error:
                self._error = error
            finally:
                self._events.put(None)

        self._thread = threading.Thread(target=work, name="arbor-search", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Event]:
        while (event := self._events.get()) is not None:
            yield event
        self._events.put(None)  # a second loop ends at once
        self._thread.join()
        if self._error is not None:
            raise self._error

    def stop(self, status: Status = "interrupted") -> None:
        """End after the current forward; the remaining events still come."""
        self._stopped = status
        self._stop_search(status)

    @property
    def solution(self) -> Solution:
        """The solution, once the search has ended; waits for it.

        Raises:
            whatever ended the search.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._solution is not None
        return self._solution
