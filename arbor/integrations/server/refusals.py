"""Refusals: errors of requests, in OpenAI's format and with HTTP's status codes."""

from __future__ import annotations

import re
from typing import Any

from fastapi.responses import JSONResponse
from pydantic import ValidationError

from arbor.errors import ArborError, BudgetInfeasible, OutOfMemory
from arbor.support.texts import clipped, visible

MOST_TEXT = 600  # characters of a message
MOST_PARAM = 120  # characters of a field's name
MOST_PROBLEMS = 3  # of a body that are listed
_PATH = re.compile(r"(?<![\w.:/])(?:~|[A-Za-z]:)?[/\\](?:[\w.@+-]+[/\\])+[\w.@+-]*")
_OPTION = re.compile(r"--([a-z]+(?:-[a-z]+)*)")

# Errors that have another name here.
CODES = {"problem-too-long": "context_length_exceeded", "problem-token": "invalid_token"}
TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable",
}


class Refusal(Exception):
    """A request that is not answered.

    Args:
        status: HTTP's.
        code: stable name.
        message: one or two sentences.
        param: the field it concerns.
        retry_s: seconds after which the client may try again; None: that would not help.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        retry_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = clipped(visible(message), MOST_TEXT)
        self.param = None if param is None else clipped(visible(param), MOST_PARAM)
        self.retry_s = retry_s

    def to_dict(self) -> dict[str, Any]:
        """The body of the response."""
        return {
            "error": {
                "message": self.message,
                "type": TYPES.get(self.status, "invalid_request_error"),
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> JSONResponse:
        """The response."""
        headers = {}
        if self.retry_s is not None:
            headers["Retry-After"] = str(max(1, round(self.retry_s)))
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.to_dict(), self.status, headers)


def without_paths(text: str) -> str:
    """A message without paths of this machine."""
    return _PATH.sub("(path)", text)


def with_fields(text: str) -> str:
    """A message with the fields of a request, ``path_tokens``, for options, ``--path-tokens``."""
    return _OPTION.sub(lambda option: option[1].replace("-", "_"), text)


def refusal_of(error: BaseException) -> Refusal:
    """The refusal for an error of a search; that of a fault says nothing of its cause."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, OutOfMemory):
        return Refusal(
            503, "out_of_memory", "The machine has too little memory for this.", retry_s=5
        )
    if isinstance(error, ArborError) and error.exit_code in (2, 4, 6):
        code = CODES.get(error.code, error.code.replace("-", "_"))
        if isinstance(error, BudgetInfeasible):
            return Refusal(400, code, f"This request does not fit: {error.message}")
        message = f"{error.message} {error.hint}".strip()
        return Refusal(400, code, with_fields(without_paths(message)))
    return Refusal(500, "engine_fault", "The server failed on this request; others go on.")


def refusal_of_body(error: ValidationError) -> Refusal:
    """The refusal of a body that does not follow its schema, with the first mistakes."""
    found: dict[str, str] = {}
    for each in error.errors(include_url=False, include_context=False, include_input=False):
        place = ".".join(str(part) for part in each["loc"] if _is_place(part))
        if each["type"] == "json_invalid":
            return Refusal(400, "invalid_json", f"The body is not JSON: {each['msg']}.")
        words = each["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
        if each["type"] == "extra_forbidden":
            words = "unknown or unsupported field; leave it out"
        known = found.setdefault(place, words)
        if words not in known.split(", or "):
            found[place] = f"{known}, or {words}"
    shown = [f"{place or 'body'}: {words}" for place, words in list(found.items())[:MOST_PROBLEMS]]
    more = len(found) - len(shown)
    message = "; ".join(shown) + (f"; and {more} more" if more > 0 else "") + "."
    return Refusal(400, "invalid_request", message, param=next(iter(found), None))


def _is_place(part: int | str) -> bool:
    """Whether a part of a location is a field or an index, not the name of a type in a union."""
    if isinstance(part, int):
        return True
    return not any(sign in part for sign in "[(-") and part not in ("str", "int", "float", "bool")
