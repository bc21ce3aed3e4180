"""Runs on disk: write them, read them back, replay them event by event, watch them live.

The names are loaded when they are first asked for: whoever writes a trace needs no tree and no terminal.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from arbor.trace.fold import Block, Replay, canonical
    from arbor.trace.read import Trace, read_trace
    from arbor.trace.write import SCHEMA, TraceWriter

__all__ = ["SCHEMA", "Block", "Replay", "Trace", "TraceWriter", "canonical", "read_trace"]

_HOME = {
    "SCHEMA": "write",
    "Block": "fold",
    "Replay": "fold",
    "Trace": "read",
    "TraceWriter": "write",
    "canonical": "fold",
    "read_trace": "read",
}


def __getattr__(name: str) -> Any:
    """Loads the module a name lives in."""
    if name not in _HOME:
        raise AttributeError(f"module 'arbor.trace' has no attribute '{name}'")
    value = getattr(importlib.import_module(f"arbor.trace.{_HOME[name]}"), name)
    globals()[name] = value
    return value
