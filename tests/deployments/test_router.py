"""Which replica a call reaches, and which engine a request is sent to."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.deployments.balancing import PrefixAffinity
from shoal.deployments.metrics import join_metrics
from shoal.deployments.stages import EngineGoneError, RemoteEngines, RemoteStage, Route, error_to_wire
from shoal.model_shards.engine.request import Request
from shoal.model_shards.sampling.params import SamplingParams

REPLICAS = [SimpleNamespace(replica_id=SimpleNamespace(unique_id=name)) for name in "abc"]


@pytest.mark.parametrize(
    ("route", "reaches"),
    [
        (Route(to="b"), "b"),
        (Route(to="gone"), "abc"),
        (Route(unlike=frozenset("ac")), "b"),
        (Route(unlike=frozenset("abc")), "abc"),
        (Route(), "abc"),
        (None, "abc"),
    ],
)
async def test_a_call_reaches_the_replica_it_is_for(route: Route | None, reaches: str) -> None:
    from ray.serve.request_router import PendingRequest

    from shoal.deployments.router import ShardGroupRouter

    router = ShardGroupRouter.__new__(ShardGroupRouter)
    pending = None if route is None else PendingRequest(args=["abort", ([],), route], kwargs={}, metadata=None)
    (candidates,) = await router.choose_replicas(REPLICAS, pending)
    assert "".join(replica.replica_id.unique_id for replica in candidates) == reaches


class Handle:
    """Two replicas behind a handle; a call for one that is gone reaches another."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self.answer = self

    def remote(self, method: str, args: tuple[Any, ...], route: Route) -> Any:
        fitting = [name for name in self.names if name == route.to or (not route.to and name not in route.unlike)]
        name = (fitting or self.names)[0]

        async def answer() -> tuple[bool, Any]:
            if route.to not in ("", name):
                return False, error_to_wire(EngineGoneError("gone"))
            return True, SimpleNamespace(instance_id=name) if method == "describe" else (name, method, *args)

        return answer()


async def test_a_directory_finds_each_replica_once_and_calls_it_alone() -> None:
    handle = Handle("a", "b")
    engines = RemoteEngines(handle, "ShardGroup", timeout_s=1.0)
    known: dict[str, Any] = {}
    while (found := await engines.find(frozenset(known))) is not None:
        known[found[0].instance_id] = found[1]
    assert sorted(known) == ["a", "b"]
    assert await known["b"].abort(["r"]) == ("b", "abort", ["r"])
    handle.names = ("a",)
    with pytest.raises(EngineGoneError):
        await known["b"].abort(["r"])


async def test_a_stage_without_a_route_is_called_without_one() -> None:
    class Plain:
        def remote(self, *args: Any) -> Any:
            async def answer() -> tuple[bool, Any]:
                return True, args

            return answer()

    assert await RemoteStage(SimpleNamespace(answer=Plain()), "Guard", 1.0).check(1) == ("check", (1,))


@dataclass(eq=False)
class Engine:
    load: int


def request(prompt: list[int], salt: str = "") -> Request:
    return Request("r", prompt, SamplingParams(), seed=0, cache_salt=salt)


def test_a_prompt_goes_where_the_longest_beginning_of_it_went() -> None:
    affinity, first, second = PrefixAffinity(), Engine(0), Engine(1)
    system, chat = list(range(40)), list(range(100))
    assert affinity.choose(request(system), [first, second]) is first
    assert affinity.choose(request([*chat, 7]), [second]) is second
    first.load, second.load = 3, 2
    assert affinity.choose(request([*chat, 8]), [first, second]) is second
    first.load, second.load = 2, 3
    assert affinity.choose(request([*chat, 9]), [first, second]) is second, "64 tokens alike weigh more than 32"
    assert affinity.choose(request([*chat, 9], salt="another tenant"), [first, second]) is first
    assert affinity.choose(request([5, 6, 7]), [first, second]) is first, "too short to matter"


def test_a_cached_beginning_is_not_worth_a_crowd() -> None:
    affinity, first, second = PrefixAffinity(), Engine(0), Engine(8)
    prompt = list(range(64))
    assert affinity.choose(request(prompt), [first, second]) is first
    first.load = 14
    assert affinity.choose(request(prompt), [first, second]) is first
    first.load = 15
    assert affinity.choose(request(prompt), [first, second]) is second
    affinity.forget(second)
    second.load, first.load = 8, 10
    assert affinity.choose(request(prompt), [first, second]) is second, "the least loaded, since nothing is known"


def test_the_metrics_of_two_engines_are_one_valid_text() -> None:
    from prometheus_client.parser import text_string_to_metric_families

    text = '# HELP shoal_x_total X.\n# TYPE shoal_x_total counter\nshoal_x_total{model_name="m"} 3\n'
    assert join_metrics({"a": text}) == text
    (family,) = text_string_to_metric_families(join_metrics({"a": text, "b": text}))
    assert [sample.labels for sample in family.samples] == [
        {"model_name": "m", "engine": "a"},
        {"model_name": "m", "engine": "b"},
    ]
