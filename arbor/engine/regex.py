"""Regular expressions in the words that xgrammar reads: what it would read otherwise is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from re import _constants as ops  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any, NoReturn, TypeAlias

from arbor.errors import UsageError

Ranges: TypeAlias = list[tuple[int, int]]  # of code points, both ends within; sorted and apart

_LAST = 0x10FFFF
_ALL: Ranges = [(0, _LAST)]
_UNSPOKEN: Ranges = [(0x00, 0x00), (0xD800, 0xDFFF)]  # xgrammar ends a text at the first
_LINE_ENDS = [(0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029)]
_ESCAPED: Ranges = [(0x00, 0x1F), (0x22, 0x22), (0x5C, 0x5C)]  # of JSON
_CLASSES: dict[Any, tuple[Ranges, Callable[[str], bool]]] = {  # of ASCII, and of Unicode
    ops.CATEGORY_DIGIT: ([(0x30, 0x39)], str.isdecimal),
    ops.CATEGORY_SPACE: ([(0x09, 0x0D), (0x20, 0x20)], lambda c: c.isspace() or c == "\ufeff"),
    ops.CATEGORY_WORD: (
        [(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)],
        lambda c: c.isalnum() or c == "_",
    ),
}
_OPPOSITES = {
    ops.CATEGORY_NOT_DIGIT: ops.CATEGORY_DIGIT,
    ops.CATEGORY_NOT_SPACE: ops.CATEGORY_SPACE,
    ops.CATEGORY_NOT_WORD: ops.CATEGORY_WORD,
}
_STARTS = (ops.AT_BEGINNING, ops.AT_BEGINNING_STRING)
_ENDS = (ops.AT_END, ops.AT_END_STRING)
_REFUSED = {
    ops.AT: "a word boundary, or '^' or '$' in its middle",
    ops.ASSERT: "a part that looks ahead or back",
    ops.ASSERT_NOT: "a part that looks ahead or back",
    ops.FAILURE: "a part that looks ahead or back",
    ops.GROUPREF: "a reference back to a group",
    ops.GROUPREF_EXISTS: "a reference back to a group",
    ops.ATOMIC_GROUP: "an atomic group",
    ops.POSSESSIVE_REPEAT: "a possessive quantifier",
}


def whole_text(pattern: str, ends: str = "") -> str:
    """A regex that xgrammar reads as Python's ``re.fullmatch`` reads the given one.

    A set of characters has those that it has in Python and in JavaScript, by Unicode and by ASCII:
    ``\\d`` is 0 to 9, and ``\\D`` has the digits of no script.

    Args:
        pattern: as Python's `re` has it.
        ends: characters that end a text; sets have them only where they have no others.

    Raises:
        UsageError: it is invalid, or has what a format cannot apply; names that.
    """
    avoided = [(ord(character), ord(character)) for character in ends]
    return _Writer(pattern, avoided, in_json=False).written("")


def within_json(pattern: str) -> str:
    """A regex for the text between the quotes of a JSON string, in which ``re.search`` finds one.

    Sets of characters are as those of `whole_text`, without those that JSON escapes where they have
    others.

    Args:
        pattern: as Python's `re` has it.

    Raises:
        UsageError: it is invalid, or has what a format cannot apply; names that.
    """
    writer = _Writer(pattern, _ESCAPED, in_json=True)
    written = writer.written(f"{writer.characters(_ALL)}*")
    # in ASCII alone it would become an automaton without backslashes
    return f"{written}(?:é){{0}}" if _literal("\\") in written else written


def json_characters(least: int, most: int | None) -> str:
    """A regex for the text between the quotes of a JSON string that has a number of characters."""
    some = _Writer("", _ESCAPED, in_json=True).characters(_ALL)
    return f"{some}{{{least},{'' if most is None else most}}}"


class _Writer:
    """Writes a regex anew."""

    def __init__(self, pattern: str, avoided: Ranges, *, in_json: bool) -> None:
        self._pattern = pattern
        self._avoided = avoided
        self._in_json = in_json

    def written(self, around: str) -> str:
        """The regex.

        Args:
            around: what may come before its start and after its end, unless an anchor is there.
        """
        try:
            parsed = parser.parse(self._pattern)
            if parsed.state.flags & ~re.UNICODE:
                self._refuse("a flag")
            return self._sequence(list(parsed), around, around)
        except (re.error, OverflowError, RecursionError) as error:
            raise UsageError(
                "step-format",
                f"the pattern {self._pattern!r:.60} is invalid: {error}.",
                "Write it as Python's 're' reads it.",
            ) from error

    def characters(self, ranges: Ranges) -> str:
        """One of some characters, as an atom."""
        spoken = _without(ranges, _UNSPOKEN)
        plain = _without(spoken, self._avoided)
        if plain or (spoken and not self._in_json):
            return _class(plain or spoken)
        codes = [code for low, high in ranges for code in range(low, high + 1) if code < 0x80]
        if not self._in_json or not codes:
            self._refuse("a set without characters")
        escapes = (json.dumps(chr(code))[1:-1] for code in codes)
        return f"(?:{'|'.join(''.join(map(_literal, each)) for each in escapes)})"

    def _sequence(self, items: list[Any], before: str | None, after: str | None) -> str:
        """Parts one after another.

        Args:
            items: the parts.
            before: what may come before them; None if they are not at the start of the regex.
            after: what may come after them; None if they are not at its end.
        """
        while items and before is not None and items[0][0] is ops.AT and items[0][1] in _STARTS:
            before, items = "", items[1:]
        while items and after is not None and items[-1][0] is ops.AT and items[-1][1] in _ENDS:
            after, items = "", items[:-1]
        if not items:
            return before or after or ""
        last = len(items) - 1
        return "".join(
            self._part(op, value, before if place == 0 else None, after if place == last else None)
            for place, (op, value) in enumerate(items)
        )

    def _part(self, op: Any, value: Any, before: str | None, after: str | None) -> str:
        if op is ops.SUBPATTERN:
            _, added, removed, inner = value
            if added or removed:
                self._refuse("a flag")
            return self._choice([inner], before, after)
        if op is ops.BRANCH:
            return self._choice(value[1], before, after)
        return f"{before or ''}{self._one(op, value)}{after or ''}"

    def _choice(self, branches: Iterable[Any], before: str | None, after: str | None) -> str:
        """One of some sequences, as an atom; empty if all are."""
        found = [self._sequence(list(each), before, after) for each in branches]
        some = "|".join(dict.fromkeys(filter(None, found)))
        # after a part that begins or ends with a repetition, '?' would let that through alone
        return f"(?:{some}{'' if all(found) else '|'})" if some else ""

    def _one(self, op: Any, value: Any) -> str:
        """A part without others beside it."""
        if op in (ops.MAX_REPEAT, ops.MIN_REPEAT):
            least, most, inner = value
            some = self._choice([inner], None, None)
            end = "" if most is ops.MAXREPEAT else most
            return f"(?:{some}){{{least},{end}}}" if some and most else ""
        if op is ops.IN:
            return self.characters(_members(value, most=False))
        if op is ops.ANY:
            return self.characters(_complement(_LINE_ENDS))
        if op is ops.LITERAL:
            return self.characters([(value, value)])
        if op is ops.NOT_LITERAL:
            return self.characters(_complement([(value, value)]))
        self._refuse(_REFUSED[op])

    def _refuse(self, what: str) -> NoReturn:
        raise UsageError(
            "step-format",
            f"the pattern {self._pattern!r:.60} has {what}, which a format cannot apply.",
            "Leave it out and check it afterwards.",
        )


def _members(items: list[Any], *, most: bool) -> Ranges:
    """The characters of a set: those of its least reading, or of its most."""
    negated = items[0][0] is ops.NEGATE
    found: Ranges = []
    for op, value in items[negated:]:
        if op is ops.CATEGORY:
            found += _category(value, most=most is not negated)
        else:
            found.append(value if op is ops.RANGE else (value, value))
    return _complement(found) if negated else _joined(found)


def _category(name: Any, *, most: bool) -> Ranges:
    """The characters of a class as ``\\d``: by ASCII or Unicode, whichever has fewer (or more)."""
    if name in _OPPOSITES:
        return _complement(_category(_OPPOSITES[name], most=not most))
    return _of_unicode(name) if most else _CLASSES[name][0]


@lru_cache
def _of_unicode(name: Any) -> Ranges:
    belongs = _CLASSES[name][1]
    return _joined((code, code) for code in range(_LAST + 1) if belongs(chr(code)))


def _joined(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Ranges in order, those that touch as one."""
    found: Ranges = []
    for low, high in sorted(ranges):
        if found and low <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(high, found[-1][1])
        else:
            found.append((low, high))
    return found


def _complement(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """All other characters."""
    found, following = [], 0
    for low, high in [*_joined(ranges), (_LAST + 1, 0)]:
        if low > following:
            found.append((following, low - 1))
        following = high + 1
    return found


def _without(ranges: Ranges, others: Ranges) -> Ranges:
    return _complement(_complement(ranges) + others)


def _class(ranges: Ranges) -> str:
    """A set of characters as xgrammar reads it; ``^`` comes last, and not in a range."""
    caret = ord("^")
    parts = [
        _character(low) if low == high else f"{_character(low)}-{_character(high)}"
        for low, high in _without(ranges, [(caret, caret)])
    ]
    if _without([(caret, caret)], ranges):
        return parts[0] if len(parts) == 1 and parts[0].isalnum() else f"[{''.join(parts)}]"
    return f"[{''.join(parts)}^]" if parts else r"\^"


def _literal(character: str) -> str:
    return _class([(ord(character), ord(character))])


def _character(code: int) -> str:
    character = chr(code)
    return character if character.isascii() and character.isalnum() else f"\\u{{{code:x}}}"
