"""Presets: the search configurations of the papers, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from arbor.errors import UnknownName

_ARBORKV: Mapping[str, Any] = {"temperature": 0.7, "top_p": 0.9}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    # ArborKV section 5.1: branching 3, depth 6, 64 expansions, 128 tokens a thought
    "config-s": {
        "controller": {"name": "tot", "strategy": "dfs", "width": 3, "max_visited": 64},
        "max_depth": 6,
        "max_expansions": 64,
        "step_tokens": 128,
        "sampling": _ARBORKV,
    },
    # branching 5, depth 8, 256 expansions
    "config-l": {
        "controller": {
            "name": "tot",
            "strategy": "dfs",
            "width": 5,
            "max_per_state": 5,
            "max_visited": 256,
        },
        "max_depth": 8,
        "max_expansions": 256,
        "step_tokens": 128,
        "sampling": _ARBORKV,
    },
    # Wang et al., arXiv 2203.11171: 40 sampled chains, temperature 0.7, top-k 40
    "self-consistency": {
        "controller": {"name": "chain", "samples": 40},
        "aggregate": "majority",
        "sampling": {"temperature": 0.7, "top_k": 40},
    },
}


def preset(name: str) -> dict[str, Any]:
    """The settings of `Solver` under a preset's name: ``Solver(**preset("config-s"))``.

    The ArborKV paper calls the search of ``config-s`` and ``config-l`` only "DPTS-style". Here it
    is depth-first search, which backtracks, so that evicted blocks are needed again.

    Raises:
        UnknownName: no such preset; suggests the closest one.
    """
    if name not in PRESETS:
        raise UnknownName("preset", name, sorted(PRESETS))
    return dict(PRESETS[name])
