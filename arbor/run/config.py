"""Configurations as TOML: writing and reading the settings that repeat a run.

The standard library reads TOML but does not write it. tomli-w would, but gives every array several
lines (``targets = [10, 99]`` takes four), and has no fallback for values such as paths.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterator, Mapping
from datetime import date, time
from pathlib import Path
from typing import Any

from arbor.errors import InputError, UsageError
from arbor.support.texts import likely_encoding

DEEPEST = 16  # tables and lists in one another


def config_text(config: Mapping[str, Any]) -> str:
    """A configuration as TOML; ``tomllib`` reads it back. None is left out: TOML has no null."""
    return "\n".join(_lines(config, ())) + "\n"


def read_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """A configuration from a TOML file.

    Raises:
        InputError: it cannot be read.
        UsageError: it is not TOML, or holds a value that no setting has: a date, an integer of more
            than 64 bits, or tables nested too deeply.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            "not-utf8",
            f"{path}: byte 0x{error.object[error.start]:02x} at offset {error.start:,}.",
            f"A configuration is UTF-8: iconv -f {likely_encoding(error.object)} -t utf8.",
            path=str(path),
        ) from error
    except OSError as error:
        raise InputError(
            "config-unreadable",
            f"{path} cannot be read: {error.strerror}.",
            "'arbor solve --print-config' and 'arbor trace config' write one.",
            path=str(path),
        ) from error
    try:
        config = tomllib.loads(text)
    except ValueError as error:  # TOMLDecodeError, and int() of thousands of digits
        raise _invalid(path, f"is not valid TOML: {error}") from error
    except RecursionError as error:
        raise _invalid(path, "is nested too deeply") from error
    _check_values(config, path)
    return config


def _check_values(config: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Refuses values that no setting has; names the key."""
    waiting: list[tuple[str, Any, int]] = [(key, value, 1) for key, value in config.items()]
    while waiting:
        key, value, depth = waiting.pop()
        if depth > DEEPEST:
            raise _invalid(path, f"is nested too deeply at '{key}': {DEEPEST} tables at most")
        if isinstance(value, date | time):  # datetime is a date
            raise _invalid(path, f"has a date or time as '{key}': it must be a text, in quotes")
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise _invalid(path, f"has an integer of more than 64 bits as '{key}'")
        if isinstance(value, Mapping):
            waiting += [(f"{key}.{name}", each, depth + 1) for name, each in value.items()]
        elif isinstance(value, list):
            waiting += [(key, each, depth + 1) for each in value]


def _invalid(path: str | os.PathLike[str], what: str) -> UsageError:
    return UsageError(
        "config-invalid",
        f"{path} {what}.",
        "'arbor solve --print-config' shows a valid one.",
        path=str(path),
    )


def refuse_trust(config: Mapping[str, Any], where: str) -> None:
    """Reject ``trust_remote_code`` in a configuration.

    A file of unknown origin must not allow a model's code to run.

    Raises:
        UsageError: the setting is present.
    """
    if "trust_remote_code" in config:
        raise UsageError(
            "trust",
            f"{where} sets trust_remote_code, which only the command line or the caller may set.",
            "Take trust_remote_code out of it; if you trust the model, add --trust-remote-code.",
        )


def refuse_unnamed(config: Any) -> None:
    """Reject a configuration that does not hold settings by name.

    Raises:
        UsageError: it is no mapping, or has a key that is no text.
    """
    wrong = [] if isinstance(config, Mapping) else [f"is {config!r:.60}"]
    wrong = wrong or [f"has the key {key!r:.60}" for key in config if not isinstance(key, str)]
    if wrong:
        raise UsageError(
            "setting-type",
            f"the configuration {wrong[0]}.",
            "It is the path of a TOML file, or a mapping of settings by name.",
        )


def refuse_updated(config: Mapping[str, Any], where: str) -> None:
    """Reject a configuration of weights that it cannot give back.

    Raises:
        UsageError: they are those of `Solver.update_weights`.
    """
    if "updated_weights" in config:
        raise UsageError(
            "updated-weights",
            f"{where} is that of weights that Solver.update_weights gave; it does not hold them.",
            "Take updated_weights out of it, and update the weights again.",
        )


def _lines(table: Mapping[str, Any], place: tuple[str, ...]) -> Iterator[str]:
    """The table's lines, plain settings first: whatever follows a table's header belongs to it."""
    given = {key: value for key, value in table.items() if value is not None}
    for key, value in given.items():
        if not isinstance(value, Mapping):
            yield f"{_key(key)} = {_value(value)}"
    for key, value in given.items():
        if isinstance(value, Mapping):
            yield f"\n[{'.'.join(map(_key, (*place, key)))}]"
            yield from _lines(value, (*place, key))


def _key(key: str) -> str:
    bare = key.replace("_", "").replace("-", "")
    return key if bare.isascii() and bare.isalnum() else _value(key)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, Mapping):
        rows = (f"{_key(key)} = {_value(item)}" for key, item in value.items() if item is not None)
        return "{ " + ", ".join(rows) + " }"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    # a JSON string is a TOML string, except for the delete character
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
