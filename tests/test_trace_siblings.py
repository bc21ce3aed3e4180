"""Identical siblings: what makes them identical, and that no block is lost."""

from __future__ import annotations

import dataclasses

import pytest

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
