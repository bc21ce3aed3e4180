"""Blocks whose first tokens are given: computed like those of a path, then continued or ended."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models import Words, build, path_logits
from support.slow_cases import only
from support.trees import (
    GREEDY,
    LENGTH,
    PROMPT,
    SAMPLED,
    Lab,
    path_ids,
    relative_error,
)

from arbor.engine.mode import Mode, Rehydrate
from arbor.engine.operation import GivenBlock, Growth
from arbor.engine.stop_rule import StopRule
from arbor.events import Boundary, Header, Opened, Pruned
from arbor.model.sampling_params import Sampling
from arbor.tasks.base import BlockLimits
from arbor.trace import Replay
from arbor.tree import Node, NodeState, ThoughtTree

FIRST = (7, 8, 9, 30, 31)
SECOND = (11, 3)
MOST = len(FIRST) + LENGTH
SMALLEST = len(PROMPT) + LENGTH + MOST  # the longest path of `listed`
TOLERANCE = 1e-5


def growth(most: int = MOST, sampling: Sampling = SAMPLED) -> Growth:
    return Growth(3, sampling, StopRule(Words(), BlockLimits((), most, 8), ()))


def plant(lab: Lab, slots: int, **run: object) -> ThoughtTree:
    """A new tree, with the events that a session adds."""
    lab.events.clear()
    tree = ThoughtTree(PROMPT)
    lab.open(tree, slots, **run)
    lab.events.append(Header("", "", "", "", "", "", 0, None, {}, {}, {}, {"budget_tokens": slots}))
    lab.events.append(Opened(0, None, 0, 0, len(PROMPT), ""))
    lab.extend(tree.root)
    return tree


def give(lab: Lab, blocks: Sequence[GivenBlock]) -> list[Node]:
    operation = lab.begin_given(blocks)
    while not operation.done:
        lab.step()
    return operation.result()


def give_up(lab: Lab, nodes: Sequence[Node]) -> None:
    for node in nodes:
        node.state = NodeState.PRUNED
    lab.events.append(Pruned(tuple(node.id for node in nodes)))
    lab.forget(nodes)


def listed(lab: Lab, slots: int) -> ThoughtTree:
    """Blocks that go on from given tokens, given up once they have ended, then whole ones after the
    same leaves."""
    tree = plant(lab, slots)
    leaves = lab.sprout([(tree.root, 3)])
    asking = [GivenBlock(leaf, FIRST[at:], growth()) for at, leaf in enumerate(leaves)]
    give_up(lab, give(lab, asking))
    texts = (FIRST, SECOND, (5,))
    give(lab, [GivenBlock(leaf, each, growth(), whole=True) for leaf in leaves for each in texts])
    return tree


@functools.cache
def laboratory(mode: Mode = "lossless", rehydrate: Rehydrate = "selective") -> Lab:
    return Lab(build("llama"), debug=True, mode=mode, rehydrate=rehydrate)


@functools.cache
def full() -> list[tuple[list[int], NodeState, int, float]]:
    """The blocks of `listed` at full retention."""
    tree = listed(Lab(build("llama")), 4096)
    return [(node.tokens, node.state, node.given, node.confidence) for node in tree]


def problems(lab: Lab) -> list[str]:
    """Inconsistencies of the events since the tree was planted."""
    replay = Replay()
    for event in lab.events:
        replay(event)
    return replay.problems


@pytest.mark.slow
@settings(max_examples=12)
@given(slots=st.integers(SMALLEST, 120))
def test_any_feasible_budget_gives_the_same_tree(slots: int) -> None:
    lab = laboratory()

    tree = listed(lab, slots)

    for node, (tokens, state, count, sure) in zip(tree, full(), strict=True):
        assert (node.tokens, node.state, node.given) == (tokens, state, count)
        assert node.confidence == pytest.approx(sure, abs=1e-5)
    assert lab.memory.peak <= slots
    assert problems(lab) == []


@pytest.mark.parametrize("rehydrate", ["selective", "span", "off"])
@pytest.mark.parametrize("slots", only([30], [24, 30, 44, 200]))
def test_a_lossy_search_reads_every_given_token(rehydrate: Rehydrate, slots: int) -> None:
    lab = laboratory("lossy", rehydrate)

    tree = listed(lab, slots)

    assert problems(lab) == []
    assert [node.tokens[: node.given] for node in tree if node.given] == [
        tokens[:count] for tokens, _, count, _ in full() if count
    ]


def test_a_block_goes_on_from_its_given_tokens_as_the_model_does() -> None:
    lab, model = laboratory(), build("llama")
    tree = plant(lab, 4096)

    (node,) = give(lab, [GivenBlock(tree.root, FIRST, growth(sampling=GREEDY))])

    own = path_logits(model, path_ids(node))
    start = len(PROMPT) + len(FIRST)
    best = own[start - 1 : -1].argmax(-1).tolist()
    assert node.tokens == [*FIRST, *best] and len(best) == LENGTH
    chances = own[start - 1 : -1].log_softmax(-1)
    assert node.logprob == pytest.approx(float(chances.max(-1).values.sum()), abs=1e-4)
    assert node.top1 == pytest.approx(float(chances.max(-1).values.exp().mean()), abs=1e-4)
    (boundary,) = [e for e in lab.events if isinstance(e, Boundary)]
    assert (boundary.given, boundary.stop) == (len(FIRST), "length")


def test_a_whole_block_ends_with_its_given_tokens_and_its_kv_is_the_models() -> None:
    lab, model = laboratory(), build("llama")
    tree = plant(lab, 4096)

    nodes = give(lab, [GivenBlock(tree.root, each, growth(), whole=True) for each in (FIRST, (5,))])

    assert [node.tokens for node in nodes] == [list(FIRST), [5]]
    assert [(node.state, node.logprob, node.top1) for node in nodes] == [
        (NodeState.CLOSED, 0.0, 0.0)
    ] * 2
    assert all(node.span.exact.all() for node in nodes)
    answers = lab.ask(nodes, [(11,), (11,)])
    own = torch.stack([path_logits(model, [*path_ids(node), 11])[-1] for node in nodes])
    assert relative_error(answers, own) < TOLERANCE
    ended = {e.node: e.given for e in lab.events if isinstance(e, Boundary)}
    assert ended == {nodes[0].id: len(FIRST), nodes[1].id: 1}


def test_given_tokens_that_were_never_computed_are_not_reported_after_an_interruption() -> None:
    lab = laboratory()
    over = False
    tree = plant(lab, SMALLEST, interrupted=lambda: over)
    leaves = lab.sprout([(tree.root, 2)])
    operation = lab.begin_given([GivenBlock(leaf, FIRST, growth()) for leaf in leaves])
    lab.step()
    lab.step()
    over = True
    while not operation.done:
        lab.step()

    states = [node.state for node in operation.result()]
    cut = [e for e in lab.events if isinstance(e, Boundary) and e.stop == "limit"]
    assert states == [NodeState.PRUNED] * 2 and len(cut) == 2
    assert any(not e.ids and not e.given for e in cut), "one of them still waited"
    assert any(e.given == len(FIRST) <= len(e.ids) for e in cut)
    give_up(lab, operation.result())
    assert problems(lab) == []
    assert lab.memory.used_by(tree) <= sum(len(leaf.tokens) for leaf in tree.nodes[:3])
    lab.memory.check()


def test_given_tokens_wait_where_nothing_may_leave_until_there_are_slots_for_them() -> None:
    """Two searches, with room for the given tokens of one next to what both keep."""
    given = tuple(range(10, 30))
    lab = Lab(build("llama"), policy="full", debug=True)
    trees = [ThoughtTree(PROMPT), ThoughtTree(PROMPT[::-1])]
    kept = 2 * len(PROMPT) + 4 * LENGTH
    for tree in trees:
        lab.open(tree, 200, alone=False, pool=kept + 30)
        lab.extend(tree.root)
    lab.sprout([(trees[0].root, 4)], GREEDY)
    running = [
        lab.begin_given([GivenBlock(tree.root, given, growth(len(given) + 4))]) for tree in trees
    ]
    ended = []
    while running:
        lab.step()
        for operation in [each for each in running if each.done]:
            (block,) = operation.result()
            ended.append(block.tree)
            give_up(lab, [block])
            running.remove(operation)

    assert ended == trees
