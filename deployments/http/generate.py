"""POST /v1/chat/completions and /v1/completions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from shoal.deployments.generation import Generation
from shoal.deployments.http.body import read_json
from shoal.deployments.http.disconnect import until_disconnect
from shoal.deployments.http.formats import ChatFormat, EchoedPrompt, Format, StreamUsage, TextFormat, TextOptions
from shoal.deployments.http.requests import RequestContext
from shoal.deployments.http.sse import EventStreamResponse, generation_events
from shoal.deployments.protocol.chat import ChatCompletionRequest
from shoal.deployments.protocol.completions import CompletionRequest
from shoal.deployments.protocol.fields import GenerationFields, parse_body
from shoal.deployments.protocol.logprobs import Vocabulary
from shoal.deployments.protocol.responses import (
    CHAT_CHUNK_OBJECT,
    CHAT_OBJECT,
    TEXT_OBJECT,
    Envelope,
    new_id,
)
from shoal.deployments.service import GatewayService
from shoal.deployments.streams import merge
from shoal.model_shards.engine.request import RequestDelta


@dataclass(frozen=True, slots=True)
class _Answer:
    generation: Generation
    layout: Format


async def chat_completions(service: GatewayService, request: Request) -> Response:
    body = await _read(service, request, ChatCompletionRequest)
    body.check()

    async def start() -> _Answer:
        wants_vocabulary = bool(body.logprobs) or body.prompt_logprobs is not None
        vocabulary = (await service.vocabulary())[0] if wants_vocabulary else None
        layout = ChatFormat(
            _envelope(service, "chatcmpl", (CHAT_OBJECT, CHAT_CHUNK_OBJECT)),
            _stream_usage(body),
            vocabulary=vocabulary,
            wants_logprobs=bool(body.logprobs),
            wants_prompt_logprobs=body.prompt_logprobs is not None,
        )
        return _Answer(await service.start_chat(body), layout)

    return await _answer(service, request, body.streams, start)


async def completions(service: GatewayService, request: Request) -> Response:
    body = await _read(service, request, CompletionRequest)
    body.check()

    async def start() -> _Answer:
        vocabulary, special = await _vocabulary_for(service, body)
        generation, encoded = await service.start_completion(body)
        echo = None
        if body.echo:
            echo = [EchoedPrompt(*prompt) for prompt in zip(encoded.texts, encoded.token_ids, strict=True)]
        options = TextOptions(
            n=body.num_choices,
            echo=echo,
            logprobs=body.logprobs is not None,
            prompt_logprobs=body.prompt_logprobs is not None,
            vocabulary=vocabulary,
            invisible=special if body.skip_special_tokens is not False else frozenset(),
        )
        envelope = _envelope(service, "cmpl", (TEXT_OBJECT, TEXT_OBJECT))
        return _Answer(generation, TextFormat(envelope, _stream_usage(body), options))

    return await _answer(service, request, body.streams, start)


async def _read(service: GatewayService, request: Request, model: type[Any]) -> Any:
    """The checked body, of a model that is served here, when requests can be served at all."""
    limits = service.config.limits
    body = parse_body(model, await read_json(request, limits), limits)
    service.check_ready()
    service.check_model(body.model)
    return body


async def _vocabulary_for(service: GatewayService, body: CompletionRequest) -> tuple[Vocabulary | None, frozenset[int]]:
    if body.logprobs is None and body.prompt_logprobs is None:
        return None, frozenset()
    return await service.vocabulary()


def _envelope(service: GatewayService, prefix: str, objects: tuple[str, str]) -> Envelope:
    info = service.link.info
    return Envelope(new_id(prefix), info.model_name, info.fingerprint, objects)


def _stream_usage(body: GenerationFields) -> StreamUsage:
    return StreamUsage(final=body.include_usage, continuous=body.continuous_usage)


async def _answer(
    service: GatewayService, request: Request, streams: bool, start: Callable[[], Awaitable[_Answer]]
) -> Response:
    """Both modes watch for a client that hangs up, from here to the last byte."""
    context: RequestContext = request.state.context
    context.facts["stream"] = streams
    work = _open_stream(service, request, start) if streams else _whole(service, request, start)
    return await until_disconnect(request.receive, work)


async def _whole(service: GatewayService, request: Request, start: Callable[[], Awaitable[_Answer]]) -> Response:
    answer = await start()
    outputs: dict[int, RequestDelta] = {}
    first_token = _first_token(service, request)
    with answer.generation as generation:
        async for updates in generation.updates():
            for choice, delta in updates.items():
                first_token()
                outputs[choice] = merge(outputs[choice], delta) if choice in outputs else delta
    _note_usage(request, generation)
    return JSONResponse(answer.layout.body(outputs, generation.usage))


async def _open_stream(service: GatewayService, request: Request, start: Callable[[], Awaitable[_Answer]]) -> Response:
    """Waits for the first event before it answers, so that an early failure still has its HTTP status."""
    answer = await start()
    events = generation_events(answer.generation, answer.layout, _first_token(service, request))
    try:
        first = await anext(events)
    except BaseException:
        answer.generation.close()
        raise

    def done() -> None:
        _note_usage(request, answer.generation)

    return EventStreamResponse(first, events, service.config.write_timeout_s, done)


def _first_token(service: GatewayService, request: Request) -> Callable[[], None]:
    """To be called with each delta; records the first."""
    context: RequestContext = request.state.context

    def record() -> None:
        if "first_token_s" not in context.facts:
            context.facts["first_token_s"] = round(context.elapsed_s, 6)
            route = request.scope["route"].path
            service.metrics.observe("shoal_http_first_token_seconds", (context.elapsed_s,), (route,))

    return record


def _note_usage(request: Request, generation: Generation) -> None:
    usage, facts = generation.usage, request.state.context.facts
    facts["prompt_tokens"], facts["completion_tokens"] = usage["prompt_tokens"], usage["completion_tokens"]
    facts["cached_tokens"] = usage["prompt_tokens_details"]["cached_tokens"]
