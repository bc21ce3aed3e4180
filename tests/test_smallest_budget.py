"""The smallest workable budget of a plan is enough, whatever blocks a search grows."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from support.models import Words, build
from support.slow_cases import every
from support.trees import LENGTH, PROMPT, SAMPLED, Lab

from arbor.budget import Budget, Footprint
from arbor.engine.mode import Rehydrate
from arbor.engine.stop_rule import StopRule
from arbor.engine.token_source import Growth
from arbor.errors import BudgetInfeasible
from arbor.events import Forwarded, Rehydrated
from arbor.tasks.base import BlockLimits

pytestmark = pytest.mark.usefixtures("loaded_once")

DEPTH = 4
QUESTIONS = ((7, 8, 9), (11,))
ENDS = range(0, 80, 6)  # tokens that end a block before its bound
SHAPE = Footprint(len(PROMPT), LENGTH, DEPTH, blocks=60, question_tokens=max(map(len, QUESTIONS)))


def grow_at_random(lab: Lab, slots: int, seed: int) -> None:
    """Six rounds of growing and asking; they depend on the shape of the tree alone."""
    choices = random.Random(seed)
    tree = lab.plant(slots)
    growth = Growth(seed, SAMPLED, StopRule(Words(), BlockLimits((), LENGTH, DEPTH), ENDS))
    nodes = {(): tree.root}
    for _ in range(6):
        open_ends = [key for key in nodes if len(key) < DEPTH]
        leaves = choices.sample(open_ends, min(len(open_ends), choices.randint(1, 3)))
        grown = lab.grow([(nodes[key], choices.randint(1, 3)) for key in leaves], growth)
        nodes |= {child.key: child for child in grown}
        asked = choices.sample(list(nodes), min(len(nodes), 4))
        lab.ask([nodes[key] for key in asked], [choices.choice(QUESTIONS) for _ in asked])


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=str)
def model(request: pytest.FixtureRequest) -> Any:
    return build("llama").to(request.param)


@pytest.mark.parametrize("rehydrate", ["selective", "span"])
@pytest.mark.parametrize("seed", every(5, range(6)))
def test_random_trees_grow_within_the_smallest_budget(
    model: Any, rehydrate: Rehydrate, seed: int
) -> None:
    smallest = Budget.parse("full").plan(SHAPE, 1).smallest_tokens
    lab = Lab(model, policy="reentry", rehydrate=rehydrate, debug=True)

    grow_at_random(lab, smallest, seed)

    assert max(event.peak for event in lab.events if isinstance(event, Forwarded)) <= smallest
    assert any(isinstance(event, Rehydrated) for event in lab.events)


def test_one_token_less_is_not_enough_for_the_longest_path(model: Any) -> None:
    """So that the test above is about the smallest budget."""
    smallest = SHAPE.smallest_tokens - SHAPE.question_tokens
    stop = StopRule(Words(), BlockLimits((), LENGTH, DEPTH), ())

    def longest_path(slots: int) -> None:
        lab = Lab(model)
        end = lab.plant(slots).root
        for _ in range(DEPTH):
            (end,) = lab.grow([(end, 1)], Growth(0, SAMPLED, stop))

    longest_path(smallest)
    with pytest.raises(BudgetInfeasible) as error:
        longest_path(smallest - 1)
    assert error.value.needed == smallest
