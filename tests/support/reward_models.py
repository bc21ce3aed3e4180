"""Small random reward models on disk, their tokenizers, and scores by transformers' own classes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from support.fakes import FakeTask, Thought, grow, scripted
from support.models import config_of
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from arbor.controllers.base import Expansion
from arbor.tasks.base import BlockLimits, Problem
from arbor.tree import Node, ThoughtTree
from arbor.verifiers.base import SearchShape
from arbor.verifiers.reward_model import OutcomeRewardModel

CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
)
PROBLEM = Problem("0", "fake", "What is 2+3?")
# a second copy of the built-in model, which is asked the question that the verifier self asks
OWN = OutcomeRewardModel(
    "builtin:sapling",
    family="text",
    head="tags",
    prompt="{prompt}",
    end="Reachable?",
    good=" yes",
    bad=" no",
)


def byte_tokenizer(*tags: str, chat: bool = False, merges: Sequence[str] = ()) -> Any:
    """A byte-level tokenizer: a token for each byte, for each tag and for each merge.

    Args:
        tags: texts that are one token each.
        chat: it has a chat template with `CHAT`.
        merges: pairs of bytes that are joined, as texts of two characters.
    """
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    byte = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)

    def symbol(text: str) -> str:
        [(found, _)] = byte.pre_tokenize_str(text)
        return found

    pairs = [(symbol(pair[0]), symbol(pair[1])) for pair in merges]
    words = ["<pad>", "<s>", "</s>", *symbols, *(first + second for first, second in pairs)]
    vocabulary = {word: number for number, word in enumerate(words)}
    found = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    found.pre_tokenizer = byte
    found.decoder = decoders.ByteLevel()
    marks = ["<|im_start|>", "<|im_end|>"] if chat else []
    found.add_tokens([AddedToken(tag, normalized=False) for tag in (*tags, *marks)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=found, eos_token="</s>", pad_token="<pad>")
    if chat:
        tokenizer.chat_template = CHAT
    return tokenizer


def spaced_tokenizer(*pieces: str) -> Any:
    """A tokenizer that puts a space before every text, as SentencePiece does.

    Args:
        pieces: tokens besides the single characters, with U+2581 for a space.
    """
    letters = [chr(code) for code in range(32, 127) if chr(code) != " "]
    words = ["<unk>", "\N{LOWER ONE EIGHTH BLOCK}", "\n", *letters, *pieces]
    scores = [(word, float(len(word))) for word in words]
    found = Tokenizer(models.Unigram(scores, unk_id=0, byte_fallback=False))
    mark = "\N{LOWER ONE EIGHTH BLOCK}"
    found.normalizer = normalizers.Sequence(
        [normalizers.Prepend(mark), normalizers.Replace(" ", mark)]
    )
    found.decoder = decoders.Replace(mark, " ")
    return PreTrainedTokenizerFast(tokenizer_object=found, unk_token="<unk>")


def save(
    folder: Path, auto: str, architecture: str, tokenizer: Any, seed: int = 0, **settings: Any
) -> Path:
    """A random model in a folder.

    Args:
        folder: made.
        auto: the class of transformers that builds it, such as ``AutoModelForCausalLM``.
        architecture: a ``model_type``.
        tokenizer: saved with it.
        settings: of the config.
    """
    config = config_of(architecture, **{"vocab_size": len(tokenizer), **settings})
    torch.manual_seed(seed)
    model = getattr(transformers, auto).from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        for weight in module.parameters(recurse=False):
            if weight.dim() >= 2:
                std = 0.7 if isinstance(module, nn.Embedding) else 1.4 * weight.shape[-1] ** -0.5
                nn.init.normal_(weight, std=std, generator=generator)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_qwen_prm(folder: Path, tokenizer: Any) -> Path:
    """A process reward model in the form of Qwen2.5-Math-PRM: a Qwen2 with a head of two layers,
    whose class comes with the weights and is not in transformers."""
    save(folder, "AutoModelForCausalLM", "qwen2", tokenizer)
    weights = load_file(folder / "model.safetensors")
    del weights["lm_head.weight"]
    generator = torch.Generator().manual_seed(1)
    for name, shape in {
        "score.0.weight": (32, 32),
        "score.0.bias": (32,),
        "score.2.weight": (2, 32),
        "score.2.bias": (2,),
    }.items():
        weights[name] = torch.randn(shape, generator=generator) * 0.3
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    change_config(
        folder,
        architectures=["Qwen2ForProcessRewardModel"],
        auto_map={
            "AutoConfig": "configuration_qwen2_rm.Qwen2RMConfig",
            "AutoModel": "modeling_qwen2_rm.Qwen2ForProcessRewardModel",
        },
    )
    return folder


def change_config(folder: Path, **settings: Any) -> None:
    """Set entries of a model's config."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | settings), "utf-8")


# Scores by transformers, each path from nothing


@torch.inference_mode()
def sequence_score(folder: Path, ids: Sequence[int]) -> float:
    """The score of the last token by `AutoModelForSequenceClassification`, one label."""
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    return float(torch.sigmoid(model(torch.tensor([list(ids)])).logits[0, 0]))


@torch.inference_mode()
def token_score(folder: Path, ids: Sequence[int]) -> float:
    """The second of two classes of the last token by `AutoModelForTokenClassification`."""
    model = transformers.AutoModelForTokenClassification.from_pretrained(folder).eval()
    return float(torch.softmax(model(torch.tensor([list(ids)])).logits[0, -1], dim=-1)[1])


def tag_score(good: int, bad: int) -> Callable[[Path, Sequence[int]], float]:
    """The softmax of a good token against a bad one by `AutoModelForCausalLM`."""

    @torch.inference_mode()
    def score(folder: Path, ids: Sequence[int]) -> float:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
        logits = model(torch.tensor([list(ids)])).logits[0, -1, [good, bad]]
        return float(torch.softmax(logits, dim=-1)[0])

    return score


@torch.inference_mode()
def qwen_score(folder: Path, ids: Sequence[int]) -> float:
    """What `Qwen2ForProcessRewardModel` of the model card computes at the last token."""
    model = transformers.Qwen2Model.from_pretrained(folder).eval()
    head: dict[str, Tensor] = load_file(folder / "model.safetensors")
    hidden = model(torch.tensor([list(ids)])).last_hidden_state[0, -1]
    inner = torch.relu(head["score.0.weight"] @ hidden + head["score.0.bias"])
    logits = head["score.2.weight"] @ inner + head["score.2.bias"]
    return float(torch.softmax(logits, dim=-1)[1])


# Searches


def shape(*, depth: int = 3, tokens: int = 32, blocks: int = 60) -> SearchShape:
    """A search of `PROBLEM`, as a reward model plans it."""
    limits = BlockLimits(max_tokens=tokens, stop=("\n",), max_depth=depth)
    return SearchShape(FakeTask(), PROBLEM, limits, blocks, prompt_tokens=12)


def levels(depth: int = 3, width: int = 2) -> list[list[Node]]:
    """A search's tree, level by level below the root: step texts differ in length and words."""
    tree = ThoughtTree([0])
    texts = {0: "Add {}.\n", 1: "Then we multiply by {}.\n", 2: "So {} it is.\n"}
    level, found = [tree.root], []
    for number in range(depth):
        script = scripted(
            {
                (*node.key, i): Thought(texts[(i + number) % 3].format(10 * node.id + i))
                for node in level
                for i in range(width)
            }
        )
        level = grow(tree, [Expansion(node, width) for node in level], script)
        found.append(level)
    return found
