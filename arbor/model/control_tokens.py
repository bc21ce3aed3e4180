"""Texts by users, encoded as text: a control token that someone typed is not one.

``<|im_end|>`` in a problem would end the user's turn and let the problem write the next one. So in
what a user wrote the names of control tokens are marked before a template puts it in its place.
Encoding then takes marked names as text, and those that the template writes as control tokens.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

# the code in a template, and the texts in quotes within it
STATEMENT = re.compile(r"\{%.*?%\}|\{\{.*?\}\}|\{#.*?#\}", re.DOTALL)
QUOTED = re.compile(r"'((?:[^'\\]|\\.)*)'|\"((?:[^\"\\]|\\.)*)\"", re.DOTALL)

PRIVATE = range(0xE000, 0xF900)  # characters that mean nothing by agreement
MARK_LENGTH = 8


def _unguessable() -> str:
    """A text that nobody has written: it marks."""
    return "".join(map(chr, random.SystemRandom().choices(PRIVATE, k=MARK_LENGTH)))


MARK, STAND_IN = _unguessable(), _unguessable()


class ControlTokens:
    """Control tokens of a tokenizer: added tokens that are special, or that its template writes.

    Of those that are not special, only a name between signs, as in ``<|im_end|>``, is a control
    token. Words and runs of spaces, lines or signs are text, even where the template writes them.

    Args:
        tokenizer: a Hugging Face tokenizer, or a `PlainTokenizer`; in texts for one without a
            backend of the package tokenizers, a name is taken apart by a space.

    Attributes:
        template: the chat template that they were looked for in.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.template = getattr(tokenizer, "chat_template", None)
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self._between = " " if self._backend is None else MARK
        written = _written(self.template) if isinstance(self.template, str) else ""
        if self._backend is None:
            special = set(getattr(tokenizer, "all_special_tokens", ()))
            added = getattr(tokenizer, "get_added_vocab", dict)() | dict.fromkeys(special, 0)
        else:
            found = self._backend.get_added_tokens_decoder()
            special = {each.content for each in found.values() if each.special}
            added = {each.content: number for number, each in found.items()}
        self._ids: dict[str, int] = {
            name: number
            for name, number in added.items()
            if name in special or (name in written and _is_a_tag(name))
        }
        self._literal: Any = None  # reads no name as a control token
        self._stand_ins: dict[int, int] = {}  # their ids there -> ids of control tokens

    def mark(self, text: str) -> str:
        """The text with the names of control tokens in it marked."""
        return self._replaced(text, lambda name: f"{name[:1]}{self._between}{self.mark(name[1:])}")

    def mark_in(self, text: str, part: str) -> str:
        """The text with the names in a part of it marked; in all of it, if the part is not there as
        it stands."""
        marked = self.mark(part)
        if marked == part:
            return text
        return text.replace(part, marked) if part in text else self.mark(text)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text in which names are marked.

        Args:
            text: with what `mark` returned in it.
            add_special_tokens: as of the tokenizer.
        """
        if self._literal is None:
            self._literal = self._without_control_tokens()
        written = self._replaced(text, lambda name: _stand_in(self._ids[name]))
        (found,) = self._literal.encode_batch(
            [written.replace(MARK, "")], add_special_tokens=add_special_tokens
        )
        return [self._stand_ins.get(each, each) for each in found.ids]

    def _replaced(self, text: str, written: Callable[[str], str]) -> str:
        """The text with each name in it written otherwise; of overlapping ones the longest."""
        names = sorted((name for name in self._ids if name in text), key=len, reverse=True)
        if not names:
            return text
        return re.sub("|".join(map(re.escape, names)), lambda found: written(found[0]), text)

    def _without_control_tokens(self) -> Any:
        """A tokenizer to which names of control tokens are text; it has a stand-in for each."""
        from tokenizers import AddedToken, Tokenizer

        assert self._backend is not None, "only a backend has control tokens"
        serialized = json.loads(self._backend.to_str())
        settings = {each["id"]: each for each in serialized["added_tokens"]}
        for number in self._ids.values():
            settings[number]["special"] = True
        literal: Any = Tokenizer.from_str(json.dumps(serialized))
        literal.no_truncation()
        literal.no_padding()
        literal.encode_special_tokens = True
        kept = ("single_word", "lstrip", "rstrip", "normalized")
        numbers = list(self._ids.values())
        own = [{name: settings[number][name] for name in kept} for number in numbers]
        stand_ins = [_stand_in(number) for number in numbers]
        literal.add_tokens(
            [AddedToken(each, **kinds) for each, kinds in zip(stand_ins, own, strict=True)]
        )
        ids = map(literal.token_to_id, stand_ins)
        self._stand_ins = dict(zip(ids, numbers, strict=True))
        return literal


def _written(template: str) -> str:
    """The texts that a chat template may write of its own, apart from each other."""
    quoted = (
        "".join(texts) for part in STATEMENT.findall(template) for texts in QUOTED.findall(part)
    )
    return "\0".join([*STATEMENT.split(template), *quoted])


def _is_a_tag(name: str) -> bool:
    """Whether a name has a letter, and signs around it."""
    ends = name[:1] + name[-1:]
    between = not any(each.isalnum() or each.isspace() for each in ends)
    return between and any(each.isalpha() for each in name)


def _stand_in(number: int) -> str:
    """A text in the place of the control token with this id."""
    digits = (chr(PRIVATE.start + int(each, 16)) for each in f"{number:06x}")
    return f"{STAND_IN}{''.join(digits)}"


_of: WeakKeyDictionary[Any, ControlTokens] = WeakKeyDictionary()


def control_tokens(tokenizer: Any) -> ControlTokens:
    """Those of a tokenizer; found once for each chat template."""
    found = _of.get(tokenizer)
    if found is None or found.template != getattr(tokenizer, "chat_template", None):
        found = _of[tokenizer] = ControlTokens(tokenizer)
    return found


def encode_marked(tokenizer: Any, text: str, add_special_tokens: bool = True) -> list[int]:
    """Token ids of a text in which `ControlTokens.mark` may have marked names: those are text.

    Args:
        tokenizer: of the model.
        text: as a template or a task put it together.
        add_special_tokens: as of the tokenizer.
    """
    if MARK in text:
        return control_tokens(tokenizer).encode(text, add_special_tokens)
    given = {} if add_special_tokens else {"add_special_tokens": False}
    return list(tokenizer.encode(text, **given))


def encode_raw(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text whose control tokens are meant: a beginning that it names and the
    tokenizer adds is there once."""
    ids: list[int] = list(tokenizer.encode(text))
    bare: list[int] = list(tokenizer.encode(text, add_special_tokens=False))
    return ids[1:] if bare[:1] == ids[:1] and ids[1 : 1 + len(bare)] == bare else ids
