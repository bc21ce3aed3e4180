"""EPTree: where chains branch, what the engine computes for it, and what of it is recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.fakes import Thought, run, scripted

from arbor import Solver
from arbor.controllers.eptree import EPTree
from arbor.errors import TraceError
from arbor.measure.replay import replay
from arbor.trace import Replay, read_trace
from arbor.tree import Node

pytestmark = pytest.mark.usefixtures("loaded_once")

PUZZLE = "4 5 6 10"
SMALL = "eptree,chains=2,forks=3,width=2"
INDEPENDENT = {"arithmetic": False}  # some branches begin inside thoughts


def inside(tree: Any) -> list[Node]:
    """The blocks that begin with tokens of an earlier one."""
    return [node for node in tree if node.given]


def test_chains_branch_before_the_least_probable_tokens() -> None:
    script = scripted(
        {
            (0,): Thought("a", tokens=2, logprob=-4.0),  # -2 each
            (0, 0): Thought("b", terminal=True, tokens=1, logprob=-3.0),
            (1,): Thought("c", terminal=True, tokens=3, logprob=-6.0),  # -2 each
            (2,): Thought("d", terminal=True),
            (3,): Thought("e", terminal=True),
            (0, 1): Thought("f", terminal=True),
            (0, 2): Thought("g", terminal=True),
        }
    )

    done = run(EPTree(chains=2, forks=3, width=1), script, max_depth=3)

    # the one token of (0, 0), then those of (0,), the earliest of the others
    assert done.asked == [[((), 2)], [((0,), 1)], [((0,), 1), ((), 1), ((), 1)]]
    first, second = done.tree.root.children[2:]
    assert (first.given, second.given) == (0, 1)
    assert second.tokens[0] == done.tree.root.children[0].tokens[0]
    assert len(done.best) == 5


def test_thoughts_branch_where_the_least_probable_one_begins() -> None:
    script = scripted(
        {
            (0,): Thought("a", tokens=2, logprob=-4.0),
            (0, 0): Thought("b", terminal=True, tokens=3, logprob=-5.0),
            (0, 1): Thought("c", terminal=True),
            (0, 2): Thought("c", terminal=True),
            (1,): Thought("d", terminal=True),
            (2,): Thought("d", terminal=True),
        }
    )

    controller = EPTree(chains=1, forks=2, width=1, at="thought")
    assert run(controller, script, 2).asked[2:] == [[((), 1), ((0,), 1)]]
    # three forks among two places: the first counts twice
    controller = EPTree(chains=1, forks=3, width=1, at="thought")
    assert run(controller, script, 2).asked[2:] == [[((), 2), ((0,), 1)]]


def test_a_branch_begins_with_the_tokens_before_the_least_probable_one() -> None:
    with Solver(controller=SMALL, sampling=INDEPENDENT) as solver:
        solution = solver.solve(PUZZLE)
        tree = solver.engine.tree
        blocks = inside(tree)
        assert len(solution.candidates) == 2 + 3 * 2
        assert 1 < len(blocks) <= 6
        for node in blocks:
            assert node.parent is not None
            first = [
                s
                for s in node.parent.children
                if s.tokens[: node.given] == node.tokens[: node.given]
            ]
            assert first[0].id < node.id
            assert first[0].logprobs[: node.given] == node.logprobs[: node.given]
        for node in tree.nodes[1:]:
            assert len(node.logprobs) == len(node.tokens)
            assert node.logprob == pytest.approx(sum(node.logprobs))
            assert all(logprob < 0 for logprob in node.logprobs)


def test_the_smallest_budget_gives_the_tree_of_full_retention(tmp_path: Path) -> None:
    found = []
    for name in ("full", "smallest"):
        path = tmp_path / f"{name}.arbor.jsonl"
        with Solver(
            controller=SMALL, sampling=INDEPENDENT, deterministic=True, device="cpu"
        ) as solver:
            plan = solver.plan(PUZZLE, budget="full")
            slots = plan.full_tokens if name == "full" else plan.enough_tokens
            solution = solver.solve(PUZZLE, budget=f"{slots}tok", trace=path)
            tree = [(n.key, n.tokens, n.given, n.logprobs, n.state) for n in solver.engine.tree]
            assert inside(solver.engine.tree)
            assert len(tree) - 1 <= plan.blocks
        assert Replay.of(read_trace(path)).problems == []
        assert solution.metrics.peak_tokens <= slots
        found.append(tree)

    assert found[0] == found[1]


def test_every_token_is_once_in_a_rollout() -> None:
    with Solver(controller="eptree,chains=2,forks=3,width=2,rounds=2") as solver:
        (rollout,) = solver.rollouts([PUZZLE])
        tree = solver.engine.tree

    given = sum(node.given for node in tree)
    assert given
    assert len(rollout.tokens) == tree.tokens - given
    assert rollout.sampled.sum() == len(rollout.tokens) - rollout.starts[1]
    assert len(rollout.leaves) == 2 + 2 * 3 * 2
    for leaf in rollout.leaves:
        at = rollout.path(leaf)
        path = tree[int(rollout.nodes[leaf])].path
        assert rollout.tokens[at].tolist() == [token for node in path for token in node.tokens]
        found = rollout.logprobs[at][rollout.starts[1] :]
        assert np.allclose(found, [each for node in path[1:] for each in node.logprobs])
        assert (np.diff(rollout.positions[at]) == 1).all()


@pytest.mark.parametrize("level", ["steps", "tokens"])
def test_a_replay_needs_the_log_probabilities_of_tokens(level: str, tmp_path: Path) -> None:
    path = tmp_path / "run.arbor.jsonl"
    with Solver(controller=SMALL, sampling=INDEPENDENT) as solver:
        solution = solver.solve(PUZZLE, trace=path, trace_level=level)
        tokenizer = solver.tokenizer
    trace = read_trace(path)
    if level == "steps":
        with pytest.raises(TraceError) as error:
            replay(trace, tokenizer, policy="reentry", slots=2000)
        assert error.value.code == "trace-replay"
        assert "--set trace_level=tokens" in (error.value.hint or "")
        return

    metrics = replay(trace, tokenizer, policy="reentry", slots=2000)
    assert metrics.tokens_generated == solution.metrics.tokens_generated
    assert metrics.tokens_given == solution.metrics.tokens_given > 0
