"""The gateway's ASGI application."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from shoal.deployments.http.body import read_json
from shoal.deployments.http.errors import RouteError
from shoal.deployments.http.generate import chat_completions, completions
from shoal.deployments.http.requests import Exchange, RequestMiddleware
from shoal.deployments.protocol.fields import parse_body
from shoal.deployments.protocol.responses import ModelCard, TokenizeResponse
from shoal.deployments.protocol.tokens import DetokenizeRequest, TokenizeRequest
from shoal.deployments.service import GatewayService

PROMETHEUS_TEXT = "text/plain; version=0.0.4; charset=utf-8"

Handler = Callable[[Exchange], Awaitable[None]]
SimpleHandler = Callable[[Request], Awaitable[Response]]


def create_app(service: GatewayService, version: str) -> ASGIApp:
    """The whole HTTP surface. The service must be connected before requests come, and be closed by whoever made it."""

    async def show_version(_: Request) -> Response:
        return JSONResponse({"version": version})

    router = Router(
        [
            _route("POST", "/v1/chat/completions", lambda exchange: chat_completions(service, exchange)),
            _route("POST", "/v1/completions", lambda exchange: completions(service, exchange)),
            *_models(service),
            *_tokens(service),
            *_operations(service),
            _simple_route("GET", "/version", show_version),
        ]
    )

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = router  # where it is, Starlette raises what it would else answer as plain text
        try:
            await router(scope, receive, send)
        except HTTPException as error:
            message = f"{scope['method']} {scope['path'][:200]}: {error.detail}."
            raise RouteError(message, error.status_code) from error

    return RequestMiddleware(app, service.metrics, service.in_flight)


class _Endpoint:
    """A handler as an ASGI application of its own: Starlette gives it the connection as it came."""

    def __init__(self, path: str, handler: Handler) -> None:
        self._path = path
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send)
        exchange.context.route = self._path
        await self._handler(exchange)


def _route(method: str, path: str, handler: Handler) -> Route:
    return Route(path, _Endpoint(path, handler), methods=[method])


def _simple_route(method: str, path: str, handler: SimpleHandler) -> Route:
    """Of a handler that makes its whole answer at once."""

    async def respond(exchange: Exchange) -> None:
        await exchange.respond(await handler(exchange.request))

    return _route(method, path, respond)


def _models(service: GatewayService) -> list[Route]:
    def card() -> ModelCard:
        info = service.links.info
        return ModelCard(
            id=info.model_name,
            object="model",
            created=info.created,
            owned_by="shoal",
            root=info.model_name,
            parent=None,
            max_model_len=info.max_model_len,
        )

    async def models(_: Request) -> Response:
        return JSONResponse({"object": "list", "data": [card()]})

    async def model(request: Request) -> Response:
        service.check_model(request.path_params["name"])
        return JSONResponse(card())

    # The name of a model may hold slashes.
    return [_simple_route("GET", "/v1/models", models), _simple_route("GET", "/v1/models/{name:path}", model)]


def _tokens(service: GatewayService) -> list[Route]:
    limits = service.config.limits

    async def tokenize(request: Request) -> Response:
        body = parse_body(TokenizeRequest, await read_json(request, limits), limits)
        service.check_model(body.model)
        body.check()
        token_ids = await service.tokenize(body)
        max_model_len = service.links.info.max_model_len
        answer = TokenizeResponse(count=len(token_ids), max_model_len=max_model_len, tokens=token_ids)
        if body.return_token_strs:
            vocabulary, _ = await service.vocabulary()
            answer["token_strs"] = [vocabulary.show(token_id) for token_id in token_ids]
        return JSONResponse(answer)

    async def detokenize(request: Request) -> Response:
        body = parse_body(DetokenizeRequest, await read_json(request, limits), limits)
        service.check_model(body.model)
        return JSONResponse({"prompt": await service.stages.tokenizer.decode(body.tokens)})

    return [_simple_route("POST", "/tokenize", tokenize), _simple_route("POST", "/detokenize", detokenize)]


def _operations(service: GatewayService) -> list[Route]:
    async def live(_: Request) -> Response:
        """The process answers. Says nothing about the engine."""
        return JSONResponse({"status": "alive"})

    async def ready(_: Request) -> Response:
        """Requests can be served: the engine answers, makes progress, and nothing is shutting down. Looks at what the
        last heartbeat said, so that a probe never waits behind work."""
        reason = "shutting down" if service.draining else service.links.trouble
        if reason is not None:
            return JSONResponse({"status": "unavailable", "reason": reason}, status_code=503)
        return JSONResponse({"status": "ready"})

    async def metrics(_: Request) -> Response:
        return PlainTextResponse(await service.metrics_text(), media_type=PROMETHEUS_TEXT)

    return [
        _simple_route("GET", "/health/live", live),
        _simple_route("GET", "/health/ready", ready),
        _simple_route("GET", "/metrics", metrics),
    ]
