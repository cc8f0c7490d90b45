"""Clients that hang up: the engine is told within a step, and every KV block comes back."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from typing import Any

import pytest

from shoal.deployments.http.body import ClientGoneError
from shoal.deployments.http.disconnect import ClientWatch

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


class Client:
    """An ASGI `receive` whose client is there until `leave`."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}


async def test_a_watch_ends_its_block_when_the_client_goes() -> None:
    client = Client()
    asyncio.get_running_loop().call_later(0.01, client.gone.set)
    with pytest.raises(ClientGoneError):
        async with ClientWatch(client.receive, 60.0):
            await asyncio.sleep(5)
    # The task is as it was: nothing of the cancellation is left.
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    await asyncio.sleep(0)


async def test_a_watch_lets_results_and_errors_through() -> None:
    client = Client()
    async with ClientWatch(client.receive, 60.0):
        await asyncio.sleep(0)
    with pytest.raises(KeyError):
        async with ClientWatch(client.receive, 60.0):
            raise KeyError
    client.gone.set()
    await asyncio.sleep(0.01)
    assert {task.get_name() for task in asyncio.all_tasks()} == {asyncio.current_task().get_name()}  # type: ignore[union-attr]


async def test_a_cancellation_from_outside_stays_one() -> None:
    client = Client()

    async def work() -> None:
        async with ClientWatch(client.receive, 60.0):
            await asyncio.sleep(5)

    task = asyncio.create_task(work())
    await asyncio.sleep(0.01)
    client.gone.set()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_watch_ends_a_write_that_takes_too_long_and_no_other() -> None:
    async def write(times: int, seconds: float) -> None:
        async with ClientWatch(Client().receive, 0.2) as watch:
            for _ in range(times):
                watch.writing_since = time.monotonic()
                await asyncio.sleep(seconds)
                watch.writing_since = None
            await asyncio.sleep(0.3)

    await write(6, 0.06)
    with pytest.raises(ClientGoneError):
        await write(1, 5.0)


async def test_a_receive_that_fails_means_a_client_that_is_gone() -> None:
    async def receive() -> dict[str, Any]:
        raise ConnectionError

    with pytest.raises(ClientGoneError):
        async with ClientWatch(receive, 60.0):
            await asyncio.sleep(5)
