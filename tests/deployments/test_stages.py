"""Calls between stages over a handle: values, errors, silence."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from shoal.configs.errors import EngineDeadError, InvalidRequestError, OverloadedError
from shoal.deployments.engine_link import may_have_arrived
from shoal.deployments.stages import RemoteCallable, RemoteStage, UnknownGatewayError


class Echo(RemoteCallable):
    async def double(self, value: int) -> int:
        return 2 * value

    async def refuse(self) -> None:
        raise OverloadedError("full", retry_after_s=2.0)

    async def wrong(self, name: str) -> None:
        raise InvalidRequestError("no", param=name)

    async def crash(self) -> None:
        raise RuntimeError("bug")

    async def sleep(self) -> None:
        await asyncio.sleep(60)

    async def _hidden(self) -> None:
        raise AssertionError


class Handle:
    """What a Serve handle looks like to a RemoteStage."""

    def __init__(self, service: RemoteCallable) -> None:
        self.answer = self
        self._service = service

    def remote(self, method: str, args: tuple[Any, ...]) -> Any:
        return self._service.answer(method, args)


@pytest.fixture
def stage() -> Any:
    return RemoteStage(Handle(Echo()), "Echo", timeout_s=0.2)


async def test_values_come_back(stage: Any) -> None:
    assert await stage.double(21) == 42


async def test_errors_for_people_keep_their_type(stage: Any) -> None:
    with pytest.raises(OverloadedError) as full:
        await stage.refuse()
    assert full.value.retry_after_s == 2.0
    with pytest.raises(InvalidRequestError) as wrong:
        await stage.wrong("top_p")
    assert wrong.value.param == "top_p"


@pytest.mark.parametrize("method", ["crash", "sleep", "_hidden", "nothing"])
async def test_a_call_that_fails_or_is_not_answered_is_a_dead_engine(stage: Any, method: str) -> None:
    with pytest.raises(EngineDeadError, match=f"Echo .*{method}"):
        await getattr(stage, method)()


def test_what_may_have_arrived_is_aborted() -> None:
    assert may_have_arrived(None)
    assert may_have_arrived(EngineDeadError("no answer"))
    assert may_have_arrived(asyncio.CancelledError())
    assert not may_have_arrived(OverloadedError("full", retry_after_s=1.0))
    assert not may_have_arrived(UnknownGatewayError("who?"))
