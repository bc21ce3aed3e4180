"""StepFormat: what every thought has to match, a regular expression or a JSON schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from arbor.errors import InputError, UsageError

EXAMPLE = (
    r"As in 'regex:\d+ \+ \d+ = \d+', 'json:schema.json' or 'json:{}' with a schema in place of {}."
)


@dataclass(frozen=True, slots=True)
class StepFormat:
    """What every thought has to match, up to the text that ends it.

    Attributes:
        kind: ``regex`` or ``json``.
        text: the regular expression, or the JSON schema as JSON.
    """

    kind: Literal["regex", "json"]
    text: str

    @classmethod
    def parse(cls, value: Any) -> Self:
        """A format as a user gives it.

        Args:
            value: a format; ``regex:PATTERN``, ``json:SCHEMA`` or ``json:FILE``; or a JSON schema
                as a mapping.

        Raises:
            UsageError: neither of these, or a schema that is not JSON.
            InputError: the file cannot be read.
        """
        if isinstance(value, cls):
            return value
        if isinstance(value, Mapping):
            return cls("json", json.dumps(value))
        kind, _, text = str(value).partition(":")
        if not isinstance(value, str) or kind not in ("regex", "json") or not text.strip():
            raise UsageError("step-format", f"{value!r:.80} is not a step format.", EXAMPLE)
        if kind == "regex":
            return cls("regex", text)
        return cls("json", _schema(text))

    def __str__(self) -> str:
        return f"{self.kind}:{self.text}"


def _schema(text: str) -> str:
    """The JSON of a schema, given as JSON or as the name of a file."""
    source = text
    if not text.lstrip().startswith("{"):
        try:
            source = Path(text).read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not UTF-8"
            raise InputError(
                "step-format-unreadable", f"{text} cannot be read: {reason}.", EXAMPLE, path=text
            ) from error
    try:
        schema = json.loads(source)
    except json.JSONDecodeError as error:
        raise UsageError(
            "step-format", f"the JSON schema of the step format is not JSON: {error}.", EXAMPLE
        ) from error
    if not isinstance(schema, dict):
        raise UsageError(
            "step-format", "the JSON schema of the step format has to be an object.", EXAMPLE
        )
    return json.dumps(schema)
