"""Thoughts that the model proposes: what becomes of its lines, and what they cost."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.letters import LETTERS, Desk, Found, Listing, Writer, search

from arbor.controllers.base import Expansion
from arbor.controllers.tot import ToT
from arbor.engine.mode import Mode, Rehydrate
from arbor.errors import UsageError
from arbor.events import Boundary, Opened, Pruned
from arbor.run.limits import SessionLimits
from arbor.tasks.base import Problem, Proposal
from arbor.tree import Node, NodeState, ThoughtTree

pytestmark = pytest.mark.usefixtures("loaded_once")

ASKED = len("next?")
NINE = Proposal("next?", 9)
SETTINGS: dict[str, Any] = {"generate": "propose", "width": 3, "beam": 2, "stop_value": None}
PLAIN = ToT(**SETTINGS)


@functools.cache
def desk(mode: Mode = "lossless", rehydrate: Rehydrate = "selective") -> Desk:
    return Desk(mode, rehydrate)


def proposed(writes: Writer | str, controller: Any = PLAIN, **settings: Any) -> Found:
    """A search whose model writes this after each question."""
    here = settings.pop("desk", None) or desk()
    here.script.writes = writes if callable(writes) else lambda thoughts: str(writes)
    settings.setdefault("limits", SessionLimits(settings.pop("depth", 1)))
    return search(here, controller, **settings)


def children(found: Found, key: Sequence[int] = ()) -> list[Node]:
    """The thoughts after a block."""
    node = found.outcome.tree.root
    for index in key:
        node = node.children[index]
    return [child for child in node.children if child.given == len(child.tokens)]


def texts(nodes: Sequence[Node]) -> list[str]:
    return [node.text for node in nodes]


# Lines


@pytest.mark.parametrize(
    ("completion", "thoughts"),
    [
        ("v1\nv2\nv3\n.", ["v1\n", "v2\n", "v3\n"]),
        ("v3\nv1\nv2\n", ["v3\n", "v1\n", "v2\n"]),  # ends with the text
        ("v3\nv1", ["v3\n", "v1\n"]),  # the last line is whole: the text ends with it
        ("a\nb\nc\nd\n.", ["a\n", "b\n", "c\n"]),  # more than width
        ("a\nb\na\n\nb\nc\n.", ["a\n", "b\n", "c\n"]),  # repeats
        ("a.", ["a\n"]),
        ("abcdef\nabcdxyz\nb\n.", ["abcd", "b\n"]),  # longer than a thought: cut, so these repeat
        (".", []),
        ("", []),
        ("\n\n\n.", []),
        ("aa\n" * 9, ["aa\n"]),  # cut off
        ("a\n" * 10 + "bbbbb\n", ["a\n"]),  # cut off in a line, which is left out
        ("x" * 40, []),
    ],
)
def test_the_lines_of_a_completion_are_the_thoughts(completion: str, thoughts: list[str]) -> None:
    found = proposed(completion)

    assert texts(children(found)) == thoughts
    assert found.problems == []


def test_a_question_and_its_completion_are_one_block_that_is_given_up() -> None:
    found = proposed("v1\nv2\n.")

    question, *thoughts = found.outcome.tree.root.children
    assert question.text == "next?v1\nv2\n."
    assert (question.given, question.state) == (ASKED, NodeState.PRUNED)
    assert not question.span.resident.any()
    assert [(each.given, each.logprob) for each in thoughts] == [(3, 0.0)] * 2
    opened = [e.node for e in found.events if isinstance(e, Opened)]
    boundaries = [(e.node, e.given) for e in found.events if isinstance(e, Boundary)]
    assert opened == [0, 1, 2, 3]
    assert boundaries[0] == (1, ASKED) and sorted(boundaries[1:]) == [(2, 3), (3, 3)]
    # before the thoughts open
    assert found.events.index(Pruned((1,))) < max(
        place for place, event in enumerate(found.events) if isinstance(event, Opened)
    )


# The tree


@settings(max_examples=30)
@given(completion=st.text(st.sampled_from(LETTERS), max_size=30), width=st.integers(1, 5))
def test_any_completion_gives_distinct_thoughts(completion: str, width: int) -> None:
    found = proposed(completion, ToT(**(SETTINGS | {"width": width})))

    thoughts = children(found)
    assert len({tuple(each.tokens) for each in thoughts}) == len(thoughts) <= width
    assert all(0 < len(each.tokens) <= 4 for each in thoughts)
    assert found.problems == []
    for each in thoughts:
        assert "".join(each.text.split("\n")) in completion


# Limits and interruptions


# Searches without rounds, and plug-ins


@dataclass(frozen=True)
class Racing:
    """Grows every line, two at a time, without rounds.

    Attributes:
        declared: proposals of one `ask` that it declares.
        generate: of its expansions.
    """

    declared: int = 2
    generate: Any = "propose"

    def max_blocks(self, max_depth: int) -> int:
        return 60

    def most_proposals(self, max_depth: int) -> int:
        return self.declared

    def start(self, tree: ThoughtTree, max_depth: int) -> RacingSearch:
        return RacingSearch(self, tree, max_depth)


class RacingSearch:
    continuous = True

    def __init__(self, settings: Racing, tree: ThoughtTree, max_depth: int) -> None:
        self.generate, self.tree, self.max_depth = settings.generate, tree, max_depth
        self.frontier = [tree.root]
        self.heard: list[list[tuple[int, ...]]] = []

    def ask(self, room: int) -> list[Expansion]:
        asked, self.frontier = self.frontier[:2], self.frontier[2:]
        return [Expansion(leaf, 2, self.generate) for leaf in asked]

    def tell(self, children: Sequence[Node]) -> None:
        self.heard.append([child.key for child in children])
        self.frontier += [c for c in children if c.state is NodeState.CLOSED]

    def best(self) -> list[Node]:
        return [node for node in self.tree if node.state is NodeState.TERMINAL]


@dataclass(frozen=True)
class Wrong(Listing):
    """Wrong answers.

    Attributes:
        question, lines: the answers of `proposal` and of `proposals`.
    """

    question: Any = NINE
    lines: Any = ()

    def proposal(self, problem: Problem, thoughts: Sequence[str]) -> Any:
        return self.question

    def proposals(self, problem: Problem, thoughts: Sequence[str], text: str) -> Any:
        return self.lines


@pytest.mark.parametrize(
    "task",
    [
        Wrong(question="next?"),
        Wrong(question=Proposal("", 9)),
        Wrong(question=Proposal("next?", 0)),
        Wrong(question=Proposal("next?", 9, ("",))),
        Wrong(question=Proposal("next?", 9, 1)),  # type: ignore[arg-type]
        Wrong(lines="v1"),
        Wrong(lines=[1]),
        Wrong(lines=None),
    ],
)
def test_a_task_s_wrong_answer_is_refused(task: Wrong) -> None:
    with pytest.raises(UsageError, match="answered 'proposal") as caught:
        proposed("v9\n.", task=task)
    assert caught.value.code == "task-answer"
