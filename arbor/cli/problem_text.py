"""Problems and other texts from the command line, from a file or from stdin."""

from __future__ import annotations

import codecs
import io
import sys
from dataclasses import dataclass
from pathlib import Path

from arbor.errors import InputError, UsageError
from arbor.support.setting import setting
from arbor.support.texts import clipped, likely_encoding, refuse_surrogates


@dataclass(frozen=True, kw_only=True)
class ProblemOptions:
    """Where a problem comes from."""

    HEADING = "Problem"

    problem: str | None
    file: Path | None = setting(None, "Read the problem from a file; '-' as PROBLEM reads stdin.")
    encoding: str = setting("utf-8", "Encoding of the file or of stdin.", metavar="NAME")

    @property
    def given(self) -> bool:
        """Whether there is a problem."""
        return self.problem is not None or self.file is not None

    def read(self) -> str:
        """The problem.

        Raises:
            UsageError: no problem, two of them, or an unknown encoding.
            InputError: the problem cannot be read.
        """
        text, file = self.problem, self.file
        if (text is None) == (file is None):
            raise UsageError(
                "usage",
                "PROBLEM and --file exclude each other." if self.given else "no problem is given.",
                'Give one: arbor solve "4 5 6 10", arbor solve --file problem.txt, or arbor solve -.',
            )
        if text is not None and text != "-":
            if not text.isprintable() and any("\ud800" <= sign <= "\udfff" for sign in text):
                what = "the problem on the command line is not UTF-8."
                raise InputError("not-utf8", what, "Use --file instead.")
            return text
        name = "stdin" if file is None else str(file)
        try:
            data = sys.stdin.buffer.read() if file is None else file.read_bytes()
        except OSError as error:
            what = f"{name} cannot be read: {error.strerror}."
            raise InputError("problem-unreadable", what, path=name) from error
        return decoded(data, self.encoding, name)


def decoded(data: bytes, encoding: str, name: str) -> str:
    """The text, without a byte order mark.

    Raises:
        UsageError: an unknown encoding, or one that cannot decode the data.
        InputError: the data is in another encoding, or has half of a character; names the place.
    """
    try:
        codec = encoding
        io.TextIOWrapper(io.BytesIO(), codec)  # refuses codecs that are not of text, as base64
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
