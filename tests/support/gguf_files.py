"""Small models as GGUF files."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch

HEADS, KV_HEADS, WIDTH, LAYERS = 4, 2, 64, 2
WINDOWED = ("gemma2", "gemma3")  # architectures with windows in some layers
NAMED = 260  # id of the first token that a test names


def llama(kind: str = "Llama", layers: int = LAYERS, **settings: Any) -> Any:
    """A small random model of a class that has the weights of Llama.

    Args:
        kind: of the class.
        layers: how many.
        settings: others of its config.
    """
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=640,
        hidden_size=WIDTH,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        **{"tie_word_embeddings": False, **settings},
    )
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            torch.nn.init.normal_(parameter)
    return model


Setting = int | float | bool | str | list[int] | list[bool]
EMPTY = struct.pack("<4sIQQ", b"GGUF", 3, 0, 0)  # a header without settings and tensors


def write_gguf(
    model: Any,
    path: Path,
    quantized: bool = False,
    *,
    without: str = "",
    settings: Mapping[str, Setting] | None = None,
    template: str = "",
    pre: str = "gpt-2",
    named: Mapping[str, int] | None = None,
    others: Mapping[str, Sequence[float]] | None = None,
    unsaid: str = "",
) -> None:
    """The model as llama.cpp writes it: heads of q and k are interleaved.

    Args:
        model: of Llama, or another with its weights.
        path: of the file.
        quantized: whether matrices are Q8_0, in blocks of 32.
        without: a tensor to leave out, as the file calls it.
        settings: more of them, or others.
        template: of chats.
        pre: how texts are split; empty: the file does not say.
        named: further tokens, each with its type; the first of them has the id `NAMED`.
        others: one-dimensional tensors besides the weights.
        unsaid: a setting to leave out.
    """
    import gguf
    import numpy as np

    config = model.config
    writer = gguf.GGUFWriter(path, config.model_type)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
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
    _add(writer, given | dict(settings or {}), others or {}, unsaid)
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
        short, _, kind = name.rpartition(".")
        for own, theirs in names.items():
            short = short.replace(own, theirs) if short.endswith(own) else short
        short = short.replace("model.layers", "blk")
        data = weight.float().numpy()
        for part, heads in (("attn_q", HEADS), ("attn_k", KV_HEADS)):
            if short.endswith(part):
                split = data.reshape(heads, 2, -1, *data.shape[1:])
                data = np.ascontiguousarray(split.swapaxes(1, 2).reshape(data.shape))
        if f"{short}.{kind}" == without:
            continue
        if quantized and data.ndim == 2:
            blocks = gguf.GGMLQuantizationType.Q8_0
            packed = gguf.quants.quantize(data, blocks)
            writer.add_tensor(f"{short}.{kind}", packed, raw_dtype=blocks)
        else:
            writer.add_tensor(f"{short}.{kind}", data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(
    writer: Any,
    settings: Mapping[str, Setting],
    others: Mapping[str, Sequence[float]],
    unsaid: str = "",
) -> None:
    """Adds settings, in place of any of the same name, and one-dimensional tensors; and takes one
    setting away."""
    import numpy as np

    add: dict[type, Any] = {bool: writer.add_bool, float: writer.add_float32}
    add |= {str: writer.add_string, list: writer.add_array}
    for key, value in settings.items():
        writer.kv_data[0].pop(key, None)
        add.get(type(value), writer.add_uint32)(key, value)
    writer.kv_data[0].pop(unsaid, None)
    for name, numbers in others.items():
        writer.add_tensor(name, np.array(numbers, dtype=np.float32))


def write_settings(
    path: Path,
    architecture: str,
    settings: Mapping[str, Setting],
    vocabulary: Mapping[str, tuple[float, int]] | None = None,
    unsaid: str = "",
) -> None:
    """A file of a small model's settings alone, without tensors.

    Args:
        path: of the file.
        architecture: as llama.cpp calls it.
        settings: of the architecture or the tokenizer, more of them or others.
        vocabulary: of SentencePiece; score and type of each token.
        unsaid: a setting to leave out.
    """
    import gguf

    words = vocabulary or dict.fromkeys(("<pad>", "<eos>", "<bos>"), (0.0, 3))

    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(131072)
    writer.add_embedding_length(64)
    writer.add_block_count(12)
    writer.add_feed_forward_length(128)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-6)
    if architecture in WINDOWED:
        writer.add_sliding_window(512)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(list(words))
    writer.add_token_scores([score for score, _ in words.values()])
    writer.add_token_types([kind for _, kind in words.values()])
    own = {
        name if name.startswith(("tokenizer.", "general.")) else f"{architecture}.{name}": value
        for name, value in settings.items()
    }
    _add(writer, own, {}, unsaid)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "smollm3": ("SmolLM3", {"pad_token_id": 0}),
    "qwen2": ("Qwen2", {}),
    "qwen2moe": ("Qwen2Moe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "qwen3": ("Qwen3", {"head_dim": 128}),
    "qwen3moe": ("Qwen3Moe", {"head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2}),
    "gemma2": ("Gemma2", {"head_dim": 32, "sliding_window": 64}),
    "gemma3": ("Gemma3Text", {"head_dim": 32, "sliding_window": 64}),
    "phi3": ("Phi3", {"pad_token_id": 0}),
    "starcoder2": ("Starcoder2", {}),
}


def write_random(
    path: Path,
    architecture: str,
    kinds: Sequence[str] = ("Q8_0",),
    tied: bool = False,
    *,
    sizes: Mapping[str, int] | None = None,
    settings: Mapping[str, Setting] | None = None,
    others: Mapping[str, Sequence[float]] | None = None,
    unsaid: str = "",
) -> None:
    """A small model of an architecture whose weights are random blocks.

    Args:
        path: of the file.
        architecture: a key of `ARCHITECTURES`.
        kinds: types of the matrices, in turn; Q8_0 where the inputs are not whole blocks.
        tied: whether the head reads the embedding.
        sizes: other ones of its config.
        settings, others, unsaid: as in `write_gguf`.
    """
    import gguf
    import numpy as np
    import transformers

    name, own = ARCHITECTURES[architecture]
    config = getattr(transformers, f"{name}Config")(
        vocab_size=320,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        **(own | dict(sizes or {})),
    )
    with torch.device("meta"):
        model: Any = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")(config)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // HEADS
    writer.add_rope_dimension_count(head_dim)
    writer.add_key_length(head_dim)
    writer.add_vocab_size(config.vocab_size)
    if "sliding_window" in own:
        writer.add_sliding_window(own["sliding_window"])
    if "num_experts" in own:
        writer.add_expert_count(own["num_experts"])
        writer.add_expert_used_count(own["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if hasattr(config, "shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    tokens = ["<pad>", "<bos>", "<eos>", *gguf_alphabet(), "4Ġ"]
    tokens += [f"<unused{number}>" for number in range(config.vocab_size - len(tokens))]
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges(["4 Ġ"])
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    _add(writer, settings or {}, others or {}, unsaid)
    names = gguf.get_tensor_name_map(_number_of(architecture), LAYERS)
    random = np.random.default_rng(0)
    turn = 0
    for own_name, weight in model.state_dict().items():
        if own_name == "lm_head.weight" and tied:
            continue
        shape = tuple(weight.shape)
        layer, experts, part = own_name.partition(".mlp.experts.")
        if experts:
            place = f"blk.{layer.rpartition('.')[2]}.ffn_{{}}_exps.weight"
            parts = ("gate", "up") if part == "gate_up_proj" else ("down",)
            shape = (shape[0], shape[1] // len(parts), shape[2])
            stored = [place.format(each) for each in parts]
        else:
            stored = [names.get_name(own_name, try_suffixes=(".weight", ".bias"))]
        for each in filter(None, stored):  # Gemma's head is tied in any case
            if len(shape) == 1 or "gate_inp" in each:
                numbers = random.standard_normal(shape).astype(np.float32) * 0.1
                writer.add_tensor(each, numbers.squeeze() + np.float32("norm" in each))
            else:
                kind = kinds[turn % len(kinds)]
                if shape[-1] % gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0]:
                    kind = "Q8_0"
                turn += 1
                blocks = random_blocks(kind, prod(shape[:-1]), shape[-1], turn)
                blocks = blocks.reshape(*shape[:-1], -1)
                writer.add_tensor(each, blocks, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _number_of(architecture: str) -> Any:
    from gguf import MODEL_ARCH_NAMES

    return next(number for number, name in MODEL_ARCH_NAMES.items() if name == architecture)


# Where the blocks of a type have their float16 numbers.
HALVES = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    **{"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)},
}


def random_blocks(kind: str, rows: int, inputs: int, seed: int) -> Any:
    """Rows of blocks of random bytes, uint8, with scales of the size that weights have."""
    import numpy as np
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    random = np.random.default_rng(seed)
    numbers, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    if numbers == 1:
        weight = torch.from_numpy(random.standard_normal((rows, inputs)) * 0.05)
        plain = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]
        return weight.to(plain).view(torch.uint8).numpy()
    data = random.integers(0, 256, (rows, inputs // numbers, size), dtype=np.uint8)
    for at in HALVES[kind]:
        scales = random.standard_normal((rows, inputs // numbers, 1)) * 1e-3
        data[:, :, at : at + 2] = scales.astype(np.float16).view(np.uint8)
    return data.reshape(rows, -1)


def gguf_alphabet() -> list[str]:
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())
