"""Bytes from a file or from stdin as text."""

from __future__ import annotations

from arbor.errors import InputError, UsageError


def decoded(data: bytes, encoding: str, name: str) -> str:
    """The text, without a byte order mark.

    Args:
        data: what was read.
        encoding: the value of ``--encoding``.
        name: its source, for the error.

    Raises:
        UsageError: an unknown encoding.
        InputError: the data is in another encoding; names the first wrong byte.
    """
    try:
        return data.decode(encoding).removeprefix("\ufeff")
    except LookupError as error:
        raise UsageError(
            "encoding", f"unknown encoding '{encoding}'.", "Use --encoding utf-8 or latin-1."
        ) from error
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InputError(
            f"not-{encoding.lower().replace('utf-8', 'utf8')}",
            f"{name}: byte 0x{data[error.start]:02x} at offset {error.start:,} (line {line}).",
            "It may be Latin-1: iconv -f latin1 -t utf8, or --encoding latin-1.",
            path=name,
            offset=error.start,
            line=line,
        ) from error
