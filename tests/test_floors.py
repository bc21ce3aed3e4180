"""Whatever must stay, and whatever the budget: a search fits, or is refused; it never goes round in
circles."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
from hypothesis import Phase, event, given, settings
from hypothesis import strategies as st
from support.models import build
from support.offers import EVERY
from support.policies import POLICIES
from support.trees import Lab, grown

from arbor.engine.mode import Mode, Rehydrate
from arbor.errors import BudgetInfeasible
from arbor.events import Event, Forwarded, Pressure
from arbor.retention.policy import Protect

# ten blocks of five tokens, a prompt and twelve questions, one after the other and each path
# computed anew
MOST = {"forwards": 120, "fits": 240}


@pytest.fixture(scope="module")
def model() -> Any:
    return build("llama")


class Counted(Lab):
    """A lab that counts its steps, and stops where there are more than a search can take."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.steps: Counter[str] = Counter()
        super().__init__(*args, **kwargs)
        self.listener = self.count

    def count(self, what: Event) -> None:
        self.steps["forwards"] += what.steps if isinstance(what, Forwarded) else 0
        self.steps["fits"] += isinstance(what, Pressure)
        for name, most in MOST.items():
            assert self.steps[name] <= most, f"more than {most} {name}"


tokens = st.integers(0, 24)
protects = st.builds(Protect, sinks=tokens, recent=tokens, tail=tokens, floor=tokens)
modes = st.sampled_from(
    [
        ("lossless", "selective"),
        ("lossless", "span"),
        ("lossy", "selective"),
        ("lossy", "span"),
        ("lossy", "off"),
    ]
)


@pytest.mark.slow
@settings(max_examples=20, phases=(Phase.explicit, Phase.generate))  # shrinking takes minutes
@given(st.sampled_from(["full", *EVERY]), protects, modes, st.integers(1, 70))
def test_floors_that_do_not_fit_are_refused_and_never_hang(
    model: Any, name: str, protect: Protect, mode: tuple[Mode, Rehydrate], slots: int
) -> None:
    policy = dataclasses.replace({**POLICIES, **EVERY}[name], protect=protect)
    if policy.by_head:
        mode = ("lossy", mode[1])
    lab = Counted(model, policy=policy, mode=mode[0], rehydrate=mode[1])

    try:
        tree, _ = grown(lab, slots)
    except BudgetInfeasible as error:
        assert error.needed > slots == error.budget
        event(f"refused {mode[0]}")
    else:
        assert len(tree) == 10
        assert lab.steps["forwards"] > 10
        event(f"fits {mode[0]}")
    lab.memory.check()
    assert lab.memory.peak <= slots
