"""Tokens of GGUF files: split as the file says, tags whole, and texts that end where they end."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.gguf_files import NAMED, llama, write_gguf, write_settings
from support.real_models import model_file

from arbor.model.control_tokens import control_tokens, encode_marked
from arbor.model.gguf.conversion import header_given
from arbor.model.gguf.header import read_gguf_header
from arbor.model.gguf.tokenizer import ending_ids
from arbor.model.loading import load_tokenizer, locate_model
from arbor.model.plain_tokenizer import PlainTokenizer, plain_parts

pytest.importorskip("gguf", reason="the extra `gguf` is not installed")
pytest.importorskip("accelerate", reason="the extra `gguf` is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")  # of the packages that convert

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4


def written(path: Path, **given: Any) -> Path:
    write_gguf(llama(), path, **given)
    return path


def tokenizer_of(path: Path) -> Any:
    return load_tokenizer(locate_model(path))


# Splitting


OF_LLAMA_CPP = {
    "1. Take 25 stones.\r\n2. Leave 7.\r\n": (
        "33 30 7285 216 34 37 8989 30 2738 34 30 22726 216 39 30 2738"
    ),
    "| a | 12 | 3.5 |\n|---|---:|\n": (
        "108 253 2504 216 33 34 2504 216 35 30 37 2504 198 108 5583 108 5583 44189 198"
    ),
    "key:\n  - 'x1'\n  - 2024-10-30\n": (
        "2393 42 3805 731 637 104 33 23 3805 731 216 34 32 34 36 29 33 32 29 35 32 198"
    ),
    "½ Ⅷ ١٢ x²  \n\n\tend": (
        "16738 216 173 223 117 216 164 111 164 112 1792 19133 256 1116 197 486"
    ),
}


@pytest.mark.parametrize(("text", "ids"), OF_LLAMA_CPP.items())
def test_a_real_model_reads_the_tokens_that_it_was_trained_on(
    smollm2: Path, text: str, ids: str
) -> None:
    tokenizer = tokenizer_of(smollm2)
    parts = plain_parts(tokenizer)

    wanted = [int(each) for each in ids.split()]
    assert tokenizer.encode(text) == wanted
    assert parts is not None and PlainTokenizer(*parts).encode(text) == wanted


TEXT = "a1234 — don't DON'T été\r\n\n  x²，水"


@pytest.mark.parametrize(
    ("name", "pieces"),
    [
        ("gpt-2", "a|1234| —| don|'t| DON|'|T| été|\r\n\n | x|²|，|水"),
        ("smollm", "a|1|2|3|4| —| don|'t| DON|'|T| été|\r\n\n | x|²|，|水"),
        ("starcoder", "a|1|2|3|4| —| don|'t| DON|'|T| été|\r\n\n | x|²|，|水"),
        ("qwen2", "a|1|2|3|4| —| don|'t| DON|'T| été|\r\n\n| | x|²|，水"),
        ("llama-bpe", "a|123|4| —| don|'t| DON|'T| été|\r\n\n| | x|²|，水"),
        ("dbrx", "a|123|4| —| don|'t| DON|'T| été|\r\n\n| | x|²|，水"),
        ("tekken", "a|1|2|3|4| —| don|'t| DON|'T| été|\r\n\n| | x|²|，水"),
        ("gpt-4o", "a|123|4| —| don't| DON'T| été|\r\n\n| | x|²|，水"),
        ("deepseek-coder", "a|1|2|3|4| |—| don|'|t| DON|'|T| été|\r|\n|\n| | x|²|，|水"),
        ("deepseek-llm", "a|1234| |—| don|'|t| DON|'|T| é|t|é|\r|\n|\n| | x|²|，|水"),
        ("falcon", "a|123|4| |—| don|'|t| DON|'|T| été|\r\n\n | x|²|，|水"),
    ],
)
def test_texts_are_split_as_the_file_says(name: str, pieces: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(written(tmp_path / "m.gguf", pre=name))
    split = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(TEXT)

    found = "|".join(TEXT[begin:end] for _, (begin, end) in split)
    assert found == pieces


# Spaces

BYTES = {f"<0x{byte:02X}>": (0.0, 6) for byte in range(256)}
PIECES = """
    ▁▁ ▁t he ▁the ▁a an ▁an in th ▁▁▁▁ er 12 ▁1 or ▁w ▁wor ld ▁world ll llo ell ▁hello
"""
SINGLE = list("▁abdehilnortw0123.,é")
TAGS = {"<|tag|>": (0.0, USER_DEFINED), "<|end|>": (0.0, CONTROL)}
WORDS = {
    **{"<unk>": (0.0, 2), "<s>": (0.0, CONTROL), "</s>": (0.0, CONTROL)},
    **BYTES,
    **{each: (-float(at), NORMAL) for at, each in enumerate([*PIECES.split(), *SINGLE])},
    **TAGS,
}
NUMBER = {word: number for number, word in enumerate(WORDS)}


def of_llama_cpp(text: str, adds_space: bool) -> list[int]:
    """Tokens of a text as llama.cpp finds them: of two neighbours, those that make the token with
    the highest score are joined first, and the first ones of equals."""
    found = []
    for part in re.split(f"({'|'.join(map(re.escape, TAGS))})", text):
        if part in TAGS:
            found.append(NUMBER[part])
            continue
        pieces = list((f" {part}" if adds_space and part else part).replace(" ", "▁"))
        while True:
            joined = [f"{one}{other}" for one, other in itertools.pairwise(pieces)]
            known = [(-WORDS[each][0], at) for at, each in enumerate(joined) if each in WORDS]
            if not known:
                break
            _, at = min(known)
            pieces[at : at + 2] = [joined[at]]
        for each in pieces:
            spelled = [f"<0x{byte:02X}>" for byte in each.encode()]
            found += [NUMBER[each]] if each in WORDS else [NUMBER[one] for one in spelled]
    return found


PARTS = (
    *("a the", "the ", "hello", "world", " world", " ", "  ", "12", "é", "X", "😀", "▁", "，"),
    *("\t", "\n", "\0", "<|", "</s", *TAGS),
)
SPOKEN = st.lists(st.sampled_from(PARTS), max_size=8).map("".join)


@pytest.mark.parametrize("architecture", ["llama", "phi3", "gemma3"])
@pytest.mark.parametrize("said", [None, True, False])
def test_spaces_are_those_of_llama_cpp(
    architecture: str, said: bool | None, tmp_path: Path
) -> None:
    path = tmp_path / "m.gguf"
    ids = {"unknown": 0, "bos": 1, "eos": 2}
    settings: dict[str, Any] = {f"tokenizer.ggml.{k}_token_id": v for k, v in ids.items()}
    if said is not None:
        settings["tokenizer.ggml.add_space_prefix"] = said
    write_settings(path, architecture, settings, WORDS)
    tokenizer = tokenizer_of(path)

    @given(SPOKEN)
    @example(" the world")
    @example("a<|end|>the <|tag|> 12")
    @hypothesis.settings(max_examples=200, deadline=None)
    def check(text: str) -> None:
        tokens = tokenizer.encode(text, add_special_tokens=False)
        assert tokens == of_llama_cpp(text, said is not False)
        if "▁" not in text and not any(tag in text for tag in TAGS):
            assert tokenizer.decode(tokens) == text

    check()


# Tags


ADDED_BY_TRANSFORMERS = "<|endoftext|> <mask> <pad> <bos> <eos> <unk>"


@pytest.mark.parametrize("name", ["llama-bpe", "tekken", "qwen2", "deepseek-v3"])
def test_a_tag_that_a_byte_level_file_lacks_is_text(name: str, tmp_path: Path) -> None:
    path = written(tmp_path / "m.gguf", pre=name)
    check_own_tokens(path)


@pytest.mark.parametrize("architecture", ["llama", "phi3", "gemma2", "gemma3"])
def test_a_tag_that_a_sentencepiece_file_lacks_is_text(architecture: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_settings(path, architecture, {"tokenizer.ggml.bos_token_id": 1}, WORDS)
    check_own_tokens(path)


def check_own_tokens(path: Path) -> None:
    tokenizer = tokenizer_of(path)
    length = read_gguf_header(path).length("tokenizer.ggml.tokens")
    assert length is not None

    assert len(tokenizer) == length
    tokens = tokenizer.encode(ADDED_BY_TRANSFORMERS)
    assert max(tokens) < length
    assert set(tokenizer.all_special_ids) <= set(range(length))
    assert tokenizer.decode(tokens).endswith(ADDED_BY_TRANSFORMERS)


@pytest.mark.parametrize(
    ("named", "text", "tokens"),
    [
        ({"ĠĠ": NORMAL, "  ": USER_DEFINED}, "4   4", ["4", "  ", "Ġ", "4"]),
        ({"  ": USER_DEFINED, "ĠĠ": NORMAL}, "4  4", ["4", "  ", "4"]),
        ({"Ãx": USER_DEFINED}, "ÃÃx", ["Ã", "ĥ", "Ãx"]),
        ({"éà": CONTROL}, "é\néà\n", ["Ã", "©", "Ċ", "éà", "Ċ"]),
        ({"<｜User｜>": CONTROL}, "é<｜User｜>", ["Ã", "©", "<｜User｜>"]),
    ],
)
def test_a_tag_is_read_and_written_by_its_name(
    named: dict[str, int], text: str, tokens: list[str], tmp_path: Path
) -> None:
    path = written(tmp_path / "m.gguf", named=named)
    tokenizer = tokenizer_of(path)
    parts = plain_parts(tokenizer)
    names = read_gguf_header(path).get("tokenizer.ggml.tokens")
    assert parts is not None and names is not None

    for each in (tokenizer, PlainTokenizer(*parts)):
        found = each.encode(text)
        assert [names[number] for number in found] == tokens
        assert each.decode(found) == text


@pytest.mark.parametrize("kind", [NORMAL, USER_DEFINED])
@pytest.mark.parametrize(
    ("name", "setting"),
    [
        *(("<|fim_prefix|>", ""), ("<fim_suffix>", ""), ("<｜fim▁end｜>", ""), ("<PRE>", "")),
        *(("<a>", "fim_mid"), ("<a>", "suffix")),
    ],
)
def test_a_tag_of_what_is_filled_in_is_no_text_of_users(
    name: str, setting: str, kind: int, tmp_path: Path
) -> None:
    settings = {f"tokenizer.ggml.{setting}_token_id": NAMED} if setting else {}
    tokenizer = tokenizer_of(written(tmp_path / "m.gguf", named={name: kind}, settings=settings))

    text = f"4{name}4"
    as_text = encode_marked(tokenizer, control_tokens(tokenizer).mark(text), False)

    assert NAMED in tokenizer.encode(text) and NAMED not in as_text
    assert tokenizer.decode([NAMED], skip_special_tokens=True) == ""


# Ends


@pytest.mark.parametrize(
    ("named", "settings", "ends"),
    [
        ([], {}, []),
        (["<a>"], {"eot": NAMED}, ["<a>"]),
        (["<a>", "<b>"], {"eom": NAMED, "eot": NAMED + 1}, ["<b>", "<a>"]),
        (["<|im_end|>", "<|a|>"], {}, ["<|im_end|>"]),
        (["<|eot_id|>", "<|eom_id|>", "<end_of_turn>"], {}, None),
        (["<|endoftext|>", "<|end|>", "</s>"], {}, None),
        (["<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|fim_middle|>"], {}, 3),
        (["<reponame>", "<filename>"], {}, ["<reponame>"]),
        (["<a>", "<|fim_pad|>"], {"fim_pad": NAMED}, ["<a>"]),
        (["<|end|>", "<|return|>", "<|call|>"], {}, ["<|return|>", "<|call|>"]),
        (["</s>", "<|tool_response>"], {}, ["<|tool_response>"]),
    ],
)
def test_texts_end_at_the_tokens_that_end_them(
    named: list[str], settings: dict[str, int], ends: list[str] | int | None, tmp_path: Path
) -> None:
    if not isinstance(ends, list):
        ends = named[:ends]
    path = written(
        tmp_path / "m.gguf",
        named=dict.fromkeys(named, CONTROL),
        settings={f"tokenizer.ggml.{kind}_token_id": each for kind, each in settings.items()},
    )
    found = ending_ids(read_gguf_header(path))

    assert found[0] == 2  # the file's own
    assert sorted(found[1:]) == sorted(NAMED + named.index(each) for each in ends)


@pytest.mark.parametrize(
    ("name", "ends"),
    [
        ("smollm2", {0, 2, 4}),
        pytest.param(
            "qwen-small",
            {128247, 151643, 151645, 151662, 151663, 151664},
            marks=pytest.mark.slow,
        ),
        pytest.param("gemma", {1, 106, 212}, marks=pytest.mark.slow),
    ],
)
def test_a_real_model_ends_where_llama_cpp_ends(name: str, ends: set[int]) -> None:
    assert set(ending_ids(read_gguf_header(model_file(name)))) == ends


# Older versions of transformers


@pytest.mark.parametrize("architectures", [None, {}, {"llama": "llama"}])
def test_transformers_is_given_the_vocabulary_where_its_tokenizer_takes_it_from_the_reader(
    architectures: dict[str, str] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gguf
    from transformers.integrations.gguf import gguf_tokenizer_mapping

    if architectures is not None:
        table = "GGUF_TOKENIZER_ARCHS"
        monkeypatch.setattr(gguf_tokenizer_mapping, table, architectures, raising=False)
    path = written(tmp_path / "m.gguf")
    header = read_gguf_header(path)
    with header_given(header):
        field = gguf.GGUFReader(path).fields["tokenizer.ggml.tokens"]

    assert len(field.data) == header.length("tokenizer.ggml.tokens")
    if architectures == {}:
        texts = [bytes(field.parts[at]).decode() for at in field.data]
        assert texts == header.get("tokenizer.ggml.tokens")
