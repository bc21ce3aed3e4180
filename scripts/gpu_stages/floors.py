"""Floors of a decode step: model and tree shapes, bytes and operations, and what a machine moves.

A step over n leaves reads every weight except the input embedding and, once each, the KV of every
token on a path of a leaf. The floor is the larger of bytes / bandwidth and operations / peak.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

BYTES = 2  # of a bfloat16 number


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder with gated feed-forward layers and an untied output head.

    Attributes:
        name: of the checkpoint with these shapes; the check fills them with random weights.
        model_type: of the transformers config.
        layers, hidden, intermediate, heads, kv_heads, head_dim, vocabulary: of the config.
        qkv_bias: queries, keys and values have biases.
    """

    name: str
    model_type: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    qkv_bias: bool = False

    @property
    def config(self) -> dict[str, Any]:
        """Keyword arguments of the transformers config."""
        return {
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": 16_384,
            "tie_word_embeddings": False,
            "bos_token_id": None,
            "eos_token_id": None,
        }

    @property
    def weights_read(self) -> int:
        """Weights that a step reads: all except the input embedding."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = self.hidden * (2 * queries + 2 * keys)
        biases = (queries + 2 * keys) if self.qkv_bias else 0
        layer = attention + biases + 3 * self.hidden * self.intermediate + 2 * self.hidden
        return self.layers * layer + self.hidden + self.vocabulary * self.hidden

    @property
    def kv_bytes(self) -> int:
        """KV bytes of one token over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * BYTES

    @property
    def flop_per_key(self) -> int:
        """Operations per row and key of its path: the products of queries and of values."""
        return 4 * self.heads * self.head_dim * self.layers


@dataclass(frozen=True)
class TreeShape:
    """A full tree: a prompt, then blocks of one length; its leaves are taken in depth-first order.

    Attributes:
        name: as the documents call it.
        branching: children of every block that is not a leaf.
        depth: blocks on a path after the prompt.
        prompt: tokens.
        block: tokens of a block.
    """

    name: str
    branching: int
    depth: int
    prompt: int = 1024
    block: int = 128

    @property
    def path_tokens(self) -> int:
        """Tokens from the root to the end of a leaf."""
        return self.prompt + self.depth * self.block

    def blocks(self, leaves: int) -> int:
        """Blocks on the paths of the first leaves, the prompt not counted."""
        found, level = 0, leaves
        for _ in range(self.depth):
            found += level
            level = -(-level // self.branching)
        return found

    def unique_tokens(self, leaves: int) -> int:
        """Tokens on the paths of the first leaves, each counted once."""
        return self.prompt + self.blocks(leaves) * self.block


@dataclass(frozen=True)
class Machine:
    """What a GPU was measured to do.

    Attributes:
        bytes_per_s: of a large copy, bytes read and written.
        flop_per_s: of a large bfloat16 product.
    """

    bytes_per_s: float
    flop_per_s: float


LLAMA_8B = ModelShape("llama-3.1-8b", "llama", 32, 4096, 14_336, 32, 8, 128, 128_256)
QWEN_7B = ModelShape("qwen2.5-7b", "qwen2", 28, 3584, 18_944, 28, 4, 128, 152_064, qkv_bias=True)
TINY = ModelShape("tiny", "llama", 2, 64, 128, 4, 2, 16, 512)  # for a run on a CPU
MODELS: Mapping[str, ModelShape] = {shape.name: shape for shape in (LLAMA_8B, QWEN_7B, TINY)}

CONFIG_S = TreeShape("config-s", branching=3, depth=6)
CONFIG_L = TreeShape("config-l", branching=5, depth=8)
SMALL = TreeShape("small", branching=2, depth=3, prompt=32, block=24)  # for a run on a CPU
TREES: Mapping[str, TreeShape] = {tree.name: tree for tree in (CONFIG_S, CONFIG_L, SMALL)}

H200 = Machine(bytes_per_s=4.3e12, flop_per_s=790e12)  # for floors that are predicted


def step_floor_ms(
    model: ModelShape, machine: Machine, rows: int, kv_tokens: float, path_tokens: float
) -> float:
    """The shortest a decode step can take."""
    weights = model.weights_read
    moved = weights * BYTES + kv_tokens * model.kv_bytes
    operations = rows * (2.0 * weights + path_tokens * model.flop_per_key)
    return 1e3 * max(moved / machine.bytes_per_s, operations / machine.flop_per_s)


def tree_floor_ms(
    model: ModelShape,
    tree: TreeShape,
    leaves: int,
    machine: Machine,
    own: float | None = None,
    kv_part: float = 1.0,
) -> float:
    """The floor of a step over the first leaves of a tree whose shared tokens are read once.

    Args:
        model, tree: their shapes.
        leaves: how many decode.
        machine: what the GPU does.
        own: tokens of each leaf's block so far; a whole block if left out.
        kv_part: bytes of KV, as a part of those in bfloat16.
    """
    missing = 0.0 if own is None else tree.block - own
    unique = tree.unique_tokens(leaves) - leaves * missing
    return step_floor_ms(model, machine, leaves, kv_part * unique, tree.path_tokens - missing)
