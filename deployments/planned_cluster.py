"""The machines that `shoal check` plans for: this one, or a cluster that is only described."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

from shoal.configs.app import AppConfig
from shoal.configs.errors import ConfigError
from shoal.configs.resolve import Device, Machine
from shoal.configs.schema import EngineConfig
from shoal.deployments.engine_placement import mesh_of
from shoal.deployments.placement import Node, Placement, lay_out


@dataclass(frozen=True, slots=True)
class PlannedCluster:
    engine: EngineConfig
    """With the device that these machines have."""
    machine: Machine
    """What a rank may use there."""
    node: Node
    """What each node has."""
    nodes: int | None
    """None: as many as are needed."""
    device: Device

    def lay_out(self, placement: Placement) -> list[str]:
        """The node of each bundle, on as few as have room. Raises ConfigError, with the numbers."""
        if placement.mesh.world_size == 1:  # in the replica itself
            return ["node 0"]
        count = self.nodes or len(placement.bundles)
        nodes = [Node(f"node {index}", self.node.cpus, self.node.gpus) for index in range(count)]
        for used in range(1 if self.nodes is None else count, count):
            try:
                return lay_out(placement, nodes[:used])
            except ConfigError:
                continue  # one more node
        return lay_out(placement, nodes)


def plan_cluster(config: AppConfig) -> PlannedCluster:
    """Raises ConfigError when GPUs are asked for, none is here, and nobody says what they are like."""
    from shoal.model_shards.engine.machine import measure_machine

    engine, asked, here = config.engine, config.placement, measure_machine()
    ranks = mesh_of(engine).world_size
    gpus = here.num_gpus if asked.gpus_per_node is None else asked.gpus_per_node
    if engine.device == "cuda" or (engine.device == "auto" and gpus):
        return _of_gpus(config, here, gpus, ranks)
    cpus = float(os.cpu_count() or 1)
    sharing = math.ceil(ranks / (asked.nodes or 1))
    machine = Machine(0, here.available_ram, ranks=sharing)
    return PlannedCluster(
        engine.model_copy(update={"device": "cpu"}), machine, Node("", cpus, 0), asked.nodes or 1, "cpu"
    )


def _of_gpus(config: AppConfig, here: Machine, gpus_per_node: int, ranks: int) -> PlannedCluster:
    asked = config.placement
    memory = asked.gpu_memory or here.free_gpu_memory
    if not gpus_per_node or not memory:
        raise ConfigError(
            f"device is {config.engine.device} and {ranks} rank{'s' if ranks > 1 else ''} need a GPU each, but this "
            f"machine has {here.num_gpus}. To plan for other machines, say what they have: --gpus-per-node 8 "
            "--gpu-memory 80GB, or gpus_per_node and gpu_memory in the placement section. Else set device to cpu.",
            param="device",
        )
    described = asked.gpus_per_node is not None
    nodes = asked.nodes if described else 1
    engine = config.engine.model_copy(update={"device": "cuda"})
    total = gpus_per_node * nodes if nodes is not None else max(ranks, gpus_per_node)
    machine = Machine(total, here.available_ram, memory)
    # How many CPUs such nodes have is not known; those of GPU servers are plenty.
    return PlannedCluster(engine, machine, Node("", math.inf, float(gpus_per_node)), nodes, "cuda")
