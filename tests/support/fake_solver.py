"""A fake solver for the tests of the command line; `install` makes imports yield it."""

from __future__ import annotations

import sys
import time
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, ClassVar

from support.fake_run import fake_run

from arbor.aggregate.base import AnswerVotes
from arbor.budget import Budget, Footprint, Plan
from arbor.cli.record_options import SolverOptions
from arbor.errors import ArborError, InputError
from arbor.events import Answered, Ended, Event, Header
from arbor.metrics import Metrics, MetricsFold
from arbor.run.request import Options
from arbor.run.solution import Candidate
from arbor.tasks.base import BlockLimits, Grade, Problem
from arbor.trace import TraceWriter

SOLVERS: list[FakeSolver] = []  # every one that was built, for a test to look at
STEP_TOKENS, DEPTH, BLOCKS, PROMPT = 8, 3, 60, 20


@dataclass
class FakeSolution:
    answer: str | None
    finish_reason: str
    metrics: Metrics
    correct: bool | None = None
    trace_path: str | None = None
    score: float = 0.75
    guessed: bool = False
    grade: Grade | None = None
    limit: str | None = None
    config: dict[str, Any] = field(default_factory=dict)

    candidates: tuple[Candidate, ...] = ()

    votes: ClassVar[tuple[AnswerVotes, ...]] = ()

    def __str__(self) -> str:
        return self.answer or ""

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema": "arbor.solution/1",
            "answer": self.answer,
            "finish_reason": self.finish_reason,
            "correct": self.correct,
            "guessed": self.guessed,
            "metrics": self.metrics.to_dict(),
            "config": self.config,
            "trace_path": self.trace_path,
        }


class FakeStream:
    """The events of a fake run.

    Words of the problem choose its course: ``endless`` runs until it is stopped, ``none`` ends
    without an answer. A `Problem` is solved if its key is the answer, never with ``unsolvable``.
    """

    def __init__(
        self,
        solver: FakeSolver,
        problem: str | Problem,
        trace: TraceWriter | None,
        seed: int | None = None,
    ) -> None:
        self._solver, self._problem, self._trace = solver, problem, trace
        self._seed = seed
        self._stopped: str | None = None
        self._solution: FakeSolution | None = None
        self.waits = True  # for its own end; else it gives None while it is endless

    def stop(self, status: str = "interrupted") -> None:
        self._stopped = status

    @property
    def solution(self) -> FakeSolution:
        assert self._solution is not None
        return self._solution

    def __iter__(self) -> Iterator[Event]:
        return (event for event in self.steps() if event is not None)

    def steps(self) -> Iterator[Event | None]:
        """The events, and None where there is none yet."""
        fold = MetricsFold()
        writer = self._trace
        answer: str | None = "(10 - 4) * 5 - 6"
        for event in self._events():
            if event is None:
                yield None
                continue
            if isinstance(event, Answered) and event.text is None:
                answer = None
            for listener in (fold, *([writer] if writer else []), *self._solver.listeners):
                listener(event)
            yield event
        if writer:
            writer.close()
        status = self._stopped or ("exhausted" if answer is None else "solved")
        self._solution = FakeSolution(
            answer,
            status,
            fold.metrics(),
            correct=self._correct(answer),
            trace_path=str(writer.path) if writer else None,
            guessed="guess" in self._solver.words,
            grade=self._grade(answer),
            config=self._solver.config,
        )

    def _correct(self, answer: str | None) -> bool | None:
        problem = self._problem
        return problem.expected == answer if isinstance(problem, Problem) and answer else None

    def _grade(self, answer: str | None) -> Grade | None:
        """The judgement of an exact grader, which finds no answer in a problem with ``invalid``."""
        problem = self._problem
        if not isinstance(problem, Problem):
            return None
        extracted = None if "invalid" in problem.text else answer
        correct = problem.expected == answer is not None
        return Grade(correct, extracted, "Same text or not.", "text" if extracted else "none")

    def _events(self) -> Iterator[Event | None]:
        words = self._solver.words
        if isinstance(self._problem, Problem):
            self._solver.solved.append(self._problem.id)
            words = [*words, *self._problem.text.split()]
        if "unsolvable" in words:
            raise InputError("problem-too-long", "9,120 tokens; the context is 8,192.", "Shorter.")
        if "bug" in words:
            raise RuntimeError("a plank came loose")
        for event in fake_run(seed=1):
            if isinstance(event, Answered):
                endless = "endless" in words
                if endless and self.waits:
                    print("running", file=sys.stderr, flush=True)
                while endless and self._stopped is None:
                    time.sleep(0.01)
                    if not self.waits:
                        yield None
                if "stuck" in words:
                    time.sleep(3600)
                if "none" in words:
                    event = Answered(None, (), None, 0.0, None)
            if isinstance(event, Header) and self._seed is not None:
                event = replace(event, seed=self._seed)
            if isinstance(event, Ended) and self._stopped:
                event = Ended("interrupted", event.nodes, event.metrics)
            yield event


class FakeSolver:
    """A solver with the real one's arguments; words in ``--revision`` choose its behaviour."""

    rounding = None
    setup = types.SimpleNamespace(tp=1)
    checkpoint = types.SimpleNamespace(read=lambda: types.SimpleNamespace(tokenizer=()))
    boundary = BlockLimits(("\n",), STEP_TOKENS, DEPTH)
    listeners: tuple[Callable[[Event], None], ...] = ()

    def __init__(self, model: Any = "builtin:sapling", **settings: Any) -> None:
        self.config = {"model": str(model), **{k: repr(v) for k, v in settings.items()}}
        self.settings = settings
        self.words = (settings["revision"] or "").split(",")
        self._budget = Budget.parse(settings["budget"])
        self.solved: list[str] = []
        SOLVERS.append(self)

    def __enter__(self) -> FakeSolver:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def close(self) -> None:
        return None

    def describe(self) -> Any:
        return types.SimpleNamespace(
            parameters=10**9, dtype="float32", weights="auto", weights_bytes=4 * 10**9
        )

    def load(self) -> None:
        return None

    @property
    def task(self) -> Any:
        return types.SimpleNamespace(example="4 5 6 10")

    @property
    def device(self) -> str:
        return "cpu"

    def solve(self, problem: str, *, budget: str, **limits: Any) -> FakeSolution:
        self.solved.append(budget)
        time.sleep(0.002 if "slow" in self.words else 0)
        for _ in (stream := FakeStream(self, problem, None)):
            pass
        return stream.solution

    def plan(self, problem: str | Problem | None = None, *, budget: str | None = None) -> Plan:
        asked = self._budget if budget is None else Budget.parse(budget)
        return asked.plan(Footprint(PROMPT, STEP_TOKENS, DEPTH, BLOCKS), 1024)

    def results(
        self,
        jobs: Iterable[tuple[str | Problem, Options]],
        *,
        concurrency: int,
        listen: Callable[[int, Event], None],
        bugs: str = "raise",
    ) -> Iterator[tuple[int, FakeSolution | ArborError]]:
        """In turns, an event each; as many jobs as run at a time are read before any begins.

        ``running`` is said when only endless ones are in progress.
        """
        self._stopped = said = False
        source = enumerate(jobs)
        ready = [
            (place, self.stream(problem, **options))
            for place, (problem, options) in islice(source, concurrency)
        ]
        going: dict[int, tuple[FakeStream, Iterator[Event | None]]] = {}
        self._streams = [stream for _, stream in ready]
        while ready or going:
            for place, stream in [] if self._stopped else ready:
                stream.waits = concurrency == 1
                going[place] = stream, stream.steps()
            ready, happened = [], False
            for place, (stream, steps) in list(going.items()):
                try:
                    event = next(steps)
                except StopIteration:
                    del going[place]
                    happened = True
                    yield place, stream.solution
                except ArborError as error:
                    del going[place]
                    yield place, error
                else:
                    if event is not None:
                        happened = True
                        listen(place, event)
            if not happened and not said:
                said = True
                print("running", file=sys.stderr, flush=True)
            for place, (problem, options) in islice(source, concurrency - len(going)):
                if self._stopped:
                    break
                ready.append((place, self.stream(problem, **options)))
            self._streams = [stream for stream, _ in going.values()]
            self._streams += [stream for _, stream in ready]

    def stop(self, status: str = "interrupted") -> None:
        self._stopped = True
        for stream in self._streams:
            stream.stop(status)

    def stream(
        self,
        problem: str | Problem,
        *,
        expected: str | None = None,
        timeout: float | None = None,
        max_tokens: int | None = None,
        first: str | None = None,
        confidence: float | None = None,
        seed: int | None = None,
        trace: TraceWriter | None = None,
        trace_level: str = "events",
    ) -> FakeStream:
        self.config["expected"] = expected
        self.config["timeout"] = timeout
        self.config["max_tokens"] = max_tokens
        self.config["first"] = first
        self.config["confidence"] = confidence
        self.config["trace_level"] = trace_level
        self.config["problem"] = problem
        return FakeStream(self, problem, trace, seed)


def install() -> None:
    """Make ``from arbor.solver import Solver`` yield the fake."""
    module = types.ModuleType("arbor.solver")
    module.Solver = FakeSolver
    sys.modules["arbor.solver"] = module


def install_light() -> None:
    """Make commands use the fake without the imports of the real one."""
    import arbor.cli.bench
    import arbor.cli.evaluation.compare
    import arbor.cli.evaluation.eval
    import arbor.cli.solve

    def build(
        options: SolverOptions, problem: str | None = None, *, searches: bool = True
    ) -> FakeSolver:
        settings = options.settings
        return FakeSolver(settings.model, revision=settings.revision, budget=str(settings.budget))

    arbor.cli.solve.build_solver = build
    arbor.cli.evaluation.eval.build_solver = build
    arbor.cli.evaluation.eval.import_engine = lambda: None
    arbor.cli.bench.build_solver = build
    arbor.cli.evaluation.compare.build_solver = build
