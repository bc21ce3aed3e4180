"""How a model is divided among ranks, by transformers' plan for its architecture."""

from __future__ import annotations

import os
from typing import Any

from arbor.errors import ModelError, UsageError


def cannot(count: int, what: str, instead: str) -> UsageError:
    """The error for what does not run on several ranks."""
    return UsageError(
        "tp", f"tp={count}: {what} does not run on several processes.", f"Use {instead}.", tp=count
    )


def kv_heads_of_rank(config: Any, count: int) -> tuple[int, int]:
    """The KV heads of a layer, in all and on each rank; from the config alone.

    They are divided only where the plan divides the keys, so that some models keep all on each
    rank.

    Raises:
        ModelError: transformers has no plan for the architecture, or the heads do not divide.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.distributed.tensor_parallel import get_kv_heads_per_rank

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    plan = dict(model.tp_plan or {})
    text = config.get_text_config()
    if not any(".layers." in name for name in plan):
        raise ModelError(
            "tp-unsupported",
            f"transformers has no plan that divides model_type '{text.model_type}'.",
            "Use tp=1, or another model.",
            model_type=text.model_type,
        )
    heads = int(text.num_attention_heads)
    kv_heads = int(getattr(text, "num_key_value_heads", None) or heads)
    mine = get_kv_heads_per_rank(plan, kv_heads, count)
    if mine is None or heads % count:
        fits = max(each for each in range(1, count) if not (kv_heads % each or heads % each))
        raise ModelError(
            "tp-unsupported",
            f"tp={count}: {heads} query heads and {kv_heads} KV heads do not divide by {count}.",
            f"Use tp={fits}.",
            heads=heads,
            kv_heads=kv_heads,
        )
    assert isinstance(mine, int), "of one number, not of a list"
    return kv_heads, mine


def check_started(count: int) -> None:
    """Refuses a number of ranks that is not that of the processes.

    Raises:
        UsageError: there are others, or none.
    """
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if "RANK" not in os.environ or started != count:
        raise UsageError(
            "tp",
            f"tp={count}: this is one of {started} processes.",
            f"Start the script with torchrun --nproc-per-node {count}.",
            tp=count,
            processes=started,
        )
