"""Traces: runs on disk, written, read, replayed event by event, compared and repaired.

Names load on first use: writing a trace imports neither the tree nor numpy.
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
