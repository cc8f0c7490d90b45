"""What a deployment asks of Ray, decided without a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal.configs.app import AppConfig, PlacementConfig
from shoal.configs.errors import ConfigError
from shoal.configs.schema import EngineConfig
from shoal.deployments import engine_placement
from shoal.deployments.engine_placement import decide_device, mesh_of, place_engine
from shoal.deployments.placement import Node, plan_placement
from shoal.model_shards.parallel.mesh import MeshShape

GPUS = [Node("a", 8.0, 4.0), Node("b", 8.0, 0.0)]


def config(**engine: Any) -> AppConfig:
    """Of a model that is nowhere, so that nothing of it is checked."""
    return AppConfig(engine=EngineConfig(model="nobody/has-this", **engine))


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_placement, "cluster_nodes", lambda: GPUS)


def test_one_rank_is_in_the_replica_with_its_own_gpu(connected: None) -> None:
    placed = place_engine(config(), as_processes=False)
    assert placed.options == {"ray_actor_options": {"num_cpus": 1.0, "num_gpus": 1}}
    assert placed.config.engine.device == "cuda"
    assert place_engine(config(device="cpu"), as_processes=False).options["ray_actor_options"]["num_gpus"] == 0


def test_several_ranks_are_a_placement_group_whose_replica_takes_no_gpu(connected: None) -> None:
    placed = place_engine(config(tensor_parallel_size=2, pipeline_parallel_size=2), as_processes=False)
    assert placed.options == {
        "ray_actor_options": {"num_cpus": 1.0, "num_gpus": 0},
        "placement_group_bundles": [{"CPU": 3.0, "GPU": 2.0}, {"CPU": 2.0, "GPU": 2.0}],
        "placement_group_strategy": "PACK",
    }


def test_processes_share_the_replicas_gpus(connected: None) -> None:
    placed = place_engine(config(tensor_parallel_size=4), as_processes=True)
    assert placed.options == {"ray_actor_options": {"num_cpus": 1.0, "num_gpus": 4}}
    with pytest.raises(ConfigError, match="8 ranks on one machine need a GPU each, but a has 4, b has 0"):
        place_engine(config(tensor_parallel_size=8), as_processes=True)


def test_more_than_the_cluster_has_is_refused(connected: None) -> None:
    with pytest.raises(ConfigError, match=r"3 times 2 GPUs and 2 CPUs whole on one node.*room for 2 of 3"):
        place_engine(config(tensor_parallel_size=2, pipeline_parallel_size=3), as_processes=False)


def test_without_a_cluster_the_engine_looks_for_itself() -> None:
    assert decide_device(EngineConfig(model="x"), None) is None
    assert decide_device(EngineConfig(model="x", device="cuda"), None) == "cuda"
    assert decide_device(EngineConfig(model="x"), [Node("a", 2.0, 0.0)]) == "cpu"
    assert decide_device(EngineConfig(model="scripted:x.json"), GPUS) is None


def test_a_scripted_model_has_one_rank(tmp_path: Path) -> None:
    assert mesh_of(EngineConfig(model="scripted:x.json", tensor_parallel_size=4)) == MeshShape()


def test_a_replica_that_takes_its_ranks_share_is_refused_at_once() -> None:
    placement = plan_placement(MeshShape(2), PlacementConfig(), "cpu")
    engine_placement._check_own_share(placement, {"CPU_group_0_abc": 1.0, "bundle_group_abc": 0.001})
    with pytest.raises(ConfigError, match=r"replica takes 2 CPU of its first bundle \[3 CPUs\], where 1 is planned"):
        engine_placement._check_own_share(placement, {"CPU_group_0_abc": 2.0})
