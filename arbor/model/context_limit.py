"""The longest path whose KV stays valid as the path grows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

DEFAULT_CONTEXT = 2048  # of configs without a length


def context_limit(config: Any) -> int:
    """The longest path, in tokens, on which all K/V are rotated alike.

    Dynamic NTK and longrope choose the rotation by the largest position in the batch, so a path
    that outgrows the length they begin to rescale at would be attended with keys of two scales. Up
    to that length they are exact.

    Args:
        config: a text config.

    Returns:
        the model's context length, or the length at which its rotary embedding would begin to
        rescale.
    """
    limit = int(getattr(config, "max_position_embeddings", None) or DEFAULT_CONTEXT)
    for rope in _rotary(config):
        if rope.get("rope_type", rope.get("type")) == "longrope":
            outside = getattr(config, "original_max_position_embeddings", None)
            first = rope.get("original_max_position_embeddings") or outside or limit
            limit = min(limit, int(first))
    return limit


def _rotary(config: Any) -> Iterator[Mapping[str, Any]]:
    """The rotary parameters of every kind of layer: one mapping, or one per layer type."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if any(isinstance(part, Mapping) for part in rope.values()):
        yield from (part for part in rope.values() if isinstance(part, Mapping))
    else:
        yield rope
