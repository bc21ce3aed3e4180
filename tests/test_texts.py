"""Texts of unknown origin: what is refused, what is shown, what is cut."""

from __future__ import annotations

import json
import tomllib

import pytest
from support.hostile import CHARACTERS, MARKUP, OBEYED, TERMINAL, encodable

from arbor.errors import InputError
from arbor.support.texts import one_line, refuse_surrogates, surrogate_of, visible

EVERY = (*MARKUP, *TERMINAL, *CHARACTERS)


@pytest.mark.parametrize("text", EVERY)
def test_a_visible_text_holds_nothing_that_a_terminal_obeys(text: str) -> None:
    shown = visible(text)

    assert not OBEYED.search(shown) and not surrogate_of(shown)
    assert "\n" not in one_line(text) and not OBEYED.search(one_line(text))


@pytest.mark.parametrize("text", EVERY)
def test_a_document_means_the_same_when_it_is_visible(text: str) -> None:
    text = encodable(text)

    document = visible(json.dumps({"a": text}, ensure_ascii=False))

    assert json.loads(document) == {"a": text}
    assert tomllib.loads(f"a = {document.removeprefix('{').partition(':')[2][:-1]}") == {"a": text}


def test_half_of_a_character_is_refused_with_its_place() -> None:
    refuse_surrogates("caf\u00e9 \U0001f600 \0\u202e", "the problem")
    with pytest.raises(InputError) as caught:
        refuse_surrogates(f"{'x' * 1_999}\udfff\ud800", "the problem")

    assert caught.value.code == "not-utf8"
    assert caught.value.message == "the problem: character 2,000 is \\udfff, half of a character."
