"""Identical siblings: blocks with one parent, text, state and answer, which a view shows as one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from arbor.trace.fold import Block
from arbor.tree import NodeState


def identical_siblings(blocks: Mapping[int, Block], nodes: Iterable[int]) -> list[tuple[int, ...]]:
    """Groups of identical siblings, in the order of their first members.

    Spaces around a text do not count. An open block, and a block without text, is identical to no
    other: its text is not known.

    Args:
        blocks: of a replay, by id.
        nodes: the ids to group; members of a group keep their order.
    """
    groups: dict[object, list[int]] = {}
    for node in nodes:
        block = blocks[node]
        text = block.text.strip()
        known = text and block.state is not NodeState.OPEN
        key = (block.parent, text, block.state, block.answer) if known else node
        groups.setdefault(key, []).append(node)
    return [tuple(group) for group in groups.values()]
