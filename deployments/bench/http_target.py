"""Any server that speaks OpenAI's chat or completions API, driven with streaming requests."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from shoal.configs.errors import ConfigError
from shoal.deployments.bench.prompts import Message, PlannedRequest, Ruler
from shoal.deployments.bench.records import RequestRecord
from shoal.deployments.bench.sse import StreamContents
from shoal.deployments.bench.target import Target

_MAX_ERROR_TEXT = 300


@dataclass(frozen=True)
class HttpSettings:
    """Where and how to ask."""

    url: str
    """Root of the server, with or without /v1."""
    model: str | None = None
    """Default: the first of /v1/models."""
    api: str = "chat"
    """`chat` or `completions`."""
    api_key: str | None = None
    timeout_s: float = 600.0
    extra_body: dict[str, Any] = field(default_factory=dict)
    """Merged into every request, over what the bench itself sends; None removes a field."""

    @property
    def root(self) -> str:
        return self.url.rstrip("/").removesuffix("/v1")


class HttpTarget(Target):
    """One server. A new connection per request: some servers drop idle ones without a word, which would be counted as
    errors of the engine, and a real crowd of users does not share connections either."""

    def __init__(self, settings: HttpSettings) -> None:
        super().__init__()
        if not settings.url.startswith(("http://", "https://")):
            raise ConfigError(f"{settings.url!r} is no http:// or https:// address.", param="url")
        self.settings = settings
        self.model = settings.model or ""
        self.defaults: dict[str, Any] = {"temperature": 0, "seed": 0, "ignore_eos": True}
        self._path = "/v1/chat/completions" if settings.api == "chat" else "/v1/completions"
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> HttpTarget:
        headers = {"Authorization": f"Bearer {self.settings.api_key}"} if self.settings.api_key else {}
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=self.settings.timeout_s),
            headers=headers,
        )
        try:
            if not self.model:
                self.model = await self._first_model()
        except BaseException:
            await self._session.close()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.session.close()

    @property
    def session(self) -> aiohttp.ClientSession:
        assert self._session is not None, "use HttpTarget as an asynchronous context manager"
        return self._session

    @property
    def label(self) -> str:
        return f"{self.model} at {self.settings.root}"

    def describe(self) -> dict[str, Any]:
        return {"kind": "http", "url": self.settings.root, "model": self.model, "api": self.settings.api}

    async def _first_model(self) -> str:
        status, answer = await self.get_json("/v1/models")
        models = answer.get("data") if status == 200 else None
        if not models:
            raise ConfigError(
                f"{self.settings.root}/v1/models answered {status} and names no model; pass --model.", param="model"
            )
        return str(models[0]["id"])

    async def get_json(self, path: str) -> tuple[int, dict[str, Any]]:
        return await self._json("GET", path, None)

    async def post_json(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        return await self._json("POST", path, body)

    async def _json(self, method: str, path: str, body: dict[str, Any] | None) -> tuple[int, dict[str, Any]]:
        """Status and decoded body; ({} when it is no JSON object). Raises ConfigError when nobody answers."""
        try:
            async with self.session.request(method, self.settings.root + path, json=body) as response:
                try:
                    answer = await response.json(content_type=None)
                except ValueError:
                    answer = None
                return response.status, answer if isinstance(answer, dict) else {}
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ConfigError(
                f"No answer from {self.settings.root} ({_describe(error)}). `shoal serve` starts a server.",
                param="url",
            ) from error

    def prompt_fields(self, messages: list[Message]) -> dict[str, Any]:
        """The prompt as this API wants it."""
        if self.settings.api == "chat":
            return {"messages": messages}
        return {"prompt": "\n".join(message["content"] for message in messages)}

    def body(self, request: PlannedRequest) -> dict[str, Any]:
        body = {
            "model": self.model,
            **self.prompt_fields(request.messages),
            "max_tokens": request.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.defaults,
            **self.settings.extra_body,
        }
        return {name: value for name, value in body.items() if value is not None}

    async def ruler(self) -> Ruler:
        from shoal.deployments.bench.rulers import http_ruler

        return await http_ruler(self)

    async def send(self, request: PlannedRequest, due: float | None = None) -> RequestRecord:
        now = self.clock()
        record = RequestRecord(request.max_tokens, now if due is None else due, request.tag, sent=now)
        chunks: list[tuple[float, bytes]] = []
        try:
            async with self.session.post(self.settings.root + self._path, json=self.body(request)) as response:
                if response.status != 200:
                    text = await response.text(errors="replace")
                    record.error = f"HTTP {response.status}: {text[:_MAX_ERROR_TEXT]}"
                    return record
                async for data in response.content.iter_any():
                    chunks.append((self.clock(), data))
                    self.on_event(data.count(b"data:"))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            record.error = _describe(error)
            return record
        finally:
            record.end = self.clock()
        # Parsed after the last byte, so that the client's own work cannot delay a time stamp of this request.
        _fill(record, StreamContents().read(chunks))
        return record

    async def settle_options(self, request: PlannedRequest) -> list[str]:
        """Sends one request and drops the optional fields a server refuses; returns what was dropped.

        Raises ConfigError with the server's own words when it refuses the plain request as well.
        """
        dropped: list[str] = []
        while (record := await self.send(request)).error is not None:
            if not record.error.startswith("HTTP 4") or not self.defaults:
                raise ConfigError(f"{self.label} does not serve the first request: {record.error}", param="url")
            named = [name for name in self.defaults if name in record.error]
            for name in named or list(self.defaults):
                dropped.append(name)
                del self.defaults[name]
        return dropped


def _fill(record: RequestRecord, contents: StreamContents) -> None:
    """Moves what the stream said into the record."""
    usage = contents.usage
    record.token_times = contents.token_times
    record.output_tokens = usage.get("completion_tokens") or len(contents.token_times)
    record.input_tokens = usage.get("prompt_tokens")
    record.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    record.finish_reason = contents.finish_reason
    record.error = contents.error
    if record.error is None and not contents.token_times:
        record.error = "the stream ended without any text"
    if record.error is None and not contents.done:
        record.error = "the stream broke off before [DONE]"


def _describe(error: BaseException) -> str:
    if isinstance(error, TimeoutError | asyncio.TimeoutError):
        return "timed out"
    return f"{type(error).__name__}: {error}"[:_MAX_ERROR_TEXT]
