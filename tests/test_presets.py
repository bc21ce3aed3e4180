"""Named search shapes, lossy budgets, and when a recorded run reads a block."""

from __future__ import annotations

import pytest

from arbor import Solver
from arbor.cli.record_options import read_options
from arbor.cli.solve import SolveOptions
from arbor.cli.solve import solve as command
from arbor.retention.alpha import with_alpha
from arbor.run.presets import preset
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
        wanted = getattr(asked.settings, name)
        if name == "policy":  # without a calibration
            wanted = with_alpha(wanted, None)
        assert wanted == getattr(solver.setup, name), name
