"""Random damage to the file of a trace: values of the wrong kind, lost lines, cut ends."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from typing import Any

HOLE = "@hole@"

# JSON, or nearly; none of them fits every field
VALUES = (
    *("1e999", "-1e999", "1e308", "-1e308", "5e-324", "1.5", "-0.0", "NaN", "Infinity"),
    *("0", "1", "-1", "7", "1000000", "2147483648", "-2147483649", "4294967296"),
    *("9223372036854775807", "-9223372036854775808", "9223372036854775808"),
    *("10000000000000000000", "1" + "0" * 400, "1" + "0" * 5000),
    *("true", "false", "null", '""', '"abc"', '"7"', '"1e999"', r'"\ud800"', r'"\u0000\u001b[2J"'),
    *("[]", "[[]]", "[1]", "[[1, 2], [3, 4]]", "[1, null]", '["a", 1]', "[[0, 1], [0, 2]]"),
    *("{}", '{"a": 1}', '{"device": -1}', '{"device": 1e999}', "[" * 70 + "]" * 70),
    "[" * 900 + "]" * 900,
    '{"a":' * 300 + "1" + "}" * 300,
)
GARBAGE = (b"", b" ", b"{", b"[]", b"3", b"null", b"\xff\xfe", b"\x00", b'{"e":"end"}', b"[" * 5000)


def damage(trace: bytes, draw: random.Random) -> bytes:
    """A trace with one to four random faults; compressed, and then cut or changed, now and then."""
    lines = trace.split(b"\n")[:-1]
    for _ in range(draw.randint(1, 4)):
        draw.choices(FAULTS, WEIGHTS)[0](lines, draw)
    data = b"\n".join([*lines, b""])
    if draw.random() < 0.1:
        data = gzip.compress(data, mtime=0)
        if draw.random() < 0.5:
            data = _flipped(data, draw)
    if draw.random() < 0.15:
        data = data[: draw.randrange(len(data) + 1)]
    return data


def _any_value(lines: list[bytes], draw: random.Random) -> None:
    """Another value in a random place of a random line."""
    at = draw.randrange(len(lines)) if lines else -1
    record = _record(lines, at)
    if record is None:
        return
    inner: Any = record
    while True:
        keys = list(inner) if isinstance(inner, dict) else range(len(inner))
        key = draw.choice(keys)
        if isinstance(inner[key], dict | list) and inner[key] and draw.random() < 0.7:
            inner = inner[key]
            continue
        inner[key] = HOLE
        break
    _fill(lines, at, record, draw)


def _missing(lines: list[bytes], draw: random.Random) -> None:
    at = draw.randrange(len(lines)) if lines else -1
    record = _record(lines, at)
    if record is not None:
        del record[draw.choice(list(record))]
        lines[at] = json.dumps(record).encode()


def _unknown(lines: list[bytes], draw: random.Random) -> None:
    """A field or a type of a later version."""
    at = draw.randrange(len(lines)) if lines else -1
    record = _record(lines, at)
    if record is None:
        return
    if draw.random() < 0.3:
        record["e"] = draw.choice(["dream", "offload", "evict", "end", "header", "node"])
    record["later"] = HOLE
    _fill(lines, at, record, draw)


def _other_type(lines: list[bytes], draw: random.Random) -> None:
    """The value of one line in another."""
    if len(lines) < 2:
        return
    at = draw.randrange(len(lines))
    first, second = _record(lines, at), _record(lines, draw.randrange(len(lines)))
    if first is not None and second is not None:
        first[draw.choice(list(first))] = second[draw.choice(list(second))]
        lines[at] = json.dumps(first).encode()


def _lost(lines: list[bytes], draw: random.Random) -> None:
    if lines:
        start = draw.randrange(len(lines))
        del lines[start : start + draw.choice([1, 1, 2, 20])]


def _twice(lines: list[bytes], draw: random.Random) -> None:
    if lines:
        lines.insert(draw.randrange(len(lines) + 1), draw.choice(lines))


def _swapped(lines: list[bytes], draw: random.Random) -> None:
    if lines:
        one, other = draw.randrange(len(lines)), draw.randrange(len(lines))
        lines[one], lines[other] = lines[other], lines[one]


def _garbage(lines: list[bytes], draw: random.Random) -> None:
    lines.insert(draw.randrange(len(lines) + 1), draw.choice(GARBAGE))


def _short(lines: list[bytes], draw: random.Random) -> None:
    if lines:
        at = draw.randrange(len(lines))
        lines[at] = lines[at][: draw.randrange(len(lines[at]) + 1)]


def _byte(lines: list[bytes], draw: random.Random) -> None:
    if lines:
        at = draw.randrange(len(lines))
        lines[at] = _flipped(lines[at], draw)


FAULTS: tuple[Callable[[list[bytes], random.Random], None], ...] = (
    *(_any_value, _missing, _unknown, _other_type),
    *(_lost, _twice, _swapped, _garbage, _short, _byte),
)
WEIGHTS = (12, 2, 2, 4, 1, 1, 1, 1, 1, 2)


def _record(lines: list[bytes], at: int) -> dict[str, Any] | None:
    """A line that is still an object with fields."""
    if at < 0:
        return None
    try:
        record = json.loads(lines[at])
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and record else None


def _fill(lines: list[bytes], at: int, record: dict[str, Any], draw: random.Random) -> None:
    text = json.dumps(record).replace(json.dumps(HOLE), draw.choice(VALUES))
    lines[at] = text.encode()


def _flipped(data: bytes, draw: random.Random) -> bytes:
    if not data:
        return data
    at = draw.randrange(len(data))
    return data[:at] + bytes([draw.randrange(256)]) + data[at + 1 :]
