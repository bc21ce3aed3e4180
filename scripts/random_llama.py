"""Random Llama models of the sizes the benchmarks use, and what an engine needs to run them."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from arbor.engine.stop_rule import StopRule
from arbor.kernels.attention.base import AttentionBackend
from arbor.kernels.attention.native_cascade import NativeCascade
from arbor.kernels.attention.torch_cascade import TorchCascade
from arbor.kernels.fused.parts import fused_ops
from arbor.kernels.fused.rotary import rotary_ops
from arbor.kernels.linear.layers import pack_linears
from arbor.kernels.native import native_library
from arbor.model.fuse.attention import fuse_attention
from arbor.model.fuse.parts import fuse
from arbor.model.runner import ModelRunner
from arbor.tasks.base import BlockLimits

SIZES: dict[str, dict[str, Any]] = {
    # 4.9M parameters; heads of 32
    "5m": {
        "hidden_size": 256,
        "intermediate_size": 688,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 2048,
    },
    # 100M parameters; heads of 64
    "100m": {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "vocab_size": 32000,
    },
}


def random_llama(size: str, dtype: torch.dtype, vocab_size: int = 0) -> LlamaForCausalLM:
    """The same random weights for the same size, whatever the dtype.

    Args:
        size: of `SIZES`.
        dtype: of the weights.
        vocab_size: of a tokenizer; 0: that of the size.
    """
    torch.manual_seed(0)
    config = LlamaConfig(
        **SIZES[size] | ({"vocab_size": vocab_size} if vocab_size else {}),
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    model: Any = LlamaForCausalLM(config)
    return model.to(dtype).eval()


def fused_runner(model: Any, backend: AttentionBackend | None = None) -> ModelRunner:
    """A runner as `load_weights` makes it; None: the backend that is shipped."""
    if backend is None:
        backend = TorchCascade() if native_library() is None else NativeCascade()
    deterministic = isinstance(backend, NativeCascade)
    runner = ModelRunner(model, backend, deterministic=deterministic)
    if runner.device.type == "cpu":
        pack_linears(model, deterministic=deterministic)
        if (ops := fused_ops(runner.device)) is not None:
            fuse(model, ops)
        if (rotary := rotary_ops(runner.device)) is not None:
            fuse_attention(model, rotary)
        runner.fuse_layers()
    return runner


class NoText:
    """A tokenizer for token ids that mean nothing."""

    eos_token_id = None

    def decode(self, ids: list[int], **kwargs: object) -> str:
        return ""


def fixed_length(tokens: int) -> StopRule:
    """Blocks of exactly `tokens` tokens."""
    return StopRule(NoText(), BlockLimits(stop=(), max_tokens=tokens, max_depth=64), ())


def prefix(length: int, vocabulary: int) -> list[int]:
    """The benchmarks' prompt: (7 i) mod (V - 10) + 5."""
    return [(i * 7) % (vocabulary - 10) + 5 for i in range(length)]
