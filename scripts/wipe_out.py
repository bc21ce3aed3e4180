"""Wipe-out: the part of a path's segments of which no token is held (AMS, arXiv 2605.23200).

The paper names the failure and a rate but does not define its segments; here they are the lines of
the path, the prompt left out, and stretches of equal length of the whole path.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from arbor import Solver
from arbor.tree import NO_SLOT

STRETCH = 16  # positions; a line of a word problem has about 20


def held_tokens(solver: Solver) -> tuple[NDArray[np.bool_], list[int]]:
    """Which tokens of the last run's path the device holds.

    Args:
        solver: its last run was one chain; KV stays in place until the next.

    Returns:
        bool [C, T], of each KV head of each layer, or [1, T] where all hold the same; and the
        lengths of the path's blocks, the prompt first, which sum to T.
    """
    engine = solver.engine
    memory, nodes = engine.memory, engine.tree.nodes
    lengths = [len(node.span.slot) for node in nodes]
    ends = np.cumsum(lengths)
    slots = np.concatenate([node.span.slot for node in nodes])
    here = np.flatnonzero(slots != NO_SLOT)
    heads = memory.heads
    if heads is None or not memory.table.mixed[slots[here]].any():
        held = np.zeros((1, int(ends[-1])), bool)
        held[0, here] = True
        return held, lengths
    held = np.zeros((len(heads), int(ends[-1])), bool)
    positions = heads.positions(memory.table, slots[here])
    holders = heads.holders(memory.table, slots[here])
    if holders is None:
        holders = np.broadcast_to(np.arange(len(heads))[:, None], positions.shape)
    held[holders, positions] = True
    return held, lengths


def wiped(held: NDArray[np.bool_], lengths: Sequence[int]) -> float:
    """The part of segments of which nothing is held, mean over KV heads.

    Args:
        held: bool [C, T].
        lengths: tokens of each segment, in order; empty ones do not count.
    """
    sizes = np.array([length for length in lengths if length], np.int64)
    if not len(sizes):
        return 0.0
    counts = np.add.reduceat(held, np.cumsum(sizes) - sizes, axis=1, dtype=np.int64)
    return float((counts == 0).mean())


def wipe_out(solver: Solver) -> dict[str, float]:
    """The rates of the last run: of its lines, and of stretches of `STRETCH` positions."""
    held, lengths = held_tokens(solver)
    prompt, total = lengths[0], sum(lengths)
    whole, rest = divmod(total, STRETCH)
    return {
        "lines": wiped(held[:, prompt:], lengths[1:]),
        "stretches": wiped(held, [STRETCH] * whole + [rest]),
    }
