"""Thoughts that the model proposes: what becomes of its lines, and what they cost."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.letters import LETTERS, Desk, Found, Letters, Listing, Writer, search
from support.slow_cases import only

from arbor.controllers.base import Expansion
from arbor.controllers.tot import ToT
from arbor.engine.mode import Mode, Rehydrate
from arbor.errors import BudgetInfeasible, UsageError
from arbor.events import Boundary, Event, Forwarded, Opened, Pruned, Selected
from arbor.metrics import MetricsFold
from arbor.run.limits import Limits
from arbor.run.session import Session
from arbor.tasks.base import Problem, Proposal
from arbor.tree import Node, NodeState, ThoughtTree
from arbor.verifiers.self_eval import SelfEval

pytestmark = pytest.mark.usefixtures("loaded_once")

ASKED = len("next?")
NINE = Proposal("next?", 9)
PROMPT = len("go:")
SETTINGS: dict[str, Any] = {"generate": "propose", "width": 3, "beam": 2, "stop_value": None}
PLAIN = ToT(**SETTINGS)
# the longest path of a search of depth 2: prompt, a thought, a question with its completion
SMALLEST = PROMPT + 4 + ASKED + 24


@functools.cache
def desk(mode: Mode = "lossless", rehydrate: Rehydrate = "selective") -> Desk:
    return Desk(mode, rehydrate)


def proposed(writes: Writer | str, controller: Any = PLAIN, **settings: Any) -> Found:
    """A search whose model writes this after each question."""
    here = settings.pop("desk", None) or desk()
    here.script.writes = writes if callable(writes) else lambda thoughts: str(writes)
    settings.setdefault("limits", Limits(settings.pop("depth", 1)))
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


def test_sampled_tokens_are_counted_apart_from_given_ones() -> None:
    fold = MetricsFold()
    for event in (found := proposed("v1\nv2\n.")).events:
        fold(event)
    metrics = fold.metrics()

    assert metrics.tokens_generated == len("v1\nv2\n.")
    assert metrics.tokens_given == ASKED + 2 * len("v1\n")
    assert metrics.tree_tokens == found.outcome.tree.tokens
    computed = sum(e.rows for e in found.events if isinstance(e, Forwarded))
    assert computed == found.outcome.tree.tokens, "each token is computed once"


def test_a_line_may_be_an_answer() -> None:
    found = proposed("v1\nyes!\n.", depth=3)

    first, second = children(found)
    assert [first.state, second.state] != [NodeState.TERMINAL] * 2
    assert second.state is NodeState.TERMINAL
    assert found.outcome.answer == "yes"


def test_levels_grow_from_the_best_lines() -> None:
    lists = {"": "v1\nv9\nv5\n.", "v9\n": "a!\nv9\n.", "v5\n": "."}

    found = proposed(lambda thoughts: lists["".join(thoughts)], depth=2)

    assert texts(children(found)) == ["v1\n", "v9\n", "v5\n"]
    assert texts(children(found, [2])) == ["a!\n", "v9\n"]
    assert children(found, [3]) == []
    assert found.problems == []
    selected = [e.leaves for e in found.events if isinstance(e, Selected)]
    assert selected == [((0, 3),), ((3, 3), (4, 3))]


def test_a_level_without_lines_ends_the_search() -> None:
    found = proposed(".", depth=3)

    assert found.outcome.status == "exhausted"
    assert len([e for e in found.events if isinstance(e, Selected)]) == 1


def test_a_depth_first_search_goes_back_where_nothing_is_proposed() -> None:
    lists = {"": "v9\nv5\n.", "v9\n": ".", "v5\n": "b!\n."}

    controller = ToT(strategy="dfs", **SETTINGS)
    found = proposed(lambda thoughts: lists["".join(thoughts)], controller, depth=2)

    assert found.outcome.answer == "b"
    assert found.problems == []


# The tree


def _written(seed: int) -> Writer:
    """A list for each state: of one to four thoughts, some of them equal, some long."""

    def write(thoughts: list[str]) -> str:
        random = np.random.default_rng([seed, *map(ord, "".join(thoughts))])
        words = ["v9", "v5", "v1", "w", "long one", "!"]
        return "\n".join(random.choice(words, random.integers(1, 5))) + "\n."

    return write


def shape(found: Found) -> list[Any]:
    return [(n.key, tuple(n.tokens), n.given, n.state, n.value, n.text) for n in found.outcome.tree]


@settings(max_examples=10)
@given(seed=st.integers(0, 3), slots=st.integers(SMALLEST + 4, 110), strategy=st.booleans())
def test_any_feasible_budget_gives_the_same_tree(seed: int, slots: int, strategy: bool) -> None:
    controller = ToT(strategy="bfs" if strategy else "dfs", **SETTINGS)
    want = proposed(_written(seed), controller, depth=3)

    found = proposed(_written(seed), controller, depth=3, slots=slots)

    assert shape(found) == shape(want)
    assert found.problems == want.problems == []
    assert desk().memory.peak <= slots


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


@pytest.mark.parametrize("rehydrate", ["selective", "span", "off"])
@pytest.mark.parametrize("slots", [36, 60, 200])
def test_a_lossy_search_proposes_too(rehydrate: Rehydrate, slots: int) -> None:
    lossy = desk("lossy", rehydrate)

    found = proposed(_written(1), depth=3, slots=slots, desk=lossy)

    # the lists are scripted, so the thoughts are those of any search
    assert shape(found) == shape(proposed(_written(1), depth=3))
    assert found.problems == []


def test_a_question_that_grows_has_a_shorter_completion() -> None:
    lists = {"": "v9\n" * 5 + "v8\n.", "v9\n": "v7\n" * 9}
    task = Listing(longest=19, quotes=True)

    found = proposed(lambda each: lists.get("".join(each), "."), depth=2, task=task)

    first, second = [n for n in found.outcome.tree if 0 < n.given < len(n.tokens)][:2]
    assert (first.given, len(first.tokens)) == (ASKED, ASKED + 19)
    assert (second.given, len(second.tokens)) == (ASKED + 3, ASKED + 19)


def test_a_question_without_room_for_a_completion_is_refused() -> None:
    task, controller = Listing(longest=2, quotes=True), ToT(threshold=-1.0, **SETTINGS)

    with pytest.raises(UsageError, match="fewer than 7 tokens") as caught:
        proposed("9\n", controller, depth=2, task=task)

    assert caught.value.code == "task-answer"


# Limits and interruptions


def test_an_expansion_that_proposes_counts_as_one() -> None:
    found = proposed(_written(0), limits=Limits(3, max_expansions=2))

    assert sum(len(e.leaves) for e in found.events if isinstance(e, Selected)) == 2
    assert found.outcome.limit == "max_expansions"


def test_only_sampled_tokens_count_for_the_limit_of_tokens() -> None:
    lists = "v9\nv8\nv7\n."  # 10 tokens
    found = proposed(lists, limits=Limits(5, max_tokens=35))

    # the first is not limited; 25 tokens have room for two more; then 5 have room for none
    selected = [e.leaves for e in found.events if isinstance(e, Selected)]
    assert [len(leaves) for leaves in selected] == [1, 2]
    assert [width for leaves in selected for _, width in leaves] == [3, 3, 3]
    assert found.outcome.limit == "max_tokens"


@pytest.mark.parametrize("slots", [SMALLEST + 4, pytest.param(4096, marks=pytest.mark.slow)])
def test_an_interruption_leaves_nothing_open(slots: int) -> None:
    whole = proposed(_written(2), depth=3, slots=slots)
    for at in range(2, len(whole.events), 5):
        left = [at]

        def hear(event: Event, session: Session, left: list[int] = left) -> None:
            left[0] -= 1
            if not left[0]:
                session.stop("interrupted")

        found = proposed(_written(2), depth=3, slots=slots, heard=hear)

        assert found.problems == []
        assert {node.state for node in found.outcome.tree}.isdisjoint({NodeState.OPEN})
        assert desk().memory.used_by(found.outcome.tree) <= slots
        for node in found.outcome.tree:
            asked = 0 < node.given < len(node.tokens)
            assert not (asked and node.span.resident.any())


def test_a_budget_below_the_smallest_is_refused_and_leaves_nothing() -> None:
    with pytest.raises(BudgetInfeasible) as caught:
        proposed("v9\n.", depth=1, slots=PROMPT + ASKED)

    assert caught.value.needed == PROMPT + ASKED + 1
    assert [node.id for node in desk().tree] == [0]


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


def heard_by(found: Found) -> Any:
    checked: Any = found.session._search
    return checked._search.heard


@pytest.mark.parametrize("slots", only([70], [SMALLEST + 4, 70, 90, 130]))
@pytest.mark.parametrize("limits", [Limits(3), Limits(3, max_tokens=60)])
def test_a_search_without_rounds_hears_the_same_at_any_budget(slots: int, limits: Limits) -> None:
    want = proposed(_written(3), Racing(), limits=limits)

    found = proposed(_written(3), Racing(), limits=limits, slots=slots)

    def thoughts(found: Found) -> list[Any]:
        return sorted((n.key, n.text) for n in found.outcome.tree)

    assert thoughts(found) == thoughts(want)
    assert heard_by(found) == heard_by(want)
    assert len(heard_by(want)) > 2
    assert want.outcome.limit == (None if limits.max_tokens is None else "max_tokens")
    assert found.problems == want.problems == []


def test_the_clock_of_a_search_without_rounds_counts_sampled_tokens() -> None:
    # the question after bbb is longer, and its list shorter; the last two lists end at one time
    lists = {"": "a\nbbb\n.", "a\n": "v1\nv2\n.", "bbb\n": "v3!\n."}
    lists |= {"a\nv1\n": "\n\n.", "a\nv2\n": "!\n."}
    task = Listing(quotes=True)

    found = proposed(lambda each: lists["".join(each)], Racing(), depth=3, task=task)

    text = {node.key: node.text for node in found.outcome.tree}
    reported = [[text[key] for key in keys] for keys in heard_by(found)]
    assert reported == [["a\n", "bbb\n"], ["v3!\n"], ["v1\n", "v2\n"], ["!\n"]]


def test_the_outlook_holds_thoughts_that_wait_for_the_verifier_and_no_questions() -> None:
    task = Listing(verdicts={"y": 1.0, "n": 0.0})
    asked: list[set[int]] = []
    waiting: list[set[int]] = []

    def look(event: Event, session: Session) -> None:
        if not isinstance(event, Boundary) or session._search is None:
            return
        outlook = set(desk().opened.run.outlook())
        question = event.given < len(event.ids)
        (asked if question else waiting).append(outlook)

    found = proposed("v9\nv5\n.", depth=2, task=task, verifier=SelfEval(), heard=look)

    assert asked and not set().union(*asked)
    thoughts = {n.id for n in found.outcome.tree if n.given and n.given == len(n.tokens)}
    assert set().union(*waiting) == thoughts


@pytest.mark.parametrize(
    "controller", [Racing(declared=0), Racing(declared=1), Racing(generate="dream")]
)
def test_a_controller_proposes_only_as_declared(controller: Racing) -> None:
    with pytest.raises(UsageError, match="answered 'ask'") as caught:
        proposed("v9\nv8\n.", controller, depth=3)
    assert caught.value.code == "controller-answer"


@pytest.mark.parametrize("declared", [-1, 1.5, None])
def test_what_a_controller_declares_is_a_number(declared: Any) -> None:
    with pytest.raises(UsageError, match="answered 'most_proposals'"):
        proposed("v9\n.", Racing(declared=declared))


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


def test_a_task_may_be_given_no_lines_it_likes() -> None:
    found = proposed("v9\n.", task=Wrong(lines=["", "a\n", ""]))

    assert texts(children(found)) == ["a\n"]
    assert Letters().encode("a\n") == children(found)[0].tokens
