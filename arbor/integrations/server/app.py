"""The application: OpenAI's endpoints, health and metrics, on a socket until a signal ends it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import hmac
import logging
import math
import os
import re
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import uvicorn
from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from arbor._version import __version__
from arbor.errors import UsageError
from arbor.integrations.server.metrics import CLIENT_GONE, CountedRequests
from arbor.integrations.server.planned import Planned, plan_chat, plan_completion, plan_solve
from arbor.integrations.server.refusals import Refusal, refusal_of, refusal_of_body
from arbor.integrations.server.responses import PublicRecords, Responses
from arbor.integrations.server.schema import (
    ChatRequest,
    CompletionRequest,
    Generating,
    SolveRequest,
)
from arbor.integrations.server.service import Service
from arbor.integrations.server.settings import ServerSettings
from arbor.run.worker import SharedEngine
from arbor.support.texts import clipped

SSE_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
LOCAL_HOSTS = ("127.0.0.1", "localhost", "[::1]")
HEADERS_BYTES = 65_536
_HOST = re.compile(r"(\[[^\]]*\]|[^:]*)(?::\d*)?")  # with a port
IDLE_S = 15  # of a connection that is kept open
BACKLOG = 256
BINDS = "Take an address of this machine, as in --bind 127.0.0.1, or 0.0.0.0 for all of them."
LAST_FORWARD_S = 30  # that requests get beyond their time to end, after which they are cancelled

Asked = TypeVar("Asked", bound=BaseModel)


def make_app(service: Service) -> FastAPI:
    """The application of a service.

    Args:
        service: with its engine loaded; closed when the application shuts down.
    """
    settings, metrics = service.settings, service.metrics
    created = int(time.time())

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        try:
            yield
        finally:
            service.close()

    def addressed(request: Request) -> None:
        check_host(request, settings)

    app = FastAPI(
        title="arbor",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,  # these pages load scripts from elsewhere
        redoc_url=None,
        openapi_url=None,
        dependencies=[Depends(addressed)],
    )
    app.add_middleware(CountedRequests, metrics=metrics)

    def allowed(request: Request) -> None:
        check_key(request, settings)

    guarded = [Depends(allowed)]

    @app.exception_handler(Refusal)
    async def refused(request: Request, refusal: Refusal) -> Response:
        return refusal.response()

    @app.exception_handler(ClientGone)
    async def unread(request: Request, error: ClientGone) -> Response:
        return Response(status_code=CLIENT_GONE)

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> Response:
        what = f"{request.method} {request.url.path}"
        code, words = "http_error", f"{what}: {error.detail}."
        if error.status_code == 404:
            code, words = "unknown_url", f"Unknown URL: {what}."
        elif error.status_code == 405:
            code, words = "method_not_allowed", f"Method not allowed: {what}."
        return Refusal(error.status_code, code, words).response()

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        return refusal_of(error).response()

    # Generation

    def generates(
        path: str,
        schema: type[ChatRequest] | type[CompletionRequest] | type[SolveRequest],
        plan: Callable[[Any, SharedEngine, ServerSettings], Planned],
        responses: Callable[[Planned, Any], Responses | PublicRecords],
    ) -> None:
        """Adds an endpoint: plan what a body asks for, run it, answer whole or in parts."""

        @app.post(path, dependencies=guarded)
        async def answer(request: Request) -> Response:
            arrived_s = time.monotonic()
            body = await parsed_body(request, settings, schema)
            if body.model is not None and body.model != settings.name:
                words = f"The model '{body.model}' is not served here; this is '{settings.name}'."
                raise Refusal(404, "model_not_found", words, param="model")
            admitted = await service.admit(lambda: plan(body, service.engine, settings), arrived_s)
            made = responses(admitted.planned, body)

            def over() -> None:
                admitted.close()
                metrics.seconds.labels(path).observe(time.monotonic() - arrived_s)

            if body.stream:
                return EventStream(made.stream(admitted), over)
            try:
                document = await unless_gone(request, made.whole(admitted))
            finally:
                over()
            return JSONResponse(document)

    name = settings.name
    generates(
        "/v1/chat/completions",
        ChatRequest,
        plan_chat,
        lambda planned, body: Responses(name, planned, "chat.completion", _with_usage(body)),
    )
    generates(
        "/v1/completions",
        CompletionRequest,
        plan_completion,
        lambda planned, body: Responses(name, planned, "text_completion", _with_usage(body)),
    )
    generates(
        "/v1/solve",
        SolveRequest,
        plan_solve,
        lambda planned, body: PublicRecords(service.source, name),
    )

    # The server itself

    model = {"id": settings.name, "object": "model", "created": created, "owned_by": "arbor"}

    @app.get("/v1/models", dependencies=guarded)
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model]}

    @app.get("/v1/models/{name:path}", dependencies=guarded)
    async def one_model(name: str) -> dict[str, Any]:
        if name != settings.name:
            raise Refusal(404, "model_not_found", "This model is not served here.", param="model")
        return model

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> Response:
        state = "draining" if service.draining else "ready"
        return JSONResponse({"status": state}, 503 if service.draining else 200)

    @app.get("/metrics", dependencies=guarded)
    async def read_metrics() -> Response:
        return PlainTextResponse(metrics.text(), media_type="text/plain; version=0.0.4")

    return app


def _with_usage(body: Generating) -> bool:
    """Whether a stream ends with the usage."""
    return bool(body.stream_options and body.stream_options.include_usage)


class ClientGone(Exception):
    """The client has closed the connection."""


async def unless_gone(request: Request, work: Awaitable[Any]) -> Any:
    """The result of some work, which is cancelled where the client goes away.

    Raises:
        ClientGone: it has.
    """

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(gone())
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        for each in (working, watching):
            each.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await each


class EventStream(StreamingResponse):
    """Server-sent events.

    Args:
        chunks: of the body; closed at the end.
        over: called once, when all are sent or the client went away.
    """

    def __init__(self, chunks: AsyncIterator[bytes], over: Callable[[], None]) -> None:
        super().__init__(chunks, media_type="text/event-stream", headers=SSE_HEADERS)
        self._over = over

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._over()


# Hosts, API keys, and the bodies of requests within their limits


def check_host(request: Request, settings: ServerSettings) -> None:
    """Refuse a request that addresses the server by another name than its own (DNS rebinding).

    Raises:
        Refusal: it does.
    """
    given = request.headers.get("host", "")
    host = _HOST.fullmatch(given)
    if settings.hosts and (host is None or host[1].lower() not in settings.hosts):
        names = f"{', '.join(settings.hosts[:-1])} or {settings.hosts[-1]}"
        words = (
            f"The Host '{clipped(given)}' is not a name of this server, which answers on its own "
        )
        words += f"machine only. Send {names}, or begin it with --bind ADDRESS and API keys."
        raise Refusal(400, "unknown_host", words)


def check_key(request: Request, settings: ServerSettings) -> None:
    """Refuse a request without a valid API key, where the server has any.

    Digests are compared, with every key, in a time that depends neither on where keys differ nor
    on their lengths.

    Raises:
        Refusal: no key, or a wrong one.
    """
    if not settings.api_keys:
        return
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    token = given.strip() if scheme.lower() == "bearer" else ""
    given_digest = hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
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
        ClientGone: it has not come whole.
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
        raise ClientGone from None
    return b"".join(parts)


async def parsed_body(request: Request, settings: ServerSettings, schema: type[Asked]) -> Asked:
    """The body of a request by its schema.

    Raises:
        Refusal: it cannot be read, or does not follow the schema.
        ClientGone: it has not come whole.
    """
    body = await read_body(request, settings)
    try:
        return schema.model_validate_json(body)
    except ValidationError as error:
        raise refusal_of_body(error) from None
    except (UnicodeDecodeError, RecursionError):
        raise Refusal(400, "invalid_json", "The body is not JSON in UTF-8.") from None


# The socket, and uvicorn


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
        # `create_server` hides why a name is unknown
        socket.getaddrinfo(host or None, port, family)
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except (socket.gaierror, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "no name of a host"
        raise UsageError(
            "address", f"{host}:{port}: the host '{host}' is unknown: {reason}.", BINDS
        ) from error
    except OSError as error:
        taken = error.errno in (errno.EADDRINUSE, errno.EACCES)
        hint = "Take another --port; 0 takes a free one." if taken else BINDS
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise UsageError("address", f"{host}:{port}: {reason}.", hint) from error


def url_of(listening: socket.socket) -> str:
    """The address of a socket that listens, as a URL."""
    host, port = listening.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


class Server(uvicorn.Server):
    """uvicorn's server of a service.

    Args:
        service: drained and closed when the server ends.
        ready: called once requests are answered.
        verbose: log every request.
    """

    def __init__(self, service: Service, ready: Callable[[], None], verbose: bool = False) -> None:
        super().__init__(
            uvicorn.Config(
                make_app(service),
                log_level="info" if verbose else "warning",
                access_log=verbose,
                timeout_keep_alive=IDLE_S,
                timeout_graceful_shutdown=math.ceil(service.settings.drain) + LAST_FORWARD_S,
                h11_max_incomplete_event_size=HEADERS_BYTES,
                server_header=False,
            )
        )
        self.service = service
        self.ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn's, then the report."""
        await super().startup(sockets)
        if not self.should_exit:
            self.ready()

    async def on_tick(self, counter: int) -> bool:
        """Whether to end: uvicorn's reasons, or nothing more can be computed."""
        return await super().on_tick(counter) or self.service.lost is not None

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain, then uvicorn's: what is still in progress after that time is told so. After a
        second Ctrl-C, which gives up what is in progress, the application is closed too, and what
        was given up is not logged as a fault."""
        self.service.drain()
        drain_s = self.service.settings.drain
        closing = asyncio.get_running_loop().call_later(drain_s, self.service.close)
        await super().shutdown(sockets)
        closing.cancel()
        if self.force_exit:
            logging.getLogger("uvicorn.error").disabled = True
            await self.lifespan.shutdown()
