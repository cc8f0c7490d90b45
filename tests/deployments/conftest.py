"""A gateway in this process with a scripted model, behind a real HTTP server on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from shoal.configs.app import AppConfig
from shoal.deployments.gateway import Gateway

# Ray reads it once, when it is imported, and some test here imports Ray before another starts a cluster.
os.environ.setdefault("RAY_AUTH_MODE", "token")

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'system' and not loop.first %}{{ raise_exception('System must come first') }}{% endif %}"
    "<|{{ message.role }}|>{{ message.content }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="session")
def tiny_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a byte-level BPE of 256 bytes, a few merges and special tokens; BOS is added to plain text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(token, special=True) for token in ("<s>", "<|end|>", "<|user|>", "<|assistant|>")],
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog and the cat " * 4], trainer)
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    directory = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "<|end|>",
        "add_bos_token": True,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 1, "bos_token_id": 0}))
    return directory


HELLO = {"rules": [], "default": {"pieces": ["Hello", ", ", "world", "!"]}}


@dataclass
class Server:
    """A running gateway."""

    url: str
    gateway: Gateway
    http: httpx.AsyncClient

    async def chat(self, content: str = "hi", **body: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": content}], **body}
        return await self.http.post("/v1/chat/completions", json=body)

    async def complete(self, prompt: Any = "hi", **body: Any) -> httpx.Response:
        return await self.http.post("/v1/completions", json={"prompt": prompt, **body})

    @staticmethod
    def events(response: httpx.Response) -> list[dict[str, Any]]:
        """The JSON of each SSE event; checks that [DONE] comes once and last."""
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
        assert lines[-1] == "[DONE]"
        assert lines.count("[DONE]") == 1
        return [json.loads(line) for line in lines[:-1]]

    @staticmethod
    def text(chunks: list[dict[str, Any]], index: int = 0) -> str:
        """The joined text of one choice of a stream, chat or completion."""
        choices = [choice for chunk in chunks for choice in chunk.get("choices", ()) if choice["index"] == index]
        return "".join(
            choice["delta"].get("content", "") if "delta" in choice else choice["text"] for choice in choices
        )

    @staticmethod
    def finish_reasons(chunks: list[dict[str, Any]], index: int = 0) -> list[str]:
        """The finish reasons of one choice, in the order of their chunks."""
        choices = [choice for chunk in chunks for choice in chunk.get("choices", ()) if choice["index"] == index]
        return [choice["finish_reason"] for choice in choices if choice["finish_reason"] is not None]

    @staticmethod
    def error(response: httpx.Response, status: int) -> dict[str, Any]:
        """The error object of a refused request; checks its shape."""
        assert response.status_code == status, response.text
        assert response.headers["content-type"] == "application/json"
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert "Traceback" not in error["message"]
        return dict(error)

    async def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples with these labels."""
        from prometheus_client.parser import text_string_to_metric_families

        text = (await self.http.get("/metrics")).text
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        return sum(
            sample.value
            for sample in samples
            if sample.name == name and all(sample.labels.get(key) == value for key, value in labels.items())
        )

    async def wait_for(self, condition: Callable[[], Any], timeout_s: float = 5.0) -> None:
        """Until an async condition holds."""
        async with asyncio.timeout(timeout_s):
            while not await condition():  # noqa: ASYNC110 (the condition is an HTTP request)
                await asyncio.sleep(0.02)

    async def idle(self) -> bool:
        """Nothing runs or waits, and all KV blocks are free or cached."""
        running = await self.metric("shoal_sequences_running") + await self.metric("shoal_sequences_waiting")
        return running == 0 and await self.metric("shoal_kv_blocks", state="used") == 0


@contextlib.asynccontextmanager
async def serve_asgi(gateway: Gateway) -> AsyncIterator[str]:
    """A real HTTP server, so that sockets can be closed and filled."""
    listener = socket.socket()
    # Small, so that a client which takes nothing is felt after kilobytes and not after megabytes.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(gateway.asgi, log_level="warning", lifespan="off"))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        while not server.started:  # noqa: ASYNC110 (uvicorn offers no event)
            await asyncio.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task


@pytest.fixture
def serve_gateway() -> Callable[[Gateway], contextlib.AbstractAsyncContextManager[Server]]:
    """serve_gateway(gateway): that gateway behind a real HTTP server; it stays its maker's to close."""

    @contextlib.asynccontextmanager
    async def serve(gateway: Gateway) -> AsyncIterator[Server]:
        async with serve_asgi(gateway) as url, httpx.AsyncClient(base_url=url, timeout=60.0) as http:
            yield Server(url, gateway, http)

    return serve


ServerFactory = Callable[..., contextlib.AbstractAsyncContextManager[Server]]


@pytest.fixture
def start_server(tiny_tokenizer: Path, tmp_path: Path) -> ServerFactory:
    """start_server(script, engine={...}, gateway={...}, guard={...}): a gateway with a scripted model."""

    @contextlib.asynccontextmanager
    async def start(script: dict[str, Any] | None = None, **sections: Any) -> AsyncIterator[Server]:
        path = tmp_path / "test-model.json"
        path.write_text(json.dumps({"tokenizer": str(tiny_tokenizer), **(HELLO if script is None else script)}))
        engine = {"model": f"scripted:{path}", "max_model_len": 512, **sections.pop("engine", {})}
        settings = {"gateway": {"heartbeat_s": 0.05, "drain_s": 1.0}, **sections}
        gateway = await Gateway.colocated(AppConfig.model_validate({"engine": engine, **settings}))
        try:
            async with serve_asgi(gateway) as url, httpx.AsyncClient(base_url=url, timeout=20.0) as http:
                yield Server(url, gateway, http)
        finally:
            await gateway.close()

    return start


@pytest.fixture
def deny_list(tmp_path: Path) -> Path:
    path = tmp_path / "deny.txt"
    path.write_text("\\bkumquat\\b\n")
    return path
