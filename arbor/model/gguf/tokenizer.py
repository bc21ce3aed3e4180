"""What the tokenizer of a GGUF file has besides what transformers reads: pieces, tags, and ends.

*Pieces.* A byte-level vocabulary was learned on pieces of texts, and its merges give the model's
own tokens on the same pieces alone. The file names its pattern in ``tokenizer.ggml.pre``.
transformers knows some of the names and splits as GPT-2 does for all others: ``smollm`` has each
digit alone.

*Spaces* are characters of a SentencePiece vocabulary. llama.cpp puts one before a text, and behind
each tag within it, unless the file says no. transformers goes by the architecture instead, and to
a text that begins with a space most of its tokenizers add none.

*Tags*, as in ``<|im_end|>``. transformers reads a control token of a byte-level vocabulary as text
where its name has characters that spell no bytes, as in DeepSeek's: a chat template then writes no
turn that the model knows. It spells others as bytes, in the place of tokens that merges make, and
adds tags that the file lacks. And a token that ends texts by its name is a control token, whatever
the file calls it; so is one that stands between the parts of what is filled in.

*Ends* are the tokens at which llama.cpp ends a text, and the chats'. A file names one or a few of
them by id. Others are known by their names, among them those that end what is filled in between
two parts of a file of code: where a model writes the name of another file, it has filled in. At
last the chat template names the token that it writes behind an answer.
"""

from __future__ import annotations

import functools
import json
import logging
import re
from collections.abc import Iterable, Mapping
from typing import Any

from arbor.errors import ModelError
from arbor.model.gguf.header import GGUFHeader

logger = logging.getLogger(__name__)

MODEL, NAME = "tokenizer.ggml.model", "tokenizer.ggml.pre"
ADDS_FIRST, FIRST = "tokenizer.ggml.add_bos_token", "tokenizer.ggml.bos_token_id"
BYTE_LEVEL, SENTENCEPIECE = "gpt2", "llama"  # of `MODEL`
ADDS_SPACE, SPACE = "tokenizer.ggml.add_space_prefix", "▁"
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


def split_as_told(tokenizer: Any, header: GGUFHeader) -> None:
    """Lets the tokenizer of a file split texts as the file says: by a pattern, or at its spaces.

    Args:
        tokenizer: that transformers made of the file.
        header: of the file.

    Raises:
        ModelError: the name of the pattern is not known.
    """
    if header.get(MODEL) == BYTE_LEVEL:
        _split_by_pattern(tokenizer, header)
    elif header.get(MODEL) == SENTENCEPIECE:
        _keep_spaces(tokenizer.backend_tokenizer, header.get(ADDS_SPACE) is not False)


def _keep_spaces(backend: Any, added: bool) -> None:
    """Spaces are characters of the vocabulary; added: one before each part between tags."""
    from tokenizers import decoders, normalizers

    first = [normalizers.Prepend(SPACE)] if added else []
    backend.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", SPACE)])
    backend.pre_tokenizer = None
    last = [decoders.Strip(" ", 1, 0)] if added else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *last]
    )


def _split_by_pattern(tokenizer: Any, header: GGUFHeader) -> None:
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


TOKENS, TYPES = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"
TEMPLATE = "tokenizer.chat_template"
CONTROL, USER_DEFINED = 3, 4  # of `TYPES`
TAGS = (CONTROL, USER_DEFINED)

# Settings that name an end by id, and the names of tokens that stand for a missing one.
BY_ID = ("eos", "eot", "eom")
BETWEEN: dict[str, tuple[str, ...]] = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
# Settings that name what stands between the parts, and the names of missing ones as above.
PARTS: dict[tuple[str, str], tuple[str, ...]] = {
    ("fim_pre", "prefix"): (
        *("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>"),
        *("<|code_prefix|>", "<|prefix|>"),
    ),
    ("fim_suf", "suffix"): (
        *("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>"),
        *("<|code_suffix|>", "<|suffix|>"),
    ),
    ("fim_mid", "middle"): (
        *("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>"),
        *("<|code_middle|>", "<|middle|>"),
    ),
}
BY_NAME = (
    *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|calls|>"),
    *("<|flush|>", "<end_of_turn>", "<turn|>", "<|tool_response>", "<|endoftext|>"),
    *("<|end_of_text|>", "<end_of_utterance>", "</s>", "<eos>", "<EOT>", "_<EOT>", "[EOT]"),
    *("[EOS]", "<｜end▁of▁sentence｜>", "[e~["),
)
# A name that ends no text where the vocabulary has all names of one of the groups.
UNLESS = {
    "<|end|>": (
        *({"<|return|>", "<|call|>"}, {"<|return|>", "<|calls|>"}),
        *({"<|flush|>", "<|call|>"}, {"<|flush|>", "<|calls|>"}),
    ),
    "</s>": ({"<|tool_response>"},),
}


@functools.lru_cache(maxsize=4)
def ending_ids(header: GGUFHeader) -> tuple[int, ...]:
    """Ids of the tokens that end a text, the file's own first.

    Raises:
        ModelError: a token is not UTF-8.
    """
    tokens = header.get(TOKENS) or []
    ids = {name: number for number, name in enumerate(tokens)}
    ends = [_named(header, kind) for kind in BY_ID]
    for kind, names in BETWEEN.items():
        ends += _either_way(header, (kind,), names, ids)
    ends += [ids[name] for name in BY_NAME if name in ids]
    ended = {tokens[each] for each in ends if each is not None and each < len(tokens)}
    others = {
        ids[name]
        for name, groups in UNLESS.items()
        if name in ids and any(group <= ended for group in groups)
    }
    ends = [each for each in ends if each not in others]
    ends.append(_after_an_answer(header, tokens))
    return tuple(dict.fromkeys(each for each in ends if each is not None))


def _either_way(
    header: GGUFHeader, kinds: Iterable[str], names: Iterable[str], ids: Mapping[str, int]
) -> list[int]:
    """The tokens that settings name by id; without them those of the names."""
    own = [each for kind in kinds if (each := _named(header, kind)) is not None]
    return own or [ids[name] for name in names if name in ids]


def _named(header: GGUFHeader, kind: str) -> int | None:
    found = header.get(f"tokenizer.ggml.{kind}_token_id")
    return found if isinstance(found, int) else None


def _after_an_answer(header: GGUFHeader, tokens: list[str]) -> int | None:
    """The tag that the chat template writes behind an answer; None if it writes none."""
    template = header.get(TEMPLATE)
    if not isinstance(template, str):
        return None
    answer = "an answer"
    messages = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": answer}]
    text = _rendered(template, messages, _beginnings(header, tokens))
    _, found, behind = text.rpartition(answer)
    behind = behind.lstrip()
    tags = [
        number
        for number, kind in enumerate(header.get(TYPES) or ())
        if kind in TAGS and tokens[number] and behind.startswith(tokens[number])
    ]
    return max(tags, key=lambda each: len(tokens[each])) if found and tags else None


def _beginnings(header: GGUFHeader, tokens: list[str]) -> dict[str, str]:
    """What a template may write of the vocabulary, as in ``eos_token``."""
    ids = {f"{kind}_token": _named(header, kind) for kind in ("bos", "eos")}
    return {name: tokens[each] for name, each in ids.items() if each is not None}


def _rendered(template: str, messages: list[dict[str, str]], special: dict[str, str]) -> str:
    from arbor.model.plain_tokenizer import chat_renderer

    try:
        (text,), _ = chat_renderer()(
            conversations=[messages], chat_template=template, add_generation_prompt=False, **special
        )
    except Exception:  # a template may raise anything; its use is refused by name
        return ""
    return str(text)


def set_ends(model: Any, header: GGUFHeader) -> None:
    """Lets the generation config of a model of this file end texts where they end."""
    generation = getattr(model, "generation_config", None)
    ends = ending_ids(header)
    if generation is not None and ends:
        generation.eos_token_id = list(ends)


def restore_tags(tokenizer: Any, header: GGUFHeader, ends: Iterable[int]) -> None:
    """Lets a tokenizer read the tags of its file and no others, and leave those that end texts, or
    stand between parts that are filled in, out of texts.

    Args:
        tokenizer: that transformers made of the file.
        header: of the file.
        ends: ids of the tokens that end a text.
    """
    from tokenizers import AddedToken

    tokens, types = header.get(TOKENS) or [], header.get(TYPES) or []
    special = {number for number, kind in enumerate(types) if kind == CONTROL} | set(ends)
    ids = {name: number for number, name in enumerate(tokens)}
    for kinds, parts in PARTS.items():
        special |= set(_either_way(header, kinds, parts, ids))
    tags = special | {number for number, kind in enumerate(types) if kind in TAGS}
    names = {number: tokens[number] for number in sorted(tags) if tokens[number]}
    byte_level = header.get(MODEL) == BYTE_LEVEL
    backend = _own_tokens(tokenizer.backend_tokenizer, tokens, names if byte_level else {})
    tokenizer._tokenizer = backend
    known = backend.get_added_tokens_decoder()
    for number, name in names.items():
        if number in known and (known[number].special or number not in special):
            continue
        if backend.token_to_id(name) == number:  # else its name would be a new token
            added = AddedToken(name, normalized=False, special=number in special)
            (backend.add_special_tokens if added.special else backend.add_tokens)([added])
    if byte_level:
        _write_whole(backend, names.values())
    for kind, name in tokenizer.special_tokens_map.items():
        if isinstance(name, str) and backend.token_to_id(name) is None:
            setattr(tokenizer, kind, None)


def _own_tokens(backend: Any, tokens: list[str], names: Mapping[int, str]) -> Any:
    """A tokenizer with the tokens of its file alone, under their own names.

    transformers adds those that its classes expect behind the file's. And it spells a tag as the
    bytes of its name, so that one of two spaces takes the place of the merged ``ĠĠ``.

    Args:
        backend: that transformers made of the file.
        tokens: of the file, by id.
        names: id -> name of each tag of a byte-level vocabulary; none for others.
    """
    from tokenizers import Tokenizer

    vocabulary = spelled = backend.get_vocab(with_added_tokens=False)
    if names:
        found = {number: name for name, number in spelled.items() if number not in names}
        lost = {number: name for number, name in enumerate(tokens) if number not in found}
        vocabulary = {
            name: number for part in (lost, found, names) for number, name in part.items()
        }
    beyond = any(number >= len(tokens) for number in backend.get_added_tokens_decoder())
    if not beyond and vocabulary == spelled:
        return backend
    serialized = json.loads(backend.to_str())
    serialized["added_tokens"] = [
        each
        for each in serialized["added_tokens"]
        if each["id"] < len(tokens) and vocabulary.get(each["content"]) == each["id"]
    ]
    if names:
        serialized["model"]["vocab"] = vocabulary
    return Tokenizer.from_str(json.dumps(serialized))


def _write_whole(backend: Any, names: Iterable[str]) -> None:
    """Tags of letters that also spell bytes, as in ``é``, are written as their names."""
    from tokenizers import Regex, decoders, pre_tokenizers

    spelling = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = set(spelling.alphabet())
    misread = [each for each in names if not each.isascii() and alphabet.issuperset(each)]
    whole = [
        decoders.Replace(Regex(rf"\A{re.escape(each)}\z"), spelling.pre_tokenize_str(each)[0][0])
        for each in misread
    ]
    if whole:
        backend.decoder = decoders.Sequence([*whole, backend.decoder])
