"""What the engine leaves behind when a forward fails or a search is interrupted."""

from __future__ import annotations

from typing import Any

import pytest
from models import build
from trees import Lab

from arbor.engine.runner import ModelRunner
from arbor.events import Boundary
from arbor.tree import NodeState


class Failure(RuntimeError):
    """Stands for an out-of-memory error in the middle of a forward."""


def fail_after(monkeypatch: pytest.MonkeyPatch, forwards: int) -> None:
    """Let so many forwards through, then fail one, then work again."""
    right = ModelRunner.forward
    count = 0

    def forward(self: ModelRunner, *args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == forwards + 1:
            raise Failure
        return right(self, *args, **kwargs)

    monkeypatch.setattr(ModelRunner, "forward", forward)


@pytest.mark.parametrize("forwards", [0, 3])
def test_a_failed_forward_leaves_no_token_that_claims_kv_it_never_got(
    monkeypatch: pytest.MonkeyPatch, forwards: int
) -> None:
    lab = Lab(build("llama"), debug=True)
    tree = lab.plant()
    held = lab.memory.used
    fail_after(monkeypatch, forwards)

    with pytest.raises(Failure):
        lab.sprout([(tree.root, 3)])

    lab.memory.check()
    assert lab.memory.used == held + 3 * forwards
    for child in tree.root.children:
        assert child.span.exact.sum() == forwards


def test_a_failed_rehydration_can_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(build("llama"), debug=True)
    tree = lab.plant()
    right = lab.ask([tree.root], [(7, 8)])
    lab.memory.release([tree.root])
    fail_after(monkeypatch, 0)

    with pytest.raises(Failure):
        lab.ask([tree.root], [(7, 8)])

    assert lab.memory.used == 0
    again = lab.ask([tree.root], [(7, 8)])
    assert float((again - right).abs().max()) < 1e-5


def test_an_interruption_gives_up_blocks_in_progress_and_waves_not_begun() -> None:
    lab = Lab(build("llama"), debug=True)
    tree = lab.plant(slots=24)
    steps = 0

    def interrupted() -> bool:
        nonlocal steps
        steps += 1
        return steps > 3

    lab.open(tree, 24, interrupted)
    lab.extend(tree.root)
    children = lab.sprout([(tree.root, 4)])

    assert [child.state for child in children] == [NodeState.PRUNED] * 4
    assert [len(child.tokens) for child in children][2:] == [0, 0]
    stops = [event.stop for event in lab.events if isinstance(event, Boundary)]
    assert stops == ["limit"] * 4
