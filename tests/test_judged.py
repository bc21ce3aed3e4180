"""What is judged: blocks whose values the search, the aggregate, a limit or the policy reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.run_cli import Arbor

from arbor import Solver
from arbor.controllers.ranking import finished
from arbor.events import Event, Forwarded, Verified
from arbor.measure.replay import replay
from arbor.run.solution import Solution
from arbor.trace import Replay, read_trace
from arbor.tree import Node, NodeState, ThoughtTree

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


def test_of_several_chains_the_aggregate_says_what_is_judged() -> None:
    chains: Any = {"controller": "chain,samples=4"}
    every, nodes, by_steps = judged(aggregate="argmax,steps=min", **chains)
    last, _, best = judged(aggregate="best", **chains)
    none, _, vote = judged(aggregate="majority", **chains)

    assert sorted(every) == [node.id for node in nodes]
    assert sorted(last) == [node.id for node in nodes if node.state is NodeState.TERMINAL]
    assert none == [] and vote.votes[0].votes == max(each.votes for each in vote.votes)
    value = {each.node: each.value for each in by_steps.candidates}
    assert {each.node: each.value for each in best.candidates} == pytest.approx(value, abs=1e-5)


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


def test_a_limit_that_reads_the_value_of_a_path_has_it_judged() -> None:
    found, nodes, solution = judged(controller="chain", limits={"first": "verified"})

    assert found == [nodes[-1].id] and solution.score == nodes[-1].value
    assert judged(controller="chain", limits={"first": "answer"})[0] == []
    sure = judged(controller="chain", limits={"confidence": 0.5})
    assert sure[0] == [sure[1][-1].id]


@pytest.mark.parametrize(("policy", "reads"), [("kkt", True), ("lru", False)])
def test_a_lossy_policy_that_weighs_values_has_every_block_judged(policy: str, reads: bool) -> None:
    found, nodes, _ = judged(controller="chain", mode="lossy", policy=policy, budget="90tok")

    assert found == ([node.id for node in nodes] if reads else [])


def test_a_verifier_that_compares_candidates_gets_all_of_them_or_none() -> None:
    chains: Any = {"controller": "chain,samples=3", "verifier": "vote"}
    found, nodes, _ = judged(aggregate="best", **chains)

    ends = [node.depth for node in nodes if node.state is NodeState.TERMINAL]
    assert found and sorted(found) == [node.id for node in nodes if node.depth in ends]


def test_finished_paths_of_which_some_are_not_valued_go_by_likelihood() -> None:
    tree = ThoughtTree([1])
    for valued, value, logprob in ((True, 0.9, -4.0), (False, 0.0, -1.0), (True, 0.2, -2.0)):
        leaf = tree.fork(tree.root)
        leaf.tokens.append(2)
        leaf.valued, leaf.value, leaf.logprob = valued, value, logprob
        leaf.state = NodeState.TERMINAL

    assert [leaf.id for leaf in finished(tree)] == [2, 3, 1]
    tree.nodes[2].valued = True
    assert [leaf.id for leaf in finished(tree)] == [1, 3, 2]


@pytest.mark.parametrize("limits", [{}, {"max_tokens": 30}], ids=["whole", "cut"])
def test_a_chain_that_was_not_judged_is_replayed(tmp_path: Path, limits: Any) -> None:
    trace = tmp_path / "run.jsonl"
    with Solver(controller="chain", verifier="self", seed=3, device="cpu") as solver:
        solution = solver.solve(PUZZLE, trace=trace, **limits)
        found = replay(read_trace(trace), solver.tokenizer, policy="lru", slots=400)

    assert Replay.of(read_trace(trace)).problems == []
    generated = solution.metrics.tokens_generated
    assert found.tokens_generated == generated if not limits else found.tokens_generated > 0


def test_what_was_not_judged_is_shown_without_a_value(command: Arbor, tmp_path: Path) -> None:
    trace = tmp_path / "run.jsonl"
    with Solver(controller="chain", verifier="self", seed=3, device="cpu") as solver:
        solver.solve(PUZZLE, trace=trace)

    assert "(not judged, path 0 > 1" in command("trace", "info", str(trace)).out
