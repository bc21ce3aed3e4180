"""The texts of a path's blocks joined are the text of the path, wherever it is cut."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from arbor.engine.stop_rule import StopRule
from arbor.engine.text import LOOK_BACK, added
from arbor.engine.token_source import ModelSampler
from arbor.tasks.base import BlockLimits
from arbor.tree import Node, ThoughtTree

WORDS = ("▁the", "▁answer", "▁is", "▁42", ".", "er", "▁")
CHARACTERS = ("€", "é", "😀", "\n")


def pieces() -> PreTrainedTokenizerFast:
    """A tokenizer with the decoder of Llama 2 and Mistral: words carry their space, other
    characters are bytes."""
    names = ["<unk>", "</s>", *WORDS]
    names += sorted({f"<0x{byte:02X}>" for text in CHARACTERS for byte in text.encode()})
    model = models.BPE({name: i for i, name in enumerate(names)}, [], unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")


def octets() -> PreTrainedTokenizerFast:
    """A tokenizer with the decoder of GPT-2 and a token for each byte."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    other = [byte for byte in range(256) if byte not in printed]
    names = {chr(byte): byte for byte in printed}
    names |= {chr(256 + number): byte for number, byte in enumerate(other)}
    tokenizer = Tokenizer(models.BPE(names, []))
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


PIECES = pieces()
OCTETS = octets()


def ids(*texts: str) -> list[int]:
    """Tokens of `PIECES`: a word is one, another character as many as it has bytes."""
    found: list[int] = []
    for text in texts:
        names = [text] if text in WORDS else [f"<0x{byte:02X}>" for byte in text.encode()]
        found += PIECES.convert_tokens_to_ids(names)
    return found


def path(tokenizer: Any, blocks: Sequence[Sequence[int]]) -> Node:
    """The last block of a path, with the texts of all but the root."""
    tree, source = ThoughtTree(blocks[0]), ModelSampler(tokenizer)
    node = tree.root
    for block in blocks[1:]:
        node = tree.fork(node)
        for token in block:
            tree.append(node, token)
        source.finish(node)
    return node


def cut(tokens: Sequence[int], ends: set[int]) -> list[Sequence[int]]:
    places = [0, *sorted({min(end, len(tokens)) for end in ends} | {1, len(tokens)})]
    return [tokens[a:b] for a, b in itertools.pairwise(places) if b > a]


cuts = st.sets(st.integers(1, 60), max_size=8)
mixed = st.lists(st.sampled_from((*WORDS, *CHARACTERS)), max_size=20)


@given(texts=mixed, ends=cuts)
def test_words_with_spaces_and_characters_of_bytes_survive_any_cut(
    texts: list[str], ends: set[int]
) -> None:
    tokens = ids("▁the", *texts)

    node = path(PIECES, cut(tokens, ends))

    assert "the" + "".join(node.thoughts) == PIECES.decode(tokens)


BYTES = st.text("ab\n\ufffdé€🙂\u0301", min_size=1, max_size=30)


@given(text=BYTES, ends=st.sets(st.integers(1, 120), max_size=30))
@example(text="\ufffd🙂", ends={1, 4})
@example(text="a\ufffd🙂b", ends={2, 5})
@example(text="x\ufffdé", ends={2, 5})
@example(text="\ufffd\ufffd\ufffd🙂", ends=set(range(14)))
@example(text="🙂" * 9, ends=set(range(37)))
def test_replacement_characters_of_the_models_own_survive_any_cut(
    text: str, ends: set[int]
) -> None:
    tokens = [*b"x", *text.encode(), *b"."]

    node = path(OCTETS, cut(tokens, ends))

    assert "x" + "".join(node.thoughts) == OCTETS.decode(tokens) == f"x{text}."


@given(
    text=st.text("ab選é🙂", min_size=1, max_size=10),
    ends=st.sets(st.integers(1, 40), max_size=20),
    blocks=st.sets(st.integers(1, 20), max_size=6),
)
@example(text="a選選", ends={1, 5}, blocks={1})
@example(text="a🙂🙂", ends={1, 6, 7}, blocks={1})
def test_a_text_cut_within_a_token_has_all_its_whole_characters(
    text: str, ends: set[int], blocks: set[int]
) -> None:
    data = text.encode()
    tokens = [b"x", *map(bytes, cut(data, ends))]  # of any bytes, as in large vocabularies

    def decode(ids: Sequence[int]) -> str:
        return b"".join(tokens[each] for each in ids).decode("utf-8", "replace")

    found, before = "", [0]
    for block in cut(range(1, len(tokens)), blocks):
        found += added(decode, before[-LOOK_BACK:], block)
        before += block
        whole = b"".join(tokens[1 : len(before)]).decode("utf-8", "ignore")
        assert found == whole
    assert found == text


@pytest.mark.parametrize("stop", [" is", "€", "é\n", " is 42", "\n", "😀 the", "er."])
@given(texts=mixed, most=st.integers(1, 40))
def test_a_look_at_two_tokens_finds_every_end_that_a_look_at_the_text_finds(
    stop: str, texts: list[str], most: int
) -> None:
    tokens = ids("▁the", *texts)
    rule = StopRule(PIECES, BlockLimits((stop,), most, 3), ids("▁42", ".")[1:])
    unhurried = StopRule(PIECES, BlockLimits((stop,), most, 3), ids("▁42", ".")[1:])

    # the first token may have been given, and is not asked about
    for end in range(2, len(tokens) + 1):
        reason = unhurried.after(tokens[:end])
        if rule.goes_on(tokens[:end]):
            assert reason is None
        if reason is not None:
            break
