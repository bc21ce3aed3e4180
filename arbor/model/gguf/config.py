"""Settings of a GGUF file's model that transformers leaves at the defaults of its config.

llama.cpp takes them from the file: layers have the biases that it has tensors of, and Gemma scales
its queries by the width of a head, or of the input in its largest models.
"""

from __future__ import annotations

from typing import Any

from arbor.model.gguf.header import GGUFHeader

BIASES = {"attention_bias": "attn_q.bias", "mlp_bias": "ffn_down.bias"}
LARGEST = {"gemma2": 46, "gemma3": 62}  # layers of the models with 27B weights
SOFTCAPS = ("attn_logit_softcapping", "final_logit_softcapping")


def complete_config(config: Any, header: GGUFHeader) -> None:
    """Gives a config what its file says besides, but for the rotary embedding.

    Args:
        config: that transformers made of the file.
        header: of the file.
    """
    for setting, tensor in BIASES.items():
        if hasattr(config, setting):
            found = any(each.name.endswith(f".{tensor}") for each in header.tensors)
            setattr(config, setting, found)
    kind = header.get("general.architecture")
    if kind == "llama" and hasattr(config, "sliding_window"):
        config.sliding_window = None  # a file named mistral, whose window is transformers' default
    if kind not in LARGEST:
        return
    largest = config.num_hidden_layers == LARGEST[kind]
    width = config.hidden_size // config.num_attention_heads
    config.query_pre_attn_scalar = width if largest else config.head_dim
    for setting in SOFTCAPS:
        if f"{kind}.{setting}" in header:
            setattr(config, setting, header.get(f"{kind}.{setting}") or None)
