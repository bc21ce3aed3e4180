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
    """Separates the text of a choice from the calls in it; white space after a call is left out.

    Args:
        most: calls that are read; further ones are left out. 0: they stay text.

    Attributes:
        count: calls so far.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._held = ""
        self._after_call = False
        self.count = 0

    def read(self, text: str, is_last: bool) -> tuple[str, list[dict[str, Any]]]:
        """What is certain to be text with a further part, and the calls that are complete.

        Args:
            text: the part.
            is_last: a call that is not complete is text.
        """
        self._held += text
        said, calls = "", []
        while True:
            if self._after_call:
                self._held = self._held.lstrip()
                self._after_call = not self._held
            at = self._held.find(BEGIN) if self._most else -1
            if at < 0:
                kept = _beginning(self._held) if self._most and not is_last else 0
                sure = len(self._held) - kept
                said, self._held = said + self._held[:sure], self._held[sure:]
                break
            said, self._held = said + self._held[:at], self._held[at:]
            call, length = _call(self._held) if END in self._held else (None, 0)
            if call is not None:
                self._after_call = True
                if self.count < self._most:
                    calls.append(call)
                    self.count += 1
            elif is_last:
                length = len(BEGIN)
                said += BEGIN
            else:
                break
            self._held = self._held[length:]
        return said, calls


def _beginning(text: str) -> int:
    """Characters at the end of a text with which a call may begin."""
    return next((n for n in range(len(BEGIN) - 1, 0, -1) if text.endswith(BEGIN[:n])), 0)


def _call(text: str) -> tuple[dict[str, Any] | None, int]:
    """The call with which a text begins, None where it is not one, and its characters."""
    left = text.removeprefix(BEGIN).lstrip()
    try:
        call, end = json.JSONDecoder().raw_decode(left)
        left = left[end:].lstrip()
        name, arguments = call["name"], call.get("arguments", {})
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        f"{name}{written}".encode()  # no half of a surrogate pair
    except (ValueError, KeyError, TypeError, RecursionError):
        return None, 0
    if not (isinstance(name, str) and isinstance(arguments, dict) and left.startswith(END)):
        return None, 0
    function = {"name": name, "arguments": written}
    found = {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
    return found, len(text) - len(left) + len(END)
