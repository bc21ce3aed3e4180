"""How a model is divided among ranks, by transformers' plan for its architecture."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from arbor.errors import ModelError, UsageError

COLUMNS, GATHERED = "colwise", "colwise_gather_output"
ROWS, SPLIT = "rowwise", "rowwise_split_input"
WHOLE = "replicate"  # each rank has all of it
KEYS = ("k_proj", "qkv_proj", "query_key_value")  # what computes the keys


def cannot(count: int, what: str, instead: str) -> UsageError:
    """The error for what does not run on several ranks."""
    return UsageError(
        "tp",
        f"--tp {count}: {what} does not run on several processes.",
        f"Use {instead}.",
        tp=count,
    )


@dataclass(frozen=True, slots=True)
class Division:
    """Which part of a model each rank has.

    Attributes:
        count: ranks.
        plan: module, with ``*`` for the number of its layer -> a style of transformers; what each
            rank has whole is `WHOLE`.
        read_whole: modules that each rank reads whole, and has a part of.
        kv_heads: of a layer, in all.
        kv_heads_each: of these on each rank.
        copies: ranks that have the same KV head, where there are fewer heads than ranks.
        attention: whether each rank computes some of the heads; else all of them.
        note: why a part of a layer is not divided; empty if all is.
        numbers: weights that each rank has, up to a block of a quantised format.
    """

    count: int
    plan: Mapping[str, str]
    kv_heads: int
    kv_heads_each: int
    read_whole: frozenset[str] = frozenset()
    copies: int = 1
    attention: bool = True
    note: str = ""
    numbers: int = 0

    @property
    def read(self) -> dict[str, str]:
        """The plan by which transformers reads weights."""
        return {
            name: WHOLE if name in self.read_whole else style for name, style in self.plan.items()
        }


def division_of(config: Any, count: int) -> Division:
    """How a model is divided, from its config alone.

    Heads that do not divide are computed by every rank, and one KV head by several ranks where
    there are fewer of them than ranks. Embeddings are whole everywhere.

    Raises:
        ModelError: transformers has no plan for the architecture.
    """
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    division = _division(config.get_text_config(), dict(model.tp_plan or {}), count)
    return replace(division, numbers=_numbers_each(model, division))


def _numbers_each(model: Any, division: Division) -> int:
    """Weights of each rank; those of a head that is the embedding count once."""
    found = 0
    for name, weight in model.named_parameters():
        module, _, part = name.rpartition(".")
        style = division.plan.get(starred(module))
        count = 1
        if style in (COLUMNS, GATHERED) or (style in (ROWS, SPLIT) and part == "weight"):
            count = division.count
            if _last(module) in ("k_proj", "v_proj") and division.attention:
                count = division.kv_heads // division.kv_heads_each
        found += -(-weight.numel() // count)
    return found


def starred(name: str) -> str:
    """``model.layers.3.mlp`` -> ``model.layers.*.mlp``, as plans name it."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _division(text: Any, plan: dict[str, str], count: int) -> Division:
    """`division_of`, from the config of a decoder and transformers' plan for it."""
    if not any(".layers." in name for name in plan):
        raise ModelError(
            "tp-unsupported",
            f"transformers has no plan that divides model_type '{text.model_type}'.",
            "Use --tp 1, or another model.",
            model_type=text.model_type,
        )
    plan |= {name: WHOLE for name in plan if name.endswith("embed_tokens")}
    tied = frozenset(name for name in plan if "." not in name and text.tie_word_embeddings)
    heads = int(text.num_attention_heads)
    kv_heads = int(getattr(text, "num_key_value_heads", None) or heads)
    keys = [name for name, style in plan.items() if _last(name) in KEYS and style == COLUMNS]
    if not keys:
        return Division(count, plan, kv_heads, kv_heads, tied, attention=False)
    if not heads % count and not kv_heads % count:
        return Division(count, plan, kv_heads, kv_heads // count, tied)
    if not heads % count and not count % kv_heads and all(_last(name) == KEYS[0] for name in keys):
        own = [name.removesuffix(KEYS[0]) for name in keys]
        both = frozenset(name for part in own for name in (f"{part}k_proj", f"{part}v_proj"))
        copies = count // kv_heads
        note = f"{copies} processes have the same KV head"
        return Division(count, plan, kv_heads, 1, tied | both, copies, note=note)
    attention = tuple(name.removesuffix(_last(name)) for name in keys)
    plan |= {name: WHOLE for name in plan if name.startswith(attention)}
    note = (
        f"{heads} query heads and {kv_heads} KV heads do not divide by {count}: each process "
        "computes all of them, and keeps all KV"
    )
    return Division(count, plan, kv_heads, kv_heads, tied, attention=False, note=note)


def cuts(size: int, count: int, grain: int) -> list[int]:
    """Where a dimension is cut into parts that are as alike as blocks of `grain` let them be.

    Returns:
        `count` + 1 places, from 0 to `size`.

    Example:
        >>> cuts(4864, 2, 256)
        [0, 2560, 4864]
    """
    blocks = -(-size // grain)
    return [min(size, -(-blocks * each // count) * grain) for each in range(count + 1)]


def _last(name: str) -> str:
    return name.rpartition(".")[2]
