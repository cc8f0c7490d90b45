"""The gateway's ASGI application."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp

from shoal.configs.errors import ShoalError
from shoal.deployments.http.body import read_json
from shoal.deployments.http.errors import RouteError, error_response
from shoal.deployments.http.generate import chat_completions, completions
from shoal.deployments.http.requests import RequestMiddleware
from shoal.deployments.protocol.fields import parse_body
from shoal.deployments.protocol.responses import ModelCard, TokenizeResponse
from shoal.deployments.protocol.tokens import DetokenizeRequest, TokenizeRequest
from shoal.deployments.service import GatewayService

PROMETHEUS_TEXT = "text/plain; version=0.0.4; charset=utf-8"


def create_app(service: GatewayService, version: str) -> ASGIApp:
    """The whole HTTP surface. The service must be connected before requests come, and be closed by whoever made it."""
    app = FastAPI(title="Shoal", version=version, docs_url=None, redoc_url=None)
    app.add_api_route("/health/live", _live, methods=["GET"], include_in_schema=False)
    for add in (_add_generation, _add_models, _add_tokens, _add_operations):
        add(app, service)
    app.add_exception_handler(ShoalError, _on_error)
    app.add_exception_handler(HTTPException, _on_error)
    app.add_exception_handler(Exception, _on_error)
    return RequestMiddleware(app, service.metrics, service.in_flight)


async def _on_error(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        # Raised by the router: no such path, or not with this method.
        path = request.url.path[:200]
        message = f"{request.method} {path}: {error.detail}."
        return error_response(RouteError(message, error.status_code))
    return error_response(error)


async def _live() -> Response:
    """The process answers. Says nothing about the engine."""
    return JSONResponse({"status": "alive"})


def _add_generation(app: FastAPI, service: GatewayService) -> None:
    async def chat(request: Request) -> Response:
        return await chat_completions(service, request)

    async def text(request: Request) -> Response:
        return await completions(service, request)

    app.add_api_route("/v1/chat/completions", chat, methods=["POST"], name="chat completions")
    app.add_api_route("/v1/completions", text, methods=["POST"], name="text completions")


def _add_models(app: FastAPI, service: GatewayService) -> None:
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

    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [card()]})

    async def model(model_id: str) -> Response:
        service.check_model(model_id)
        return JSONResponse(card())

    app.add_api_route("/v1/models", models, methods=["GET"])
    app.add_api_route("/v1/models/{model_id:path}", model, methods=["GET"])


def _add_tokens(app: FastAPI, service: GatewayService) -> None:
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

    app.add_api_route("/tokenize", tokenize, methods=["POST"])
    app.add_api_route("/detokenize", detokenize, methods=["POST"])


def _add_operations(app: FastAPI, service: GatewayService) -> None:
    async def ready() -> Response:
        """Requests can be served: the engine answers, makes progress, and nothing is shutting down. Looks at what the
        last heartbeat said, so that a probe never waits behind work."""
        reason = "shutting down" if service.draining else service.link.trouble
        if reason is not None:
            return JSONResponse({"status": "unavailable", "reason": reason}, status_code=503)
        return JSONResponse({"status": "ready"})

    async def metrics() -> Response:
        return PlainTextResponse(await service.metrics_text(), media_type=PROMETHEUS_TEXT)

    async def version() -> Response:
        return JSONResponse({"version": app.version})

    app.add_api_route("/health/ready", ready, methods=["GET"])
    app.add_api_route("/metrics", metrics, methods=["GET"])
    app.add_api_route("/version", version, methods=["GET"])
