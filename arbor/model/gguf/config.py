"""Settings of a GGUF file's model that transformers leaves at the defaults of its config.

llama.cpp takes them from the file, or has its own defaults: layers have the biases that it has
tensors of, and Gemma scales its queries by the width of a head, or of the input in its largest
models. What a file says and no config does is refused (`check_settings`).
"""

from __future__ import annotations

from typing import Any

from arbor.model.gguf.header import EPSILONS, GGUFHeader
from arbor.model.gguf.unread import check_settings, check_value

BIASES = {"attention_bias": "attn_q.bias", "mlp_bias": "ffn_down.bias"}
LARGEST = {"gemma2": 46, "gemma3": 62}  # layers of the models with 27B weights
FULL, WINDOWED = "full_attention", "sliding_attention"
# Architectures whose config has one window for all layers; the others, but for Gemma, have none.
ONE_WINDOW = ("phi3", "starcoder2", "mistral")
NO_WINDOW = (
    *("llama", "smollm3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
    *("falcon", "nemotron", "stablelm"),
)
OTHER_WIDTHS = "gemma4"  # its layers have heads of two widths, and transformers' config both
# Names of the number that is added to a variance, in configs.
OWN_EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon")


def complete_config(config: Any, header: GGUFHeader) -> None:
    """Gives a config what its file says besides, but for the rotary embedding.

    Args:
        config: that transformers made of the file.
        header: of the file.

    Raises:
        ModelError: a setting of the file has no counterpart in transformers.
    """
    for setting, tensor in BIASES.items():
        if hasattr(config, setting):
            found = any(each.name.endswith(f".{tensor}") for each in header.tensors)
            setattr(config, setting, found)
    if getattr(config, "pad_token_id", None) is not None:  # transformers' default
        config.pad_token_id = header.get("tokenizer.ggml.padding_token_id")
    _set_epsilon(config, header)
    _set_heads(config, header)
    _set_experts(config, header)
    _set_windows(config, header)
    for each in ("attn_logit_softcapping", "final_logit_softcapping"):
        if hasattr(config, each) and header.own(each) is not None:
            setattr(config, each, header.own(each) or None)
    kind = header.get("general.architecture")
    if kind in LARGEST:
        largest = config.num_hidden_layers == LARGEST[kind]
        width = config.hidden_size // config.num_attention_heads
        config.query_pre_attn_scalar = width if largest else config.head_dim
    check_settings(header, config)


def _set_epsilon(config: Any, header: GGUFHeader) -> None:
    """The number that norms add to a variance, whatever transformers looks for in the file."""
    for own in OWN_EPSILONS:
        if own in vars(config):
            names = EPSILONS if own == "rms_norm_eps" else EPSILONS[::-1]
            given = (header.own(f"attention.{name}") for name in names)
            setattr(config, own, next(each for each in given if each is not None))


def _set_heads(config: Any, header: GGUFHeader) -> None:
    """How many heads keys have, and how many numbers a head."""
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int):
        return
    groups = header.own("attention.head_count_kv", heads)
    if "num_key_value_heads" in vars(config) and isinstance(groups, int):
        config.num_key_value_heads = groups
    if header.get("general.architecture") == OTHER_WIDTHS:
        return
    natural = config.hidden_size // heads
    width = header.own("attention.key_length", natural)
    if "head_dim" in vars(config):
        config.head_dim = width
    else:
        check_value(header, "attention.key_length", (natural,))
    for each in ("value_length", "key_length_swa", "value_length_swa"):
        check_value(header, f"attention.{each}", (width,))


def _set_experts(config: Any, header: GGUFHeader) -> None:
    """The sizes of experts, by llama.cpp's defaults where the file does not say them."""
    whole = header.own("feed_forward_length", 0)
    if not header.own("expert_count") or not isinstance(whole, int):
        return
    used = header.own("expert_used_count", 0) or 1
    sizes = {
        "moe_intermediate_size": header.own("expert_feed_forward_length") or whole // used,
        "shared_expert_intermediate_size": header.own("expert_shared_feed_forward_length") or whole,
        "norm_topk_prob": header.own("expert_weights_norm"),
    }
    for setting, value in sizes.items():
        if setting in vars(config) and value is not None:
            setattr(config, setting, value)


def _set_windows(config: Any, header: GGUFHeader) -> None:
    """Which layers read the latest tokens alone, and how many."""
    key, kind = "attention.sliding_window", header.get("general.architecture")
    window = header.own(key)
    limit = header.own("context_length")
    if config.model_type in ONE_WINDOW:
        config.sliding_window = window or None
    elif config.model_type in NO_WINDOW and window and window < limit:
        check_value(header, key, (0,))
    if kind not in LARGEST:
        return
    pattern, layers = header.own(f"{key}_pattern"), range(config.num_hidden_layers)
    if window == 0 or (window is None and kind == "gemma3"):
        config.sliding_window = limit  # of no layer; transformers makes a mask for it nonetheless
        config.layer_types = [FULL for _ in layers]
    elif isinstance(pattern, list):
        config.layer_types = [WINDOWED if pattern[layer] else FULL for layer in layers]
    elif pattern is not None:  # one layer of so many has no window, the last
        full = [pattern > 0 and layer % pattern == pattern - 1 for layer in layers]
        config.layer_types = [FULL if each else WINDOWED for each in full]
