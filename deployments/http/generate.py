"""POST /v1/chat/completions and /v1/completions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from starlette.responses import JSONResponse

from shoal.deployments.generation import Generation
from shoal.deployments.http.body import read_json
from shoal.deployments.http.disconnect import ClientWatch
from shoal.deployments.http.formats import ChatFormat, EchoedPrompt, Format, StreamUsage, TextFormat, TextOptions
from shoal.deployments.http.requests import Exchange
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


async def chat_completions(service: GatewayService, exchange: Exchange) -> None:
    body = await _read(service, exchange, ChatCompletionRequest)
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

    await _answer(service, exchange, body.streams, start)


async def completions(service: GatewayService, exchange: Exchange) -> None:
    body = await _read(service, exchange, CompletionRequest)
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

    await _answer(service, exchange, body.streams, start)


async def _read(service: GatewayService, exchange: Exchange, model: type[Any]) -> Any:
    """The checked body, of a model that is served here, when requests can be served at all."""
    limits = service.config.limits
    body = parse_body(model, await read_json(exchange.request, limits), limits)
    service.check_ready()
    service.check_model(body.model)
    exchange.context.mark("parsed")
    return body


async def _vocabulary_for(service: GatewayService, body: CompletionRequest) -> tuple[Vocabulary | None, frozenset[int]]:
    if body.logprobs is None and body.prompt_logprobs is None:
        return None, frozenset()
    return await service.vocabulary()


def _envelope(service: GatewayService, prefix: str, objects: tuple[str, str]) -> Envelope:
    info = service.links.info
    return Envelope(new_id(prefix), info.model_name, info.fingerprint, objects)


def _stream_usage(body: GenerationFields) -> StreamUsage:
    return StreamUsage(final=body.include_usage, continuous=body.continuous_usage)


async def _answer(
    service: GatewayService, exchange: Exchange, streams: bool, start: Callable[[], Awaitable[_Answer]]
) -> None:
    """Both modes watch for a client that hangs up, from here to the last byte."""
    exchange.context.facts["stream"] = streams
    async with ClientWatch(exchange.receive, service.config.write_timeout_s) as watch:
        answer = await start()
        exchange.context.mark("accepted")
        try:
            if streams:
                await _stream(service, exchange, answer, watch)
            else:
                await _whole(service, exchange, answer)
        finally:
            answer.generation.close()
            _note_usage(exchange, answer.generation)


async def _whole(service: GatewayService, exchange: Exchange, answer: _Answer) -> None:
    outputs: dict[int, RequestDelta] = {}
    generation = answer.generation
    async for updates in generation.updates():
        if updates and not outputs:
            _first_token(service, exchange)
            generation.be_patient()
        for choice, delta in updates.items():
            outputs[choice] = merge((outputs[choice], delta)) if choice in outputs else delta
    await exchange.respond(JSONResponse(answer.layout.body(outputs, generation.usage)))


async def _stream(service: GatewayService, exchange: Exchange, answer: _Answer, watch: ClientWatch) -> None:
    """Waits for the first event before it answers, so that an early failure still has its HTTP status."""
    events = generation_events(answer.generation, answer.layout, lambda: _first_token(service, exchange))
    try:
        first = await anext(events)
        await exchange.respond(EventStreamResponse(first, events, watch))
    finally:
        await events.aclose()


def _first_token(service: GatewayService, exchange: Exchange) -> None:
    context = exchange.context
    context.mark("first_token")
    service.metrics.observe("shoal_http_first_token_seconds", (context.elapsed_s,), (context.route,))


def _note_usage(exchange: Exchange, generation: Generation) -> None:
    usage, facts = generation.usage, exchange.context.facts
    facts["prompt_tokens"], facts["completion_tokens"] = usage["prompt_tokens"], usage["completion_tokens"]
    facts["cached_tokens"] = usage["prompt_tokens_details"]["cached_tokens"]
