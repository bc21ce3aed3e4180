"""The Hub where it cannot be reached: what is in its cache is read at once, without retries."""

from __future__ import annotations

import functools
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit
from urllib.request import getproxies

from arbor.errors import ModelError

PATIENCE_S = 5.0  # for a name and a connection; huggingface_hub's own retries take half a minute


@contextmanager
def cache_if_unreachable() -> Iterator[None]:
    """While it lasts, huggingface_hub is offline if its server cannot be reached."""
    from huggingface_hub import constants

    was_offline = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = was_offline or not is_reachable(constants.ENDPOINT)
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = was_offline


@functools.cache
def is_reachable(endpoint: str) -> bool:
    """Whether a server answers; assumed where a proxy stands in between. Asked once a process."""
    if {"https", "http", "all"} & set(getproxies()):
        return True
    place = urlsplit(endpoint)
    port = place.port or (80 if place.scheme == "http" else 443)
    answered = threading.Event()

    def ask() -> None:
        try:
            socket.create_connection((place.hostname or "", port), timeout=PATIENCE_S).close()
        except OSError:
            return
        answered.set()

    asking = threading.Thread(target=ask, name="arbor-hub", daemon=True)
    asking.start()
    asking.join(PATIENCE_S)  # looking up a name has no time limit of its own
    return answered.is_set()


def offline_error(label: str, name: str, instead: str) -> ModelError | None:
    """The error for what is not in the cache where the Hub cannot be reached; None where it can.

    Args:
        label: what is not there, for the message.
        name: the same, as it was given.
        instead: what works besides a download.
    """
    from huggingface_hub import constants

    missing = f"{label} is not in HF_HOME={os.environ.get('HF_HOME', '~/.cache/huggingface')}"
    if os.environ.get("HF_HUB_OFFLINE") == "1":
        why, download = " and HF_HUB_OFFLINE=1", "Download it first"
    elif not is_reachable(constants.ENDPOINT):
        why, download = f", and {constants.ENDPOINT} cannot be reached", "Connect to download it"
    else:
        return None
    return ModelError("offline", f"{missing}{why}.", f"{download}, {instead}.", model=name)
