"""The HTTP client against a server with known delays. Waits are lower bounds; upper ones are generous."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import pytest

from shoal.configs.errors import ConfigError
from shoal.deployments.bench.http_target import HttpSettings, HttpTarget
from shoal.deployments.bench.prompts import PlannedRequest

if TYPE_CHECKING:
    from tests.deployments.bench.conftest import FakeServer

HELLO = PlannedRequest([{"role": "user", "content": "hello there"}], 4, "tag")


@pytest.fixture
async def target(server: FakeServer) -> AsyncIterator[HttpTarget]:
    async with HttpTarget(HttpSettings(server.url)) as opened:
        yield opened


async def test_delays_of_the_server_are_what_is_measured(server: FakeServer, target: HttpTarget) -> None:
    server.tail_delay = 0.05
    record = await target.send(HELLO)
    assert record.error is None
    assert 0.1 <= record.ttft < 0.3
    assert len(record.gaps) == 3
    assert all(0.035 <= gap < 0.2 for gap in record.gaps)
    assert 0.26 <= record.e2e < 0.8
    assert record.tpot is not None
    assert record.e2e == pytest.approx(record.ttft + 3 * record.tpot)


async def test_counts_come_from_the_usage_of_the_server(server: FakeServer, target: HttpTarget) -> None:
    server.tokens, server.tokens_per_event = 6, 2
    record = await target.send(HELLO)
    assert (record.output_tokens, len(record.token_times), record.input_tokens, record.cached_tokens) == (6, 3, 9, 3)
    assert (record.finish_reason, record.tag, record.wanted_tokens) == ("length", "tag", 4)


async def test_the_model_is_the_first_one_served(server: FakeServer, target: HttpTarget) -> None:
    await target.send(HELLO)
    assert server.seen[-1]["model"] == "fake"


async def test_requests_are_greedy_streams_that_do_not_stop_early(server: FakeServer, target: HttpTarget) -> None:
    await target.send(HELLO)
    body = server.seen[-1]
    assert (body["temperature"], body["stream"], body["ignore_eos"], body["max_tokens"]) == (0, True, True, 4)
    assert body["stream_options"] == {"include_usage": True}


async def test_extra_fields_win_and_null_removes_one(server: FakeServer) -> None:
    settings = HttpSettings(server.url + "/v1/", model="fake", extra_body={"temperature": 0.5, "seed": None})
    async with HttpTarget(settings) as target:
        await target.send(HELLO)
    assert server.seen[-1]["temperature"] == 0.5
    assert "seed" not in server.seen[-1]


async def test_completions_send_a_prompt(server: FakeServer) -> None:
    async with HttpTarget(HttpSettings(server.url, api="completions")) as target:
        record = await target.send(HELLO)
    assert record.error is None
    assert server.seen[-1]["prompt"] == "hello there"


async def test_a_refused_option_is_dropped_and_reported(server: FakeServer, target: HttpTarget) -> None:
    server.refuse = {"ignore_eos": "Unrecognized request argument: ignore_eos"}
    assert await target.settle_options(HELLO) == ["ignore_eos"]
    assert (await target.send(HELLO)).error is None


async def test_options_are_dropped_all_when_the_refusal_names_none(server: FakeServer, target: HttpTarget) -> None:
    server.refuse = {"seed": "bad request"}
    assert sorted(await target.settle_options(HELLO)) == ["ignore_eos", "seed", "temperature"]


async def test_a_server_that_refuses_the_plain_request_is_an_error_with_its_words(
    server: FakeServer, target: HttpTarget
) -> None:
    server.refuse = {"model": "no such model"}
    with pytest.raises(ConfigError, match="no such model"):
        await target.settle_options(HELLO)


async def test_an_error_inside_the_stream_fails_the_request(server: FakeServer, target: HttpTarget) -> None:
    server.fail_with = "blocks ran out"
    assert (await target.send(HELLO)).error == "blocks ran out"


async def test_a_stream_without_done_is_broken(server: FakeServer, target: HttpTarget) -> None:
    server.cut = True
    assert (await target.send(HELLO)).error == "the stream broke off before [DONE]"


async def test_a_stream_without_text_is_an_error(server: FakeServer, target: HttpTarget) -> None:
    server.tokens = 0
    assert (await target.send(HELLO)).error == "the stream ended without any text"


async def test_a_slow_server_times_out(server: FakeServer) -> None:
    server.first_delay = 5.0
    async with HttpTarget(HttpSettings(server.url, timeout_s=0.2)) as target:
        assert (await target.send(HELLO)).error == "timed out"


async def test_nobody_listens() -> None:
    with pytest.raises(ConfigError, match="No answer from"):
        async with HttpTarget(HttpSettings("http://127.0.0.1:1")):
            pass


def test_an_address_needs_a_scheme() -> None:
    with pytest.raises(ConfigError, match="http://"):
        HttpTarget(HttpSettings("localhost:8000"))
