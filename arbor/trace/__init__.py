"""Runs on disk: write them, read them back, replay them event by event, watch them live."""

from arbor.trace.read import Trace, read_trace
from arbor.trace.replay import Block, Replay, canonical
from arbor.trace.write import SCHEMA, TraceWriter

__all__ = ["SCHEMA", "Block", "Replay", "Trace", "TraceWriter", "canonical", "read_trace"]
