"""SearchStream: a search in progress, event by event."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self

from arbor.events import Event
from arbor.run.job import SearchJob
from arbor.run.solution import Solution

if TYPE_CHECKING:
    from arbor.run.session import Status


class SearchStream:
    """A search in progress, in its solver's background thread: iterate over its events.

        for event in (stream := solver.stream("4 5 6 10")):
            ...
        stream.solution

    The search goes on whether its events are read or not. `stop`, `close` and the end of a ``with``
    block end it; leaving the loop early does not. ``async for`` works as well, and
    ``await stream.wait()`` gives the solution without blocking the event loop; an ``async for``
    that is left early and a `wait` that is cancelled end the search. An error that ends the search
    is raised by the loop, by `wait` and by `solution`.

    Args:
        job: the search, with its events.
        refuse: called before waiting, with whether in an event loop; raises where the thread would
            wait for itself.
    """

    def __init__(self, job: SearchJob, refuse: Callable[[bool], None]) -> None:
        self._job = job
        self._refuse = refuse

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Event:
        job = self._job
        if job.events.empty():
            self._refuse(False)
        event = job.events.get()
        if event is None:
            job.events.put(None)  # a second loop ends at once
            job.wait()
            raise StopIteration
        return event

    async def __aiter__(self) -> AsyncIterator[Event]:
        job = self._job
        try:
            while True:
                if job.events.empty():
                    self._refuse(True)
                    await called(job.at_news)
                    continue
                event = job.events.get()
                if event is None:
                    job.events.put(None)
                    job.wait()
                    return
                yield event
        finally:
            self.stop()  # where the loop was left early

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    async def wait(self) -> Solution:
        """The solution, once the search has ended; cancelling stops the search.

        Raises:
            Exception: the error that ended the search.
        """
        if not self._job.ended:
            self._refuse(True)
        try:
            await called(self._job.at_end)
        except BaseException:  # cancelled, or closed with its event loop
            self.stop()
            raise
        return self._job.solution()

    def stop(self, status: Status = "interrupted") -> None:
        """End after the current forward, at once if the search has not begun; the remaining events
        still come.

        Safe from a signal handler.
        """
        if not self._job.ended:
            self._job.stop(status)

    def close(self) -> None:
        """`stop`, for ``contextlib.closing``."""
        self.stop()

    @property
    def solution(self) -> Solution:
        """The solution; waits for the end of the search.

        Raises:
            Exception: the error that ended the search.
        """
        if not self._job.ended:
            self._refuse(False)
        return self._job.solution()


async def called(notify: Callable[[Callable[[], object]], None]) -> None:
    """Wait in an event loop until a function given to `notify` is called in any thread."""
    loop = asyncio.get_running_loop()
    called = loop.create_future()

    def finish() -> None:
        if not called.done():
            called.set_result(None)

    def call() -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, and what waited in it
            loop.call_soon_threadsafe(finish)

    notify(call)
    await called
