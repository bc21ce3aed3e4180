"""Bytes from a file or from stdin as text."""

from __future__ import annotations

from arbor.errors import InputError, UsageError


def decoded(data: bytes, encoding: str, name: str) -> str:
    """The text, without a byte order mark.

    Args:
        data: what was read.
        encoding: as ``--encoding`` names it.
        name: where it comes from, for the error.

    Raises:
        UsageError: no such encoding.
        InputError: it is not in this encoding; says where and what it may be.
    """
    try:
        return data.decode(encoding).removeprefix("\ufeff")
    except LookupError as error:
        raise UsageError(
            "encoding", f"--encoding {encoding} is no encoding.", "As in utf-8 or latin-1."
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
