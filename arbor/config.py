"""Configurations as TOML: writing and reading the settings that repeat a run.

The standard library reads TOML but does not write it. tomli-w would, but gives every array several
lines (``targets = [10, 99]`` takes four), and has no fallback for values such as paths.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from arbor.errors import InputError, UsageError


def config_text(config: Mapping[str, Any]) -> str:
    """A configuration as TOML; ``tomllib`` reads it back. None is left out: TOML has no null."""
    return "\n".join(_lines(config, ())) + "\n"


def read_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """A configuration from a TOML file.

    Raises:
        InputError: it cannot be read.
        UsageError: it is not TOML.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            "not-utf8",
            f"{path}: byte 0x{error.object[error.start]:02x} at offset {error.start:,}.",
            "A configuration is UTF-8: iconv -f latin1 -t utf8.",
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
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(
            "config-invalid",
            f"{path} is not valid TOML: {error}.",
            "'arbor solve --print-config' shows a valid one.",
            path=str(path),
        ) from error


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
