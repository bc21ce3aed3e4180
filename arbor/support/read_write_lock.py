"""ReadWriteLock: many readers at a time, or one writer whom the next readers wait for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class Reading:
    """One reading of what a `ReadWriteLock` guards.

    Attributes:
        thread: that reads now; a reading may go on in another one.
    """

    thread: threading.Thread


class ReadWriteLock:
    """Many threads may read at a time; one writes while nobody reads.

    No reader begins while a writer waits, unless the writer waits for it in any case: in a thread
    that reads already, or while a thread that reads waits for others (`waiting`).
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._readers: list[Reading] = []
        self._writers = 0  # those that wait, and the one that writes
        self._writing: threading.Thread | None = None  # the one that writes
        self._held_up = 0  # readers that wait for other threads
        self._when_unread: list[Callable[[], object]] = []

    @property
    def wanted(self) -> bool:
        """Whether a writer waits, or writes."""
        return self._writers > 0

    @property
    def is_due(self) -> bool:
        """Whether a writer waits for the end of what this thread reads, and for no reading around
        it."""
        once = self._threads.count(threading.current_thread()) < 2
        return self.wanted and once and not self._held_up

    @property
    def is_read(self) -> bool:
        """Whether anybody reads."""
        return bool(self._readers)

    @property
    def is_read_here(self) -> bool:
        """Whether this thread reads, so that it would wait for itself to write."""
        return threading.current_thread() in self._threads

    @property
    def is_written_here(self) -> bool:
        """Whether this thread writes, so that it would wait for itself to read or to write."""
        return self._writing is threading.current_thread()

    @property
    def _threads(self) -> list[threading.Thread]:
        return [each.thread for each in self._readers]

    @contextmanager
    def reading(self) -> Iterator[Reading]:
        """While it lasts, nobody writes."""
        own = Reading(threading.current_thread())
        with self._changed:
            self._changed.wait_for(
                lambda: not self._writers or self._held_up or own.thread in self._threads
            )
            self._readers.append(own)
        try:
            yield own
        finally:
            with self._changed:
                self._readers.remove(own)
                self._call_if_unread()
                self._changed.notify_all()

    def when_unread(self, call: Callable[[], object]) -> None:
        """Call while nobody reads: now, or at the end of the last reading, in its thread."""
        with self._changed:
            self._when_unread.append(call)
            self._call_if_unread()

    def _call_if_unread(self) -> None:
        while self._when_unread and not self._readers:
            self._when_unread.pop()()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """While it lasts, this thread waits for others; if it reads, they may begin to."""
        held_up = self.is_read_here
        with self._changed:
            self._held_up += held_up
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._held_up -= held_up

    @contextmanager
    def announced(self) -> Iterator[None]:
        """While it lasts, no other thread begins to read, unless one that reads waits for it."""
        with self._changed:
            self._writers += 1
        try:
            yield
        finally:
            with self._changed:
                self._writers -= 1
                self._changed.notify_all()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """While it lasts, nobody reads; waits until that is so."""
        with self.announced(), self._changed:
            self._changed.wait_for(lambda: not self._readers)
            self._writing = threading.current_thread()
            try:
                yield
            finally:
                self._writing = None
