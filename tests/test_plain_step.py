"""A step that only decodes enters what it needs, and nothing to learn that it needs no more."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import arbor
from arbor import Solver
from arbor.engine import hooks
from arbor.engine.step import Stepper
from arbor.kernels.native import native_library

PACKAGE = f"{Path(arbor.__file__).parent.as_posix()}/"
OWN = ("engine", "memory", "retention", "forest.py", "tree.py")
BUDGETS = ("full", 0.25)
# files and functions that a plain step enters of these, and of all; a comprehension counts for the
# function it is in
MOST = {"full": (10, 40), 0.25: (11, 51)}
MOST_WITH_NATIVE = {"full": (24, 75), 0.25: (25, 86)}
JOINS = {"Stepper._join", "Stepper._start"}
HOOKS = {
    name
    for hook in (hooks.PromptHook, hooks.Way, hooks.BranchHook, hooks.Watch)
    for name in vars(hook)
    if not name.startswith("_")
}

Entered = set[tuple[str, str]]  # paths below the package, and functions


@pytest.fixture(scope="module", params=BUDGETS)
def budget(request: pytest.FixtureRequest) -> str | float:
    """What the search may hold."""
    given: str | float = request.param
    return given


@pytest.fixture(scope="module")
def plain(budget: str | float) -> list[Entered]:
    """What each step of a search enters that only decodes, without a feature."""
    steps: list[Entered] = []
    right = Stepper.step

    def watched(self: Stepper) -> None:
        entered: Entered = set()

        def note(frame: FrameType, event: str, _: Any) -> None:
            path = frame.f_code.co_filename
            if event == "call" and path.startswith(PACKAGE):
                function = frame.f_code.co_qualname.split(".<locals>")[0]
                entered.add((path.removeprefix(PACKAGE), function))

        sys.setprofile(note)
        try:
            right(self)
        finally:
            sys.setprofile(None)
        steps.append(entered)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stepper, "step", watched)
        with Solver(controller="tot", budget=budget) as solver:
            solver.solve("4 5 6 10", max_tokens=150)
            steps.clear()  # what is done once is done by now
            solver.solve("3 3 8 8", max_tokens=250)
    return [step for step in steps if not JOINS & {function for _, function in step}]


def test_a_plain_step_calls_no_hook(plain: list[Entered]) -> None:
    assert {"other", "watch", "ahead", "chosen", "answer"} <= HOOKS
    for step in plain:
        assert "engine/hooks.py" not in {path for path, _ in step}
        assert not {path for path, _ in step if path.startswith(("papers/", "integrations/"))}
        assert not HOOKS & {function.rpartition(".")[2] for _, function in step}


def counts(steps: list[Entered]) -> tuple[float, float]:
    """Files and functions that a step enters, medians."""
    files = statistics.median(len({path for path, _ in step}) for step in steps)
    return files, statistics.median(len(step) for step in steps)


def test_a_plain_step_enters_few_files_and_functions(
    plain: list[Entered], budget: str | float
) -> None:
    own = [{each for each in step if each[0].split("/")[0] in OWN} for step in plain]

    assert len(own) > 10
    files, functions = counts(own)
    assert files <= MOST[budget][0]
    assert functions <= MOST[budget][1]


@pytest.mark.skipif(native_library() is None, reason="the library is not built")
def test_a_plain_step_asks_nothing_that_a_plan_has_decided(
    plain: list[Entered], budget: str | float
) -> None:
    files, functions = counts(plain)

    assert files <= MOST_WITH_NATIVE[budget][0]
    assert functions <= MOST_WITH_NATIVE[budget][1]
