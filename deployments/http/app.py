"""The gateway's ASGI application."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
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
    routes = Routes()
    routes.add("POST", "/v1/chat/completions", lambda exchange: chat_completions(service, exchange))
    routes.add("POST", "/v1/completions", lambda exchange: completions(service, exchange))
    for add in (_add_models, _add_tokens, _add_operations):
        add(routes, service)

    async def show_version(_: Request) -> Response:
        return JSONResponse({"version": version})

    routes.add_simple("GET", "/version", show_version)
    return RequestMiddleware(routes, service.metrics, service.in_flight)


class Routes:
    """The routes by their paths. A dozen fixed paths need no patterns, and a framework's router, with its middleware,
    costs more than everything else that a request does here before it is tokenized."""

    def __init__(self) -> None:
        self._handlers: dict[str, tuple[str, Handler]] = {}

    def add(self, method: str, path: str, handler: Handler) -> None:
        """`{}` at the end of a path stands for any rest of it, slashes included: `path_params["rest"]`."""
        self._handlers[path] = (method, handler)

    def add_simple(self, method: str, path: str, handler: SimpleHandler) -> None:
        """One that makes its whole answer at once."""

        async def respond(exchange: Exchange) -> None:
            await exchange.respond(await handler(exchange.request))

        self.add(method, path, respond)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        route = self._route(path)
        if route is None:
            raise RouteError(f"{scope['method']} {path[:200]}: Not Found.", 404)
        method, handler = self._handlers[route]
        if scope["method"] not in (method, "HEAD" if method == "GET" else method):
            raise RouteError(f"{scope['method']} {path[:200]}: Method Not Allowed.", 405)
        scope["path_params"] = {"rest": path.removeprefix(route.removesuffix("{}"))}
        exchange = Exchange(scope, receive, send)
        exchange.context.route = route
        await handler(exchange)

    def _route(self, path: str) -> str | None:
        if path in self._handlers:
            return path
        if path.endswith("/") and path[:-1] in self._handlers:
            return path[:-1]
        return next((route for route in self._handlers if route.endswith("{}") and path.startswith(route[:-2])), None)


def _add_models(routes: Routes, service: GatewayService) -> None:
    def card() -> ModelCard:
        info = service.link.info
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
        service.check_model(request.path_params["rest"])
        return JSONResponse(card())

    routes.add_simple("GET", "/v1/models", models)
    routes.add_simple("GET", "/v1/models/{}", model)


def _add_tokens(routes: Routes, service: GatewayService) -> None:
    limits = service.config.limits

    async def tokenize(request: Request) -> Response:
        body = parse_body(TokenizeRequest, await read_json(request, limits), limits)
        service.check_model(body.model)
        body.check()
        token_ids = await service.tokenize(body)
        answer = TokenizeResponse(count=len(token_ids), max_model_len=service.link.info.max_model_len, tokens=token_ids)
        if body.return_token_strs:
            vocabulary, _ = await service.vocabulary()
            answer["token_strs"] = [vocabulary.show(token_id) for token_id in token_ids]
        return JSONResponse(answer)

    async def detokenize(request: Request) -> Response:
        body = parse_body(DetokenizeRequest, await read_json(request, limits), limits)
        service.check_model(body.model)
        return JSONResponse({"prompt": await service.stages.tokenizer.decode(body.tokens)})

    routes.add_simple("POST", "/tokenize", tokenize)
    routes.add_simple("POST", "/detokenize", detokenize)


def _add_operations(routes: Routes, service: GatewayService) -> None:
    async def live(_: Request) -> Response:
        """The process answers. Says nothing about the engine."""
        return JSONResponse({"status": "alive"})

    async def ready(_: Request) -> Response:
        """Requests can be served: the engine answers, makes progress, and nothing is shutting down. Looks at what the
        last heartbeat said, so that a probe never waits behind work."""
        reason = "shutting down" if service.draining else service.link.trouble
        if reason is not None:
            return JSONResponse({"status": "unavailable", "reason": reason}, status_code=503)
        return JSONResponse({"status": "ready"})

    async def metrics(_: Request) -> Response:
        return PlainTextResponse(await service.metrics_text(), media_type=PROMETHEUS_TEXT)

    routes.add_simple("GET", "/health/live", live)
    routes.add_simple("GET", "/health/ready", ready)
    routes.add_simple("GET", "/metrics", metrics)
