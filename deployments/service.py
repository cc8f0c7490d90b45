"""What the gateway does with a request, apart from HTTP: tokenize, guard, check, submit."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import secrets
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shoal.configs.app import GatewayConfig
from shoal.configs.errors import (
    ContentFilterError,
    ContextLengthError,
    EngineDeadError,
    InvalidRequestError,
    ModelNotFoundError,
    OverloadedError,
    ShoalError,
)
from shoal.deployments.engine_links import EngineLinks
from shoal.deployments.generation import Generation, Outputs
from shoal.deployments.http.requests import InFlight
from shoal.deployments.metrics import Metrics
from shoal.deployments.protocol.chat import ChatCompletionRequest, ChatMessage
from shoal.deployments.protocol.completions import CompletionRequest
from shoal.deployments.protocol.fields import GenerationFields
from shoal.deployments.protocol.logprobs import Vocabulary
from shoal.deployments.protocol.tokens import TokenizeRequest
from shoal.deployments.stages import ChatJob, Encoded, GuardStage, PromptsJob, TokenizerStage
from shoal.deployments.streams import StreamHub
from shoal.guardrails.pipeline import RailPipeline
from shoal.guardrails.verdicts import Verdict
from shoal.model_shards.engine.request import Request
from shoal.model_shards.sampling.params import SamplingParams, check_token_ids

logger = logging.getLogger("shoal.gateway")


@dataclass(frozen=True, slots=True)
class Stages:
    """The neighbours that requests pass: objects in this process, or `RemoteStage`s."""

    tokenizer: TokenizerStage
    guard: GuardStage | None
    """None where no input rail is configured: then there is nothing to ask."""


def _has_failed(task: asyncio.Task[Any]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


def chat_job(
    body: ChatCompletionRequest | TokenizeRequest,
    messages: Sequence[ChatMessage],
    template_kwargs: dict[str, Any],
    bad_words: list[str] | None,
) -> ChatJob:
    """What the chat template is given. Tools are withheld from it when the client wants none called."""
    continues = bool(body.continue_final_message)
    shows_tools = not isinstance(body, ChatCompletionRequest) or body.tool_choice != "none"
    return ChatJob(
        messages=[message.to_template(position) for position, message in enumerate(messages)],
        tools=body.tools if shows_tools else None,
        add_generation_prompt=not continues if body.add_generation_prompt is None else body.add_generation_prompt,
        continue_final_message=continues,
        template_kwargs=template_kwargs,
        add_special_tokens=bool(body.add_special_tokens),
        bad_words=bad_words,
    )


class GatewayService:
    """One a gateway process; lives on one event loop and holds no state of a model."""

    def __init__(
        self,
        config: GatewayConfig,
        stages: Stages,
        links: EngineLinks,
        hub: StreamHub,
        output_rails: RailPipeline,
        metrics: Metrics,
    ) -> None:
        self.config = config
        self.stages = stages
        self.links = links
        self.metrics = metrics
        self.draining = False
        self.in_flight = InFlight()
        self._hub = hub
        self._outputs = Outputs(output_rails, links.abort, self._output_blocked)
        self._vocabulary: asyncio.Task[tuple[Vocabulary, frozenset[int]]] | None = None

    # Before a request ------------------------------------------------------------------------------------------------

    def check_model(self, model: str | None) -> str:
        """The served name. Raises ModelNotFoundError for another; without a name, the served model is meant."""
        served = self.links.info.model_name
        if model is not None and model != served:
            message = f"The model {model[:200]!r} does not exist here; GET /v1/models lists what does."
            raise ModelNotFoundError(message, param="model")
        return served

    def check_ready(self) -> None:
        """Raises what a client must be told while requests cannot be served."""
        if self.draining:
            raise OverloadedError("The server is shutting down.", retry_after_s=5.0)
        if self.links.trouble is not None:
            raise EngineDeadError(f"The server is not ready: {self.links.trouble}.")

    async def vocabulary(self) -> tuple[Vocabulary, frozenset[int]]:
        """The bytes of all tokens and the ids of special ones, fetched once."""
        if self._vocabulary is None or _has_failed(self._vocabulary):
            # In a context of its own: Serve cancels what a request does when its client hangs up.
            loop, context = asyncio.get_running_loop(), contextvars.Context()
            self._vocabulary = loop.create_task(self._fetch_vocabulary(), context=context)
        return await asyncio.shield(self._vocabulary)

    async def _fetch_vocabulary(self) -> tuple[Vocabulary, frozenset[int]]:
        table, special = await self.stages.tokenizer.vocabulary()
        return Vocabulary(table), special

    async def tokenize(self, body: TokenizeRequest) -> list[int]:
        """The token ids of a prompt or of messages, exactly as a completion of them would begin."""
        if body.messages is not None:
            job = chat_job(body, body.messages, body.chat_template_kwargs or {}, bad_words=None)
            return (await self.stages.tokenizer.encode_chat(job)).token_ids[0]
        assert body.prompt is not None
        if not body.prompt:
            return []
        add_special_tokens = body.add_special_tokens is not False
        text_job = PromptsJob([body.prompt], add_special_tokens, decode=False)
        encoded = await self.stages.tokenizer.encode_prompts(text_job)
        return encoded.token_ids[0]

    async def metrics_text(self) -> str:
        """The gateway's metrics and the engine's. Without the engine, the gateway's alone."""
        try:
            engine = await self.links.metrics_text()
        except ShoalError as error:
            engine = f"# the engine's metrics are missing: {type(error).__name__}\n"
        return self.metrics.render() + engine

    # A request -------------------------------------------------------------------------------------------------------

    async def start_chat(self, body: ChatCompletionRequest) -> Generation:
        """Everything up to the engine's acceptance. Raises what the client must be told instead of an answer."""
        job = chat_job(body, body.messages, body.template_kwargs, body.bad_words)
        encoded = await self.stages.tokenizer.encode_chat(job)
        await self._check_input([message["content"] or "" for message in job.messages], "messages")
        field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        sampling = body.sampling(
            max_tokens=body.token_limit,
            logprobs=body.num_logprobs,
            prompt_logprobs=body.prompt_logprobs,
            bad_words=encoded.bad_words,
        )
        return await self._start(body, encoded, sampling, ("messages", field))

    async def start_completion(self, body: CompletionRequest) -> tuple[Generation, Encoded]:
        """As `start_chat`; also gives the prompts, for `echo`."""
        prompts = body.prompts(self.config.limits.max_prompts)
        job = PromptsJob(
            prompts=prompts,  # type: ignore[arg-type]  # all str or all list, checked by `prompts`
            add_special_tokens=body.add_special_tokens is not False,
            decode=bool(body.echo) or self.stages.guard is not None,
            bad_words=body.bad_words,
        )
        encoded = await self.stages.tokenizer.encode_prompts(job)
        await self._check_input(encoded.texts, "prompt")
        scores = body.logprobs if body.scores_prompt else body.prompt_logprobs
        if body.token_limit == 0 and scores is None:
            scores = 0  # the engine takes max_tokens 0 only to score; nobody asked to see the scores
        sampling = body.sampling(
            max_tokens=body.token_limit, logprobs=body.logprobs, prompt_logprobs=scores, bad_words=encoded.bad_words
        )
        return await self._start(body, encoded, sampling, ("prompt", "max_tokens")), encoded

    async def _check_input(self, texts: Sequence[str], field: str) -> None:
        if self.stages.guard is None:
            return
        verdict = await self.stages.guard.check_input(list(texts))
        outcome = "allowed" if verdict.allowed else "blocked"
        self.metrics.add("shoal_rail_verdicts_total", 1, ("input", verdict.rail or "all", outcome))
        if not verdict.allowed:
            logger.info("input blocked", extra={"rail": verdict.rail, "rule": verdict.rule})
            message = f"The request was refused by the content rules of this server ({verdict.rail})."
            raise ContentFilterError(message, param=field)

    async def _start(
        self, body: GenerationFields, encoded: Encoded, sampling: SamplingParams, fields: tuple[str, str]
    ) -> Generation:
        self._check(encoded, sampling, fields)
        requests = [self._request(token_ids, sampling, body) for token_ids in encoded.token_ids]
        generation = Generation(requests, self._hub, self.config, self._outputs)
        try:
            await self.links.submit(generation.requests)
        except BaseException:
            generation.close(submitted=False)
            raise
        return generation

    def _request(self, token_ids: list[int], sampling: SamplingParams, body: GenerationFields) -> Request:
        return Request(
            request_id=uuid.uuid4().hex,
            prompt_token_ids=token_ids,
            sampling=sampling,
            seed=secrets.randbits(64) if sampling.seed is None else sampling.seed,
            priority=body.priority or 0,
            cache_salt=body.cache_salt or "",
        )

    def _check(self, encoded: Encoded, sampling: SamplingParams, fields: tuple[str, str]) -> None:
        """All that can be known to be wrong before the engine is asked, so that a batch is refused as a whole."""
        prompt_field, limit_field = fields
        info = self.links.info
        sampling.check(info.vocab_size)
        choices = len(encoded.token_ids) * sampling.n
        most = self.config.limits.max_choices
        if choices > most:
            message = f"The request asks for {choices} choices (prompts times n); {most} is the limit."
            raise InvalidRequestError(message, param="n")
        for token_ids in encoded.token_ids:
            check_token_ids(prompt_field, token_ids, info.vocab_size)
            self._check_context(len(token_ids), sampling.max_tokens, prompt_field, limit_field)

    def _check_context(self, prompt: int, max_tokens: int | None, prompt_field: str, limit_field: str) -> None:
        limit = self.links.info.max_model_len
        # Scoring needs no room for an answer; anything else needs room for a token at least.
        wanted = prompt + (1 if max_tokens is None else max_tokens)
        if wanted <= limit:
            return
        asked = "" if max_tokens is None else f" and asks for {max_tokens} in the completion ({limit_field})"
        message = (
            f"This model's maximum context length is {limit} tokens. The request has {prompt} tokens in its "
            f"{prompt_field}{asked}: reduce one of them."
        )
        raise ContextLengthError(message, param=prompt_field if prompt >= limit else limit_field)

    def _output_blocked(self, verdict: Verdict) -> None:
        self.metrics.add("shoal_rail_verdicts_total", 1, ("output", verdict.rail, "blocked"))
        logger.info("output blocked", extra={"rail": verdict.rail, "rule": verdict.rule})
