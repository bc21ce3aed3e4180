"""Service: admission, deadlines and cancellation of the requests of a server."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from arbor.engine.text import Decode
from arbor.errors import RankLost
from arbor.events import Event
from arbor.integrations.server.metrics import ServerMetrics
from arbor.integrations.server.planned import Planned
from arbor.integrations.server.refusals import Refusal, refusal_of
from arbor.integrations.server.settings import ServerSettings
from arbor.run.choices import Choices, Delta, PlainAnswers, RunCost, SearchAnswers
from arbor.run.solution import Solution
from arbor.run.stream import SearchJob

if TYPE_CHECKING:
    from arbor.solver import Solver

logger = logging.getLogger(__name__)

HEARTBEAT_S = 10.0  # without news, after which a stream sends something
TOGETHER_S = 0.01  # between two pieces of a stream at least; each wakes the event loop
FIRST_GUESS_S = 1.0  # seconds of a request, before any has ended
SMOOTHING = 0.2  # weight of the last request in the mean of these seconds


@dataclass(frozen=True, slots=True)
class RunEnded:
    """The end of a run: its number, what it found, and what it has cost."""

    run: int
    solution: Solution
    cost: RunCost


@dataclass(frozen=True, slots=True)
class RequestNews:
    """What has happened in the runs of a request since the last news; nothing: a heartbeat.

    Attributes:
        deltas: (number of the run, what a choice of it has grown by).
        ended: the runs that have.
        events: where they are wanted.
    """

    deltas: tuple[tuple[int, Delta], ...] = ()
    ended: tuple[RunEnded, ...] = ()
    events: tuple[Event, ...] = ()


class Service:
    """Admission, deadlines and cancellation of the requests of a server.

    All methods are called in its event loop; searches run in a thread of the solver.

    Args:
        solver: loaded.
        tokens: of KV, for all requests; None: all of them share the solver's budget, a part of what
            full retention of them holds.
        settings: limits.
    """

    def __init__(self, solver: Solver, tokens: int | None, settings: ServerSettings) -> None:
        self.solver = solver
        self.settings = settings
        self.engine = solver.shared(settings.concurrency, tokens)
        engine = self.engine
        room = lambda: solver.engine.room_tokens if tokens is None else tokens  # noqa: E731
        held = lambda: solver.engine.held_tokens  # noqa: E731
        self.metrics = ServerMetrics(
            (
                ("arbor_searches_running", "Searches in progress.", lambda: engine.running),
                ("arbor_searches_waiting", "Searches that have not begun.", lambda: engine.waiting),
                ("arbor_kv_slots", "Tokens of KV that there is room for.", room),
                ("arbor_kv_slots_used", "Tokens of KV in use, kept prompts included.", held),
            )
        )
        heard = (*engine.setup.listeners, self.metrics.hear)
        engine.setup = dataclasses.replace(engine.setup, listeners=heard)
        self.source = solver.checkpoint.source.name
        self.draining = False
        self.lost: RankLost | None = None  # after which nothing can be computed
        self._planning = 0  # requests
        self.admitted = 0  # searches that have not ended
        self._seconds = FIRST_GUESS_S  # of a request, smoothed
        # plans one request at a time, next to the engine
        self._planner = ThreadPoolExecutor(1, thread_name_prefix="arbor-plan")
        tokenizer = solver.tokenizer
        self.decode: Decode = lambda tokens: str(tokenizer.decode(tokens, skip_special_tokens=True))
        self.named: Decode = lambda tokens: str(tokenizer.decode(tokens))

    def drain(self) -> None:
        """Admit nothing more."""
        self.draining = True

    def close(self) -> None:
        """End what is in progress with its best so far; nothing new is admitted."""
        self.drain()
        self.engine.stop()
        self._planner.shutdown(wait=False, cancel_futures=True)

    # One request

    async def admit(self, plan: Callable[[], Planned], arrived_s: float) -> Admitted:
        """Plan a request in the planner's thread, and let its searches join; to be closed.

        Args:
            plan: the request.
            arrived_s: when it arrived, in `time.monotonic`.

        Raises:
            Refusal: the server is full or shuts down, or the request cannot be run.
        """
        if self.draining:
            raise Refusal(503, "shutting_down", "The server is shutting down.", retry_s=5)
        self._refuse_if_full(1)
        self._planning += 1
        try:
            planned = await asyncio.get_running_loop().run_in_executor(self._planner, plan)
        except Exception as error:
            refusal = refusal_of(error)
            if refusal.status >= 500:
                logger.exception("a request could not be planned")
            raise refusal from error
        finally:
            self._planning -= 1
        self._refuse_if_full(len(planned.runs))
        self.admitted += len(planned.runs)
        return Admitted(self, planned, arrived_s)

    def _refuse_if_full(self, runs: int) -> None:
        settings = self.settings
        most = settings.concurrency + settings.queue
        if runs > most:
            raise Refusal(
                400, "limit_exceeded", f"{runs} prompts at once; the server takes {most}."
            )
        if self.admitted + self._planning + runs > most:
            wait_s = self._seconds * max(1.0, settings.queue / settings.concurrency)
            raise Refusal(
                429,
                "queue_full",
                f"{settings.concurrency} requests are in progress and {settings.queue} wait.",
                retry_s=wait_s,
            )

    def release(self, runs: int, seconds: float) -> None:
        """The searches of a request have ended.

        Args:
            runs: how many.
            seconds: from the request's arrival.
        """
        self.admitted -= runs
        self._seconds += SMOOTHING * (seconds - self._seconds)


class Admitted:
    """A request whose searches have joined.

    Args:
        service: it belongs to.
        planned: what it runs.
        arrived_s: when it arrived, in `time.monotonic`.
    """

    def __init__(self, service: Service, planned: Planned, arrived_s: float) -> None:
        self.planned = planned
        self._service = service
        self._arrived_s = arrived_s
        for run in planned.runs:
            run.since_s = arrived_s
        self._jobs = [service.engine.begin(run) for run in planned.runs]
        loop = asyncio.get_running_loop()
        left_s = max(0.0, arrived_s + planned.timeout_s - time.monotonic())
        # for those that never have their turn; the others know their deadline
        self._timers = [
            loop.call_later(left_s, job.stop, "timeout", "timeout") for job in self._jobs
        ]

    def close(self) -> None:
        """Give up what is in progress, and its KV with it."""
        for timer in self._timers:
            timer.cancel()
        for job in self._jobs:
            if not job.ended:
                job.abandon()
        self._service.release(len(self._jobs), time.monotonic() - self._arrived_s)

    async def news(
        self, *, streaming: bool = False, with_events: bool = False
    ) -> AsyncIterator[RequestNews]:
        """What happens.

        Args:
            streaming: as it happens; else all of a run when it has ended, so that the loop does not
                take the interpreter from the searches at every event.
            with_events: hand out the events as well.

        Raises:
            Refusal: the deadline has come before a search began, or a search has failed.
        """
        first = True
        answers = [self._answers_of(job) for job in self._jobs]
        going = dict(enumerate(self._jobs))
        woken, armed = asyncio.Event(), set[int]()
        loop = asyncio.get_running_loop()

        def wake(place: int) -> None:
            armed.discard(place)
            woken.set()

        def call(place: int) -> None:  # in the worker's thread
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(wake, place)

        while going:
            woken.clear()
            deltas: list[tuple[int, Delta]] = []
            ended: list[RunEnded] = []
            events: list[Event] = []
            for place, job in list(going.items()):
                while (streaming or job.ended) and not job.events.empty():
                    event = job.events.get()
                    if event is None:
                        del going[place]
                        solution = self._solution(job)
                        deltas += [(place, each) for each in answers[place].end(solution)]
                        ended.append(RunEnded(place, solution, answers[place].cost))
                        break
                    deltas += [(place, each) for each in answers[place].feed(event)]
                    if with_events:
                        events.append(event)
            if deltas or ended or events:
                if streaming and first and deltas:
                    first = False
                    seconds = time.monotonic() - self._arrived_s
                    self._service.metrics.first_seconds.observe(seconds)
                yield RequestNews(tuple(deltas), tuple(ended), tuple(events))
                if going:
                    await asyncio.sleep(TOGETHER_S)
                continue
            for place, job in going.items():
                if place not in armed:
                    armed.add(place)
                    notify = job.at_news if streaming else job.at_end
                    notify(partial(call, place))
            try:
                async with asyncio.timeout(HEARTBEAT_S):
                    await woken.wait()
            except TimeoutError:
                yield RequestNews()

    def _answers_of(self, job: SearchJob) -> Choices:
        planned = self.planned
        if planned.searched:
            return SearchAnswers(planned.choices)
        return PlainAnswers(
            self._service.decode,
            job.run.prompt,
            planned.choices // planned.copies,
            planned.stops,
            planned.with_logprobs,
            self._service.named,
            planned.copies,
        )

    def _solution(self, job: SearchJob) -> Solution:
        """The solution of a run that has ended."""
        try:
            solution = job.solution()
        except Exception as error:
            refusal = refusal_of(error)
            if isinstance(error, RankLost):
                self._service.lost = error
            elif refusal.status >= 500:
                logger.error("a search failed", exc_info=error)
            raise refusal from error
        if solution.finish_reason == "interrupted":
            raise Refusal(503, "shutting_down", "The server is shutting down.", retry_s=5)
        if solution.finish_reason == "timeout" and not solution.metrics.nodes:
            raise Refusal(
                503, "deadline", "The deadline came before the request's turn.", retry_s=5
            )
        return solution
