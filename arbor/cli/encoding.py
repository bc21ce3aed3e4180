"""Bytes from a file or from stdin as text."""

from __future__ import annotations

import codecs

from arbor.errors import InputError, UsageError
from arbor.support.texts import clipped, likely_encoding, refuse_surrogates


def decoded(data: bytes, encoding: str, name: str) -> str:
    """The text, without a byte order mark.

    Args:
        data: what was read.
        encoding: the value of ``--encoding``.
        name: its source, for the error.

    Raises:
        UsageError: an unknown encoding, or one that cannot decode the data.
        InputError: the data is in another encoding, or has half of a character; names the place.
    """
    try:
        codec = encoding
        encoding = codecs.lookup(codec).name
        text = data.decode(codec).removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        likely = likely_encoding(data)
        says, flag = f"It is {likely.upper()}", likely
        if likely == "latin1":
            says, flag = "It may be Latin-1", "latin-1"
        raise InputError(
            f"not-{encoding.replace('utf-8', 'utf8')}",
            f"{name}: byte 0x{data[error.start]:02x} at offset {error.start:,} (line {line}).",
            f"{says}: iconv -f {likely} -t utf8, or --encoding {flag}.",
            path=name,
            offset=error.start,
            line=line,
        ) from error
    except (LookupError, ValueError) as error:
        raise UsageError(
            "encoding",
            f"unknown encoding '{clipped(encoding)}'.",
            "Use --encoding utf-8 or latin-1.",
        ) from error
    refuse_surrogates(text, name)
    return text
