"""CallReader: the calls of functions in a model's text, as it comes.

Read where the chat template has them as JSON between ``<tool_call>`` and ``</tool_call>`` (Qwen,
Hermes and others). Calls in another form stay text.
"""

from __future__ import annotations

import json
import secrets
from typing import Any

BEGIN, END = "<tool_call>", "</tool_call>"


def writes_calls(tokenizer: Any) -> bool:
    """Whether the chat template of a tokenizer has calls in the form that is read."""
    template = str(getattr(tokenizer, "chat_template", None))
    return BEGIN in template and END in template


class CallReader:
    """Separates the text of one choice from the calls at its end.

    Args:
        most: calls that are read.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._held = ""
        self._begun = False

    def feed(self, text: str) -> str:
        """What is certain to be text with a further part; the rest is held back."""
        if not self._most:
            return text
        self._held += text
        if self._begun:
            return ""
        at = self._held.find(BEGIN)
        self._begun = at >= 0
        sure = at if self._begun else len(self._held) - _beginning(self._held)
        certain, self._held = self._held[:sure], self._held[sure:]
        return certain

    def end(self) -> tuple[str, list[dict[str, Any]]]:
        """The rest: as text, or as the calls that it consists of."""
        held, self._held = self._held, ""
        calls = _calls(held) if self._begun else []
        return ("", calls[: self._most]) if calls else (held, [])


def _beginning(text: str) -> int:
    """Characters at the end of a text with which a call may begin."""
    return next((n for n in range(len(BEGIN) - 1, 0, -1) if text.endswith(BEGIN[:n])), 0)


def _calls(text: str) -> list[dict[str, Any]]:
    """The calls that a text consists of; none where it holds anything else."""
    found = []
    left = text.strip()
    while left:
        if not left.startswith(BEGIN):
            return []
        try:
            call, end = json.JSONDecoder().raw_decode(left := left[len(BEGIN) :].lstrip())
        except (ValueError, RecursionError):
            return []
        left = left[end:].lstrip()
        if not (isinstance(call, dict) and isinstance(call.get("name"), str)):
            return []
        arguments = call.get("arguments", {})
        if not (left.startswith(END) and isinstance(arguments, dict)):
            return []
        left = left[len(END) :].lstrip()
        function = {
            "name": call["name"],
            "arguments": json.dumps(arguments, ensure_ascii=False),
        }
        found.append(
            {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
        )
    return found
