"""The application: OpenAI's endpoints, health and metrics."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, StreamingResponse
from pydantic import BaseModel, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from arbor._version import __version__
from arbor.integrations.server.planned import Planned, plan_chat, plan_completion, plan_solve
from arbor.integrations.server.public import PublicRecords
from arbor.integrations.server.refusals import Refusal, refusal_of, refusal_of_body
from arbor.integrations.server.responses import DONE, HEARTBEAT, Responses, sse
from arbor.integrations.server.schema import (
    ChatRequest,
    CompletionRequest,
    Generating,
    SolveRequest,
)
from arbor.integrations.server.service import Admitted, RunEnded, Service
from arbor.integrations.server.settings import ServerSettings
from arbor.run.choices import Delta

logger = logging.getLogger(__name__)

CLIENT_GONE = 499  # nginx's status for it; nobody reads it
VIEW_REFRESH_S = 5  # of the viewer while its search goes on
PAGE_HEADERS = {"Cache-Control": "no-store", "X-Frame-Options": "DENY"}
SSE_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


Parsed = TypeVar("Parsed", bound=BaseModel)


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

    app = FastAPI(
        title="arbor",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,  # these pages load scripts from elsewhere
        redoc_url=None,
        openapi_url=None,
    )
    if settings.hosts:
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(settings.hosts))

    def allowed(request: Request) -> None:
        check_key(request, settings)

    guarded = [Depends(allowed)]

    @app.exception_handler(Refusal)
    async def refused(request: Request, refusal: Refusal) -> Response:
        _count(request, refusal.status)
        return refusal.response()

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
        _count(request, 500)
        return refusal_of(error).response()

    def _count(request: Request, status: int) -> None:
        route = request.scope.get("route")
        metrics.requests.labels(getattr(route, "path", "other"), str(status)).inc()

    # Generation

    async def answer(
        request: Request, body: Generating, kind: str, plan: Callable[[], Planned]
    ) -> Response:
        """The response to a chat or a completion."""
        arrived_s = time.monotonic()
        check_model(body.model)
        admitted = await service.admit(plan, arrived_s)
        options = body.stream_options
        with_usage = bool(options and options.include_usage)
        form = Responses(settings.name, admitted.planned, kind, with_usage)
        over = ending(admitted, request.url.path, arrived_s)
        if body.stream:
            return EventStream(_chunks(admitted, form, with_usage), over)
        return await whole(request, _whole(admitted, form), over)

    def check_model(name: str | None) -> None:
        if name is not None and name != settings.name:
            raise Refusal(
                404,
                "model_not_found",
                f"The model '{name}' is not served here; this is '{settings.name}'.",
                param="model",
            )

    def ending(admitted: Admitted, path: str, arrived_s: float) -> Callable[[int], None]:
        """What is called with the status at the end of a request that was admitted."""

        def over(status: int) -> None:
            admitted.close()
            metrics.requests.labels(path, str(status)).inc()
            metrics.seconds.labels(path).observe(time.monotonic() - arrived_s)
            if status == CLIENT_GONE:
                metrics.cancelled.inc()

        return over

    async def whole(
        request: Request, work: Awaitable[dict[str, Any]], over: Callable[[int], None]
    ) -> Response:
        """The response once some work is done."""
        status = 500
        try:
            document = await unless_gone(request, work)
            status = 200
        except Refusal as refusal:
            status = refusal.status
            return refusal.response()
        except ClientGone:
            status = CLIENT_GONE
            return Response(status_code=CLIENT_GONE)
        finally:
            over(status)
        return JSONResponse(document)

    @app.post("/v1/chat/completions", dependencies=guarded)
    async def chat(request: Request) -> Response:
        body = await parsed_body(request, settings, ChatRequest)
        plan = lambda: plan_chat(body, service.engine, settings)  # noqa: E731
        return await answer(request, body, "chat.completion", plan)

    @app.post("/v1/completions", dependencies=guarded)
    async def complete(request: Request) -> Response:
        body = await parsed_body(request, settings, CompletionRequest)
        plan = lambda: plan_completion(body, service.engine, settings)  # noqa: E731
        return await answer(request, body, "text_completion", plan)

    @app.post("/v1/solve", dependencies=guarded)
    async def solve(request: Request) -> Response:
        arrived_s = time.monotonic()
        body = await parsed_body(request, settings, SolveRequest)
        check_model(body.model)
        plan = lambda: plan_solve(body, service.engine, settings)  # noqa: E731
        admitted = await service.admit(plan, arrived_s)
        records = PublicRecords(service.source, settings.name)
        over = ending(admitted, request.url.path, arrived_s)
        if body.stream:
            return EventStream(_events(admitted, records), over)
        return await whole(request, _solution(admitted, records), over)

    # The server itself

    @app.get("/", dependencies=guarded)
    async def index() -> Response:
        if service.live is None:
            return PlainTextResponse(f"arbor {__version__} serves {settings.name} at /v1\n")
        return HTMLResponse(service.live.index(), headers=PAGE_HEADERS)

    @app.get("/live/{identity}", dependencies=guarded)
    async def live(identity: str) -> Response:
        search = None if service.live is None else service.live.find(identity)
        events = None if search is None else search.events()
        if search is None or events is None:
            raise Refusal(404, "unknown_search", "This search is not shown.")
        page = await run_in_threadpool(search.page, events)
        refresh = {} if search.ended else {"Refresh": str(VIEW_REFRESH_S)}
        return HTMLResponse(page, headers=PAGE_HEADERS | refresh)

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
        over: called once with the status, when all are sent or the client went away.
    """

    def __init__(self, chunks: AsyncIterator[bytes], over: Callable[[int], None]) -> None:
        super().__init__(chunks, media_type="text/event-stream", headers=SSE_HEADERS)
        self._over = over

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sent = False

        async def watched(message: Any) -> None:
            nonlocal sent
            await send(message)
            sent = message["type"] == "http.response.body" and not message.get("more_body", False)

        try:
            await super().__call__(scope, receive, watched)
        finally:
            self._over(200 if sent else CLIENT_GONE)


async def _whole(admitted: Admitted, form: Responses) -> dict[str, Any]:
    """The response once everything has ended."""
    deltas: list[tuple[int, Delta]] = []
    ended: list[tuple[int, RunEnded]] = []
    async for news in admitted.news():
        deltas += news.deltas
        ended += news.ended
    return form.whole(deltas, ended)


async def _solution(admitted: Admitted, records: PublicRecords) -> dict[str, Any]:
    """The solution of the only run."""
    solution: dict[str, Any] = {}
    async for news in admitted.news():
        for _, end in news.ended:
            solution = records.solution(end.solution)
    return solution


async def _events(admitted: Admitted, records: PublicRecords) -> AsyncIterator[bytes]:
    """The events of the only run as they come, and its solution; an error is the last event."""
    try:
        async for news in admitted.news(streaming=True, with_events=True):
            chunks = []
            for _, event in news.events:
                chunks.append(sse(records.record(event), event.name))
            chunks += [sse(records.solution(end.solution), "solution") for _, end in news.ended]
            yield b"".join(chunks) or HEARTBEAT
    except Refusal as refusal:
        yield sse(refusal.to_dict(), "error")


async def _chunks(admitted: Admitted, form: Responses, with_usage: bool) -> AsyncIterator[bytes]:
    """The response as it comes; an error is the last event."""
    for chunk in form.roles():
        yield chunk
    ended: list[tuple[int, RunEnded]] = []
    try:
        async for news in admitted.news(streaming=True):
            ended += news.ended
            if not news.deltas and not news.ended:
                yield HEARTBEAT
            elif news.deltas:
                yield b"".join(form.chunk(run, delta) for run, delta in news.deltas)
        if with_usage:
            yield form.last(ended)
        yield DONE
    except Refusal as refusal:
        yield sse(refusal.to_dict())


# API keys, and the bodies of requests within their limits


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
