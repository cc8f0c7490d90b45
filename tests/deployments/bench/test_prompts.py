"""Prompts of exact length, the same for the same seed."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

import pytest

from shoal.configs.errors import ConfigError
from shoal.deployments.bench.http_target import HttpSettings, HttpTarget
from shoal.deployments.bench.prompts import WORDS, Message, PromptMaker, Ruler
from shoal.deployments.bench.rulers import LocalRuler, TokenizeRuler, UsageRuler, http_ruler
from shoal.deployments.bench.workloads import LongStreams, Workload

if TYPE_CHECKING:
    from shoal.model_shards.weights.sources import ModelSource
    from tests.deployments.bench.conftest import FakeServer


class LetterRuler(Ruler):
    """A hard tokenizer: 5 tokens a message, and words of six letters or more are two tokens."""

    async def count(self, messages: list[Message]) -> int:
        return sum(5 + sum(2 if len(word) > 5 else 1 for word in m["content"].split()) for m in messages)


@pytest.fixture
def maker() -> PromptMaker:
    return PromptMaker(LetterRuler(), "seed")


@pytest.mark.parametrize("tokens", [6, 7, 64, 333])
async def test_prompts_have_the_length_asked_for(maker: PromptMaker, tokens: int) -> None:
    workload = Workload("w", "", requests=5, input_tokens=tokens)
    counts = [await LetterRuler().count(request.messages) for request in await maker.requests(workload)]
    # A word of two tokens can overshoot an odd remainder; never by more than that.
    assert all(abs(count - tokens) <= 1 for count in counts)
    assert counts.count(tokens) >= 3


async def test_a_shared_prefix_comes_on_top_and_is_the_same_for_all(maker: PromptMaker) -> None:
    requests = await maker.requests(Workload("w", "", 3, input_tokens=40, shared_prefix_tokens=100))
    assert len({request.messages[0]["content"] for request in requests}) == 1
    assert len({request.messages[1]["content"] for request in requests}) == 3
    counts = [await LetterRuler().count(request.messages) for request in requests]
    assert all(abs(count - 140) <= 1 for count in counts)


async def test_the_first_requests_behind_each_prefix_are_cold(maker: PromptMaker) -> None:
    shape = Workload("w", "", 7, input_tokens=40, concurrency=2, shared_prefix_tokens=50, prefixes=2)
    requests = await maker.requests(shape)
    assert [request.tag for request in requests] == ["cold", "cold", "hit", "hit", "cold", "cold", "hit"]
    heads = [request.messages[0]["content"] for request in requests]
    assert len(set(heads[:4])) == len(set(heads[4:])) == 1
    assert heads[0] != heads[4]


async def test_a_seed_decides_every_word() -> None:
    workload = Workload("w", "", requests=3)
    same = [await PromptMaker(LetterRuler(), "a").requests(workload) for _ in range(2)]
    other = await PromptMaker(LetterRuler(), "b").requests(workload)
    assert same[0] == same[1]
    assert same[0] != other


async def test_short_streams_never_run_dry_and_never_repeat(maker: PromptMaker) -> None:
    workload = Workload("w", "", 1, input_tokens=64, long=LongStreams(requests=2, input_tokens=100))
    shorts = list(islice(await maker.short_requests(workload), 50))
    assert len({request.messages[0]["content"] for request in shorts}) == 50
    assert {request.tag for request in shorts} == {"short"}
    longs = await maker.long_requests(workload)
    assert [request.tag for request in longs] == ["long", "long"]


async def test_a_length_below_the_template_is_refused_with_the_least_possible(maker: PromptMaker) -> None:
    with pytest.raises(ConfigError, match="at least that many"):
        await maker.requests(Workload("w", "", 1, input_tokens=3))


async def test_the_server_measures_when_it_can(server: FakeServer) -> None:
    async with HttpTarget(HttpSettings(server.url)) as target:
        ruler = await http_ruler(target)
        assert isinstance(ruler, TokenizeRuler)
        assert await ruler.count([{"role": "user", "content": "one two"}]) == 9
        assert ruler.exact
    assert server.seen == []


async def test_without_tokenize_usage_calibrates_and_measured_prompts_are_not_sent(server: FakeServer) -> None:
    server.has_tokenize = False
    async with HttpTarget(HttpSettings(server.url)) as target:
        ruler = await http_ruler(target)
        assert isinstance(ruler, UsageRuler)
        assert not ruler.exact
        requests = await PromptMaker(ruler, "seed").requests(Workload("w", "", 3, input_tokens=50))
        assert [server.prompt_tokens({"messages": request.messages}) for request in requests] == [50, 50, 50]
    assert len(server.seen) == 1
    assert server.seen[0]["max_tokens"] == 1


@pytest.mark.real_model
async def test_every_word_is_one_token_of_the_real_model(smollm2: ModelSource) -> None:
    from shoal.model_shards.tokenizer.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(smollm2)
    assert [word for word in WORDS if len(tokenizer.encode(f" {word}")) != 1] == []
    requests = await PromptMaker(LocalRuler(tokenizer), "seed").requests(Workload("w", "", 4, input_tokens=128))
    assert [len(tokenizer.encode_chat(request.messages)) for request in requests] == [128] * 4
