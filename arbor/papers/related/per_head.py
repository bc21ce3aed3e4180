"""AdaKV and PyramidKV: how many tokens each KV head keeps, with the score of SnapKV."""

from __future__ import annotations

from arbor.retention.allocators.pooled import Pooled
from arbor.retention.policy import Policy
from arbor.retention.scorers.window import Window

ADAKV = Policy(
    Pooled(),
    Window(),
    granularity="head",
    heads="adaptive",
    summary="Keeps the tokens that the last queries attended to; the KV heads of a layer compete for "
    "its room (AdaKV).",
)

PYRAMIDKV = Policy(
    Pooled(),
    Window(),
    granularity="head",
    heads="pyramid",
    summary="Keeps the tokens that the last queries attended to, more of them in lower layers "
    "(PyramidKV).",
)
