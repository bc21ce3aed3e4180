"""Serving: the application on a socket, until a signal ends it."""

from __future__ import annotations

import errno
import logging
import os
import socket
from collections.abc import Callable

import uvicorn
from fastapi import FastAPI

from arbor.errors import UsageError

LOCAL_HOSTS = ("127.0.0.1", "localhost", "[::1]", "::1")
HEADERS_BYTES = 65_536
IDLE_S = 15  # of a connection that is kept open
BACKLOG = 256


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket that listens.

    Args:
        host: name or address.
        port: 0 takes a free one.

    Raises:
        UsageError: the address cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        hint = "Take another --port; 0 takes a free one." if taken else "Check --bind and --port."
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise UsageError("address", f"{host}:{port}: {reason}.", hint) from error


def url_of(listening: socket.socket) -> str:
    """The address of a socket that listens, as a URL."""
    host, port = listening.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


class Server(uvicorn.Server):
    """uvicorn's server, which reports when it is ready.

    Args:
        app: the application.
        drain_s: seconds that requests in progress get when it ends.
        ready: called once requests are answered.
        draining: called when it begins to end.
        verbose: log every request.
    """

    def __init__(
        self,
        app: FastAPI,
        drain_s: float,
        *,
        ready: Callable[[], None] = lambda: None,
        draining: Callable[[], None] = lambda: None,
        verbose: bool = False,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_level="info" if verbose else "warning",
                access_log=verbose,
                timeout_keep_alive=IDLE_S,
                timeout_graceful_shutdown=max(1, round(drain_s)),
                h11_max_incomplete_event_size=HEADERS_BYTES,
                server_header=False,
            )
        )
        self.ready = ready
        self._draining = draining

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn's, then the report."""
        await super().startup(sockets)
        if not self.should_exit:
            self.ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """The report, then uvicorn's; after a second Ctrl-C, which gives up what is in progress,
        the application is closed too, and what was given up is not logged as a fault."""
        self._draining()
        await super().shutdown(sockets)
        if self.force_exit:
            logging.getLogger("uvicorn.error").disabled = True
            await self.lifespan.shutdown()
