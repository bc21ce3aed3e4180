"""Named search shapes, lossy budgets, and when a recorded run reads a block."""

from __future__ import annotations

import numpy as np
import pytest

from arbor import Solver
from arbor.budget import Budget, Footprint
from arbor.cli.record_options import read_options
from arbor.cli.solve import SolveOptions
from arbor.cli.solve import solve as command
from arbor.errors import BudgetInfeasible, UnknownName
from arbor.events import Opened, Selected, Verified
from arbor.retention.base import NEVER
from arbor.retention.future_reads import FutureReads
from arbor.run.presets import PRESETS, preset
from arbor.run.settings import Settings
from arbor.support.setting import settings_of

pytestmark = pytest.mark.usefixtures("loaded_once")

SHAPES = {"config-s": (3, 6, 64), "config-l": (5, 8, 256)}


@pytest.mark.parametrize("name", SHAPES)
def test_a_preset_is_the_papers_configuration(name: str) -> None:
    width, depth, expansions = SHAPES[name]
    config = Solver(**preset(name)).config

    assert config["controller"]["width"] == width
    assert (config["max_depth"], config["max_expansions"]) == (depth, expansions)
    assert config["step_tokens"] == 128
    assert (config["sampling"]["temperature"], config["sampling"]["top_p"]) == (0.7, 0.9)


def test_self_consistency_is_a_vote_of_chains() -> None:
    config = Solver(**preset("self-consistency")).config

    assert sorted(PRESETS) == sorted([*SHAPES, "self-consistency"])
    assert config["controller"] == {"name": "chain", "samples": 40}
    assert config["aggregate"] == {"name": "majority"}
    assert (config["sampling"]["temperature"], config["sampling"]["top_k"]) == (0.7, 40)


def test_an_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(UnknownName, match="config-s"):
        preset("config-x")


@pytest.mark.parametrize(
    "given", [(), ("--mode", "lossy"), ("--mode", "lossy", "--rehydrate", "span")], ids=str
)
def test_the_command_and_the_solver_have_the_same_defaults(given: tuple[str, ...]) -> None:
    values = command.make_context("solve", ["4 5 6 10", *given]).params
    asked = read_options(SolveOptions, values).solver
    solver = Solver(mode=asked.settings.mode, rehydrate=asked.settings.rehydrate)

    assert asked.components["policy"] == solver.policy.name
    for name in settings_of(Settings).keys() - {
        "msve",
        "sampling",
    }:  # the model's, once it is known
        assert getattr(asked.settings, name) == getattr(solver.setup, name), name


def test_a_lossy_budget_may_be_smaller_than_a_path_and_says_when_it_is_too_small() -> None:
    whole = Footprint(200, 16, 6, 100, 4)
    lossy = Footprint(200, 16, 6, 100, 4, protected_tokens=12)
    assert (whole.enough_tokens, lossy.enough_tokens) == (300, 20)
    Budget.parse("20tok").plan(lossy, 64)
    with pytest.raises(BudgetInfeasible, match="12 protected") as caught:
        Budget.parse("19tok").plan(lossy, 64)
    assert caught.value.needed == 20


def test_the_smallest_lossy_budget_runs() -> None:
    with Solver(mode="lossy", policy="streaming", verifier="exact") as solver:
        smallest = solver.plan("4 5 6 10").enough_tokens
        metrics = solver.solve("4 5 6 10", budget=f"{smallest}tok").metrics
    assert 0 < metrics.peak_tokens <= smallest
    assert metrics.tokens_recomputed == 0


def test_uses_say_which_operation_reads_a_block_next() -> None:
    def opened(node: int, parent: int | None) -> Opened:
        return Opened(node=node, parent=parent, index=0, depth=0, tokens=1, text="")

    uses = FutureReads.of(
        [
            opened(0, None),
            Selected(((0, 2),)),  # operation 1
            opened(1, 0),
            opened(2, 0),
            Verified("self", (1, 2), (0.5, 0.5), 2, 0.0),  # 2
            Selected(((2, 1),)),  # 3
            opened(3, 2),
            Verified("exact", (3,), (1.0,), 0, 0.0),  # asks nothing
        ]
    )
    ids = np.arange(4)
    assert uses.after(0, ids).tolist() == [1, 2, 2, NEVER]
    assert uses.after(2, ids).tolist() == [3, NEVER, 3, NEVER]
    assert uses.after(3, ids).tolist() == [NEVER] * 4
