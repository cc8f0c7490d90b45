"""Two shard groups of two tensor-parallel ranks each behind a gateway, on a Ray cluster of two nodes, under load, while
whatever can break is broken in turn."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest

pytestmark = [pytest.mark.serve, pytest.mark.timeout(1200)]

TESTS = Path(__file__).resolve().parents[1]
APP = "chaos"
STREAMS = 40
"""Under way at each failure; there are five."""
STEP_TIMEOUT_S = 10.0


def helper(path: Path) -> ModuleType:
    """A helper module of the tests, by path (the tests are no package)."""
    name = f"shoal_tests_{path.stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


nodes_helper = helper(TESTS / "deployments" / "nodes.py")


class Graph:
    """The application on its cluster."""

    def __init__(self, nodes: Any, model: Path) -> None:
        self.nodes = nodes
        self.url = f"http://127.0.0.1:{nodes.cluster.port}"
        self._model = model

    def deploy(self, groups: int) -> None:
        """As `serve deploy` does; with another number of groups the running ones stay as they are."""
        from ray.serve.context import _get_global_client
        from ray.serve.schema import ServeDeploySchema

        engine = {
            "model": str(self._model),
            "served_model_name": "tiny",
            "device": "cpu",
            "tensor_parallel_size": 2,
            "num_threads": 1,
            "max_num_seqs": 64,
            "kv_cache_memory": "16MiB",
            "step_timeout_s": STEP_TIMEOUT_S,
        }
        gateway = {"heartbeat_s": 0.5, "drain_s": 1.0, "continuation_timeout_s": 120.0, "max_continuations": 8}
        arguments = {
            "engine": engine,
            "placement": {"cpus_per_rank": 0.25},
            "wiring": {"mode": "separate", "call_timeout_s": 30},
            "gateway": gateway,
        }
        application = {
            "name": APP,
            "route_prefix": "/",
            "import_path": "shoal.deployments.app:build",
            "args": arguments,
            "deployments": [{"name": "ShardGroup", "num_replicas": groups}],
        }
        _get_global_client().deploy_apps(ServeDeploySchema.model_validate({"applications": [application]}))

    def processes(self, title: str) -> list[int]:
        """Ids of the cluster's processes that are called so, the newest last."""
        from shoal.deployments.local_cluster import descendants

        self.nodes.cluster._note_descendants()
        found = []
        for pid, started in descendants(os.getpid()):
            try:
                name = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if name.startswith(title):
                found.append((int(started), pid))
        return [pid for _, pid in sorted(found)]

    def metric(self, name: str, **labels: str) -> list[float]:
        """The values of a metric's series with these labels; none while nobody answers."""
        try:
            text = httpx.get(f"{self.url}/metrics", timeout=20.0).text
        except httpx.HTTPError:
            return []
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        lines = (line for line in text.splitlines() if line.startswith(f"{name}{{"))
        return [float(line.rpartition(" ")[2]) for line in lines if all(label in line for label in wanted)]

    def wait_until(self, condition: Callable[[], Any], what: str, timeout_s: float = 150.0) -> float:
        """Seconds until it holds."""
        start = time.monotonic()
        while not condition():
            assert time.monotonic() - start < timeout_s, f"{what}: not within {timeout_s:g} s"
            time.sleep(0.2)
        return time.monotonic() - start

    def wait_for_groups(self, count: int) -> float:
        """Seconds until so many groups answer for their blocks, and as many are attached."""

        def there() -> bool:
            return len(self.metric("shoal_kv_blocks", state="free")) == count

        return self.wait_until(there, f"{count} groups serve")


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Graph]:
    """One group on the head, which has no room for another; then a node for the second."""
    tiny_models = helper(TESTS / "model_shards" / "weights" / "tiny_models.py")
    model = tiny_models.make_tiny_checkpoint("llama", tmp_path_factory.mktemp("llama"))
    with nodes_helper.cluster_of_nodes([3]) as nodes:
        graph = Graph(nodes, model)
        graph.deploy(1)
        graph.wait_for_groups(1)
        yield graph


BODIES: list[dict[str, Any]] = [
    {"prompt": "greedy", "temperature": 0},
    {"prompt": "penalties", "temperature": 0, "repetition_penalty": 1.2, "presence_penalty": 0.5},
    {"prompt": "seeded", "temperature": 1.0, "seed": 7},
    {"prompt": "several", "temperature": 0.8, "top_p": 0.9, "seed": 11, "n": 2},
    {"prompt": "stop strings", "temperature": 1.0, "seed": 13, "stop": ["qz", "e"]},
]


def body_of(number: int) -> dict[str, Any]:
    body = BODIES[number % len(BODIES)]
    usage = {"stream_options": {"include_usage": True}}
    return {**body, "max_tokens": 120, "min_tokens": 40, "ignore_eos": True, "stream": True, **usage}


async def lines(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in response.aiter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


async def read(http: httpx.AsyncClient, number: int, on_text: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """What a stream said: texts, finish reasons and tokens used; or "error"."""
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    usage = None
    async with http.stream("POST", "/v1/completions", json=body_of(number)) as response:
        if response.status_code != 200:
            error = json.loads(await response.aread())["error"]
            return {"error": error["message"]}
        async for event in lines(response):
            if "error" in event:
                return {"error": event["error"]["message"]}
            for choice in event["choices"]:
                texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
                if choice["finish_reason"]:
                    reasons[choice["index"]] = choice["finish_reason"]
                on_text()
            usage = event["usage"]
    assert usage is not None, "a stream ended without a word"
    return {"texts": texts, "reasons": reasons, "completion_tokens": usage["completion_tokens"]}


def kill_a_rank(graph: Graph) -> None:
    os.kill(graph.processes("ray::RankActor")[-1], signal.SIGKILL)


def hang_a_rank(graph: Graph) -> None:
    """The other rank of its group is then in a collective that never returns."""
    os.kill(graph.processes("ray::RankActor")[0], signal.SIGSTOP)


def kill_a_replica(graph: Graph) -> None:
    os.kill(graph.processes(f"ray::ServeReplica:{APP}:ShardGroup")[-1], signal.SIGKILL)


def lose_a_node(graph: Graph) -> None:
    graph.nodes.lose(0)


def scale_down(graph: Graph) -> None:
    graph.deploy(1)


def bring_back(graph: Graph, failure: Callable[[Graph], None]) -> None:
    if failure is lose_a_node:
        graph.nodes.add(3)
    elif failure is scale_down:
        graph.wait_for_groups(1)
        graph.deploy(2)


FAILURES = (kill_a_rank, hang_a_rank, kill_a_replica, scale_down, lose_a_node)


async def test_every_stream_ends_right_whatever_breaks(graph: Graph, record_property: Any) -> None:
    """Or with a clear error; none hangs, and no block and no process is left. Times are told, not judged."""
    limits = httpx.Limits(max_connections=STREAMS)
    async with httpx.AsyncClient(base_url=graph.url, timeout=180.0, limits=limits) as http:
        expected = [await read(http, number) for number in range(len(BODIES))]
        assert all("error" not in answer for answer in expected), expected
        graph.nodes.add(3)
        await asyncio.to_thread(graph.deploy, 2)
        report = {"scale 1 -> 2": await asyncio.to_thread(graph.wait_for_groups, 2)}
        errors: list[str] = []
        for failure in FAILURES:
            progress = asyncio.Semaphore(0)
            running = [asyncio.create_task(read(http, number, progress.release)) for number in range(STREAMS)]
            for _ in range(8 * STREAMS):
                await asyncio.wait_for(progress.acquire(), 60.0)
            await asyncio.to_thread(failure, graph)
            lost_at = time.monotonic()
            answers = await asyncio.wait_for(asyncio.gather(*running), 240.0)
            report[f"{failure.__name__}: streams over"] = time.monotonic() - lost_at
            for number, answer in enumerate(answers):
                if "error" in answer:
                    errors.append(answer["error"])
                else:
                    assert answer == expected[number % len(BODIES)], failure.__name__
            await asyncio.to_thread(bring_back, graph, failure)
            await asyncio.to_thread(graph.wait_for_groups, 2)
            report[f"{failure.__name__}: two groups again"] = time.monotonic() - lost_at
    report["continued"] = sum(graph.metric("shoal_continuations_total", outcome="continued"))
    report["errors"] = len(errors)
    for what, value in report.items():
        record_property(what, round(value, 2))
        print(f"{what:40} {value:8.2f}")
    # Both answer, and soon neither has a block or a process more than before.
    graph.wait_until(lambda: graph.metric("shoal_kv_blocks", state="used") == [0.0, 0.0], "all blocks are back", 30.0)
    graph.wait_until(lambda: len(graph.processes("ray::RankActor")) == 4, "lost ranks are gone", 30.0)
    replicas = f"ray::ServeReplica:{APP}:ShardGroup"
    graph.wait_until(lambda: len(graph.processes(replicas)) == 2, "lost replicas are gone", 30.0)
    assert all("cannot be finished" in error or "not ready" in error for error in errors), errors
    assert report["continued"] > 0
