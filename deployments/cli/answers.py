"""Where a chat's answers come from: a server over HTTP, or the engine in this process."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import aiohttp

from shoal.configs.errors import ShoalError

if TYPE_CHECKING:
    from shoal.model_shards.engine.engine import Engine
    from shoal.model_shards.engine.request import RequestDelta

Message = dict[str, str]
OnText = Callable[[str], None]


class AnswerError(ShoalError):
    """The turn failed; the conversation can go on."""


@dataclass(frozen=True, slots=True)
class Sampling:
    max_tokens: int | None = None
    """None: as many as the context has room for."""
    temperature: float = 0.7
    seed: int | None = None


@dataclass(slots=True)
class Turn:
    """One answer as it arrives; what was received so far stays here when it is interrupted."""

    started: float = field(default_factory=time.perf_counter)
    first: float | None = None
    last: float | None = None
    text: str = ""
    events: int = 0
    output_tokens: int | None = None
    """From the server, at the end; None when the answer was stopped before."""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str | None = None

    def take(self, piece: str) -> None:
        now = time.perf_counter()
        if self.first is None:
            self.first = now
        self.last = now
        self.text += piece
        self.events += 1

    @property
    def tokens(self) -> int:
        """Counted by the server, else the number of events (about one token each)."""
        return self.events if self.output_tokens is None else self.output_tokens

    @property
    def ttft(self) -> float | None:
        return None if self.first is None else self.first - self.started

    @property
    def tokens_per_s(self) -> float | None:
        """After the first token; None for answers too short to tell."""
        if self.first is None or self.last is None or self.tokens < 2 or self.last <= self.first:
            return None
        return (self.tokens - 1) / (self.last - self.first)


class Answers(ABC):
    """Answers one conversation at a time. Cancelling `answer` stops the generation where it happens."""

    @property
    @abstractmethod
    def label(self) -> str:
        """Model and place, for people."""

    @abstractmethod
    async def answer(self, messages: list[Message], turn: Turn, on_text: OnText) -> None:
        """Streams the answer to `messages` into `turn` and `on_text`. Raises AnswerError or another ShoalError."""

    @abstractmethod
    def close(self) -> None:
        """Gives back what was started for the conversation."""


class HttpAnswers(Answers):
    """A server that speaks OpenAI's chat API."""

    def __init__(self, url: str, model: str | None, api_key: str | None, sampling: Sampling) -> None:
        self._root = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._sampling = sampling
        self._model = model

    @property
    def label(self) -> str:
        return f"{self._model or 'the first model'} at {self._root}"

    async def connect(self) -> None:
        """Finds out which model is served; raises AnswerError when nobody answers."""
        async with self._open() as session:
            try:
                async with session.get(f"{self._root}/v1/models") as response:
                    await self._check(response)
                    served = [str(model["id"]) for model in (await response.json())["data"]]
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError, TypeError) as error:
                raise AnswerError(
                    f"No usable answer from {self._root}/v1/models ({type(error).__name__}: {error}). Start a server "
                    f"with `shoal serve`, name another with --url, or use --offline MODEL to do without one."
                ) from error
        if self._model is None:
            if not served:
                raise AnswerError(f"{self._root} serves no model.")
            self._model = served[0]

    def close(self) -> None:
        """Nothing is kept open between answers."""

    async def answer(self, messages: list[Message], turn: Turn, on_text: OnText) -> None:
        body: dict[str, Any] = {
            "model": self._model,
            "messages": messages,
            "temperature": self._sampling.temperature,
            "max_tokens": self._sampling.max_tokens,
            "seed": self._sampling.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        body = {name: value for name, value in body.items() if value is not None}
        async with self._open() as session:
            try:
                async with session.post(f"{self._root}/v1/chat/completions", json=body) as response:
                    await self._check(response)
                    async for event in _events(response):
                        _take_event(event, turn, on_text)
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                raise AnswerError(f"The connection failed: {type(error).__name__}: {error}") from error

    def _open(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(headers=self._headers, timeout=aiohttp.ClientTimeout(total=None, sock_connect=10))

    async def _check(self, response: aiohttp.ClientResponse) -> None:
        if response.status == 200:
            return
        text = await response.text(errors="replace")
        try:
            message = json.loads(text)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            message = text[:300]
        raise AnswerError(f"HTTP {response.status}: {message}")


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    async for line in response.content:
        data = line.strip().removeprefix(b"data:").strip()
        if line.startswith(b"data:") and data != b"[DONE]":
            yield json.loads(data)


def _take_event(event: dict[str, Any], turn: Turn, on_text: OnText) -> None:
    if event.get("error"):
        error = event["error"]
        raise AnswerError(str(error.get("message", error)) if isinstance(error, dict) else str(error))
    for choice in event.get("choices") or ():
        turn.finish_reason = choice.get("finish_reason") or turn.finish_reason
        if piece := (choice.get("delta") or {}).get("content"):
            turn.take(piece)
            on_text(piece)
    if usage := event.get("usage"):
        turn.output_tokens, turn.prompt_tokens = usage.get("completion_tokens"), usage.get("prompt_tokens")
        turn.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")


class EngineAnswers(Answers):
    """The engine in this process. Takes over a started engine and shuts it down."""

    def __init__(self, engine: Engine, sampling: Sampling) -> None:
        self._engine = engine
        self._sampling = sampling

    @property
    def label(self) -> str:
        return f"{self._engine.model_name} in this process"

    async def answer(self, messages: list[Message], turn: Turn, on_text: OnText) -> None:
        from shoal.model_shards.engine.request import Request
        from shoal.model_shards.sampling.params import SamplingParams

        token_ids = self._engine.tokenizer.encode_chat([dict(message) for message in messages])
        turn.prompt_tokens = len(token_ids)
        room = self._engine.max_model_len - len(token_ids)
        seed = self._sampling.seed if self._sampling.seed is not None else uuid.uuid4().int & (2**63 - 1)
        sampling = SamplingParams(
            max_tokens=self._sampling.max_tokens or max(1, room), temperature=self._sampling.temperature, seed=seed
        )
        sampling.check(self._engine.vocab_size)
        request = Request(uuid.uuid4().hex, token_ids, sampling, seed)
        sink = _QueueSink(asyncio.get_running_loop())
        self._engine.submit(request, sink)
        try:
            while not await self._take(sink, turn, on_text):
                pass
        except asyncio.CancelledError:
            self._engine.abort(request.request_id)
            raise

    async def _take(self, sink: _QueueSink, turn: Turn, on_text: OnText) -> bool:
        """One delta; True when it was the last."""
        delta = await sink.queue.get()
        if delta.text:
            turn.take(delta.text)
            on_text(delta.text)
        if delta.finish_reason is None:
            return False
        if delta.error is not None:
            raise AnswerError(delta.error)
        turn.finish_reason = delta.finish_reason.value
        turn.output_tokens, turn.cached_tokens = delta.num_output_tokens, delta.num_cached_tokens
        return True

    def close(self) -> None:
        self._engine.shutdown()


class _QueueSink:
    """Hands deltas from the engine's thread to the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.queue: asyncio.Queue[RequestDelta] = asyncio.Queue()
        self._loop = loop

    def deliver(self, deltas: list[RequestDelta]) -> None:
        for delta in deltas:
            try:
                self._loop.call_soon_threadsafe(self.queue.put_nowait, delta)
            except RuntimeError:
                return  # the loop was closed by an interrupt; the request has been aborted
