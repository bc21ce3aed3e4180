"""Rehydration: only what is missing is recomputed, at its place, and then equals full retention."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models import build, path_logits
from support.trees import GREEDY, Lab, grown, leaves_of, path_ids, relative_error
from torch import Tensor

from arbor.events import Forwarded, Rehydrated
from arbor.memory.pool import KVPool
from arbor.model.plan import Piece, Segment, plan_forward
from arbor.tree import Node, ThoughtTree

NAMES = (
    "llama",
    "gemma2",
    pytest.param("gpt_oss", marks=pytest.mark.slow),
    pytest.param("deepseek_v3", marks=pytest.mark.slow),
)
KV_TOLERANCE = 1e-5


@functools.cache
def laboratory(name: str) -> Lab:
    """An engine with a tree; every test begins by making all paths complete."""
    lab = Lab(build(name), debug=True)
    grown(lab)
    return lab


@pytest.fixture(params=NAMES)
def lab(request: pytest.FixtureRequest) -> Lab:
    return whole(laboratory(request.param))


def whole(lab: Lab) -> Lab:
    lab.ask(leaves_of(lab.tree), [[1]] * len(leaves_of(lab.tree)))
    assert all(node.span.exact.all() for node in lab.tree)
    lab.events.clear()
    return lab


def prefilled(lab: Lab, ids: Sequence[int], positions: Sequence[int] | None = None) -> list[Tensor]:
    """K and V of every layer for tokens run as one segment without context, in a pool of their own,
    each [n, H, D]."""
    pool = KVPool(lab.runner.layer_kv, len(ids), lab.runner.dtype, lab.runner.device)
    slots = np.arange(len(ids), dtype=np.int32)
    places = slots.astype(np.int64) if positions is None else np.array(positions)
    lab.runner.forward(plan_forward([Segment((), list(ids), places, slots, slots)]), pool)
    return [x[:-1] for pair in zip(pool.k, pool.v, strict=True) for x in pair]


def stored(lab: Lab, nodes: Sequence[Node]) -> list[Tensor]:
    """K and V of every layer that the engine holds for blocks, each [n, H, D]."""
    slots = np.concatenate([node.span.slot for node in nodes])
    assert (slots >= 0).all()
    index = torch.from_numpy(slots.astype(np.int64))
    pool = lab.memory.pool
    return [x[index] for pair in zip(pool.k, pool.v, strict=True) for x in pair]


def kv_error(got: Sequence[Tensor], want: Sequence[Tensor]) -> float:
    """Largest difference of any number; NaN counts as infinite."""
    return max(
        float((a - b).abs().nan_to_num(nan=torch.inf).max()) for a, b in zip(got, want, strict=True)
    )


def evict(lab: Lab, node: Node, offsets: Sequence[int]) -> None:
    lab.memory.evict(node, np.array(offsets, np.int64))


def rows_of(lab: Lab) -> list[tuple[int, int]]:
    """(forwards, rows) of every accounted piece of work."""
    return [(event.steps, event.rows) for event in lab.events if isinstance(event, Forwarded)]


def holes(tree: ThoughtTree, data: st.DataObject, nodes: Sequence[Node]) -> dict[int, list[int]]:
    """Offsets to evict, drawn per block: runs, scattered tokens, whole blocks, nothing."""
    chosen = {}
    for node in nodes:
        n = len(node.tokens)
        offsets = st.one_of(
            st.just(set(range(n))),
            st.sets(st.integers(0, n - 1)),
            st.tuples(st.integers(0, n), st.integers(0, n)).map(lambda ab: set(range(*sorted(ab)))),
        )
        chosen[node.id] = sorted(data.draw(offsets, label=f"holes of block {node.id}"))
    return chosen


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=10)
@given(data=st.data())
def test_a_path_with_any_holes_comes_back_in_one_forward_over_the_missing_tokens(
    name: str, data: st.DataObject
) -> None:
    lab = whole(laboratory(name))
    leaf = data.draw(st.sampled_from(leaves_of(lab.tree)))
    missing = holes(lab.tree, data, leaf.path)
    for node in leaf.path:
        evict(lab, node, missing[node.id])

    lab.extend(leaf)

    count = sum(len(offsets) for offsets in missing.values())
    assert rows_of(lab) == ([(1, count)] if count else [])
    back = [event.nodes for event in lab.events if isinstance(event, Rehydrated)]
    assert back == ([tuple((n, len(o)) for n, o in sorted(missing.items()) if o)] if count else [])
    assert kv_error(stored(lab, leaf.path), prefilled(lab, path_ids(leaf))) < KV_TOLERANCE


@pytest.mark.parametrize("name", NAMES)
def test_growing_a_dropped_leaf_gives_the_tokens_of_full_retention(name: str) -> None:
    lab = Lab(build(name), debug=True)
    want = [node.tokens for node in lab.sprout([(leaves_of(grown(lab)[0])[-1], 2)])]
    leaf = leaves_of(grown(lab)[0])[-1]
    for node in leaf.path:
        evict(lab, node, range(len(node.tokens)))
    lab.events.clear()

    children = lab.sprout([(leaf, 2)])

    assert [node.tokens for node in children] == want
    assert rows_of(lab)[0] == (1, leaf.end)


def test_a_token_that_stays_while_its_ancestors_go_is_not_recomputed(lab: Lab) -> None:
    leaf = leaves_of(lab.tree)[0]
    before = stored(lab, [leaf])
    for node in leaf.path[:-1]:
        evict(lab, node, range(len(node.tokens)))

    lab.extend(leaf)

    assert rows_of(lab) == [(1, leaf.start)]
    assert kv_error(stored(lab, [leaf]), before) == 0.0


def over_a_gap(lab: Lab, leaf: Node, tokens: Sequence[int]) -> Node:
    """A child of `leaf` whose tokens are decoded while the tokens before them are partly missing,
    as a lossy decode would."""
    child = lab.tree.fork(leaf)
    for token in tokens:
        lab.tree.append(child, token)
    offsets = np.arange(len(tokens))
    slots = lab.memory.place(child, offsets, exact=False, depth=lab.runner.layer_count)
    context = [
        Piece(
            node.id,
            node.span.slot[node.span.resident],
            (node.start + np.flatnonzero(node.span.resident)).astype(np.int32),
        )
        for node in leaf.path
    ]
    segment = Segment(tuple(context), list(tokens), child.start + offsets, slots, slots)
    lab.runner.forward(plan_forward([segment]), lab.memory.pool)
    lab.memory.commit()
    return child


def undo(lab: Lab, child: Node) -> None:
    lab.forget([child])
    assert child.parent is not None
    child.parent.children.remove(child)
    assert lab.tree.nodes.pop() is child


def test_tokens_written_over_a_gap_are_recomputed_too(lab: Lab) -> None:
    leaf = leaves_of(lab.tree)[1]
    evict(lab, leaf.path[1], [1, 2, 3])
    child = over_a_gap(lab, leaf, [4, 71, 33])
    want = prefilled(lab, path_ids(child))
    assert kv_error(stored(lab, [child]), [x[child.start :] for x in want]) > 1e-2

    lab.extend(child)

    assert rows_of(lab) == [(1, 3 + 3)]
    assert child.span.exact.all()
    assert kv_error(stored(lab, child.path), want) < KV_TOLERANCE
    undo(lab, child)


def test_filling_only_the_holes_would_leave_the_tokens_written_over_them_wrong(lab: Lab) -> None:
    leaf = leaves_of(lab.tree)[1]
    evict(lab, leaf.path[1], [1, 2, 3])
    child = over_a_gap(lab, leaf, [4, 71, 33])
    want = prefilled(lab, path_ids(child))

    lab.extend(leaf)

    assert rows_of(lab) == [(1, 3)]
    assert kv_error(stored(lab, leaf.path), [x[: leaf.end] for x in want]) < KV_TOLERANCE
    assert kv_error(stored(lab, [child]), [x[child.start :] for x in want]) > 1e-2
    undo(lab, child)


def test_no_path_is_left_short_by_a_part_of_another_one(lab: Lab) -> None:
    first, second = leaves_of(lab.tree)[:2]
    for leaf in (first, second):
        evict(lab, leaf, range(len(leaf.tokens)))

    with pytest.raises(RuntimeError, match="computed alone"):
        lab._parts.stepper._rehydration.place([first, second], reserve=1, most=len(first.tokens))

    lab.memory.check()
    assert not lab.memory.pending


def hidden_search(slots: int) -> tuple[Lab, list[Tensor], list[list[int]]]:
    """What a search that loses a block says and grows, in a budget; the block comes back and goes
    on at the end."""
    lab = Lab(build("llama"), debug=True)
    tree = lab.plant(slots)
    (lost,) = lab.sprout([(tree.root, 1)], GREEDY)
    (leaf,) = lab.sprout([(lost, 1)], GREEDY)
    if slots < 4096:  # as after a visit to another path
        lab.memory.free_blocks([leaf, lost])
        lab.memory.evict(tree.root, np.array([3, 4]))
        lab.state.changed([tree.root, lost, leaf])
    answers = []
    with lab.hiding([lost]):
        answers.append(lab.ask([leaf], [(7, 8)]))
        (first,) = lab.sprout([(leaf, 1)], GREEDY)
        (second,) = lab.sprout([(first, 1)], GREEDY)
        answers.append(lab.ask([first, second], [(7, 8)] * 2))
    tokens = [first.tokens, second.tokens]
    for node in (first, second):
        assert not node.span.exact.any(), "they did not see the hidden block"
    for node in (tree.root, lost, leaf):  # of theirs, what is there is as it ever was
        assert node.span.exact[node.span.resident].all()
    answers.append(lab.ask([leaf, second], [(7, 8)] * 2))
    assert second.span.exact.all()
    lab.forget([first, second])
    answers.append(lab.ask([leaf], [(7, 8)]))
    return lab, answers, tokens


def test_what_a_search_does_without_a_block_does_not_depend_on_the_budget() -> None:
    full, answers, tokens = hidden_search(4096)
    (lost, leaf) = full.tree[1], full.tree[2]
    whole = path_logits(build("llama"), [*path_ids(leaf), 7, 8])[-1]
    assert relative_error(answers[0][0], whole) > 1e-3
    assert lost.span.exact.all()
    for slots in (full.tree[4].end + 2, 40):
        small, again, chosen = hidden_search(slots)
        assert chosen == tokens
        for got, want in zip(again, answers, strict=True):
            assert relative_error(got, want) < 1e-5
        assert any(isinstance(event, Rehydrated) for event in small.events)


def test_in_span_mode_a_block_that_lacks_a_token_is_computed_whole_and_no_other() -> None:
    lab = Lab(build("llama"), rehydrate="span", debug=True)
    (child,) = lab.sprout([(lab.plant().root, 1)], GREEDY)
    before = lab.rows()
    evict(lab, child, [1, 3])

    lab.extend(child)

    assert lab.rows() == before + len(child.tokens)
    assert child.span.exact.all()


def test_a_block_grown_below_a_hidden_one_is_not_computed_again_while_that_is_hidden() -> None:
    lab = Lab(build("llama"), debug=True)
    (lost,) = lab.sprout([(lab.plant().root, 1)], GREEDY)
    with lab.hiding([lost]):
        (child,) = lab.sprout([(lost, 1)], GREEDY)
        before = lab.rows()
        lab.extend(child)
        assert lab.rows() == before
    lab.extend(child)
    assert lab.rows() == before + len(child.tokens)
    assert child.span.exact.all()
