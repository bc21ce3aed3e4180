"""How the tokenizer of a GGUF file splits a text before its merges: llama.cpp's names of patterns.

A byte-level vocabulary was learned on pieces of texts, and its merges give the model's own tokens
on the same pieces alone. The file names its pattern in ``tokenizer.ggml.pre``. transformers knows
some of the names and splits as GPT-2 does for all others: ``smollm`` has each digit alone.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from arbor.errors import ModelError
from arbor.model.gguf.header import GGUFHeader

logger = logging.getLogger(__name__)

MODEL, NAME = "tokenizer.ggml.model", "tokenizer.ggml.pre"
ADDS_FIRST, FIRST = "tokenizer.ggml.add_bos_token", "tokenizer.ggml.bos_token_id"
BYTE_LEVEL = "gpt2"  # of `MODEL`
UNNAMED = "default"

# Parts of patterns.
SHORT_FORMS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORD, SIGNS = r"[^\r\n\p{L}\p{N}]?\p{L}+", r" ?[^\s\p{L}\p{N}]+[\r\n]*"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
CASED = tuple(
    rf"[^\r\n\p{{L}}\p{{N}}]?{word}" for word in (f"[{UPPER}]*[{LOWER}]+", f"[{UPPER}]+[{LOWER}]*")
)
PATH_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
CASED_LETTERS = r"[\p{Lu}\p{Ll}\p{Lt}&&[^\u10D0-\u10FF]]"
CHINESE, KANA = r"[\u0800-\u9FA5\uAC00-\uD7FF]+", r"[\u4E00-\u9FA5\u3040-\u30FF]+"
ASCII_WORD = r"[!-/:-@\[-`{-~][A-Za-z]+"


def _either(*patterns: str) -> str:
    return "|".join(patterns)


def _words(numbers: str, signs: str = SIGNS) -> str:
    """Short forms, words, numbers, signs, and spaces."""
    return _either(SHORT_FORMS, WORD, numbers, signs, SPACES)


GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
NOT_SENTENCES = r" ?[^(\s|.,!?…。，、।۔،)]+"
DEEPSEEK3 = _either(
    *(ASCII_WORD, r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+", r" ?[\p{P}\p{S}]+[\r\n]*", SPACES)
)

# Patterns, one after the other, each within the pieces of those before -> names in files.
PATTERNS: Mapping[tuple[str, ...], str] = {
    (GPT2,): "gpt-2 phi-2 mpt olmo jais trillion granite-docling gigachat a.x-4.0 mellum exaone4"
    " jina-es jina-de jina-v1-en jina-v2-es jina-v2-de jina-v2-code roberta-bpe modern-bert",
    (r"\p{N}", GPT2): "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
    (_words(r"\p{N}"),): "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open"
    " grok-2",
    (_words(r"\p{N}{1,3}"),): "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2"
    " jina-v5-nano dbrx smaug-bpe glm4 chatglm-bpe",
    (
        _either(
            *(SHORT_FORMS, r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+", r"\p{N}"),
            *(r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", SPACES),
        ),
    ): "qwen35",
    (_either(*CASED, r"\p{N}", PATH_SIGNS, SPACES),): "tekken",
    (
        _either(*(f"{each}{SHORT_FORMS}?" for each in CASED), r"\p{N}{1,3}", PATH_SIGNS, SPACES),
    ): "gpt-4o llama4 kanana2 talkie minimax-m2",
    (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CHINESE, r"\p{N}"): "deepseek-coder",
    (
        *(r"[\r\n]", rf"\s?{CASED_LETTERS}+", r"\s?[!-/:-~！-／：-～‘-‟\u3000-。]+"),
        *(r"\s+$", CHINESE, r"\p{N}+"),
    ): "deepseek-llm",
    (r"\p{N}{1,3}", KANA, DEEPSEEK3): "deepseek-v3 hunyuan-dense joyai-llm hy_v4",
    (r"[\p{P}$+<=>^~|`]+", GPT2, r"[0-9][0-9][0-9]"): "falcon",
    (NOT_SENTENCES,): "bloom poro-chat gpt3-finnish",
    (NOT_SENTENCES, r"\p{N}"): "viking",
    (r"\p{N}{1,3}", _words(r"\p{N}+")): "minicpm5",
    (_words(r"\p{N}", r" ?[^\s\p{L}\p{N}\r\n]+"),): "seed-coder",
    (
        _either(*(SHORT_FORMS, WORD, r"\p{N}", SIGNS), r"\s*[\r\n]|\s+(?!\S)|\s+"),
    ): "bailingmoe bailingmoe2 llada-moe",
    (r"[\p{P}$+<=>^~|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"): UNNAMED,
}
OF_NAME = {name: patterns for patterns, names in PATTERNS.items() for name in names.split()}

# Names whose texts begin with a token unless the file says no, and names whose pieces are tokens
# where the vocabulary has them, whatever the merges make of them.
LLAMA3 = ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0")
BEGINS = frozenset([*LLAMA3, "lfm2", "jina-v5-nano", "tekken"])
WHOLE = BEGINS | {"minicpm5"}


def split_as_named(tokenizer: Any, header: GGUFHeader) -> None:
    """Lets the tokenizer of a file split texts by the pattern that the file names.

    Args:
        tokenizer: that transformers made of the file.
        header: of the file.

    Raises:
        ModelError: the name is not known.
    """
    if header.get(MODEL) != BYTE_LEVEL:
        return
    from tokenizers import Regex, pre_tokenizers

    name = header.get(NAME) or UNNAMED
    if name not in OF_NAME:
        raise ModelError(
            "model-gguf",
            f"{header.path}: its vocabulary splits texts by '{name:.60}', which is not known here.",
            f"Take the model's safetensors; known are {', '.join(sorted(OF_NAME))}.",
            model=str(header.path),
        )
    if name == UNNAMED:
        logger.warning(
            "%s does not say how its vocabulary splits texts (%s): its tokens may be other than"
            " those that the model knows, so take a newer conversion of it",
            *(header.path, NAME),
        )
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(each), "isolated") for each in OF_NAME[name]),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.model.ignore_merges = name in WHOLE
    if name in BEGINS and ADDS_FIRST not in header and FIRST in header:
        tokenizer.add_bos_token = True
