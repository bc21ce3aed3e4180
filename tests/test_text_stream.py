"""The text of a block token by token: joined it is the block's text, cut at a stop string."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from arbor.engine.text import added
from arbor.run.choices import TextStream

PIECES = [b"a", b"b", b"ab", b" ", "é".encode(), "é".encode()[:1], "é".encode()[1:]]
PIECES += ["𝄞".encode()[i : i + 1] for i in range(4)] + [b"\xff", b"aba", b""]


def decode(tokens: list[int]) -> str:
    """A byte-level tokenizer."""
    return b"".join(PIECES[token] for token in tokens).decode("utf-8", "replace")


TOKENS = st.lists(st.integers(0, len(PIECES) - 1), max_size=24)


@given(before=TOKENS, tokens=TOKENS, cuts=st.lists(st.integers(0, 24)))
def test_the_parts_are_the_text(before: list[int], tokens: list[int], cuts: list[int]) -> None:
    stream = TextStream(decode, before, ())
    ends = sorted({cut for cut in cuts if cut < len(tokens)} | {len(tokens)})
    parts = []
    start = 0
    for end in ends:
        parts.append(stream.feed(tokens[start:end]).text)
        start = end
    parts.append(stream.end().text)

    assert "".join(parts) == added(decode, before[-16:], tokens)


@given(
    tokens=TOKENS,
    stops=st.lists(st.sampled_from(["a", "ab", "aba", "b ", "é", "aa"]), max_size=3, unique=True),
)
@example(tokens=[0, 1, 0, 1, 0], stops=["aba"])
@example(tokens=[0, 0, 1], stops=["aab", "ab"])
@example(tokens=[2], stops=["ab", "b"])
def test_a_stop_string_and_what_follows_it_are_cut(tokens: list[int], stops: list[str]) -> None:
    whole = added(decode, (), tokens)
    found = [at for stop in stops if (at := whole.find(stop)) >= 0]
    stream = TextStream(decode, (), stops)
    text = ""

    for token in tokens:
        text += stream.feed([token]).text
        assert whole.startswith(text), "nothing is taken back"
    text += stream.end().text

    assert stream.stopped == bool(found)
    assert text == expected(tokens, stops)


def expected(tokens: list[int], stops: list[str]) -> str:
    """The text up to the first stop string in it once one is whole."""
    for count in range(len(tokens) + 1):
        so_far = added(decode, (), tokens[:count])
        found = [at for stop in stops if (at := so_far.find(stop)) >= 0]
        if found:
            return so_far[: min(found)]
    return added(decode, (), tokens)
