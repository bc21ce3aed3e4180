"""Searches over one engine: one to its end, or many at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from arbor.engine.engine import Engine

Result = TypeVar("Result")


class Awaited(Protocol):
    """An operation of the engine, or a condition on several of them."""

    @property
    def done(self) -> bool:
        """Whether the search that waits for it may go on."""
        ...


# a search that yields whatever it waits for, and returns its result
Steps = Generator[Awaited, None, Result]


def completed(engine: Engine, steps: Steps[Result]) -> Result:
    """The result of one search, run to its end."""
    try:
        awaited = next(steps)
        while True:
            try:
                while not awaited.done:
                    engine.step()
            except BaseException as error:
                awaited = steps.throw(error)
            else:
                awaited = next(steps)
    except StopIteration as end:
        result: Result = end.value
        return result
    finally:  # an interruption between two resumptions reaches nothing of it
        steps.close()


def each_within(
    within: Callable[[], AbstractContextManager[None]],
    results: Generator[Result, None, None],
) -> Generator[Result, None, None]:
    """Results, each of which is found within a context of its own, as is the end.

    Nothing of the context is left while a result is handed out, and the next may be asked for in
    another thread.
    """
    try:
        while True:
            with within():
                try:
                    found = next(results)
                except StopIteration:
                    return
            yield found
    finally:
        with within():
            results.close()


@dataclass(slots=True)
class OneSearch(Generic[Result]):
    """One of many searches.

    Attributes:
        place: its place among them, 0-based.
        steps: the search; None once it is over.
        awaited: what it waits for.
        result: what it returned.
        error: what ended it instead.
    """

    place: int
    steps: Steps[Result] | None
    awaited: Awaited | None = None
    result: Result | None = None
    error: Exception | None = None

    @property
    def done(self) -> bool:
        """Whether it is over."""
        return self.steps is None

    def go_on(self) -> None:
        """Continue until it has to wait, or to the end."""
        while self.steps is not None and (self.awaited is None or self.awaited.done):
            try:
                self.awaited = next(self.steps)
            except StopIteration as end:
                self.steps, self.result = None, end.value
            except Exception as error:
                self.steps, self.error = None, error

    def close(self) -> None:
        """Give the search up."""
        if self.steps is not None:
            self.steps.close()


def as_completed(
    engine: Engine,
    searches: Iterable[Callable[[bool], Steps[Result] | None] | None],
    concurrency: int,
    first: int = 0,
) -> Iterator[OneSearch[Result]]:
    """Many searches in one engine, each when it is over.

    Every step of the engine serves all of them. An error in one leaves the others as they are. What
    is in progress when the iterator is closed is given up.

    Args:
        engine: carries out their operations.
        searches: begin a search each, read as far ahead as there are places; called with whether
            the engine is idle, one answers None to be asked again later, or, where it is idle, to
            begin neither itself nor any after it. None stands for none that is ready yet: the next
            is asked for after a step of the engine.
        concurrency: searches in progress at a time.
        first: place of the first search.
    """
    waiting: deque[tuple[int, Callable[[bool], Steps[Result] | None]]] = deque()
    source = iter(searches)
    read = first
    running: list[OneSearch[Result]] = []
    more = True
    try:
        while True:
            while more and len(running) + len(waiting) < concurrency:
                try:
                    found = next(source)
                except StopIteration:
                    more = False
                    break
                if found is None:
                    break
                waiting.append((read, found))
                read += 1
            while waiting:  # in their order: none overtakes one that does not fit yet
                place, begin = waiting[0]
                try:
                    steps = begin(not running)
                except Exception as error:
                    waiting.popleft()
                    yield OneSearch(place, None, error=error)
                    continue
                if steps is None:
                    if not running:
                        return
                    break
                waiting.popleft()
                running.append(OneSearch(place, steps))
                running[-1].go_on()
            if not running:
                if not more:
                    return
                continue
            over = []
            for search in running:
                search.go_on()
                if search.done:
                    over.append(search)
            running = [search for search in running if not search.done]
            yield from over
            if running and not over:
                engine.step()
    finally:
        for search in running:
            search.close()


def in_order(results: Iterable[tuple[int, Result]]) -> Iterator[tuple[int, Result]]:
    """(place, result) of each job in the order of the places: 0, 1, 2 and so on."""
    early: dict[int, Result] = {}
    turn = 0
    for place, result in results:
        early[place] = result
        while turn in early:
            yield turn, early.pop(turn)
            turn += 1
