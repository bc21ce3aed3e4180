"""arbor: a tree-search reasoning engine for language models that owns its KV cache.

The public names, loaded when they are first asked for: importing `arbor` imports neither torch nor
transformers.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

from arbor._version import __version__

if TYPE_CHECKING:
    from arbor.budget import Budget, Plan
    from arbor.errors import (
        ArborError,
        BudgetError,
        BudgetInfeasible,
        BudgetRange,
        InputError,
        ModelError,
        OutOfMemory,
        TraceError,
        UnknownName,
        UsageError,
        WorkerError,
    )
    from arbor.measure.workers import Workers
    from arbor.metrics import Metrics
    from arbor.model.sampling_params import Sampling
    from arbor.registry import register
    from arbor.run.listeners import Callback, StopSearch
    from arbor.run.solution import Solution
    from arbor.run.stream import SearchStream
    from arbor.solver import Solver
    from arbor.trace import Replay, Trace, TraceWriter, read_trace

__all__ = [
    "ArborError",
    "Budget",
    "BudgetError",
    "BudgetInfeasible",
    "BudgetRange",
    "Callback",
    "InputError",
    "Metrics",
    "ModelError",
    "OutOfMemory",
    "Plan",
    "Replay",
    "Sampling",
    "SearchStream",
    "Solution",
    "Solver",
    "StopSearch",
    "Trace",
    "TraceError",
    "TraceWriter",
    "UnknownName",
    "UsageError",
    "WorkerError",
    "Workers",
    "__version__",
    "read_trace",
    "register",
]

# Threads of torch that wait actively make a busy machine ten times slower. OpenMP reads this when
# torch is imported, and never again.
if "torch" not in sys.modules:
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

_HOMES = {
    "arbor.budget": ("Budget", "Plan"),
    "arbor.run.listeners": ("Callback", "StopSearch"),
    "arbor.model.sampling_params": ("Sampling",),
    "arbor.errors": (
        "ArborError",
        "BudgetError",
        "BudgetInfeasible",
        "BudgetRange",
        "InputError",
        "ModelError",
        "OutOfMemory",
        "TraceError",
        "UnknownName",
        "UsageError",
        "WorkerError",
    ),
    "arbor.measure.workers": ("Workers",),
    "arbor.metrics": ("Metrics",),
    "arbor.registry": ("register",),
    "arbor.run.solution": ("Solution",),
    "arbor.solver": ("Solver",),
    "arbor.run.stream": ("SearchStream",),
    "arbor.trace": ("Replay", "Trace", "TraceWriter", "read_trace"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Loads the module a public name lives in."""
    if name not in _HOME:
        raise AttributeError(f"module 'arbor' has no attribute '{name}'")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
