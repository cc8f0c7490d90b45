"""What the deployment that holds an engine asks of Ray, and where the engine's ranks then run.

    one rank                    in the replica, with a GPU of its own if there are any
    several, on a cluster       Ray actors in the replica's placement group (`ray_executor.py`)
    several, `shoal serve`      processes of the replica: on one machine there is nothing to place, and a process that
                                is no Ray worker starts sooner, takes some 80 MB less and needs no port

Whatever would make Serve wait for ever, or fail only after a model was loaded, is refused here.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shoal.configs.app import AppConfig
from shoal.configs.errors import ConfigError
from shoal.configs.resolve import Device
from shoal.configs.schema import SCRIPTED, EngineConfig
from shoal.deployments.model_peek import peek_model
from shoal.deployments.placement import REPLICA_CPUS, Node, Placement, lay_out, plan_placement
from shoal.model_shards.parallel.mesh import MeshShape

if TYPE_CHECKING:
    from shoal.model_shards.executor.source import RankSource

logger = logging.getLogger("shoal.placement")


@dataclass(frozen=True, slots=True)
class EngineDeployment:
    config: AppConfig
    """With the device decided: a process to which Ray gives no GPU sees none."""
    options: dict[str, Any]
    """Of the deployment."""


def place_engine(config: AppConfig, *, as_processes: bool) -> EngineDeployment:
    """Raises ConfigError, with the numbers, for what the cluster that this process is connected to cannot hold, and for
    a model that cannot be shared out so."""
    nodes, engine = cluster_nodes(), config.engine
    mesh = mesh_of(engine)
    device = decide_device(engine, nodes)
    if device is not None:
        config = config.model_copy(update={"engine": engine.model_copy(update={"device": device})})
    if mesh.world_size == 1 or as_processes:
        gpus = mesh.world_size if device == "cuda" else 0
        if nodes is not None:
            _check_one_node(gpus, nodes)
        return EngineDeployment(config, {"ray_actor_options": {"num_cpus": REPLICA_CPUS, "num_gpus": gpus}})
    placement = plan_placement(mesh, config.placement, device or "cpu")
    check_model(engine, mesh)
    if nodes is not None:
        lay_out(placement, nodes)
    options: dict[str, Any] = {
        "ray_actor_options": {"num_cpus": REPLICA_CPUS, "num_gpus": 0},
        "placement_group_bundles": [bundle.to_ray() for bundle in placement.bundles],
        "placement_group_strategy": placement.strategy,
    }
    return EngineDeployment(config, options)


def ranks_of_replica(config: AppConfig) -> RankSource | None:
    """To be called in the replica. None: on this machine, without Ray."""
    import ray

    mesh, group = mesh_of(config.engine), ray.util.get_current_placement_group()
    if mesh.world_size == 1 or group is None:
        return None
    from shoal.deployments.ray_executor import RayRanks

    device: Device = "cuda" if config.engine.device == "cuda" else "cpu"
    placement = plan_placement(mesh, config.placement, device)
    _check_own_share(placement, ray.get_runtime_context().get_assigned_resources())
    return RayRanks(group, placement, config.engine.model)


def mesh_of(engine: EngineConfig) -> MeshShape:
    if engine.model.startswith(SCRIPTED):
        return MeshShape()
    return MeshShape(
        engine.tensor_parallel_size,
        engine.pipeline_parallel_size,
        engine.data_parallel_size,
        engine.context_parallel_size,
        engine.expert_parallel,
        engine.num_redundant_experts,
    )


def decide_device(engine: EngineConfig, nodes: list[Node] | None) -> Device | None:
    """None: the engine is to see for itself."""
    if engine.model.startswith(SCRIPTED):
        return None
    if engine.device != "auto":
        return engine.device
    if nodes is None:
        return None
    return "cuda" if any(node.gpus for node in nodes) else "cpu"


def cluster_nodes() -> list[Node] | None:
    """The nodes of the cluster that this process is connected to; None when it is to none."""
    import ray

    if not ray.is_initialized():
        return None
    found = []
    for node in ray.nodes():
        if node["Alive"]:
            resources = node["Resources"]
            name = f"{node['NodeManagerAddress']}/{node['NodeID'][:6]}"
            found.append(Node(name, resources.get("CPU", 0.0), resources.get("GPU", 0.0)))
    return found


def check_model(engine: EngineConfig, mesh: MeshShape) -> None:
    """Raises ConfigError when the mesh does not divide the model; a model of which nothing is on this machine is left
    to the ranks."""
    peeked = peek_model(engine.model, fetch=False)
    if peeked is None:
        logger.info("no configuration of %s is here; whether the ranks divide it shows when they load it", engine.model)
        return
    from shoal.model_shards.runner.loading import check_mesh

    check_mesh(peeked.config, mesh)


def _check_one_node(gpus: int, nodes: list[Node]) -> None:
    most = max((node.gpus for node in nodes), default=0.0)
    if gpus > most:
        found = ", ".join(f"{node.name} has {node.gpus:g}" for node in nodes)
        raise ConfigError(
            f"device is cuda and {gpus} rank{'s' if gpus > 1 else ''} on one machine need a GPU each, but {found}. Set "
            "device to cpu, or lower the parallel sizes.",
            param="engine.device",
        )


def _check_own_share(placement: Placement, assigned: dict[str, float]) -> None:
    """What the replica itself takes of the first bundle must leave its ranks their part."""
    for name, planned in (("CPU", REPLICA_CPUS), ("GPU", 0.0)):
        own = sum(amount for resource, amount in assigned.items() if resource.split("_group_")[0] == name)
        if own > planned + 1e-6:
            raise ConfigError(
                f"The replica takes {own:g} {name} of its first bundle [{placement.bundles[0]}], where {planned:g} is "
                f"planned: {placement.ranks_per_bundle} ranks of {placement.rank} have no room beside it. Remove "
                "ray_actor_options from the file; placement.cpus_per_rank says what a rank gets.",
                param="ray_actor_options",
            )
