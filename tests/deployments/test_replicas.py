"""A gateway with several shard groups, as separate wiring has them, in one process: groups come, die, hang and are
stopped while streams run, and the clients cannot tell."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from shoal.configs.app import AppConfig
from shoal.configs.errors import EngineDeadError
from shoal.deployments.gateway import Gateway, build_shard_group, build_tokenizer
from shoal.deployments.guard import Guard
from shoal.deployments.shard_group import ShardGroup
from shoal.deployments.stages import EngineGoneError, EngineInfo

WORDS = [f"{chr(97 + index % 26)}{index}é " for index in range(48)]
SCRIPT = {
    "rules": [
        {"match": "second", "pieces": ["the ", "STOPwatch ", "STO", "Pgap ", *WORDS], "delay_ms": 8},
        {"match": "slow", "pieces": WORDS, "eos": False, "delay_ms": 25},
    ],
    "default": {"pieces": [*WORDS[24:], "😀", *WORDS[:24]], "delay_ms": 8},
}


class Replica:
    """A shard group as Serve's router lets a gateway see it."""

    def __init__(self, group: ShardGroup) -> None:
        self.group = group
        self.routable = True
        self.answers = True

    def __getattr__(self, method: str) -> Any:
        async def call(*args: Any) -> Any:
            if not self.answers:
                await asyncio.sleep(3600)
            if not self.routable:
                raise EngineGoneError("gone")
            return await getattr(self.group, method)(*args)

        return call

    async def die(self) -> None:
        """As SIGKILL: not another word, and no call arrives."""
        self.routable = False
        await self.freeze()
        self.answers = True

    async def freeze(self) -> None:
        """As SIGSTOP."""
        self.answers = False
        for link in self.group._links.values():
            link._closed = True
        if self.group._signs is not None:
            self.group._signs.cancel()

    async def stop(self) -> None:
        """As Serve stops a replica."""
        self.routable = False
        await self.group.shutdown()

    def break_engine(self) -> None:
        """Its ranks fail in the next step."""
        failed: Future[Any] = Future()
        failed.set_exception(RuntimeError("a rank was killed"))
        self.group.engine._executor.submit = lambda _plan: failed  # type: ignore[method-assign]

    def hang_engine(self) -> None:
        """Its ranks finish no step any more."""
        self.group.engine._executor.submit = lambda _plan: Future()  # type: ignore[method-assign]


class Cluster:
    """The directory of the replicas, and the gateway in front of them."""

    may_grow = True

    def __init__(self, config: AppConfig) -> None:
        self.config = config
        self.replicas: list[Replica] = []

    async def start(self, config: AppConfig | None = None) -> Replica:
        name = f"group-{len(self.replicas)}"
        group = await asyncio.to_thread(build_shard_group, config or self.config, None, None, name)
        self.replicas.append(Replica(group))
        return self.replicas[-1]

    async def find(self, known: frozenset[str]) -> tuple[EngineInfo, Any] | None:
        for replica in self.replicas:
            if replica.routable and replica.group._instance_id not in known:
                return await replica.group.describe(), replica
        return None

    async def check_and_close(self) -> None:
        """No block may be left in a group that lives, and nothing in one that was given up."""
        for replica in self.replicas:
            await replica.group.shutdown()
            stats = replica.group.engine.stats()
            assert (stats.num_live_requests, stats.kv_blocks_free) == (0, stats.kv_blocks)


@pytest.fixture
def start(tiny_tokenizer: Path, tmp_path: Path, serve_gateway: Any) -> Any:
    """start(groups=2, gateway={...}) -> (server, cluster)."""

    @contextlib.asynccontextmanager
    async def start(groups: int = 2, **gateway: Any) -> AsyncIterator[tuple[Any, Cluster]]:
        path = tmp_path / "test-model.json"
        path.write_text(json.dumps({"tokenizer": str(tiny_tokenizer), **SCRIPT}))
        settings = {"heartbeat_s": 0.1, "drain_s": 0.3, "continuation_timeout_s": 20.0, **gateway}
        engine = {"model": f"scripted:{path}", "max_model_len": 512, "max_num_seqs": 256, "step_timeout_s": 2.0}
        config = AppConfig.model_validate({"engine": engine, "gateway": settings, "wiring": {"mode": "separate"}})
        cluster = Cluster(config)
        for _ in range(groups):
            await cluster.start()
        gateway_ = await Gateway.separate(config, build_tokenizer(config), Guard(config.guard), cluster)
        try:
            async with serve_gateway(gateway_) as server:
                await server.wait_for(lambda: attached(server, groups))
                yield server, cluster
        finally:
            await gateway_.close()
            await cluster.check_and_close()

    return start


async def attached(server: Any, count: int) -> bool:
    return len([link for link in server.gateway.service.links.all if link.trouble is None]) == count


BODIES: list[dict[str, Any]] = [
    {"prompt": "first"},
    {"prompt": "second", "stop": ["STOP", "m12"]},
    {"prompt": "second", "stop": ["STOPw", "Pgap n"], "include_stop_str_in_output": True, "n": 2},
    {"prompt": "first", "n": 3, "logprobs": 1, "max_tokens": 90},
    {"prompt": ["first", "second"], "max_tokens": 60, "echo": True, "logprobs": 0},
]


async def stream(server: Any, body: dict[str, Any]) -> list[dict[str, Any]]:
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    return server.events(await server.http.post("/v1/completions", json={**body, **usage, "temperature": 1.0}))


def content(chunks: list[dict[str, Any]]) -> Any:
    """All that a client was told, but for where the borders of the chunks fall."""
    choices: dict[int, list[Any]] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        seen = choices.setdefault(choice["index"], ["", [], [], []])
        seen[0] += choice["text"]
        if choice["logprobs"]:
            seen[1] += choice["logprobs"]["tokens"]
            seen[2] += choice["logprobs"]["token_logprobs"]
        seen[3] += [choice["finish_reason"]] if choice["finish_reason"] else []
    usage = {**chunks[-1]["usage"]}
    usage.pop("prompt_tokens_details")  # what was cached where is not the client's answer
    return choices, usage


LOSSES = ("engine breaks", "engine hangs", "killed", "frozen", "stopped")


async def lose(replica: Replica, how: str) -> None:
    if how == "engine breaks":
        replica.break_engine()
    elif how == "engine hangs":
        replica.hang_engine()
    elif how == "killed":
        await replica.die()
    elif how == "frozen":
        await replica.freeze()
    else:
        await replica.stop()


@pytest.mark.parametrize("how", LOSSES)
async def test_fifty_streams_when_one_of_two_groups_is_lost(start: Any, how: str) -> None:
    async with start() as (server, cluster):
        expected = [content(await stream(server, body)) for body in BODIES]
        running = [asyncio.create_task(stream(server, BODIES[number % len(BODIES)])) for number in range(50)]
        await server.wait_for(lambda: both_run(cluster), 10.0)
        await asyncio.sleep(0.2)
        await lose(cluster.replicas[0], how)
        for number, task in enumerate(running):
            assert content(await task) == expected[number % len(BODIES)]
        assert await server.metric("shoal_continuations_total", outcome="continued") > 0
        assert await server.metric("shoal_continuations_total", outcome="failed") == 0
        assert server.gateway.service._hub.live == []
        if how in ("killed", "stopped"):
            await server.wait_for(lambda: attached(server, 1), 10.0)
            assert await server.metric("shoal_engines_lost_total") == 1


async def both_run(cluster: Cluster) -> bool:
    return all(replica.group.engine.stats().output_tokens_total > 300 for replica in cluster.replicas)


async def test_streams_wait_for_the_group_that_takes_the_place_of_the_only_one(start: Any) -> None:
    async with start(groups=1, keep_alive_s=0.2) as (server, cluster):
        expected = content(await stream(server, BODIES[3]))
        running = [asyncio.create_task(stream(server, BODIES[3])) for _ in range(5)]
        await asyncio.sleep(0.5)
        await cluster.replicas[0].die()
        await server.wait_for(lambda: attached(server, 0), 10.0)
        refused = await server.complete("first")
        assert server.error(refused, 503)["code"] == "engine_dead"
        assert refused.headers["retry-after"] == "5"
        assert not any(task.done() for task in running)
        await cluster.start()
        for task in running:
            assert content(await task) == expected


async def test_a_second_group_comes_and_the_first_goes_in_place(start: Any) -> None:
    async with start(groups=1) as (server, cluster):
        running = [asyncio.create_task(stream(server, {"prompt": "slow", "max_tokens": 60})) for _ in range(6)]
        await cluster.start()
        await server.wait_for(lambda: attached(server, 2))
        running += [asyncio.create_task(stream(server, {"prompt": "slow", "max_tokens": 60})) for _ in range(6)]
        await asyncio.sleep(0.4)
        assert all(replica.group.engine.stats().num_running for replica in cluster.replicas)
        stopping = asyncio.create_task(cluster.replicas[0].stop())
        texts = {json.dumps(content(await task)) for task in running}
        assert len(texts) == 1
        await stopping
        assert await server.metric("shoal_http_requests_total", status="200") == 12


async def test_without_another_group_it_ends_with_an_error_in_time(start: Any) -> None:
    async with start(groups=1, continuation_timeout_s=0.5) as (server, cluster):
        running = asyncio.create_task(server.complete("slow", max_tokens=400, stream=True))
        await asyncio.sleep(0.3)
        await cluster.replicas[0].die()
        *chunks, last = server.events(await running)
        assert server.text(chunks).startswith("a0é ")
        assert last["error"]["code"] == "engine_dead"
        assert await server.metric("shoal_continuations_total", outcome="failed") == 1


async def test_continuation_can_be_switched_off_and_is_bounded(start: Any) -> None:
    async with start(max_continuations=0) as (server, cluster):
        running = asyncio.create_task(server.complete("slow", max_tokens=400, stream=True))
        await asyncio.sleep(0.3)
        for replica in cluster.replicas:
            replica.break_engine()
        assert "a rank was killed" in server.events(await running)[-1]["error"]["message"]


async def test_a_client_that_hangs_up_while_its_stream_waits_leaves_nothing(start: Any) -> None:
    async with start(groups=1) as (server, cluster):
        running = asyncio.create_task(server.complete("slow", max_tokens=400, stream=True))
        await asyncio.sleep(0.3)
        await cluster.replicas[0].die()
        await server.wait_for(lambda: attached(server, 0), 10.0)
        running.cancel()
        await asyncio.sleep(0.3)
        await cluster.start()
        await server.wait_for(lambda: attached(server, 1))
        await asyncio.sleep(0.8)
        assert server.gateway.service._hub.live == []
        assert cluster.replicas[1].group.engine.stats().num_live_requests == 0


async def test_a_group_of_another_model_is_refused(start: Any, caplog: pytest.LogCaptureFixture) -> None:
    async with start(groups=1) as (server, cluster):
        odd = cluster.config.model_copy(
            update={"engine": cluster.config.engine.model_copy(update={"max_model_len": 256})}
        )
        await cluster.start(odd)
        await asyncio.sleep(0.5)
        assert await attached(server, 1)
        assert "group-1 is refused" in caplog.text


async def test_requests_divide_and_like_beginnings_meet(start: Any) -> None:
    async with start() as (server, cluster):
        await asyncio.gather(*(stream(server, {"prompt": f"{n} short"}) for n in range(12)))
        divided = [replica.group.engine.stats().output_tokens_total for replica in cluster.replicas]
        assert all(divided)
        alike = "the quick brown fox jumps over the lazy dog and the cat " * 3
        for number in range(6):
            await stream(server, {"prompt": f"{alike} {number}", "max_tokens": 4})
        prompts = [replica.group.engine.stats().cached_prompt_tokens_total for replica in cluster.replicas]
        assert sorted(prompts)[0] == 0
        assert sorted(prompts)[1] > 0
        text = (await server.http.get("/metrics")).text
        assert 'engine="group-0"' in text
        assert 'engine="group-1"' in text
        assert text.count("# TYPE shoal_step_seconds ") == 1


async def test_a_refusal_of_one_group_is_not_the_answer(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with start() as (server, cluster):

        def dead(*_: Any) -> None:
            raise EngineDeadError("dead")

        monkeypatch.setattr(cluster.replicas[0].group.engine, "submit", dead)
        answers = [await server.complete(f"{number} first", max_tokens=3) for number in range(4)]
        assert [answer.status_code for answer in answers] == [200] * 4


async def test_an_engine_that_dies_before_it_has_answered_the_submission(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its deltas are faster than its answer."""
    async with start() as (server, cluster):
        expected = content(await stream(server, BODIES[3]))
        first = cluster.replicas[0]
        submit = first.group.submit

        async def submit_and_die(*args: Any) -> None:
            await submit(*args)
            first.break_engine()
            await asyncio.sleep(0.5)

        monkeypatch.setattr(first.group, "submit", submit_and_die)
        for _ in range(2):
            assert content(await stream(server, BODIES[3])) == expected
        assert not first.group.engine.healthy
