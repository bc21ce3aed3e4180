"""The application: OpenAI's endpoints, health and metrics."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import Receive, Scope, Send

from arbor._version import __version__
from arbor.server.access import check_key, parsed_body
from arbor.server.answers import Delta
from arbor.server.planned import Planned, plan_chat, plan_completion
from arbor.server.refusals import Refusal, refusal_of
from arbor.server.responses import DONE, HEARTBEAT, Format, sse
from arbor.server.schema import ChatRequest, CompletionRequest, Generating
from arbor.server.service import Admitted, Ended, Service

logger = logging.getLogger(__name__)

CLIENT_GONE = 499  # nginx's status for it; nobody reads it
SSE_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


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
        if body.model is not None and body.model != settings.name:
            raise Refusal(
                404,
                "model_not_found",
                f"The model '{body.model}' is not served here; this is '{settings.name}'.",
                param="model",
            )
        admitted = await service.admit(plan, arrived_s)
        form = Format(settings.name, admitted.planned, kind)
        path = request.url.path

        def over(status: int) -> None:
            admitted.close()
            metrics.requests.labels(path, str(status)).inc()
            metrics.seconds.labels(path).observe(time.monotonic() - arrived_s)
            if status == CLIENT_GONE:
                metrics.cancelled.inc()

        if body.stream:
            options = body.stream_options
            with_usage = bool(options and options.include_usage)
            return EventStream(_chunks(admitted, form, with_usage), over)
        status = CLIENT_GONE
        try:
            document = await unless_gone(request, _whole(admitted, form))
            status = 200
        except Refusal as refusal:
            status = refusal.status
            return refusal.response()
        except ClientGone:
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


async def _whole(admitted: Admitted, form: Format) -> dict[str, Any]:
    """The response once everything has ended."""
    deltas: list[tuple[int, Delta]] = []
    ended: list[tuple[int, Ended]] = []
    async for news in admitted.news():
        deltas += news.deltas
        ended += news.ended
    return form.whole(deltas, ended)


async def _chunks(admitted: Admitted, form: Format, with_usage: bool) -> AsyncIterator[bytes]:
    """The response as it comes; an error is the last event."""
    for chunk in form.roles():
        yield chunk
    ended: list[tuple[int, Ended]] = []
    try:
        async for news in admitted.news():
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
