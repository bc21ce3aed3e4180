"""SearchStream: a search in progress, event by event."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING

from arbor.events import Ended, Event, Listener
from arbor.run.solution import Solution

if TYPE_CHECKING:
    from arbor.run.session import Status


class SearchStream:
    """A search in progress, in a thread of its own: iterate over its events.

        for event in (stream := solver.stream("4 5 6 10")):
            ...
        stream.solution

    ``async for`` works as well, and ``await stream.wait()`` gives the solution without blocking the
    event loop. An error that ends the search is raised by the loop, by `wait` and by `solution`.

    Args:
        search: runs the search, calls a listener with every event, and returns the solution.
        stop: ends the search after its current forward.
    """

    def __init__(
        self, search: Callable[[Listener], Solution], stop: Callable[[Status], None]
    ) -> None:
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._solution: Solution | None = None
        self._error: BaseException | None = None
        self._stop_search = stop
        self._stopped: Status | None = None
        self._running = False  # a stop must not end another search

        def listen(event: Event) -> None:
            self._running = not isinstance(event, Ended)
            if self._stopped is not None and self._running:
                stop(self._stopped)
            self._events.put(event)

        def work() -> None:
            try:
                self._solution = search(listen)
            except BaseException as error:
                self._error = error
            finally:
                self._running = False  # also where its end was not emitted
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

    async def __aiter__(self) -> AsyncIterator[Event]:
        events = iter(self)
        try:
            while (event := await asyncio.to_thread(next, events, None)) is not None:
                yield event
        finally:
            self.stop()  # where the loop was left early

    async def wait(self) -> Solution:
        """The solution, once the search has ended; cancelling stops the search.

        Raises:
            Exception: the error that ended the search.
        """
        try:
            return await asyncio.to_thread(lambda: self.solution)
        except asyncio.CancelledError:
            self.stop()
            raise

    def stop(self, status: Status = "interrupted") -> None:
        """End after the current forward; the remaining events still come.

        Safe from a signal handler.
        """
        if self._stopped is None:
            self._stopped = status
        if self._running:
            self._stop_search(status)

    @property
    def solution(self) -> Solution:
        """The solution; waits for the end of the search.

        Raises:
            Exception: the error that ended the search.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._solution is not None
        return self._solution
