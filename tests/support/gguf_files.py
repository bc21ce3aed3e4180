"""Small models as GGUF files."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

HEADS, KV_HEADS, WIDTH, LAYERS = 4, 2, 64, 2
NAMED = 260  # id of the first token that a test names


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=640,
        hidden_size=WIDTH,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


EMPTY = struct.pack("<4sIQQ", b"GGUF", 3, 0, 0)  # a header without settings and tensors


def write_gguf(
    model: Any,
    path: Path,
    quantized: bool = False,
    *,
    without: str = "",
    settings: Mapping[str, int | float | bool | str] | None = None,
    template: str = "",
    pre: str = "gpt-2",
    named: Mapping[str, int] | None = None,
    factors: Mapping[str, Sequence[float]] | None = None,
) -> None:
    """The model as llama.cpp writes it: heads of q and k are interleaved.

    Args:
        model: a Llama model.
        path: of the file.
        quantized: whether matrices are Q8_0, in blocks of 32.
        without: a tensor to leave out, as the file calls it.
        settings: more of them, or others.
        template: of chats.
        pre: how texts are split; empty: the file does not say.
        named: further tokens, each with its type; the first of them has the id `NAMED`.
        factors: one-dimensional tensors besides the weights.
    """
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(path, "llama")
    config = model.config
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    alphabet = gguf_alphabet()
    tokens = ["<pad>", "<bos>", "<eos>", *alphabet, "4Ġ"]
    assert len(tokens) == NAMED
    tokens += list(named or ())
    tokens += [f"<unused{number}>" for number in range(config.vocab_size - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    if pre:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    kinds = [3] * 3 + [1] * (len(tokens) - 3)
    kinds[NAMED : NAMED + len(named or ())] = (named or {}).values()
    writer.add_token_types(kinds)
    writer.add_token_merges(["4 Ġ"])
    if template:
        writer.add_chat_template(template)
    ids = {"bos": 1, "eos": 2, "padding": 0}
    given = {f"tokenizer.ggml.{name}_token_id": number for name, number in ids.items()}
    add = {bool: writer.add_bool, float: writer.add_float32, str: writer.add_string}
    for key, value in (given | dict(settings or {})).items():
        add.get(type(value), writer.add_uint32)(key, value)
    for name, numbers in (factors or {}).items():
        writer.add_tensor(name, np.array(numbers, dtype=np.float32))
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    for name, weight in model.state_dict().items():
        short = name.removesuffix(".weight")
        for own, theirs in names.items():
            short = short.replace(own, theirs) if short.endswith(own) else short
        short = short.replace("model.layers", "blk")
        data = weight.float().numpy()
        for part, heads in (("attn_q", HEADS), ("attn_k", KV_HEADS)):
            if short.endswith(part):
                split = data.reshape(heads, 2, data.shape[0] // heads // 2, data.shape[1])
                data = np.ascontiguousarray(split.swapaxes(1, 2).reshape(data.shape))
        if f"{short}.weight" == without:
            continue
        if quantized and data.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(f"{short}.weight", gguf.quants.quantize(data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(f"{short}.weight", data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_alphabet() -> list[str]:
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())
