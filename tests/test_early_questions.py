"""Questions about blocks while others wait for room: asked once, before the KV has left."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from support.slow_cases import only

from arbor import Solver
from arbor.events import Boundary, Event, Forwarded, Selected, Verified
from arbor.run.verification import EarlyQuestions
from arbor.tree import Node

SEARCHES = ["tot", "beam", "mcts"]


def searched(controller: str, budget: float) -> tuple[list[Event], int, int]:
    """Events of a search, tokens computed again, and tokens generated."""
    events: list[Event] = []
    with Solver(controller=controller, budget=budget, listeners=(events.append,)) as solver:
        metrics = solver.solve("4 5 6 10").metrics
    return events, metrics.tokens_recomputed, metrics.tokens_generated


def asked_early(events: list[Event]) -> int:
    """Forwards with questions that ran before the last block of their round had ended."""
    count = pending = 0
    for event in events:
        if isinstance(event, Selected):
            pending = 0
        elif isinstance(event, Forwarded) and event.kind == "verify":
            pending += 1
        elif isinstance(event, Boundary):
            count, pending = count + pending, 0
    return count


def values(events: list[Event]) -> list[tuple[tuple[int, ...], tuple[float, ...], int]]:
    return [(e.nodes, e.values, e.asked) for e in events if isinstance(e, Verified)]


@pytest.mark.parametrize("controller", only(["tot"], SEARCHES))
def test_blocks_are_judged_while_others_wait_and_are_not_computed_again_for_it(
    controller: str,
) -> None:
    whole, _, _ = searched(controller, 1.0)
    events, again, generated = searched(controller, 0.25)

    assert values(events) == values(whole)
    assert asked_early(whole) == 0 and asked_early(events) > 2
    # what is left are paths of later blocks; judged at the end of a wave, it was twice as much
    assert again < {"tot": 0.2, "beam": 0.3, "mcts": 0.6}[controller] * generated


def test_an_early_answer_does_not_keep_the_logits_of_other_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept: list[int] = []
    take = EarlyQuestions.take

    def looking(
        self: EarlyQuestions, nodes: Sequence[Node], questions: Sequence[Sequence[int]]
    ) -> dict[int, torch.Tensor]:
        found = take(self, nodes, questions)
        kept.extend(each.untyped_storage().nbytes() // each.nbytes for each in found.values())
        return found

    monkeypatch.setattr(EarlyQuestions, "take", looking)
    searched("tot", 0.25)

    assert len(kept) > 10 and set(kept) == {1}
