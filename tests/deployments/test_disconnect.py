"""Clients that hang up: the engine is told within a step, and every KV block comes back."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from typing import Any

import pytest

ENDLESS = {"default": {"pieces": ["a "], "eos": False, "delay_ms": 5}}


async def hang_up_after(server: Any, seconds: float, **body: Any) -> None:
    """Sends a request and closes the socket."""
    host, port = server.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    raw = json.dumps({"prompt": "x", "max_tokens": 400, "ignore_eos": True, **body}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(raw)}\r\n\r\n".encode()
    writer.write(head + raw)
    await asyncio.sleep(seconds)
    writer.transport.abort()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_hang_up_ends_the_request(start_server: Any, stream: bool) -> None:
    """O-19."""
    async with start_server(ENDLESS) as server:
        await hang_up_after(server, 0.3, stream=stream)
        await server.wait_for(server.idle, timeout_s=1.0)
        assert await server.metric("shoal_sequences_finished_total", reason="abort") == 1
        assert await server.metric("shoal_client_disconnects_total", route="/v1/completions") == 1
        for _ in range(20):
            assert (await server.complete(max_tokens=2)).status_code == 200
        assert await server.metric("shoal_sequences_finished_total", reason="abort") == 1


async def test_a_hang_up_while_waiting_in_the_queue(start_server: Any) -> None:
    async with start_server(ENDLESS, engine={"max_num_seqs": 1}) as server:
        running = asyncio.create_task(server.complete(max_tokens=60))
        await asyncio.sleep(0.1)
        await hang_up_after(server, 0.1, stream=True)
        assert (await running).status_code == 200
        await server.wait_for(server.idle, timeout_s=1.0)


async def test_all_choices_and_prompts_of_a_request_end(start_server: Any) -> None:
    async with start_server(ENDLESS) as server:
        await hang_up_after(server, 0.2, prompt=["x", "y"], n=3)
        await server.wait_for(server.idle, timeout_s=1.0)
        assert await server.metric("shoal_sequences_finished_total", reason="abort") == 6


async def test_a_reader_that_takes_nothing_is_given_up(start_server: Any) -> None:
    script = {"default": {"pieces": ["many many words "], "eos": False}}
    async with start_server(script, engine={"max_model_len": 50_000}, gateway={"write_timeout_s": 0.3}) as server:
        host, port = server.url.removeprefix("http://").split(":")
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((host, int(port)))
        raw = json.dumps({"prompt": "x", "max_tokens": 49_000, "stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(raw)}\r\n\r\n"
        connection.sendall(head.encode() + raw)

        async def given_up() -> bool:
            return bool(await server.metric("shoal_client_disconnects_total") == 1)

        await server.wait_for(given_up, timeout_s=20.0)
        await server.wait_for(server.idle, timeout_s=2.0)
        connection.close()


async def test_five_hundred_requests_with_a_hundred_hang_ups(start_server: Any) -> None:
    rng = random.Random(5)
    script = {"default": {"pieces": ["a ", "b ", "c "], "eos": False, "delay_ms": 1}}
    async with start_server(script, engine={"max_num_seqs": 16}) as server:
        gate = asyncio.Semaphore(24)

        async def one(number: int) -> None:
            async with gate:
                body = {"prompt": f"the quick brown fox {number % 7} " * 3, "stream": rng.random() < 0.5}
                if number % 5 == 0:
                    await hang_up_after(server, rng.random() * 0.2, **body)
                else:
                    response = await server.complete(**body, max_tokens=rng.randint(1, 12))
                    assert response.status_code == 200

        await asyncio.gather(*(one(number) for number in range(500)))
        await server.wait_for(server.idle, timeout_s=5.0)
