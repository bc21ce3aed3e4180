"""Regexes as xgrammar reads them: the texts that they allow are those that Python's allow."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arbor.engine.regex import whole_text, within_json
from arbor.errors import UsageError

xgrammar = pytest.importorskip("xgrammar")

END = 256  # the token after those of single bytes
ALPHABET = 'ab1A_ -^]"\\\n\t\x01é٣\u2028😀'
ESCAPED = '"\\\n\t\x01'


@lru_cache
def compiler() -> Any:
    tokens = [bytes([byte]) for byte in range(END)] + [b""]
    return xgrammar.GrammarCompiler(xgrammar.TokenizerInfo(tokens, stop_token_ids=[END]))


class Allowed:
    """The texts that a grammar allows."""

    def __init__(self, grammar: Any) -> None:
        self._compiled = compiler().compile_grammar(grammar)

    def __contains__(self, text: str) -> bool:
        matcher = xgrammar.GrammarMatcher(self._compiled)
        return all(map(matcher.accept_token, (*text.encode(), END)))


def texts_of(pattern: str) -> Allowed:
    return Allowed(xgrammar.Grammar.from_regex(whole_text(pattern)))


def strings_of(pattern: str) -> Allowed:
    """Those of a JSON schema."""
    schema = {"type": "string", "pattern": within_json(pattern)}
    return Allowed(xgrammar.Grammar.from_json_schema(json.dumps(schema)))


def some_texts() -> list[str]:
    most = [ALPHABET, ALPHABET, 'a"\\\n1-']
    return [
        "".join(each) for size, some in enumerate(most, 1) for each in product(some, repeat=size)
    ] + [""]


PATTERNS = [
    *(r"\x41b", r"\x0ab", r"\u0041", r"\U0001F600", r"\101", r"\N{LATIN SMALL LETTER A}"),
    *(r"\n", r"\t", r"\\", r"\"", '"', r"a\"?", r"[\n\t]+", r'["\\]*', r'a|"', r'[a"]+', r'[^a]"'),
    *(".", ".+", "[^a]", "[^a]+", r"[^\"]*", r"\s", r"\S", r"\w+", r"\W", r"\d*", r"\D"),
    *(r"[\d-]", r"[^\d\s]+", r"[^\W]", r"[\S\n]", r"[\^a]", r"[]a]", r"[^]a]", r"[A-^]+", "[^-a]"),
    *("a??", "a*?b", "a{2}", "a{,2}", "a{1,}", "a{0}", "a{,}", "a{1", "a{ 1}", "a{0,2}?b"),
    *("", "()", "(?:)*", "a|", "|a|b", "(a|b|)1", "(?P<n>a)b", "(?:a?)*1", "((a|b)*1)?"),
    *(
        "^a$",
        "^a",
        "a$",
        r"\Aa\Z",
        "^$",
        "^|a",
        "^a|1$",
        "(^|-)a(-|$)",
        "(^a|b)1",
        "^^a$$",
        "(?:^a)",
    ),
    *(r"^\S+-\d$", r"^-\w*", "é", "[é-ü]"),
]


@pytest.mark.filterwarnings("ignore:Possible nested set:FutureWarning")
@pytest.mark.parametrize("pattern", PATTERNS)
def test_what_is_allowed_matches(pattern: str) -> None:
    texts, strings = texts_of(pattern), strings_of(pattern)

    for text in some_texts():
        matched, found = bool(re.fullmatch(pattern, text)), bool(re.search(pattern, text))
        string = json.dumps(text, ensure_ascii=False)
        assert text not in texts or matched, text
        assert string not in strings or found, text
        if text.isascii():
            assert (text in texts) is matched, text
        if text.isascii() and not set(text) & set(ESCAPED):
            assert (string in strings) is found, text


@pytest.mark.parametrize("pattern", [*PATTERNS, "^[^a]$", "^.{1,2}$", '^"?$', r"^\\?b?$", r"^\s$"])
def test_strings_are_json(pattern: str) -> None:
    strings = strings_of(pattern)

    for body in some_texts():
        if f'"{body}"' in strings:
            assert re.search(pattern, json.loads(f'"{body}"')), body


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ('^"[^"]*"$', '"ab"'),
        (r"^[A-Z]:\\\w+$", "C:\\a"),
        ("^a\nb$", "a\nb"),
        (r"^\x00|\x1f$", "\x1f"),
        ('^(ab|")$', '"'),
        ('^(ab|")$', "ab"),
        (r"^a\0$", "a\0"),
    ],
)
def test_a_string_has_what_json_escapes_where_it_must(pattern: str, text: str) -> None:
    assert json.dumps(text) in strings_of(pattern)


def patterns() -> st.SearchStrategy[str]:
    atoms = st.sampled_from(
        [*ALPHABET.replace("^", "").replace("\\", ""), ".", r"\d", r"\W", r"\n"]
    )
    sets = st.tuples(st.sampled_from(["", "^"]), st.text('ab"1-é', min_size=1, max_size=3))
    leaves = atoms | sets.map(lambda each: f"[{each[0]}{re.escape(each[1])}]")
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, min_size=2, max_size=3).map("".join),
            st.lists(inner, min_size=1, max_size=3).map(lambda some: f"({'|'.join(some)})"),
            st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{,2}", "{1,2}?"])).map(
                lambda each: f"(?:{each[0]}){each[1]}"
            ),
            inner.map(lambda each: f"(^{each}|a)"),
        ),
        max_leaves=6,
    )


@given(patterns(), st.lists(st.text(ALPHABET, max_size=5), max_size=20))
@settings(max_examples=50, deadline=None)
def test_any_text_that_is_allowed_matches(pattern: str, tried: list[str]) -> None:
    try:
        texts, strings = texts_of(pattern), strings_of(pattern)
    except UsageError as error:
        assert "in its middle" in str(error)
        return

    for text in tried:
        assert text not in texts or re.fullmatch(pattern, text)
        if f'"{text}"' in strings:
            assert re.search(pattern, json.loads(f'"{text}"'))
        if json.dumps(text, ensure_ascii=False) in strings:
            assert re.search(pattern, text)


@pytest.mark.parametrize(
    ("pattern", "what"),
    [
        *((each, "in its middle") for each in ("a$b", "ab^c", "(a$)b", "a(^b)?", r"\ba", r"a\B")),
        *((each, "looks ahead or back") for each in ("(?=a)", "a(?!b)", "(?<=a)b", "(?!)")),
        *((each, "a reference back") for each in (r"(a)\1", "(?P<n>a)(?P=n)", "(a)?(?(1)b|c)")),
        *((each, "a flag") for each in ("(?i)a", "(?s).", "(?i:a)", "(?x) a")),
        *((each, "a possessive quantifier") for each in ("a++", "a{1,2}+")),
        ("(?>a|b)", "an atomic group"),
        *((each, "a set without characters") for each in (r"[^\s\S]", r"\ud800")),
        *((each, "is invalid") for each in ("a(", "[a", "*", r"\p{L}", "a{2,1}", "(" * 3000)),
    ],
)
def test_what_a_format_cannot_apply_is_refused(pattern: str, what: str) -> None:
    for write in (whole_text, within_json):
        with pytest.raises(UsageError, match=what):
            write(pattern)


def test_no_text_has_a_null_character() -> None:
    assert "\0" not in texts_of(r"[\0-\x1f]")
    with pytest.raises(UsageError, match="a set without characters"):
        whole_text(r"a\0")
