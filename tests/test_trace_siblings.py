"""Identical siblings: what makes them identical, and that no block is lost."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arbor.trace import Block
from arbor.tree import NodeState
from arbor.view.draw import identical_siblings

FIRST = Block(1, 0, 0, 1, text="9", state=NodeState.TERMINAL, answer="9")


@pytest.mark.parametrize(
    ("change", "identical"),
    [
        ({}, True),
        ({"text": " 9\n"}, True),
        ({"value": 0.5, "verified": True, "tokens": 3, "resident": 2}, True),
        ({"parent": 7}, False),
        ({"text": "10"}, False),
        ({"answer": "10"}, False),
        ({"state": NodeState.PRUNED}, False),
    ],
)
def test_parent_text_state_and_answer_make_siblings_identical(
    change: dict[str, object], identical: bool
) -> None:
    second = dataclasses.replace(FIRST, id=2, index=1, **change)

    groups = identical_siblings({1: FIRST, 2: second}, [1, 2])

    assert groups == ([(1, 2)] if identical else [(1,), (2,)])


@pytest.mark.parametrize("change", [{"text": ""}, {"state": NodeState.OPEN}])
def test_blocks_of_unknown_text_are_not_identical(change: dict[str, object]) -> None:
    blocks = {node: dataclasses.replace(FIRST, id=node, **change) for node in (1, 2)}

    assert identical_siblings(blocks, blocks) == [(1,), (2,)]


@given(texts=st.lists(st.sampled_from(["", "a", "a ", "b"]), max_size=12))
def test_every_block_is_in_one_group_in_its_order(texts: list[str]) -> None:
    blocks = {n: dataclasses.replace(FIRST, id=n, text=text) for n, text in enumerate(texts)}

    groups = identical_siblings(blocks, blocks)

    assert sorted(node for group in groups for node in group) == list(blocks)
    assert all(list(group) == sorted(group) for group in groups)
    assert [group[0] for group in groups] == sorted(group[0] for group in groups)
