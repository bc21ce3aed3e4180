"""DVTS against a tree computed by hand."""

from __future__ import annotations

from support.fakes import Thought, run, scripted

from arbor.controllers.dvts import DVTS
from arbor.tree import NodeState


def test_dvts_on_a_tree_computed_by_hand() -> None:
    """Children 0 and 1 of the root are the first subtree, 2 and 3 the second one."""
    script = scripted(
        {
            (0,): Thought("a", 0.5),
            (1,): Thought("b", 0.9),
            (2,): Thought("c", 0.3),  # ties with d, which comes later
            (3,): Thought("d", 0.3),
            (1, 0): Thought("e", 0.2),
            (1, 1): Thought("f", 0.7, terminal=True),  # ends the first subtree
            (2, 0): Thought("g", 0.1, terminal=True),  # finished, though not the best of its two
            (2, 1): Thought("h", 0.4),
        }
    )

    done = run(DVTS(subtrees=2, width=2), script, max_depth=3)

    assert done.asked == [[((), 4)], [((1,), 2), ((2,), 2)], [((2, 1), 2)]]
    assert done.best == [(1, 1), (2, 0)]
    assert [done.state(*key) for key in ((0,), (3,), (1, 0))] == [NodeState.PRUNED] * 3


def test_a_subtree_whose_best_thought_is_refuted_ends() -> None:
    script = scripted({(0,): Thought("a", 0.0), (1,): Thought("b", 0.5)})

    assert run(DVTS(2, 1), script, max_depth=2).asked[1] == [((1,), 1)]
    assert run(DVTS(2, 1, threshold=-1), script, max_depth=2).asked[1] == [((0,), 1), ((1,), 1)]
