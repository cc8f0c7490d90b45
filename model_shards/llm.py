"""Offline use: a model in this process, no server and no Ray.

from shoal.model_shards.llm import LLM
from shoal.model_shards.sampling.params import SamplingParams

with LLM("smollm2-135m") as llm:
    for answer in llm.generate(["The capital of France is"], SamplingParams(max_tokens=20, temperature=0.0)):
        print(answer.outputs[0].text)
"""

from __future__ import annotations

import itertools
import queue
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from shoal.configs.errors import InvalidRequestError
from shoal.configs.schema import parse_engine_config
from shoal.model_shards.engine.build import build_engine
from shoal.model_shards.engine.plan import TokenLogprobs
from shoal.model_shards.engine.request import FinishReason, Request, RequestDelta
from shoal.model_shards.sampling.params import SamplingParams

if TYPE_CHECKING:
    from shoal.model_shards.tokenizer.tokenizer import Tokenizer

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]


@dataclass(slots=True)
class Completion:
    """One of the n answers to a prompt."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """One a token when `SamplingParams.logprobs` is set."""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None


@dataclass(slots=True)
class RequestOutput:
    """All answers to one prompt, in the order of their index."""

    prompt: str | None
    """None when token ids were given."""
    prompt_token_ids: list[int]
    outputs: list[Completion]
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """When asked for: one entry a prompt token, the first None."""
    num_cached_tokens: int = 0


class LLM:
    """One engine for batches of prompts. Keyword arguments are the settings of `EngineConfig` (`max_model_len=512`,
    `kv_cache_memory="1GiB"`, ...); a wrong one raises ConfigError. Use it from one thread at a time."""

    def __init__(self, model: str, **engine_options: Any) -> None:
        # A batch is given whole: there is nobody to be told to come again later, so nothing is refused for its number.
        waiting = {"max_waiting_requests": 2**31, "max_waiting_tokens": 2**62}
        self._engine = build_engine(parse_engine_config({"model": model, **waiting, **engine_options}))
        self._engine.start()
        self._ids = itertools.count()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def tokenizer(self) -> Tokenizer:
        return self._engine.tokenizer

    def close(self) -> None:
        """Ends what runs and frees the model. Idempotent."""
        self._engine.shutdown()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_progress_bar: bool = False,
    ) -> list[RequestOutput]:
        """Continues each prompt (a text, or a list of token ids). One SamplingParams for all, or one a prompt.

        Raises InvalidRequestError for a prompt that cannot be run, before any is. A prompt that fails while running
        has `finish_reason` error and the reason; the others are not touched by it.
        """
        listed = _as_list(prompts)
        # Ids may come from an array; what goes to other processes must be plain integers.
        encoded = [self.tokenizer.encode(p) if isinstance(p, str) else [int(token) for token in p] for p in listed]
        texts = [prompt if isinstance(prompt, str) else None for prompt in listed]
        return self._run(texts, encoded, _for_each(sampling_params, len(encoded)), use_progress_bar)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_progress_bar: bool = False,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answers one conversation (a list of messages) or several. `template_options` go to the chat template."""
        texts = [self.tokenizer.render_chat(one, **template_options) for one in _conversations(messages)]
        # The template writes BOS and the like itself.
        encoded = [self.tokenizer.encode(text, add_special_tokens=False) for text in texts]
        return self._run(list(texts), encoded, _for_each(sampling_params, len(encoded)), use_progress_bar)

    def _run(
        self, texts: list[str | None], prompts: list[list[int]], params: list[SamplingParams], use_progress_bar: bool
    ) -> list[RequestOutput]:
        requests = [
            Request(f"llm-{next(self._ids)}", prompt, sampling, _seed(sampling))
            for prompt, sampling in zip(prompts, params, strict=True)
        ]
        for request in requests:
            self._engine.check(request)
        results = {
            request.request_id: RequestOutput(
                text, request.prompt_token_ids, [Completion(index) for index in range(request.sampling.n)]
            )
            for text, request in zip(texts, requests, strict=True)
        }
        sink = _QueueSink()
        try:
            for request in requests:
                self._engine.submit(request, sink)
            with _Progress(sum(len(output.outputs) for output in results.values()), use_progress_bar) as bar:
                while not bar.done:
                    for delta in sink.inbox.get():
                        _apply(delta, results[delta.request_id])
                        bar.advance(delta)
        except BaseException:
            for request in requests:
                self._engine.abort(request.request_id)
            raise
        return list(results.values())


class _QueueSink:
    def __init__(self) -> None:
        self.inbox: queue.SimpleQueue[list[RequestDelta]] = queue.SimpleQueue()

    def deliver(self, deltas: list[RequestDelta]) -> None:
        self.inbox.put(deltas)


class _Progress:
    """Counts sequences that have ended; drawn only when asked for."""

    def __init__(self, total: int, visible: bool) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._left = total
        self._tokens = 0
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[tokens]} tokens"),
            TimeRemainingColumn(),
            disable=not visible,
        )
        self._task = self._bar.add_task("generating", total=total, tokens=0)

    @property
    def done(self) -> bool:
        return self._left == 0

    def __enter__(self) -> _Progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def advance(self, delta: RequestDelta) -> None:
        ended = delta.finish_reason is not None
        self._left -= ended
        self._tokens += len(delta.token_ids)
        self._bar.update(self._task, advance=int(ended), tokens=self._tokens)


def _apply(delta: RequestDelta, output: RequestOutput) -> None:
    completion = output.outputs[delta.index]
    completion.text += delta.text
    completion.token_ids += delta.token_ids
    completion.logprobs += delta.logprobs
    completion.finish_reason = delta.finish_reason
    completion.stop_reason = delta.stop_reason
    completion.error = delta.error
    if delta.index == 0:
        output.num_cached_tokens = delta.num_cached_tokens
    if delta.prompt_logprobs is not None:
        output.prompt_logprobs = delta.prompt_logprobs


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt (a text, or a flat list of ids) is a batch of one."""
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [cast(Prompt, prompts)]
    return list(cast(Sequence[Prompt], prompts))


def _conversations(messages: Messages | Sequence[Messages]) -> list[Messages]:
    if not messages or isinstance(messages[0], Mapping):
        return [cast(Messages, messages)]
    return list(cast(Sequence[Messages], messages))


def _for_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise InvalidRequestError(f"{count} prompts, but {len(params)} sampling_params.", param="sampling_params")
    return list(params)


def _seed(sampling: SamplingParams) -> int:
    return secrets.randbits(64) if sampling.seed is None else sampling.seed
