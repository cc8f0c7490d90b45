"""The HTTP listener of a gateway that is its own ingress."""

from __future__ import annotations

import asyncio
import socket

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from shoal.configs.errors import ConfigError
from shoal.deployments.address import Address
from shoal.deployments.listener import Listener
from shoal.deployments.local_cluster import free_port


class App:
    """Answers with the path; /held is answered in two parts, the second when the test says so."""

    def __init__(self) -> None:
        self.began, self.release = asyncio.Event(), asyncio.Event()

    async def __call__(self, scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"got ", "more_body": True})
        if scope["path"] == "/held":
            self.began.set()
            await self.release.wait()
        await send({"type": "http.response.body", "body": scope["path"].encode()})


@pytest.fixture
def address() -> Address:
    return Address("127.0.0.1", free_port())


async def get(address: Address, path: str) -> httpx.Response:
    async with httpx.AsyncClient(timeout=30.0) as http:
        return await http.get(f"http://{address.host}:{address.port}{path}")


async def test_it_listens_from_start_to_stop(address: Address) -> None:
    listener = Listener(App(), address, max_connections=8)
    with pytest.raises(RuntimeError, match="ended"):
        listener.check_health()
    await listener.start()
    listener.check_health()
    assert (await get(address, "/x")).text == "got /x"
    await listener.stop()
    await listener.stop()
    with pytest.raises(httpx.ConnectError):
        await get(address, "/x")
    with pytest.raises(RuntimeError, match="ended"):
        listener.check_health()


async def test_a_response_that_has_begun_may_end(address: Address) -> None:
    app = App()
    listener = Listener(app, address, max_connections=8)
    await listener.start()
    held = asyncio.create_task(get(address, "/held"))
    await app.began.wait()
    stopping = asyncio.create_task(listener.stop())
    await asyncio.sleep(0.3)
    assert not stopping.done()
    app.release.set()
    assert (await held).text == "got /held"
    await stopping


async def test_a_taken_port_is_an_error_for_people(address: Address) -> None:
    with socket.socket() as taken:
        taken.bind((address.host, address.port))
        taken.listen()
        with pytest.raises(ConfigError, match=rf"Cannot listen on 127\.0\.0\.1 port {address.port}"):
            await Listener(App(), address, max_connections=8).start()


async def test_requests_are_refused_while_too_many_connections_are_open(address: Address) -> None:
    app = App()
    listener = Listener(app, address, max_connections=2)
    await listener.start()
    held = asyncio.create_task(get(address, "/held"))
    await app.began.wait()
    assert (await get(address, "/x")).status_code == 503
    app.release.set()
    assert (await held).status_code == 200
    assert (await get(address, "/x")).status_code == 200
    await listener.stop()
