"""ServerSettings: the limits and secrets of a server."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from arbor.errors import InputError, UsageError
from arbor.support.setting import setting

LEAST_KEY = 16  # characters of an API key


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """The limits of a server that its command sets."""

    HEADING = "Server"

    concurrency: int = setting(
        8, "Requests in progress at a time.", shown="short", least=1, most=1024
    )
    queue: int = setting(64, "Requests that may wait; further ones are refused (429).", least=0)
    max_tokens: int = setting(1024, "Most tokens of one choice.", least=1)
    max_search_tokens: int = setting(16_384, "Most tokens that one search generates.", least=1)
    timeout: float = setting(
        600.0, "Most seconds of a request, its wait included.", metavar="S", least=0, above=True
    )
    body_bytes: int = setting(2**20, "Most bytes of a request's body.", least=1)
    drain: float = setting(
        10.0, "Seconds that requests in progress get after Ctrl-C or SIGTERM.", metavar="S", least=0
    )


@dataclass(frozen=True, kw_only=True)
class ServerSettings(ServerLimits):
    """The limits and secrets of a server.

    Tokens, seconds and leaves that a request leaves open are the most that it may have.

    Attributes:
        name: of the model, as requests and `/v1/models` name it.
        max_choices: most choices of one request (`n`, times its prompts).
        max_expansions: most leaves that one search grows.
        max_blocks: most blocks that a search may open by its settings.
        max_depth: most thoughts on one path.
        max_stops: most stop strings.
        stop_length: most characters of a stop string.
        body_s: most seconds until a request's body has arrived.
        api_keys: if there are any, a request under `/v1` or `/metrics` has to name one.
        hosts: names by which clients may address the server (against DNS rebinding); empty: any.
    """

    name: str
    max_choices: int = 16
    max_expansions: int = 256
    max_blocks: int = 4096
    max_depth: int = 64
    max_stops: int = 16
    stop_length: int = 128
    body_s: float = 30.0
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    hosts: tuple[str, ...] = ()


def served_name(model: str) -> str:
    """The name of a model without the folders that lead to it on this machine.

    Args:
        model: built-in name, directory or Hub id.
    """
    path = Path(model)
    return path.resolve().name if path.is_dir() or path.is_absolute() else model


def read_keys(path: Path | None, given: str | None) -> tuple[str, ...]:
    """API keys of a file, one a line, and of the environment, separated by commas.

    Args:
        path: the file; lines that are empty or begin with ``#`` are ignored.
        given: value of ``ARBOR_API_KEYS``.

    Raises:
        InputError: the file cannot be read.
        UsageError: a key is too short or not plain text, or the file has none.
    """
    keys: list[str] = [] if given is None else given.split(",")
    if path is not None:
        try:
            lines = path.read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = os.strerror(error.errno or 0) if isinstance(error, OSError) else "not UTF-8"
            raise InputError("api-keys", f"{path}: {reason}.", "One key a line.") from error
        keys += [line for line in lines if line.strip() and not line.startswith("#")]
    found = tuple(dict.fromkeys(key.strip() for key in keys if key.strip()))
    for place, key in enumerate(found, 1):
        if len(key) < LEAST_KEY or not key.isascii() or not key.isprintable() or " " in key:
            raise UsageError(
                "api-keys",
                f"API key {place} of {len(found)} is short or not plain text.",
                f"{LEAST_KEY} characters or more of ASCII, as of: openssl rand -hex 16",
            )
    if (path is not None or given is not None) and not found:
        raise UsageError("api-keys", "there are no API keys where they are asked for.", "")
    return found
