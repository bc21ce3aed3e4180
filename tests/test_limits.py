"""Limits that end a search early: which one, when, and what is left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.slow_cases import every

from arbor import Solver
from arbor.aggregate.base import AnswerVotes, lead_probability
from arbor.controllers.base import Expansion
from arbor.controllers.tot import BreadthFirst, ToT
from arbor.events import Boundary, Ended, Event, Terminal
from arbor.run import allowance
from arbor.run.limits import SessionLimits
from arbor.run.solution import Solution
from arbor.tree import Node, NodeState, ThoughtTree

pytestmark = pytest.mark.usefixtures("loaded_once")

PUZZLE = "4 5 6 10"
SEVERAL = "best-of-n,samples=12"  # paths that end at different times, most of them wrong


def solved(
    events: list[Event] | None = None,
    controller: Any = SEVERAL,
    limits: Any = None,
    problem: str = PUZZLE,
    **settings: Any,
) -> Solution:
    """One search, with its events."""
    heard = [] if events is None else events
    settings = {"verifier": "exact", "seed": 1} | settings
    with Solver(controller=controller, listeners=[heard.append], **settings) as solver:
        return solver.solve(problem, **(limits or {}))


def votes(*counts: int, scores: tuple[float, ...] = ()) -> list[AnswerVotes]:
    """Ranked answers with these votes."""
    given = scores or (0.5,) * len(counts)
    return [
        AnswerVotes(str(place), count, score, (place,))
        for place, (count, score) in enumerate(zip(counts, given, strict=True))
    ]


# The confidence of an answer


def test_the_lead_of_a_vote_is_the_tail_of_its_posterior() -> None:
    # Beta(a + 1, b + 1) above one half, by hand
    assert lead_probability(votes(1)) == 3 / 4
    assert lead_probability(votes(4)) == 31 / 32
    assert lead_probability(votes(1, 1)) == 1 / 2
    assert lead_probability(votes(2, 1)) == 11 / 16
    assert lead_probability(votes(1, 3)) == 3 / 16, "a leader by score may have fewer votes"
    assert lead_probability(votes(3, 1, 2)) == lead_probability(votes(3, 2))


# Searches


@pytest.mark.parametrize(
    ("settings", "limits", "status", "limit"),
    [
        ({"max_expansions": 2}, {}, "limit", "max_expansions"),
        ({"max_expansions": 2, "controller": "dpts"}, {}, "limit", "max_expansions"),
        ({}, {"max_tokens": 20}, "limit", "max_tokens"),
        ({}, {"timeout": 0}, "timeout", "timeout"),
        ({"max_expansions": 500}, {"max_tokens": 9999, "confidence": 1}, "solved", None),
    ],
)
def test_every_limit_is_named(
    settings: Any, limits: Any, status: str, limit: str | None, tmp_path: Path
) -> None:
    events: list[Event] = []

    solution = solved(events, **({"verifier": "self", "limits": limits} | settings))

    assert (solution.finish_reason, solution.limit) == (status, limit)
    assert isinstance(events[-1], Ended) and events[-1].limit == limit
    assert Solution.from_dict(solution.to_dict()) == solution


@pytest.mark.parametrize("controller", ["tot", "dpts", "best-first", "mcts"])
@pytest.mark.parametrize("most", every(2, [250, 400]))
def test_a_round_gets_as_many_blocks_as_fit_the_tokens(controller: str, most: int) -> None:
    events: list[Event] = []
    step = {"verifier": "self", "seed": 0}

    solution = solved(events, controller, {"max_tokens": most}, **step)

    longest = max(len(event.ids) for event in events if isinstance(event, Boundary))
    assert solution.limit in ("max_tokens", None)  # None: a path that went on alone has an answer
    assert abs(solution.metrics.tokens_generated - most) <= 2 * longest


@pytest.mark.parametrize(("depth", "most", "width"), [(64, 1000, 1), (64, 1400, 3), (3, 1000, 4)])
def test_half_is_kept_at_most_until_a_path_has_an_answer(depth: int, most: int, width: int) -> None:
    """Four thoughts of 100 tokens so far; kept are 200 for each that may follow, or half."""
    tree = ThoughtTree([0])
    blocks = [tree.fork(tree.root) for _ in range(4)]
    for block in blocks:
        for token in range(100):
            tree.append(block, token)
    left = allowance.Allowance(SessionLimits(max_depth=depth, max_tokens=most))
    left.count(blocks)
    asked = [Expansion(blocks[0], 12)]

    assert [each.width for each in left.of(asked)] == [width]
    left.answered = True
    assert [each.width for each in left.of(asked)] == [most // 100 - 4]


@pytest.mark.parametrize(("since_s", "half_s"), [(None, 45.0), (70.0, 30.0)])
def test_half_of_the_time_that_the_search_has_is_kept(
    since_s: float | None, half_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It begins at 100 s; what had passed of its 90 s before is spent."""
    clock = [100.0]
    monkeypatch.setattr(allowance, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    asked = [Expansion(ThoughtTree([0]).root, 1)]
    left = allowance.Allowance(SessionLimits(max_depth=3, timeout=90), since_s)

    left.start()

    assert left.seconds_left == 2 * half_s
    clock[0] = 99.0 + half_s
    assert left.of(asked) == asked
    clock[0] = 101.0 + half_s
    assert left.of(asked) == [] and left.narrowed == "timeout"


def test_the_most_promising_leaf_has_the_greatest_value_then_the_greatest_depth() -> None:
    tree = ThoughtTree([0])
    likely, inner, given_up = (tree.fork(tree.root) for _ in range(3))
    deeper, ended = tree.fork(inner), tree.fork(inner)
    nodes = {likely: 0.8, inner: 0.9, given_up: 0.95, deeper: 0.8, ended: 1.0}
    for node, value in nodes.items():
        node.state, node.value = NodeState.CLOSED, value
    given_up.state, ended.state = NodeState.PRUNED, NodeState.TERMINAL

    assert allowance.most_promising(tree, [Expansion(tree.root, 1)]) == [deeper]
    deeper.value = 0.7
    assert allowance.most_promising(tree, [Expansion(tree.root, 1)]) == [likely]
    assert allowance.most_promising(tree, [Expansion(inner, 1)]) == [inner], (
        "the search asks for it"
    )
    assert allowance.most_promising(ThoughtTree([0]), []) == []


def test_a_search_that_explores_ends_its_best_path() -> None:
    """Within these tokens `dpts` has thoughts of two levels, and would grow another first one."""
    solution = solved(None, "dpts", {"max_tokens": 150}, verifier="self", seed=0)

    assert solution.correct and solution.limit == "max_tokens"


@pytest.mark.parametrize("controller", ["tot", "beam", "dpts", "best-first", "mcts"])
@pytest.mark.parametrize("most", [300, 340])
def test_a_path_ends_within_the_tokens(controller: str, most: int) -> None:
    """A first level takes half of these tokens, and a whole search several times as many."""
    events: list[Event] = []

    solution = solved(events, controller, {"max_tokens": most}, verifier="self", seed=0)

    longest = max(len(event.ids) for event in events if isinstance(event, Boundary))
    assert solution.limit in ("max_tokens", None)  # None: its last levels, narrowed, have an answer
    assert len(solution.path) == 1 + 3, "a whole path, right or wrong"
    assert most - 2 * longest <= solution.metrics.tokens_generated <= most + longest


@pytest.mark.parametrize("controller", ["tot", "beam", "best-first", "dpts"])
def test_a_path_ends_within_the_time(controller: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thought takes a second here: a first level up to twenty, the next one up to fifty."""
    clock = [0.0]

    def listen(event: Event) -> None:
        clock[0] += isinstance(event, Boundary)

    monkeypatch.setattr(allowance, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    with Solver(controller=controller, verifier="self", seed=0, listeners=[listen]) as solver:
        solution = solver.solve(PUZZLE, timeout=44)

    assert solution.finish_reason == "timeout"
    assert len(solution.path) == 1 + 3, "a whole path, right or wrong"


@pytest.mark.parametrize("controller", ["chain,samples=8", "rebase,width=8"])
def test_tokens_that_end_within_a_round_give_the_same_tree_at_any_budget(controller: str) -> None:
    """Thoughts of several lengths: which of a round end first depends on what fits at a time."""
    given: dict[str, Any] = {"verifier": "self", "seed": 0, "sampling": {"temperature": 2.5}}
    smallest = Solver(controller=controller, **given).plan(PUZZLE).enough_tokens
    found = []
    for budget in ("full", f"{smallest}tok"):
        events: list[Event] = []
        solution = solved(events, controller, {"max_tokens": 120}, budget=budget, **given)
        assert solution.limit == "max_tokens"
        found.append([(e.node, e.ids) for e in events if isinstance(e, Boundary)])

    assert sorted(found[0]) == sorted(found[1]) and found[0] != found[1]


@pytest.mark.parametrize(("samples", "most"), [(1, 40), (3, 66), (6, 96)])
def test_a_chain_that_went_on_alone_is_no_other_chain_too(samples: int, most: int) -> None:
    """It has been grown when the search asks for it again, and has one vote."""
    controller = f"chain,samples={samples}"
    with Solver(controller=controller, seed=1, sampling={"temperature": 1.0}) as solver:
        full, cut = solver.solve(PUZZLE), solver.solve(PUZZLE, max_tokens=most)

    graph, whole = cut.to_networkx(), full.to_networkx()
    assert len(graph) < len(whole) or samples == 1
    assert cut.limit == "max_tokens" and len(cut.candidates) == 1
    assert [node for node in graph if node and graph.out_degree(node) > 1] == []
    texts = {whole.nodes[node]["text"] for node in whole}
    assert {graph.nodes[node]["text"] for node in graph} <= texts


@pytest.mark.parametrize(
    ("limits", "seed"),
    every(4, [({"confidence": 0.6}, 18), ({"confidence": 0.6}, 8), ({"first": "answer"}, 8)]),
)
def test_what_has_not_ended_when_a_limit_is_reached_counts_at_no_budget(
    limits: Any, seed: int
) -> None:
    """Without rounds other leaves grow meanwhile, and may have been computed already."""
    given: dict[str, Any] = {"verifier": "self", "seed": seed, "sampling": {"temperature": 2.0}}
    smallest = Solver(controller="dpts", **given).plan(PUZZLE).enough_tokens
    found = []
    for budget in ("full", f"{smallest}tok"):
        solution = solved(None, "dpts", limits, budget=budget, **given)
        assert solution.finish_reason == "limit"
        nodes = solution.to_networkx().nodes.items()
        kept = {node: each["text"] for node, each in nodes if each["state"] != "pruned"}
        found.append((kept, solution.answer, solution.votes, solution.candidates))

    assert found[0] == found[1]


class Told(BreadthFirst):
    """A search that knows of the blocks it was told of alone."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.told: list[Node] = []

    def tell(self, children: Sequence[Node]) -> None:
        self.told += children
        super().tell(children)

    def best(self) -> list[Node]:
        return [child for child in self.told if child.state is NodeState.TERMINAL]


@dataclass(frozen=True)
class Telling(ToT):
    """A controller of such searches."""

    def start(self, tree: ThoughtTree, max_depth: int) -> Told:
        return Told(self, tree, max_depth)


def test_a_path_that_ended_alone_counts_where_the_search_was_not_told() -> None:
    events: list[Event] = []
    limits = {"max_tokens": 160}  # a level of 10 thoughts takes 124

    solution = solved(events, Telling(), limits, verifier="self", seed=0)

    ended = [each.node for each in events if isinstance(each, Terminal)]
    assert solution.limit == "max_tokens" and solution.path[-1:] == tuple(ended)

    solution = solved([], Telling(), limits, verifier="self", seed=0, max_expansions=2)
    assert solution.limit == "max_expansions" and not solution.path


class Forgetting(BreadthFirst):
    """A search that asks for nothing after a level whose children are not all there."""

    def tell(self, children: Sequence[Node]) -> None:
        asked = sum(expansion.width for expansion in self._next)
        super().tell(children)
        if len(children) < asked:
            self._next = []


@dataclass(frozen=True)
class Forgetful(ToT):
    """A controller of such searches."""

    def start(self, tree: ThoughtTree, max_depth: int) -> Forgetting:
        return Forgetting(self, tree, max_depth)


def test_a_path_ends_where_a_cut_round_leaves_nothing_to_ask_for() -> None:
    limits = {"max_tokens": 230}
    solution = solved(None, Forgetful(stop_value=None), limits, verifier="self", seed=0)

    assert len(solution.path) == 1 + 3, "a whole path, right or wrong"


# The longest path


@pytest.mark.parametrize("controller", every(4, ["chain", "beam", "tot", "mcts", "rebase"]))
@pytest.mark.parametrize("budget", ["full", "smallest"])
def test_no_path_is_longer_than_its_tokens(controller: str, budget: str) -> None:
    events: list[Event] = []
    given = {"task": "reasoning", "path_tokens": 21, "step_tokens": 8, "max_depth": 64}
    settings: dict[str, Any] = {"controller": controller, "verifier": "self", "seed": 3} | given
    with Solver(**settings, max_expansions=40, listeners=[events.append]) as solver:
        plan = solver.plan("3+4?")
        assert plan.enough_tokens == plan.prompt_tokens + 21 + plan.question_tokens
        chosen = "full" if budget == "full" else f"{plan.enough_tokens}tok"
        solution = solver.solve("3+4?", budget=chosen)
        tree = solver.engine.tree
        lengths = {node.id: node.reasoned for node in tree}

    assert max(lengths.values()) == 21, "8, 16, and a last thought of 5"
    ended = [event for event in events if isinstance(event, Terminal)]
    assert ended and any(event.cut for event in ended)
    assert all(event.cut == (lengths[event.node] == 21) for event in ended)
    assert {each.node for each in solution.candidates if each.cut} <= {e.node for e in ended}


@pytest.mark.parametrize(
    ("settings", "run", "limit"),
    [
        ({}, {}, None),
        ({"max_expansions": 6}, {}, "max_expansions"),
        ({}, {"max_tokens": 100}, "max_tokens"),
    ],
)
def test_chains_that_a_limit_left_out_are_said_though_another_has_an_answer(
    settings: dict[str, Any], run: dict[str, Any], limit: str | None
) -> None:
    with Solver(controller="chain,samples=4", seed=5, **settings) as solver:
        solution = solver.solve("4 5 6 10", **run)

    assert solution.answer is not None
    assert (solution.finish_reason, solution.limit) == ("limit" if limit else "solved", limit)
