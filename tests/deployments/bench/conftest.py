"""A real HTTP server whose every delay is known: the load generator must report exactly what it does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web


@dataclass
class FakeServer:
    """Answers chat requests with `tokens` events, the first after `first_delay`, the others `gap` seconds apart."""

    tokens: int = 4
    first_delay: float = 0.1
    gap: float = 0.04
    tail_delay: float = 0.0
    """Between the last token and the usage event."""
    tokens_per_event: int = 1
    refuse: dict[str, str] = field(default_factory=dict)
    """Field name -> message: requests that carry the field get a 400."""
    fail_with: str | None = None
    """An error event after the first token, from request number `fail_from` on."""
    fail_from: int = 0
    cut: bool = False
    """Close the stream without [DONE]."""
    has_tokenize: bool = True
    template_tokens: int = 7
    seen: list[dict[str, Any]] = field(default_factory=list)
    running: int = 0
    most_running: int = 0
    url: str = ""

    def prompt_tokens(self, body: dict[str, Any]) -> int:
        if "prompt" in body:
            return len(body["prompt"].split())
        return sum(len(m["content"].split()) + self.template_tokens for m in body["messages"])

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "fake", "object": "model"}]})

    async def tokenize(self, request: web.Request) -> web.Response:
        if not self.has_tokenize:
            raise web.HTTPNotFound
        return web.json_response({"count": self.prompt_tokens(await request.json())})

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.seen.append(body)
        for name, message in self.refuse.items():
            if name in body:
                return web.json_response({"error": {"message": message}}, status=400)
        usage = {
            "prompt_tokens": self.prompt_tokens(body),
            "completion_tokens": self.tokens,
            "prompt_tokens_details": {"cached_tokens": 3},
        }
        if not body.get("stream"):
            return web.json_response({"choices": [], "usage": usage})
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            return await self._stream(request, usage)
        finally:
            self.running -= 1

    async def _stream(self, request: web.Request, usage: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)

        async def event(**content: Any) -> None:
            await response.write(f"data: {json.dumps(content)}\n\n".encode())

        chat = request.path.endswith("chat/completions")
        if chat:
            await event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])
        for number in range(0, self.tokens, self.tokens_per_event):
            await asyncio.sleep(self.gap if number else self.first_delay)
            text = {"delta": {"content": "word "}} if chat else {"text": "word "}
            await event(choices=[{"index": 0, **text, "finish_reason": None}])
            if self.fail_with is not None and len(self.seen) > self.fail_from:
                await event(error={"message": self.fail_with, "type": "server_error"})
                break
        await asyncio.sleep(self.tail_delay)
        await event(choices=[{"index": 0, "delta": {}, "finish_reason": "length"}])
        await event(choices=[], usage=usage)
        if not self.cut:
            await response.write(b"data: [DONE]\n\n")
        return response


@pytest.fixture
async def server() -> AsyncIterator[FakeServer]:
    fake = FakeServer()
    app = web.Application()
    app.router.add_get("/v1/models", fake.models)
    app.router.add_post("/tokenize", fake.tokenize)
    app.router.add_post("/v1/chat/completions", fake.generate)
    app.router.add_post("/v1/completions", fake.generate)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    fake.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield fake
    await runner.cleanup()
