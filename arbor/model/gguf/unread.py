"""Refusals of a GGUF file whose model would leave something out: it would be another model.

`check_all_read` refuses tensors that the model does not take, as llama.cpp does. `check_settings`
refuses settings that change what llama.cpp computes and that no config of transformers takes.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping
from typing import Any

from arbor.errors import ModelError
from arbor.model.gguf.header import GGUFHeader
from arbor.model.gguf.rope import FACTORS, LONG, SHORT

HEAD = "output.weight"
ELSEWHERE = (FACTORS, SHORT, LONG, HEAD)  # a head that is not taken is tied to the embedding
CAUSAL = "attention.causal"

# Settings of an architecture, each with the values that change nothing.
NEUTRAL: Mapping[str, Collection[float]] = {
    CAUSAL: (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.output_scale": (0, 1),
    "attention.scale": (0,),
    "attention.temperature_length": (0,),
    "attention.temperature_scale": (0,),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "expert_count": (0,),
    "expert_gating_func": (0, 1),  # softmax
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_used_count": (0,),
    "expert_weights_scale": (0, 1),
    "final_logit_softcapping": (0,),
    "interleave_moe_layer_step": (0, 1),
    "leading_dense_block_count": (0,),
    "logit_scale": (0, 1),
    "moe_every_n_layers": (0, 1),
    "nextn_predict_layers": (0,),
    "residual_scale": (0, 1),
    "rope.scaling.alpha": (0, 1),
    "router_logit_softcapping": (0,),
    "swiglu_clamp_exp": (0,),
    "swiglu_clamp_shexp": (0,),
}
# Settings of a config that take one of them, in architectures that have it.
TAKEN: Mapping[str, Collection[str]] = {
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "expert_count": ("num_experts", "num_local_experts"),
    "expert_gating_func": ("scoring_func",),
    "expert_used_count": ("num_experts_per_tok", "top_k_experts"),
    "final_logit_softcapping": ("final_logit_softcapping",),
}


def check_settings(header: GGUFHeader, config: Any) -> None:
    """Refuse a file with a setting that changes the model, and that its config does not take.

    Args:
        header: of the file.
        config: with everything that the file says.

    Raises:
        ModelError: names the setting.
    """
    for name, neutral in NEUTRAL.items():
        if not any(hasattr(config, each) for each in TAKEN.get(name, ())):
            check_value(header, name, neutral)


def check_value(header: GGUFHeader, name: str, known: Collection[float]) -> None:
    """Refuse a file whose setting of this name is there and has other values than the known.

    Args:
        header: of the file.
        name: of the setting, after its architecture.
        known: values that a model of transformers computes with.

    Raises:
        ModelError: names the setting and its value.
    """
    value = header.own(name)
    values = value if isinstance(value, list) else [] if value is None else [value]
    other = [each for each in values if each not in known]
    if other:
        kind, said = header.get("general.architecture"), f"{other[0]!r:.40}"
        what = f"a '{kind:.20}' of transformers has no place for '{name}', which is {said}"
        if name == CAUSAL:
            what = f"its '{name}' is {said}: it embeds texts and continues none"
        raise ModelError(
            "model-gguf",
            f"{header.path}: {what}.",
            "Take a model that generates text."
            if name == CAUSAL
            else "Take the model's safetensors.",
            model=str(header.path),
        )


def check_all_read(header: GGUFHeader, taken: Container[str]) -> None:
    """Refuse a file of which the model would leave tensors out: it would be another model.

    Args:
        header: of the file.
        taken: names of the tensors that become parameters.

    Raises:
        ModelError: names the first tensor that is left.
    """
    names = (each.name for each in header.tensors)
    left = [each for each in names if each not in taken and each not in ELSEWHERE]
    if left:
        kind = header.get("general.architecture")
        others = f" and {len(left) - 1} others" if len(left) > 1 else ""
        raise ModelError(
            "model-gguf",
            f"{header.path}: a '{kind:.20}' of transformers has no place for '{left[0]:.60}'{others}.",
            "Take the model's safetensors.",
            model=str(header.path),
        )
