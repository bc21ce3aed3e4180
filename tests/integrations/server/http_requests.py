"""A server on a free port of this machine, and requests that no client library would send."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from arbor import Solver
from arbor.integrations.server.app import LOCAL_HOSTS, Server, bound_socket, url_of
from arbor.integrations.server.service import Service
from arbor.integrations.server.settings import ServerSettings
from arbor.model.runner import ModelRunner

NAME = "sapling"
TOKENS = 16_384


@dataclass(frozen=True)
class Running:
    """A server that answers.

    Attributes:
        url: without a path.
        service: behind it.
        server: uvicorn's.
    """

    url: str
    service: Service
    server: Server

    def client(self, key: str = "none") -> Any:
        """OpenAI's own client, which tries nothing twice."""
        import openai

        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60)

    def connect(self) -> http.client.HTTPConnection:
        """A connection."""
        where = urlsplit(self.url)
        return http.client.HTTPConnection(where.hostname or "", where.port, timeout=60)

    def send(
        self, path: str, body: Any = None, **headers: str
    ) -> tuple[int, dict[str, str], dict[str, Any]]:
        """Status, headers and JSON body of the answer to one request.

        Args:
            path: of the URL.
            body: bytes as they are, or JSON; None: GET.
            headers: with ``_`` for ``-``.
        """
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        sent = {"content-type": "application/json"} | given
        with closing(self.connect()) as connection:
            connection.request("GET" if data is None else "POST", path, data, sent)
            answer = connection.getresponse()
            text = answer.read()
            named = {name.lower(): value for name, value in answer.getheaders()}
        is_json = named.get("content-type", "").startswith("application/json")
        return answer.status, named, json.loads(text) if is_json else {"text": text.decode()}

    def begin(self, path: str, body: Any) -> socket.socket:
        """A request whose answer is not read."""
        where = urlsplit(self.url)
        data = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nhost: {where.netloc}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(data)}\r\nconnection: close\r\n\r\n"
        )
        connection = socket.create_connection((where.hostname or "", where.port or 0), timeout=60)
        connection.sendall(head.encode() + data)
        return connection

    @property
    def is_idle(self) -> bool:
        """Whether nothing is in progress, no tree is left, and the ledger holds kept prompts
        only."""
        service = self.service
        if service.engine.running or service.engine.waiting or service.admitted:
            return False
        engine = service.solver._engine
        if engine is None or engine._opened is None:
            return True
        memory = engine.memory
        return not engine.state.trees and memory.available == memory.slots


@contextmanager
def serving(solver: Solver, tokens: int | None = TOKENS, **settings: Any) -> Iterator[Running]:
    """A server of a solver while the context lasts."""
    given = {"drain": 1.0} | settings
    service = Service(solver, tokens, ServerSettings(name=NAME, hosts=LOCAL_HOSTS, **given))
    ready = threading.Event()
    with closing(bound_socket("127.0.0.1", 0)) as listening:
        server = Server(service, ready.set)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            assert ready.wait(30), "the server does not start"
            yield Running(url_of(listening), service, server)
        finally:
            server.should_exit = True
            thread.join(30)
            until(lambda: not solver._busy.locked())


def until(condition: Callable[[], Any]) -> None:
    """Wait for another thread; the test's own limit ends it."""
    while not condition():
        time.sleep(0.001)


class Gate:
    """Holds up every forward of the model while it is closed."""

    def __init__(self, monkeypatch: Any) -> None:
        self._open = threading.Event()
        self._open.set()
        right = ModelRunner.forward

        def forward(runner: ModelRunner, *args: Any, **kwargs: Any) -> Any:
            assert self._open.wait(60), "the gate stays closed"
            return right(runner, *args, **kwargs)

        monkeypatch.setattr(ModelRunner, "forward", forward)

    def close(self) -> None:
        """Hold up the next forward."""
        self._open.clear()

    def open(self) -> None:
        """Let all go on."""
        self._open.set()
