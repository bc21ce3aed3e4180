"""What is judged: blocks whose values the search, the aggregate, a limit or the policy reads."""

from __future__ import annotations

from typing import Any

import pytest

from arbor import Solver
from arbor.events import Event, Forwarded, Verified
from arbor.run.solution import Solution
from arbor.tree import Node, NodeState

pytestmark = pytest.mark.usefixtures("loaded_once")

PUZZLE = "4 5 6 10"
LEVELS = (
    *("tot,beam=2,width=3", "beam,beam_size=2,width=3", "dvts,subtrees=2,width=2"),
    *("rebase,width=6", "ets,width=6"),
)


def judged(**settings: Any) -> tuple[list[int], list[Node], Solution]:
    """The blocks that were judged, all blocks, and the solution of a search."""
    limits = settings.pop("limits", {})
    seen: list[Event] = []
    fixed = {"verifier": "self", "seed": 3, "sampling": {"temperature": 1.0}}
    with Solver(listeners=[seen.append], device="cpu", **(fixed | settings)) as solver:
        solution = solver.solve(PUZZLE, **limits)
        nodes = list(solver.engine.tree.nodes[1:])
    found = [node for event in seen if isinstance(event, Verified) for node in event.nodes]
    asked = any(isinstance(event, Forwarded) and event.kind == "verify" for event in seen)
    assert asked == bool(found), "no question is asked whose answer is thrown away"
    assert [node.id for node in nodes if node.valued] == sorted(found)
    return found, nodes, solution


@pytest.mark.parametrize("aggregate", ["best", "argmax,steps=min", "weighted", "majority"])
def test_a_single_chain_is_not_judged(aggregate: str) -> None:
    found, nodes, solution = judged(controller="chain", aggregate=aggregate)

    assert found == [] and len(nodes) == 3
    assert solution.score is None and [each.value for each in solution.candidates] == [None]
    assert [step.value for step in solution.steps] == [None] * 3


@pytest.mark.parametrize("controller", LEVELS)
def test_the_last_level_is_judged_for_the_aggregate_alone_and_the_tree_is_the_same(
    controller: str,
) -> None:
    every, known, _ = judged(controller=controller, aggregate="weighted")
    fewer, nodes, _ = judged(controller=controller, aggregate="majority")

    deepest = max(node.depth for node in nodes)
    assert sorted(every) == [node.id for node in known]
    assert sorted(fewer) == [node.id for node in nodes if node.depth < deepest]
    assert [(node.key, node.tokens) for node in nodes] == [(n.key, n.tokens) for n in known]


def test_a_verifier_that_compares_candidates_gets_all_of_them_or_none() -> None:
    chains: Any = {"controller": "chain,samples=3", "verifier": "vote"}
    found, nodes, _ = judged(aggregate="best", **chains)

    ends = [node.depth for node in nodes if node.state is NodeState.TERMINAL]
    assert found and sorted(found) == [node.id for node in nodes if node.depth in ends]
