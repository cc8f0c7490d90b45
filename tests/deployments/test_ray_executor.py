"""Ranks as Ray actors on a cluster of three nodes: the tokens of one rank, and one end for all."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from shoal.configs.app import AppConfig, PlacementConfig
from shoal.configs.errors import ConfigError, EngineDeadError

if TYPE_CHECKING:
    from shoal.model_shards.weights.sources import ModelSource

pytestmark = pytest.mark.serve

PROMPTS = [[65, 66, 67], list(range(10, 60)), [200] * 17, [5]]


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


TESTS = Path(__file__).resolve().parents[1]
nodes_helper = helper(TESTS / "deployments" / "nodes.py")
driver = helper(TESTS / "model_shards" / "runner" / "driver.py")


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    with nodes_helper.cluster_of_nodes([4, 4, 4]) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny_models = helper(TESTS / "model_shards" / "weights" / "tiny_models.py")
    made: Path = tiny_models.make_tiny_checkpoint("llama", tmp_path_factory.mktemp("llama"), num_hidden_layers=4)
    return made


@pytest.fixture(scope="module")
def settings(checkpoint: Path) -> Any:
    return driver.settings_for(checkpoint)


@pytest.fixture(scope="module")
def expected(settings: Any, checkpoint: Path) -> list[list[int]]:
    runner = driver.make_runner(checkpoint)
    tokens: list[list[int]] = driver.generate(runner.execute, settings, PROMPTS, 8, chunk_size=16)
    return tokens


@contextmanager
def group(settings: Any, *, separate: bool = False, step_timeout_s: float = 120.0) -> Iterator[tuple[Any, Any]]:
    """(its RayRanks, its RayExecutor) in a placement group of this driver."""
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    from shoal.deployments.placement import plan_placement
    from shoal.deployments.ray_executor import RayRanks

    placement = plan_placement(settings.mesh, PlacementConfig(stages_on_separate_nodes=separate), "cpu")
    made = placement_group([bundle.to_ray() for bundle in placement.bundles], placement.strategy)
    try:
        ray.get(made.ready(), timeout=60)
        ranks = RayRanks(made, placement, str(settings.model.path))
        executor = ranks.start(settings, step_timeout_s)
        try:
            yield ranks, executor
        finally:
            executor.close()
            wait_until(lambda: not nodes_helper.rank_processes(), 20.0, "rank processes are left")
    finally:
        remove_placement_group(made)


def wait_until(holds: Any, timeout_s: float, otherwise: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.1)


def generate(executor: Any, settings: Any) -> Any:
    return driver.generate(lambda plan: executor.submit(plan).result(120), settings, PROMPTS, 8, chunk_size=16)


def decode_steps(executor: Any, settings: Any, count: int) -> list[Future[Any]]:
    """Steps of a new sequence; its prefill is awaited."""
    plays = driver.Driver(settings, seed=1)
    plays.step_id = 1000
    lengths = {900: 4}
    executor.submit(plays.prefill_plans({900: [1, 2, 3]})[0]).result(120)
    return [executor.submit(plays.decode_plan(lengths)) for _ in range(count)]


def test_two_tensor_parallel_ranks_and_a_step_that_raises(nodes: Any, settings: Any, expected: Any) -> None:
    from shoal.model_shards.engine.plan import StepPlan

    settings = replace(settings, tensor_parallel_size=2)
    with group(settings) as (ranks, executor):
        assert len(set(ranks.nodes)) == 1, "tensor-parallel ranks stay on one node"
        machine = ranks.machine()
        assert machine.ranks == 2
        assert machine.available_ram > 1 << 28
        assert generate(executor, settings) == expected
        with pytest.raises(EngineDeadError, match=r"rank [01] \(tensor [01]/2, stage 0/1\): KeyError: 77"):
            executor.submit(StepPlan(2000, removed=[77])).result(60)
        assert "KeyError" in str(executor.failure)
    with pytest.raises(EngineDeadError):
        executor.submit(StepPlan(2001)).result(1)


def test_two_stages_and_a_rank_that_hangs(nodes: Any, settings: Any, expected: Any) -> None:
    settings = replace(settings, pipeline_parallel_size=2)
    with group(settings, step_timeout_s=8.0) as (ranks, executor):
        assert generate(executor, settings) == expected
        os.kill(ranks._ranks[0].pid, signal.SIGSTOP)
        future = executor.submit(driver.Driver(settings).prefill_plans({900: [1, 2, 3]})[0])
        with pytest.raises(EngineDeadError, match=r"not done within 8 s|another rank is gone or hangs"):
            future.result(60)


def test_two_by_two_and_a_rank_that_is_killed(nodes: Any, settings: Any, expected: Any) -> None:
    settings = replace(settings, tensor_parallel_size=2, pipeline_parallel_size=2)
    with group(settings, separate=True) as (ranks, executor):
        assert ranks.nodes[0] == ranks.nodes[1] != ranks.nodes[2] == ranks.nodes[3]
        assert generate(executor, settings) == expected
        futures = decode_steps(executor, settings, 2)
        assert all(future.result(60).token_ids for future in futures)
        os.kill(ranks._ranks[1].pid, signal.SIGKILL)
        began = time.monotonic()
        future = executor.submit(driver.Driver(settings).plan([], removed=[900]))
        wait_until(lambda: executor.failure is not None, 15.0, "the death was not seen")
        assert "rank 1 (tensor 1/2, stage 0/2) died" in str(executor.failure)
        assert future.done()
        assert time.monotonic() - began < 15
        wait_until(lambda: not nodes_helper.rank_processes(), 10.0, "rank processes are left")


def test_three_stages_on_three_nodes_and_a_node_that_is_lost(nodes: Any, settings: Any, expected: Any) -> None:
    settings = replace(settings, pipeline_parallel_size=3)
    with group(settings, separate=True, step_timeout_s=60.0) as (ranks, executor):
        assert len(set(ranks.nodes)) == 3
        assert generate(executor, settings) == expected
        nodes.lose(1)
        wait_until(lambda: executor.failure is not None, 30.0, "the loss was not seen")
        assert "stage" in str(executor.failure)
        assert "died" in str(executor.failure)
    nodes.add(4)


@pytest.mark.parametrize(
    ("engine", "says"),
    [
        ({"tensor_parallel_size": 5}, r"num_heads 4 cannot be split over tensor_parallel_size 5"),
        ({"pipeline_parallel_size": 5}, r"pipeline_parallel_size 5 is more than the model's 4 layers"),
        ({"tensor_parallel_size": 4}, r"need 1 time 4 CPUs whole on one node.* room for 0 of 1 on the nodes found"),
        ({"tensor_parallel_size": 2, "device": "cuda"}, r"2 GPUs and 2 CPUs whole on one node.*room for 0 of 1"),
        ({"device": "cuda"}, r"1 rank on one machine need a GPU each, but .* has 0"),
    ],
)
def test_what_the_cluster_cannot_hold_is_refused_before_anything_starts(
    nodes: Any, checkpoint: Path, engine: dict[str, Any], says: str
) -> None:
    from shoal.deployments.app import build

    config = AppConfig.model_validate({"engine": {"model": str(checkpoint), **engine}})
    began = time.monotonic()
    with pytest.raises(ConfigError, match=says):
        build(config)
    assert time.monotonic() - began < 10


@pytest.mark.real_model
def test_smollm2_in_two_stages_answers_over_http_and_comes_back(nodes: Any, smollm2: ModelSource) -> None:
    from shoal.deployments.app import build
    from shoal.model_shards.llm import LLM
    from shoal.model_shards.sampling.params import SamplingParams

    engine = {
        "model": "smollm2-135m",
        "max_model_len": 256,
        "max_num_seqs": 4,
        "kv_cache_memory": "32MiB",
        "num_threads": 1,
    }
    with LLM(**engine) as one_rank:
        (answer,) = one_rank.generate(["The capital of France is"], SamplingParams(temperature=0.0, max_tokens=12))
    placement = {"stages_on_separate_nodes": True, "cpus_per_rank": 0.5}
    config = AppConfig.model_validate(
        {"engine": {**engine, "pipeline_parallel_size": 2}, "placement": placement, "gateway": {"drain_s": 1.0}}
    )
    nodes.cluster.run(build(config), "stages", "/stages")
    url = f"http://127.0.0.1:{nodes.cluster.port}/stages/v1/completions"
    body = {"prompt": "The capital of France is", "max_tokens": 12, "temperature": 0}

    def ask() -> str | None:
        try:
            response = httpx.post(url, json=body, timeout=60.0)
        except httpx.TransportError:
            return None
        return response.json()["choices"][0]["text"] if response.status_code == 200 else None

    assert ask() == answer.outputs[0].text
    first = set(nodes_helper.rank_processes())
    assert len(first) == 2
    os.kill(max(first), signal.SIGKILL)
    wait_until(lambda: not first & set(nodes_helper.rank_processes()), 20.0, "a rank of the old group is left")
    wait_until(lambda: ask() == answer.outputs[0].text, 120.0, "the group did not come back")
    assert len(nodes_helper.rank_processes()) == 2
