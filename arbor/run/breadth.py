"""The breadth of a search by default: narrower where thoughts are sentences of a large model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from arbor import components
from arbor.tasks.base import Task
from arbor.tasks.worded import Worded

# by name of a controller: what ends in minutes on two cores with 1.5 billion parameters
NARROW: Mapping[str, Mapping[str, int]] = {
    "tot": {"beam": 2, "width": 3, "max_visited": 24},
    "beam": {"beam_size": 2, "width": 3},
    "dvts": {"subtrees": 2, "width": 3},
    "rebase": {"width": 6},
    "ets": {"width": 6},
    "best-first": {"width": 3, "expansions": 8},
    "dpts": {"width": 3, "max_visited": 24},
    "mcts": {"width": 3, "simulations": 8},
    "rap": {"width": 3, "simulations": 8},
    "rstar": {"width": 3, "simulations": 8},
    "rest-mcts": {"width": 3, "simulations": 8},
    "ab-mcts": {"thoughts": 24},
}


def with_breadth(controller: Any, task: Task) -> Any:
    """A controller as a user names it, with the breadth that the task's searches have by default.

    Settings that are given stay; a ready controller is left as it is.
    """
    if not isinstance(task, Worded):
        return controller
    if isinstance(controller, str):
        name, given = components.split_spec(controller)
    elif isinstance(controller, Mapping):
        name, given = str(controller.get("name")), dict(controller)
    else:
        return controller
    return {**NARROW.get(name, {}), **given, "name": name}
