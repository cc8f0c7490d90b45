"""Tokens over ZMQ: what is sent arrives, in order; who was not introduced is not heard."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq

from shoal.configs.app import AppConfig, WiringConfig
from shoal.configs.errors import ConfigError, InvalidRequestError, OverloadedError
from shoal.deployments.data_plane import DeltaReceiver, ZmqSink, decode, encode
from shoal.deployments.gateway import build_shard_group
from shoal.deployments.shard_group import ShardGroup
from shoal.deployments.stages import UnknownGatewayError, error_from_wire, error_to_wire
from shoal.deployments.streams import LiveRequest, RequestStream, StreamHub
from shoal.model_shards.engine.plan import TokenLogprobs
from shoal.model_shards.engine.request import FinishReason, Request, RequestDelta
from shoal.model_shards.sampling.params import SamplingParams


def delta(text: str, **fields: Any) -> RequestDelta:
    return RequestDelta("r", 0, text, [1], **fields)


@pytest.fixture
async def receiver() -> AsyncIterator[tuple[DeltaReceiver, RequestStream]]:
    hub, stream = StreamHub(), RequestStream()
    hub.open(LiveRequest(request(), stream, 0))
    receiver = DeltaReceiver(hub, WiringConfig())
    yield receiver, stream
    receiver.close()


def test_a_message_survives_the_wire() -> None:
    sent = [
        delta("é", logprobs=[TokenLogprobs(1, float("-inf"), 3, [(2, -0.5)])], finish_reason=FinishReason.STOP),
        delta("", prompt_logprobs=[None, TokenLogprobs(1, -2.0, 1, [])], num_cached_tokens=16, stop_reason=7),
    ]
    assert decode(encode(sent)) == sent


@pytest.mark.parametrize(
    "message", [b"", b"\xc1", msgpack.packb(5), msgpack.packb([[1, 2]]), msgpack.packb([{"a": 1}])]
)
def test_what_is_not_a_message_is_refused(message: bytes) -> None:
    with pytest.raises(ValueError, match="not a message"):
        decode(message)


async def test_deltas_arrive_in_order(receiver: tuple[DeltaReceiver, RequestStream]) -> None:
    listener, stream = receiver
    keys, context = zmq.curve_keypair(), zmq.Context()
    listener.allow(keys[0])
    sink = ZmqSink(context, listener.address, keys)
    for step in range(300):
        sink.deliver([delta(f"{step},")])
    text = ""
    async with asyncio.timeout(10):
        while not text.endswith("299,"):
            text += "".join(item.text for items in (await stream.next(1.0)).values() for item in items)
    assert text == "".join(f"{step}," for step in range(300))
    sink.close()
    context.term()


async def test_a_sender_with_an_unknown_key_is_not_heard(receiver: tuple[DeltaReceiver, RequestStream]) -> None:
    listener, stream = receiver
    listener.allow(zmq.curve_keypair()[0])
    context = zmq.Context()
    intruder = ZmqSink(context, listener.address, zmq.curve_keypair())
    plain = context.socket(zmq.PUSH)
    plain.setsockopt(zmq.LINGER, 0)
    plain.connect(listener.address.endpoint)
    intruder.deliver([delta("injected")])
    plain.send(encode([delta("injected")]), zmq.NOBLOCK)
    assert await stream.next(0.7) == {}
    plain.close()
    intruder.close()
    context.term()


async def test_it_listens_on_loopback_unless_told(receiver: tuple[DeltaReceiver, RequestStream]) -> None:
    assert receiver[0].address.endpoint.startswith("tcp://127.0.0.1:")
    with pytest.raises(ConfigError, match="allow_remote"):
        DeltaReceiver(StreamHub(), WiringConfig(data_plane_host="0.0.0.0"))


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequestError("no", param="n"),
        OverloadedError("full", retry_after_s=3.5),
        UnknownGatewayError("who?"),
        ConfigError("bad", param="x"),
    ],
)
def test_errors_survive_a_stage_call(error: Any) -> None:
    back = error_from_wire(json.loads(json.dumps(error_to_wire(error))))
    assert type(back) is type(error)
    assert (back.message, back.param, back.code, back.status) == (error.message, error.param, error.code, error.status)
    assert getattr(back, "retry_after_s", None) == getattr(error, "retry_after_s", None)


# --- the shard group's end ----------------------------------------------------------------------------------------


@pytest.fixture
async def group(tiny_tokenizer: Path, tmp_path: Path) -> AsyncIterator[ShardGroup]:
    path = tmp_path / "m.json"
    script = {"default": {"pieces": ["a"], "eos": False, "delay_ms": 5}, "tokenizer": str(tiny_tokenizer)}
    path.write_text(json.dumps(script))
    config = AppConfig.model_validate(
        {
            "engine": {"model": f"scripted:{path}", "max_model_len": 512},
            "gateway": {"drain_s": 0.0},
            "wiring": {"mode": "separate", "gateway_lease_s": 0.4},
        }
    )
    group = build_shard_group(config)
    yield group
    await group.shutdown()


def request(name: str = "r", max_tokens: int = 400, **fields: Any) -> Request:
    return Request(name, [5, 6, 7], SamplingParams(max_tokens=max_tokens, **fields), seed=1)


async def attach(group: ShardGroup, listener: DeltaReceiver) -> None:
    listener.allow((await group.describe()).data_plane_key)
    await group.attach("g", listener.address)


async def test_a_request_answers_over_the_data_plane(
    group: ShardGroup, receiver: tuple[DeltaReceiver, RequestStream]
) -> None:
    listener, stream = receiver
    await attach(group, listener)
    await group.submit("g", [request(max_tokens=5)])
    text, finish = "", None
    async with asyncio.timeout(10):
        while finish is None:
            for item in (await stream.next(1.0)).get(0, ()):
                text, finish = text + item.text, item.finish_reason
    assert (text, finish) == ("aaaaa", FinishReason.LENGTH)


async def test_a_gateway_that_is_not_attached_is_told(group: ShardGroup) -> None:
    with pytest.raises(UnknownGatewayError):
        await group.submit("nobody", [request()])
    assert (await group.heartbeat("nobody")).instance_id == ""


async def test_all_requests_of_a_submit_or_none(
    group: ShardGroup, receiver: tuple[DeltaReceiver, RequestStream]
) -> None:
    await attach(group, receiver[0])
    with pytest.raises(InvalidRequestError):
        await group.submit("g", [request("one"), request("two", temperature=9.0)])
    await _until_idle(group)


async def test_the_requests_of_a_gateway_that_died_end(
    group: ShardGroup, receiver: tuple[DeltaReceiver, RequestStream]
) -> None:
    await attach(group, receiver[0])
    await group.submit("g", [request()])
    await asyncio.sleep(0.1)
    assert (await group.heartbeat("g")).live_requests == 1
    await _until_idle(group, heartbeat=None)
    assert (await group.heartbeat("g")).instance_id == ""


async def test_a_gateway_that_is_heard_of_keeps_its_requests(
    group: ShardGroup, receiver: tuple[DeltaReceiver, RequestStream]
) -> None:
    await attach(group, receiver[0])
    await group.submit("g", [request()])
    for _ in range(10):
        await asyncio.sleep(0.1)
        assert (await group.heartbeat("g")).live_requests == 1
    await group.abort(["r", "unknown"])
    await _until_idle(group)


async def _until_idle(group: ShardGroup, heartbeat: str | None = "g") -> None:
    async with asyncio.timeout(5):
        while group.engine.stats().num_live_requests:  # noqa: ASYNC110 (the engine has no event for it)
            await asyncio.sleep(0.02)
    stats = group.engine.stats()
    assert stats.kv_blocks_free == stats.kv_blocks
