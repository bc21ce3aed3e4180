"""The clairvoyant policy's knowledge: which operation of a recorded run reads a block next."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from arbor.events import Event, Opened, Selected, Verified
from arbor.retention.base import NEVER
from arbor.retention.future_reads import FutureReads


@given(
    reads=st.lists(st.sets(st.integers(0, 6)), max_size=8),
    operation=st.integers(0, 9),
)
def test_the_next_read_is_the_first_operation_after_this_one_with_the_block(
    reads: list[set[int]], operation: int
) -> None:
    ids = np.arange(8)

    found = FutureReads(reads).after(operation, ids)

    for node, next_use in enumerate(found.tolist()):
        later = [at for at, nodes in enumerate(reads, 1) if at > operation and node in nodes]
        assert next_use == min(later, default=NEVER)
    assert found.dtype == np.int64


def test_operations_are_the_expansions_and_the_verifications_that_asked_the_model() -> None:
    def opened(node: int, parent: int | None) -> Opened:
        return Opened(node, parent, 0, 0, 0, "")

    def verified(nodes: tuple[int, ...], asked: int) -> Verified:
        return Verified("self", nodes, (0.5,) * len(nodes), asked, 0.0)

    events: list[Event] = [
        opened(0, None),
        Selected(((0, 2),)),
        opened(1, 0),
        opened(2, 0),
        verified((1, 2), asked=0),
        Selected(((2, 1),)),
        opened(3, 2),
        verified((3, 1), asked=2),
        Selected(((1, 1),)),
    ]
    reads = FutureReads.of(events)
    ids = np.arange(4)

    assert reads.after(0, ids).tolist() == [1, 3, 2, 3]
    assert reads.after(2, ids).tolist() == [3, 3, 3, 3]
    assert reads.after(3, ids).tolist() == [4, 4, NEVER, NEVER]
    assert reads.after(4, ids).tolist() == [NEVER] * 4
