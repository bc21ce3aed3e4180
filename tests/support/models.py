"""Small random decoders, one per architecture, and Hugging Face's own logits for a path.

Windows are shorter than the tests' paths and logits are of order 1 to 8, so that a wrong mask,
window, scale or position shows.
"""

from __future__ import annotations

import copy
import functools
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from arbor.model.loading import BUILTIN

VOCABULARY = 97
WINDOW = 9

_BASE: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_HEAD: Mapping[str, Any] = {"head_dim": 8}
_MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
_SLIDING: Mapping[str, Any] = {"sliding_window": WINDOW, "layer_types": _MIXED}

# name -> (model_type, what differs from the base)
ARCHITECTURES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("llama", {}),
    "llama_mha": ("llama", {"num_key_value_heads": 4}),
    "llama_gqa4": ("llama", {"num_key_value_heads": 1}),
    "llama_gqa7": (
        "llama",
        {"hidden_size": 56, "num_attention_heads": 7, "num_key_value_heads": 1},
    ),
    "llama_yarn": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "qwen2": ("qwen2", {}),
    "qwen2_sliding": ("qwen2", {"use_sliding_window": True, **_SLIDING}),
    "qwen3": ("qwen3", _HEAD),
    "mistral": ("mistral", {"sliding_window": None, **_HEAD}),
    "mistral_window": ("mistral", {"sliding_window": WINDOW, **_HEAD}),
    "gemma": ("gemma", _HEAD),
    "gemma2": (
        "gemma2",
        {
            **_HEAD,
            **_SLIDING,
            "query_pre_attn_scalar": 12,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 10.0,
        },
    ),
    "gemma3_text": ("gemma3_text", {**_HEAD, **_SLIDING, "query_pre_attn_scalar": 12}),
    "gemma3n_text": (
        "gemma3n_text",
        {
            **_HEAD,
            "num_hidden_layers": 4,
            "intermediate_size": [48] * 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "sliding_window": WINDOW,
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 8,
            "laurel_rank": 4,
            "altup_num_inputs": 2,
            "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
        },
    ),
    "phi": ("phi", {}),
    "phi3": ("phi3", {"sliding_window": None}),
    "phi3_window": ("phi3", {"sliding_window": WINDOW}),
    "granite": (
        "granite",
        {
            "attention_multiplier": 0.2,
            "embedding_multiplier": 2.0,
            "residual_multiplier": 0.5,
            "logits_scaling": 1.5,
        },
    ),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", _SLIDING),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0, 1], "use_sliding_window": False}),
    "cohere": ("cohere", {}),
    "cohere2": ("cohere2", {**_HEAD, **_SLIDING}),
    "starcoder2": ("starcoder2", {"sliding_window": WINDOW}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "sliding_window": None, **_HEAD}),
    "qwen3_moe": (
        "qwen3_moe",
        {**_HEAD, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    ),
    "gpt_oss": (
        "gpt_oss",
        {**_HEAD, **_SLIDING, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "gpt_neox": ("gpt_neox", {"num_key_value_heads": None}),
    "gpt2": ("gpt2", {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 512}),
    "opt": ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "glm": ("glm", _HEAD),
    "glm4": ("glm4", _HEAD),
    "seed_oss": ("seed_oss", _HEAD),
    "deepseek_v3": (
        "deepseek_v3",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 6,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 24,
        },
    ),
    "stablelm": ("stablelm", {}),
    "nemotron": ("nemotron", _HEAD),
    "exaone4": ("exaone4", {**_SLIDING, "sliding_window_pattern": 2}),
    "ernie4_5": ("ernie4_5", _HEAD),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", _HEAD),
    "helium": ("helium", _HEAD),
    "arcee": ("arcee", _HEAD),
    "apertus": ("apertus", _HEAD),
    "qwen2_moe": (
        "qwen2_moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 24,
        },
    ),
    "gpt_bigcode": ("gpt_bigcode", {"n_embd": 32, "n_layer": 3, "n_head": 4}),
    "persimmon": ("persimmon", {}),
    "nanochat": ("nanochat", {}),
    "vaultgemma": ("vaultgemma", {**_HEAD, **_SLIDING}),
    "gemma4_text": (
        "gemma4_text",
        {
            **_HEAD,
            **_SLIDING,
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 8,
        },
    ),
    "ministral": ("ministral", {**_HEAD, **_SLIDING}),
    "minimax_m2": (
        "minimax_m2",
        {**_HEAD, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "glm4_moe": (
        "glm4_moe",
        {
            **_HEAD,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 16,
            "n_shared_experts": 1,
        },
    ),
    "phimoe": ("phimoe", {"num_local_experts": 2}),
    "granitemoe": ("granitemoe", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "olmoe": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "ministral3": (  # scales its queries by position
        "ministral3",
        {
            **_HEAD,
            "sliding_window": None,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 64.0,
                "original_max_position_embeddings": 8,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.5,
            },
        },
    ),
}


def config_of(model_type: str, **settings: Any) -> Any:
    """A small config of any architecture."""
    # some configs change the lists they are given
    return AutoConfig.for_model(model_type, **copy.deepcopy({**_BASE, **settings}))


@functools.cache
def _weights(name: str) -> Any:
    model_type, settings = ARCHITECTURES[name]
    return random_model(config_of(model_type, **settings))


def random_model(config: Any, seed: int = 0) -> Any:
    """A model in fp32 with weights that keep signals of order one, and logits of order 1 to 8."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    model.to(torch.float32)
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        for weight in module.parameters(recurse=False):
            if weight.dim() >= 2:
                std = 0.7 if isinstance(module, nn.Embedding) else 1.4 * weight.shape[-1] ** -0.5
                nn.init.normal_(weight, std=std, generator=generator)
            else:
                with torch.no_grad():
                    weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.2)
    ids = torch.randint(3, VOCABULARY, (1, 32), generator=generator)
    head = model.get_output_embeddings().weight
    with torch.no_grad():
        head.mul_(5.0 / model(ids, use_cache=False).logits.abs().max())
    return model


def build(name: str) -> Any:
    """A new model of an architecture in `ARCHITECTURES`, always with the same weights."""
    return copy_of(_weights(name))


def copy_of(model: Any) -> Any:
    """The same weights in a model and a config of their own, as loaded."""
    config = copy.deepcopy(model.config)
    twin = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    twin.load_state_dict(model.state_dict())
    return twin


@torch.inference_mode()
def path_logits(model: Any, ids: Sequence[int]) -> Tensor:
    """What Hugging Face's own eager forward gives at every position of a whole path, [n, V]."""
    tokens = torch.tensor([list(ids)])
    logits: Tensor = model(tokens, use_cache=False).logits[0]
    return logits


@torch.no_grad()
def path_keys(model: Any, ids: Sequence[int]) -> Tensor:
    """Keys of the last layer over a whole path, by Hugging Face, [n, KV heads, head size]."""
    cache = model(torch.tensor([list(ids)]), use_cache=True).past_key_values
    keys: Tensor = cache.layers[-1].keys
    return keys[0].transpose(0, 1)


def sapling_with_token(folder: Path, name: str) -> Path:
    """The built-in model in a new folder, with one token more than its weights know: 640, not
    special."""
    shutil.copytree(BUILTIN["sapling"], folder)
    path = folder / "tokenizer.json"
    settings = json.loads(path.read_text("utf-8"))
    more = {**settings["added_tokens"][0], "special": False, "id": 640, "content": name}
    settings["added_tokens"].append(more)
    path.write_text(json.dumps(settings), "utf-8")
    return folder


class Words:
    """A tokenizer whose word for an id is the number itself."""

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return " ".join(str(token) for token in ids)

    def encode(self, text: str, **_: Any) -> list[int]:
        return [int(word) for word in text.split()]
