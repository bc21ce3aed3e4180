"""The longest path whose KV stays valid as the path grows."""

from __future__ import annotations

from typing import Any


def context_limit(config: Any) -> int:
    """Tokens a path may have, from the text config."""
    return int(getattr(config, "max_position_embeddings", 0) or getattr(config, "n_positions", 2048))
