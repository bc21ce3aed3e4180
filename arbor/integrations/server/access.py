"""Access to a server: API keys, and the bodies of requests within their limits."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac
from typing import TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from arbor.integrations.server.refusals import Refusal, refusal_of_body
from arbor.integrations.server.settings import ServerSettings

Parsed = TypeVar("Parsed", bound=BaseModel)


def check_key(request: Request, settings: ServerSettings) -> None:
    """Refuse a request without a valid API key, where the server has any.

    A browser sends the key as the password of any user. Digests are compared, with every key, in a
    time that depends neither on where keys differ nor on their lengths.

    Raises:
        Refusal: no key, or a wrong one.
    """
    if not settings.api_keys:
        return
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    token = b""
    if scheme.lower() == "bearer":
        token = given.strip().encode("utf-8", "surrogateescape")
    elif scheme.lower() == "basic":
        with contextlib.suppress(ValueError):
            token = base64.b64decode(given.strip(), validate=True).partition(b":")[2]
    given_digest = hashlib.sha256(token).digest()
    digests = [hashlib.sha256(key.encode()).digest() for key in settings.api_keys]
    matches = [hmac.compare_digest(given_digest, each) for each in digests]
    if not any(matches):
        raise Refusal(
            401, "invalid_api_key", "This server needs an API key: Authorization: Bearer KEY."
        )


async def read_body(request: Request, settings: ServerSettings) -> bytes:
    """The body of a request.

    Raises:
        Refusal: it is too large, too slow, or not declared as JSON.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Refusal(415, "content_type", "The body has to be application/json.")
    most = settings.body_bytes
    too_large = Refusal(413, "body_too_large", f"The body has more than {most:,} bytes.")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > most:
        raise too_large
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(settings.body_s):
            async for part in request.stream():
                size += len(part)
                if size > most:
                    raise too_large
                parts.append(part)
    except TimeoutError:
        words = f"The body has not arrived within {settings.body_s:g} s."
        raise Refusal(408, "body_timeout", words) from None
    except ClientDisconnect:
        raise Refusal(400, "disconnected", "The client went away.") from None
    return b"".join(parts)


async def parsed_body(request: Request, settings: ServerSettings, model: type[Parsed]) -> Parsed:
    """The body of a request by its schema.

    Raises:
        Refusal: it cannot be read, or does not follow the schema.
    """
    body = await read_body(request, settings)
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise refusal_of_body(error) from None
    except (UnicodeDecodeError, RecursionError):
        raise Refusal(400, "invalid_json", "The body is not JSON in UTF-8.") from None
