"""scripts/wipe_out.py: segments of a path of which no token is held."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from support.slow_cases import every

from arbor import Solver

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
TEXT = (
    "Facts: Tom has 4 more than Amy. Bob has 7. Amy has 3. Sue has 2 times as many as Tom. "
    "How many does Sue have?"
)


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    sys.path.insert(0, str(SCRIPTS))
    import wipe_out

    yield wipe_out
    sys.path.remove(str(SCRIPTS))


def test_a_segment_is_wiped_out_when_nothing_of_it_is_held(script: ModuleType) -> None:
    held = np.array([[1, 0, 0, 0, 0, 1]], bool)
    assert script.wiped(held, [2, 2, 2]) == pytest.approx(1 / 3)
    assert script.wiped(held, [2, 0, 4]) == 0  # an empty segment does not count
    assert script.wiped(held, [1, 4, 1]) == pytest.approx(1 / 3)
    two = np.array([[1, 0, 0, 0], [0, 0, 0, 0]], bool)
    assert script.wiped(two, [2, 2]) == pytest.approx(3 / 4)  # the mean over heads
    assert script.wiped(np.zeros((1, 0), bool), []) == 0


@pytest.mark.parametrize(
    "policy", every(4, ["snapkv,granularity=head", "tova", "lru", "pyramidkv"])
)
def test_what_is_held_is_what_the_engine_holds(script: ModuleType, policy: str) -> None:
    with Solver(
        task="chains",
        controller="chain",
        verifier="exact",
        policy=policy,
        mode="lossy",
        budget="64tok",
        step_tokens=36,
        sampling={"temperature": 0.0},
    ) as solver:
        solver.solve(TEXT)
        held, lengths = script.held_tokens(solver)
        memory, nodes = solver.engine.memory, solver.engine.tree.nodes
        rates = script.wipe_out(solver)

    assert lengths == [len(node.tokens) for node in nodes]
    assert held.shape[1] == sum(lengths)
    heads = 1 if memory.heads is None else len(memory.heads)
    assert len(held) == heads
    # cells of the slots in use, of which each holds one token of one head
    assert held.sum() == heads * memory.used <= heads * 64
    begins = np.cumsum(lengths) - lengths
    lines = [held[:, b : b + n] for b, n in zip(begins[1:], lengths[1:], strict=True) if n]
    assert rates["lines"] == pytest.approx(np.mean([~line.any(1) for line in lines]))
    assert 0 <= rates["stretches"] <= 1
