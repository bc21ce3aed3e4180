"""Plug-ins that answer nonsense: one error that names them, and an engine that goes on working."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from support.policies import POLICIES
from support.slow_cases import every

from arbor import Solver
from arbor.controllers.base import Expansion
from arbor.controllers.tot import ToT
from arbor.errors import ArborError
from arbor.retention.policy import Policy
from arbor.tasks.base import BlockLimits
from arbor.tasks.game24 import Game24
from arbor.tree import Node
from arbor.verifiers.base import Verdict
from arbor.verifiers.exact import Exact

pytestmark = pytest.mark.usefixtures("loaded_once")

PUZZLE = "4 5 6 10"
SMALL = ToT(width=4, beam=2)
BUDGET = "110tok"


class Unprintable:
    """A value that raises when shown."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")


def crash() -> Any:
    raise ZeroDivisionError("boom\x1b[31m\n" + "x" * 9999)


# what no member may answer; each call makes its own
JUNK: Mapping[str, Callable[[], Any]] = {
    "none": lambda: None,
    "text": lambda: "\x1b[2Jnonsense\n",
    "nan": lambda: float("nan"),
    "negative": lambda: -3,
    "huge": lambda: 10**400,
    "list": lambda: [1, "two", None],
    "ragged": lambda: [[1], [2, 3]],
    "dict": lambda: {"a": 1},
    "bytes": lambda: b"\xff",
    "class": lambda: Node,
    "unprintable": Unprintable,
    "exception": crash,
}


def good_answer() -> str | None:
    with Solver(controller=SMALL, verifier=Exact(), budget=BUDGET) as solver:
        return solver.solve(PUZZLE).answer


GOOD = {"budget": BUDGET, "controller": SMALL, "verifier": Exact()}


def refused(name: str, run: Callable[[], Any]) -> str:
    """The one error of a run: an `ArborError` that names the plug-in, short and printable."""
    with pytest.raises(ArborError) as caught:
        run()
    message = caught.value.message
    assert name in message
    assert message.isprintable() and len(message) < 500
    return message


# Tasks


@dataclass(frozen=True)
class BadTask(Game24):
    """Game of 24 with one member that answers nonsense."""

    member: str = ""
    junk: str = "none"

    def answer(self, problem: Any, thoughts: Any) -> str | None:
        return "24" if self.member == "grade" else super().answer(problem, thoughts)

    def __getattribute__(self, name: str) -> Any:
        if name in ("member", "junk") or name != self.member:
            return object.__getattribute__(self, name)
        if name == "boundary":
            return JUNK[self.junk]()
        return lambda *_: JUNK[self.junk]()


class Ending:
    """A rule for the end of a thought that answers nonsense."""

    def __init__(self, junk: str) -> None:
        self.junk = junk

    def __call__(self, text: str, tokens: int) -> Any:
        return JUNK[self.junk]()


@dataclass(frozen=True)
class BadEnds(Game24):
    """Game of 24 whose boundary asks a rule for the end of a thought that answers nonsense."""

    junk: str = "none"

    @property
    def boundary(self) -> BlockLimits:
        return replace(super().boundary, ends=Ending(self.junk))


@pytest.mark.parametrize("junk", ["none", "text", "exception"])
def test_a_rule_for_the_end_of_a_thought_that_answers_nonsense_is_named(junk: str) -> None:
    def solve() -> None:
        with Solver(task=BadEnds(junk=junk), **GOOD) as solver:
            solver.solve(PUZZLE)

    assert "'boundary.ends'" in refused("BadEnds", solve)


MEMBERS = ("parse", "prompt", "is_terminal", "answer", "grade", "value", "question", "boundary")
ALLOWED = {
    ("answer", "none"),
    ("answer", "text"),
    ("prompt", "text"),
    ("value", "negative"),
}


def solve_with_task(member: str, junk: str) -> None:
    verifier = "self" if member == "question" else Exact()
    with Solver(
        task=BadTask(member=member, junk=junk), **(GOOD | {"verifier": verifier})
    ) as solver:
        solver.solve(PUZZLE)


@pytest.mark.parametrize("member", MEMBERS)
@pytest.mark.parametrize("junk", ["none", "nan", "exception"])
def test_a_task_that_answers_nonsense_is_named(member: str, junk: str) -> None:
    if (member, junk) in ALLOWED:
        solve_with_task(member, junk)
        return
    message = refused("BadTask", lambda: solve_with_task(member, junk))

    assert f"'{member}'" in message


# Controllers


@dataclass(frozen=True)
class BadController:
    """A search with one member that answers nonsense."""

    member: str = ""
    junk: str = "none"

    def max_blocks(self, max_depth: int) -> Any:
        return JUNK[self.junk]() if self.member == "max_blocks" else SMALL.max_blocks(max_depth)

    def start(self, tree: Any, max_depth: int) -> Any:
        if self.member == "start":
            return JUNK[self.junk]()
        return BadSearch(self, SMALL.start(tree, max_depth), tree)


class BadSearch:
    def __init__(self, controller: BadController, inner: Any, tree: Any) -> None:
        self.controller, self.inner, self.tree, self.rounds = controller, inner, tree, 0

    def _answer(self, member: str, right: Callable[[], Any]) -> Any:
        own = self.controller
        if own.member != member:
            return right()
        wrong = {
            "stranger": lambda: [Expansion(Node(0, None, 0, 0, 0), 2)],
            "unknown": lambda: [Expansion(Node(999, None, 0, 0, 0), 2)],
            "negative width": lambda: [Expansion(self.tree.root, -1)],
            "zero width": lambda: [Expansion(self.tree.root, 0)],
            "huge width": lambda: [Expansion(self.tree.root, 10**9)],
            "width as text": lambda: [Expansion(self.tree.root, "2")],  # type: ignore[arg-type]
            "terminal": lambda: [Expansion(self.tree.nodes[-1], 2)],
            "begins elsewhere": lambda: [Expansion(self.tree.root, 2, begin=(self.tree.root, 1))],
            "begins whole": lambda: (
                [
                    Expansion(each.parent, 2, begin=(each, len(each.tokens)))
                    for each in self.tree.nodes[1:2]
                    if each.parent is not None
                ]
                or self.inner.ask(1)
            ),
            "unknown way": lambda: [Expansion(self.tree.root, 2, "guess")],  # type: ignore[arg-type]
            "twice": lambda: self.inner.best()[:1] * 2,
            "far": lambda: {10**9: 0.5},
            "more than one": lambda: {0: 1.5},
            "not finite": lambda: {0: float("inf")},
        }
        return (wrong | JUNK)[own.junk]()

    def ask(self, room: int) -> Any:
        self.rounds += 1
        if self.rounds == 1 and self.controller.junk == "terminal":
            return self.inner.ask(room)
        if self.controller.junk == "terminal":
            for node in self.tree.nodes[1:]:
                node.state = "terminal"
        return self._answer("ask", lambda: self.inner.ask(room))

    def tell(self, children: Any) -> Any:
        return self._answer("tell", lambda: self.inner.tell(children))

    def best(self) -> Any:
        return self._answer("best", self.inner.best)

    def prospects(self) -> Any:
        return self._answer("prospects", self.inner.prospects)

    def scores(self) -> Any:
        return self._answer("scores", dict)


def solve_with_controller(member: str, junk: str) -> None:
    settings = {"policy": "arborkv,value=controller" if member == "scores" else "reentry"}
    settings |= {"controller": BadController(member, junk), "verifier": Exact()}
    with Solver(budget=BUDGET, debug=True, **settings) as solver:
        solver.solve(PUZZLE)


# what the error shows of an answer of several parts
SHOWN = {
    "stranger": "{'leaf': Node(0, open, tokens=0, value=0.000)}, not a block of its tree",
    "negative width": "{'width': -1}, not a width from 1 to 20",
    "width as text": "{'width': '2'}, not a width from 1 to 20",
    "terminal": "terminal, tokens=13, value=1.000)}, not a closed block",
    "begins elsewhere": "{'begin': (Node(0, closed, tokens=11, value=0.000), 1)}, not a child",
    "unknown way": "{'generate': 'guess'}, not one of sample, propose",
    "list": " with 1, not terminal blocks of its tree",
    "twice": ", not each block once",
    "none": " with None, not ",
}
WRONG = [
    *[("ask", each) for each in ("stranger", "unknown", "negative width", "zero width")],
    *[("ask", each) for each in ("huge width", "width as text", "terminal", "none", "exception")],
    *[("ask", each) for each in ("begins elsewhere", "begins whole", "unknown way")],
    *[("best", each) for each in ("none", "list", "twice", "exception")],
    *[("prospects", each) for each in ("far", "more than one", "none", "exception")],
    *[("scores", each) for each in ("far", "not finite", "none", "exception")],
    *[("max_blocks", each) for each in ("none", "negative", "nan", "exception")],
    ("tell", "exception"),
    ("start", "exception"),
]


@pytest.mark.parametrize(("member", "junk"), every(4, WRONG))
def test_a_controller_that_answers_nonsense_is_named(member: str, junk: str) -> None:
    message = refused("BadController", lambda: solve_with_controller(member, junk))

    assert f"'{member}'" in message
    assert SHOWN.get(junk, "") in message


# Verifiers


@dataclass(frozen=True)
class BadVerifier:
    """A verifier that answers nonsense."""

    junk: str = "none"
    needs_model = False

    def verify(self, task: Any, problem: Any, candidates: Any, engine: Any) -> Any:
        count = len(candidates)
        wrong: dict[str, Callable[[], Any]] = {
            "values": lambda: [0.5] * count,
            "texts": lambda: Verdict(("high",) * count, 0),  # type: ignore[arg-type]
            "nones": lambda: Verdict((None,) * count, 0),  # type: ignore[arg-type]
            "nans": lambda: Verdict((float("nan"),) * count, 0),
            "integers": lambda: Verdict((10**400,) * count, 0),
            "few": lambda: Verdict((0.5,), 0),
            "asked": lambda: Verdict((0.5,) * count, "none"),  # type: ignore[arg-type]
            "engine": lambda: engine.ask(candidates, [[]] * count),
        }
        return (wrong | JUNK)[self.junk]()


def solve_with_verifier(junk: str) -> None:
    with Solver(budget=BUDGET, controller=SMALL, verifier=BadVerifier(junk), debug=True) as solver:
        solver.solve(PUZZLE)


@pytest.mark.parametrize(
    "junk",
    ["none", "values", "texts", "nones", "nans", "integers", "few", "asked", "text", "exception"],
)
def test_a_verifier_that_answers_nonsense_is_named(junk: str) -> None:
    refused("BadVerifier", lambda: solve_with_verifier(junk))


@dataclass(frozen=True)
class BadParts:
    """A verifier with an optional member that answers nonsense."""

    member: str
    junk: str
    needs_model = True

    def verify(self, task: Any, problem: Any, candidates: Any, engine: Any) -> Verdict:
        engine.ask(candidates, [[5]] * len(candidates))
        return Verdict((0.5,) * len(candidates), len(candidates))

    def __getattr__(self, name: str) -> Any:
        if name != self.member:
            raise AttributeError(name)
        return lambda *_: JUNK[self.junk]()


@pytest.mark.parametrize(
    ("member", "junk"),
    [
        *[("most_question_tokens", each) for each in ("text", "nan", "negative", "exception")],
        *[("own_model", each) for each in ("none", "class", "exception")],
    ],
)
def test_an_optional_member_of_a_verifier_that_answers_nonsense_is_named(
    member: str, junk: str
) -> None:
    def solve() -> None:
        verifier = BadParts(member, junk)
        with Solver(budget=BUDGET, controller=SMALL, verifier=verifier) as solver:
            solver.solve(PUZZLE)

    assert f"'{member}'" in refused("BadParts", solve)


# Policies


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (lambda: Policy(BadAllocator), "it has a class as a part: write BadAllocator(…)."),
        (lambda: Policy(None), "it has no 'counts'."),
    ],
)
def test_a_policy_without_what_it_needs_is_refused(policy: Any, words: str) -> None:
    with pytest.raises(ArborError) as caught:
        Solver(policy=policy())

    assert caught.value.code == "component-incomplete" and words in caught.value.message
    assert caught.value.hint.startswith("docs/retention.md")


@dataclass(frozen=True)
class BadAllocator:
    """An allocator that answers nonsense."""

    junk: str = "none"

    def counts(self, blocks: Any, room: int, scorer: Any) -> Any:
        wrong: dict[str, Callable[[], Any]] = {
            "shape": lambda: np.zeros((len(blocks), 2), np.int64),
            "short": lambda: np.zeros(max(0, len(blocks) - 1), np.int64),
            "floats": lambda: blocks.floor.astype(np.float64),
            "nans": lambda: np.full(len(blocks), np.nan),
            "negatives": lambda: np.full(len(blocks), -1),
            "too many": lambda: blocks.resident.copy(),
            "more than held": lambda: blocks.resident + 1,
            "large": lambda: np.full(len(blocks), 2**64 - 1, np.uint64),
            "objects": lambda: np.array([object()] * len(blocks)),
            "writes": lambda: blocks.resident.fill(0),
        }
        return (wrong | JUNK)[self.junk]()


SHAPES = ("shape", "short", "floats", "nans", "negatives", "too many", "more than held", "large")


def solve_with_policy(junk: str) -> None:
    settings: dict[str, Any] = GOOD | {"policy": BadAllocator(junk), "debug": True}
    with Solver(**settings) as solver:
        solver.solve(PUZZLE)


FIRST = ("short", "more than held")  # the others run later


@pytest.mark.parametrize(
    "junk",
    [
        pytest.param(each, marks=[] if each in FIRST else pytest.mark.slow)
        for each in (*SHAPES, "objects", "none", "text", "exception")
    ],
)
def test_a_policy_that_answers_nonsense_is_named_and_the_memory_is_whole(junk: str) -> None:
    settings: dict[str, Any] = GOOD | {"policy": BadAllocator(junk), "debug": True}
    with Solver(**settings) as solver:
        refused("BadAllocator", lambda: solver.solve(PUZZLE))
        solver.engine.memory.check()
        solver.engine.policy = POLICIES["lru"]  # keeps the rules, on the same engine
        assert solver.solve(PUZZLE).answer == good_answer()


def cases() -> Iterator[tuple[str, Callable[[], None]]]:
    """Every member with every nonsense."""
    for junk in JUNK:
        for member in MEMBERS:
            if (member, junk) not in ALLOWED:
                yield f"task {member} {junk}", lambda m=member, j=junk: solve_with_task(m, j)
        for member in ("ask", "best", "prospects", "scores", "start", "max_blocks"):
            yield f"{member} {junk}", lambda m=member, j=junk: solve_with_controller(m, j)
        yield f"verify {junk}", lambda j=junk: solve_with_verifier(j)
        yield f"counts {junk}", lambda j=junk: solve_with_policy(j)


CASES = dict(cases())


@pytest.mark.slow
def test_all_nonsense_ends_in_one_error_each() -> None:
    check(sorted(CASES))


def check(names: list[str]) -> None:
    for name in names:
        try:
            CASES[name]()
        except ArborError as error:
            assert "Bad" in error.message or "search" in error.message, (name, error.message)
            assert error.message.isprintable(), (name, error.message)
        except Exception as error:
            raise AssertionError(f"{name} ends in {type(error).__name__}") from error
