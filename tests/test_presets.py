"""Named search shapes, lossy budgets, and when a recorded run reads a block."""

from __future__ import annotations

import pytest

from arbor import Solver
from arbor.cli.option_records import SolverOptions, read_options
from arbor.cli.solve import solve as command
from arbor.run.presets import preset

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


@pytest.mark.parametrize(
    "given", [(), ("--mode", "lossy"), ("--mode", "lossy", "--rehydrate", "span")], ids=str
)
def test_the_command_and_the_solver_have_the_same_defaults(given: tuple[str, ...]) -> None:
    options = read_options(
        SolverOptions, command.make_context("solve", ["4 5 6 10", *given]).params
    )
    solver = Solver(mode=options.mode, rehydrate=options.rehydrate)
    assert options.components["policy"] == solver.policy.name
    assert Solver().mode == command.make_context("solve", ["4 5 6 10"]).params["mode"]
