"""The tokens that end a text of a GGUF file's model: those at which llama.cpp ends, and the chats'.

A file names one or a few of them by id. Others are known by their names in the vocabulary, as in
``<|im_end|>``, among them those that end what is filled in between two parts of a file of code:
where a model writes the name of another file, it has filled in. At last the chat template names the
token that it writes behind an answer.
"""

from __future__ import annotations

import functools
from typing import Any

from arbor.model.gguf.header import GGUFHeader

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
        own = _named(header, kind)
        ends += [ids.get(name) for name in names] if own is None else [own]
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
    from arbor.model.chat_rendering import chat_renderer

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
