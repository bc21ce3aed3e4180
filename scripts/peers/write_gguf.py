"""Writes a Llama model's weights as GGUF; runs in an environment with `gguf` (`bench_peers.py`).

    python write_gguf.py WEIGHTS.npz CONFIG.json DTYPE MODEL.gguf

WEIGHTS holds Hugging Face's tensors in float32. Rows of q and k are reordered from rotary halves
to pairs, as llama.cpp reads them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OUTSIDE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
}


def pairs(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """[H D, E] with D in two halves as the rotary embedding has them, to D in pairs."""
    rows, columns = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, columns)
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows, columns)


def main() -> None:
    weights, config_path, dtype, target = sys.argv[1:]
    config = json.loads(Path(config_path).read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_size = config["hidden_size"] // heads
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(head_size)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    kind = gguf.GGMLQuantizationType.BF16 if dtype == "bfloat16" else gguf.GGMLQuantizationType.F32
    with np.load(weights) as tensors:
        for name in tensors.files:
            data = tensors[name]
            if name in OUTSIDE:
                target_name = OUTSIDE[name]
            else:
                layer, part = name.removeprefix("model.layers.").split(".", 1)
                part = part.removesuffix(".weight")
                target_name = f"blk.{layer}.{NAMES[part]}.weight"
                if part == "self_attn.q_proj":
                    data = pairs(data, heads)
                elif part == "self_attn.k_proj":
                    data = pairs(data, kv_heads)
            if data.ndim == 1 or kind is gguf.GGMLQuantizationType.F32:  # norms stay float32
                writer.add_tensor(target_name, data)
            else:
                writer.add_tensor(target_name, gguf.quantize(data, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
