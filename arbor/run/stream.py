"""SearchStream: a search in a background thread, event by event; SearchJob: its other end."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TYPE_CHECKING, Self

from arbor.events import Event, ReachedLimit
from arbor.run.run import Run
from arbor.run.solution import Solution

if TYPE_CHECKING:
    from arbor.run.session import Status


class SearchJob:
    """A search for a worker to carry out, with its events and its end.

    It is taken once: by the worker, which searches, or by `stop`, after which it never begins. No
    method holds a lock while it changes anything, so that `stop` is safe in a signal handler.

    Args:
        run: the search.
        keeps_events: for a reader; else they are dropped, and only the end is kept.

    Attributes:
        events: those not read yet; None after the last.
        ended: the search is over.
        abandoned: nobody waits for its solution any more; the worker gives it up.
    """

    def __init__(self, run: Run, *, keeps_events: bool = True) -> None:
        self.run = run
        self._keeps_events = keeps_events
        self.events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self.ended = False
        self.abandoned = False
        self._right_to_begin = deque([None])  # whose `pop` succeeds once
        self._end = threading.Lock()  # held until the end
        self._end.acquire()
        self._at_news: deque[Callable[[], object]] = deque()
        self._at_end: deque[Callable[[], object]] = deque()
        self._solution: Solution | None = None
        self._error: BaseException | None = None
        self._given_up: Status | None = None  # before the search began
        self._reached: ReachedLimit | None = None  # which limit it was given up for

    # For the worker

    def take(self) -> bool:
        """Take the job; False if it is taken already."""
        try:
            self._right_to_begin.pop()
        except IndexError:
            return False
        return True

    @property
    def taken(self) -> bool:
        """Whether the job is taken."""
        return not self._right_to_begin

    def emit(self, event: Event) -> None:
        """Hand out an event of the search."""
        if not self._keeps_events:
            return
        self.events.put(event)
        _call_all(self._at_news)

    def end(self, solution: Solution | None, error: BaseException | None = None) -> None:
        """End the job, once: with the search's solution or the error that ended it; with neither
        where it was given up."""
        if solution is None and error is None and self._given_up is None:
            self._given_up = "interrupted"
        self._solution, self._error = solution, error
        self.ended = True
        self.events.put(None)
        self._end.release()
        _call_all(self._at_news)
        _call_all(self._at_end)

    # For its readers

    @property
    def given_up(self) -> bool:
        """Whether the search ended before it began."""
        return self._given_up is not None

    def stop(self, status: Status, limit: ReachedLimit | None = None) -> None:
        """End the search after its current forward; at once if it has not begun."""
        if self.take():
            self._given_up, self._reached = status, limit
            self.end(None)
        else:
            self.run.stop(status, limit)

    def abandon(self) -> None:
        """Give the search up between two steps of the engine, and its KV with it; at once if it has
        not begun. Its solution is that of a search that never began."""
        if self.take():
            self._given_up = "interrupted"
            self.end(None)
        else:
            self.abandoned = True

    def at_news(self, call: Callable[[], object]) -> None:
        """Call once, in the worker's thread, at the next event or the end; now if there is one."""
        self._at_news.append(call)
        if not self.events.empty():
            _call_all(self._at_news)

    def at_end(self, call: Callable[[], object]) -> None:
        """Call once, in the worker's thread, at the end; now if it has come."""
        self._at_end.append(call)
        if self.ended:
            _call_all(self._at_end)

    def wait(self) -> None:
        """Wait for the end.

        Raises:
            BaseException: the error that ended the search.
        """
        with self._end:
            pass
        if self._error is not None:
            raise self._error

    def solution(self) -> Solution:
        """The solution; waits for the end.

        Raises:
            BaseException: the error that ended the search.
        """
        self.wait()
        if self._given_up is not None:
            return self.run.unsearched(self._given_up, self._reached)
        assert self._solution is not None, "a search ends with a solution or an error"
        return self._solution


def _call_all(calls: deque[Callable[[], object]]) -> None:
    """Call each once, whichever thread comes first."""
    while calls:
        try:
            call = calls.popleft()
        except IndexError:  # another thread took it
            return
        call()


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
        waiting: entered while a thread waits, with whether in an event loop; raises where the
            thread would wait for itself.
    """

    def __init__(
        self, job: SearchJob, waiting: Callable[[bool], AbstractContextManager[None]]
    ) -> None:
        self._job = job
        self._waiting = waiting

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Event:
        job = self._job
        with self._waiting(False) if job.events.empty() else nullcontext():
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
                    with self._waiting(True):
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

    def __exit__(self, *error: object) -> None:
        self.close()

    async def wait(self) -> Solution:
        """The solution, once the search has ended; cancelling stops the search.

        Raises:
            Exception: the error that ended the search.
        """
        with nullcontext() if self._job.ended else self._waiting(True):
            try:
                await called(self._job.at_end)
            except BaseException:  # cancelled, or closed with its event loop
                self.stop()
                raise
        if self._job.given_up:  # the model may not be read yet, which the solution describes
            return await asyncio.to_thread(self._job.solution)
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
        with nullcontext() if self._job.ended else self._waiting(False):
            return self._job.solution()


async def called(notify: Callable[[Callable[[], object]], None]) -> None:
    """Wait in an event loop until a function given to `notify` is called in any thread."""
    loop = asyncio.get_running_loop()
    called = loop.create_future()

    def finish() -> None:
        if not called.done():
            called.set_result(None)

    def call() -> None:
        with suppress(RuntimeError):  # the loop is closed, and what waited in it
            loop.call_soon_threadsafe(finish)

    notify(call)
    await called
