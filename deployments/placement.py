"""Which rank goes where: from the settings to the bundles of a placement group, and from its nodes to the ranks.

A bundle is what Ray never divides over nodes, so what belongs together is one bundle:

    usually                        one bundle for each group of tensor-parallel ranks, on as few nodes as there is room
    stages_on_separate_nodes       one bundle for each stage, each on a node of its own
    tensor_parallel_across_nodes   one bundle for each rank

The first bundle also holds the replica that owns the ranks, so rank 0 is beside it. Nothing here knows Ray.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from shoal.configs.app import PlacementConfig
from shoal.configs.errors import ConfigError
from shoal.configs.resolve import Device
from shoal.model_shards.parallel.mesh import MeshShape

REPLICA_CPUS = 1.0
"""The replica's own, beside rank 0: scheduling, detokenizing."""

Strategy = Literal["PACK", "STRICT_SPREAD"]


@dataclass(frozen=True, slots=True)
class Node:
    """What Ray counts on a node."""

    name: str
    cpus: float
    """Infinite: not known."""
    gpus: float


@dataclass(frozen=True, slots=True)
class Bundle:
    cpus: float
    gpus: float

    def fits(self, node: Node) -> bool:
        return self.cpus <= node.cpus and self.gpus <= node.gpus

    def to_ray(self) -> dict[str, float]:
        return {"CPU": self.cpus, **({"GPU": self.gpus} if self.gpus else {})}

    def __str__(self) -> str:
        counts = [(self.gpus, "GPU"), (self.cpus, "CPU")]
        shown = [f"{count:g} {unit}{'s' if count != 1 else ''}" for count, unit in counts if 0 < count < math.inf]
        return " and ".join(shown) or "nothing"


@dataclass(frozen=True, slots=True)
class Placement:
    """A placement group, and how its bundles are shared out among ranks."""

    mesh: MeshShape
    bundles: tuple[Bundle, ...]
    strategy: Strategy
    ranks_per_bundle: int
    rank: Bundle
    """What one rank takes of its bundle."""

    def ranks_of(self, place: int) -> range:
        """Ranks of the bundle that comes at this place in the order of `order_bundles`."""
        return range(place * self.ranks_per_bundle, (place + 1) * self.ranks_per_bundle)


def plan_placement(mesh: MeshShape, settings: PlacementConfig, device: Device) -> Placement:
    """Raises ConfigError for settings that contradict each other."""
    across, separate = settings.tensor_parallel_across_nodes, settings.stages_on_separate_nodes
    if across and separate:
        raise ConfigError(
            "placement.tensor_parallel_across_nodes and placement.stages_on_separate_nodes contradict each other: the "
            "first lets a stage be on several nodes, the second keeps it on one.",
            param="placement",
        )
    together = 1 if across else mesh.stage_size if separate else mesh.tp_size
    gpus = 1.0 if device == "cuda" else 0.0
    rank = Bundle(settings.cpus_per_rank, gpus)
    other = Bundle(together * rank.cpus, together * gpus)
    first = Bundle(other.cpus + REPLICA_CPUS, other.gpus)
    bundles = (first, *[other] * (mesh.world_size // together - 1))
    return Placement(mesh, bundles, "STRICT_SPREAD" if separate else "PACK", together, rank)


def lay_out(placement: Placement, nodes: Sequence[Node]) -> list[str]:
    """The node of each bundle, by name, as Ray could choose them. Raises ConfigError, with the numbers, when there is
    no way: Ray would wait for ever."""
    first, others = placement.bundles[0], placement.bundles[1:]
    best: list[str] = []
    for home in nodes:
        if not first.fits(home):
            continue
        chosen = [home.name]
        for node in [home, *(node for node in nodes if node is not home)]:
            room = _room(placement, node, is_home=node is home)
            chosen += [node.name] * min(room, 1 + len(others) - len(chosen))
        if len(chosen) == len(placement.bundles):
            return chosen
        best = max(best, chosen, key=len)
    raise ConfigError(_lack(placement, nodes, len(best)), param="placement")


def _room(placement: Placement, node: Node, *, is_home: bool) -> int:
    """How many of the bundles but the first a node takes; the first one is on its home already."""
    if len(placement.bundles) == 1:
        return 0
    if placement.strategy == "STRICT_SPREAD":
        return 0 if is_home else int(placement.bundles[1].fits(node))
    taken, bundle = placement.bundles[0] if is_home else Bundle(0, 0), placement.bundles[1]
    most = len(placement.bundles)
    by_cpus = int(min(most, (node.cpus - taken.cpus) / bundle.cpus))
    return min(by_cpus, int((node.gpus - taken.gpus) // bundle.gpus)) if bundle.gpus else by_cpus


def _lack(placement: Placement, nodes: Sequence[Node], placed: int) -> str:
    mesh, bundles = placement.mesh, placement.bundles
    sizes = {
        "tensor_parallel_size": mesh.tp_size,
        "pipeline_parallel_size": mesh.pp_size,
        "data_parallel_size": mesh.dp_size,
        "context_parallel_size": mesh.cp_size,
    }
    product = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "1 rank"
    together = placement.ranks_per_bundle
    share = Bundle(together * placement.rank.cpus, together * placement.rank.gpus)
    what = f"{len(bundles)} time{'s' if len(bundles) > 1 else ''} {share} whole on one node"
    spread = ", each on another node" if placement.strategy == "STRICT_SPREAD" and len(bundles) > 1 else ""
    found = ", ".join(f"{node.name} ({Bundle(node.cpus, node.gpus)})" for node in nodes) or "none"
    advice = (
        "Lower tensor_parallel_size, or set placement.tensor_parallel_across_nodes"
        if placed == 0 and together == mesh.tp_size > 1
        else "Lower the parallel sizes or placement.cpus_per_rank, or add nodes"
    )
    return (
        f"{mesh.world_size} ranks ({product}) need {what}{spread}, for {together} rank{'s' if together > 1 else ''} of "
        f"{placement.rank} each, and {REPLICA_CPUS:g} more CPU beside the first for the replica. There is room for "
        f"{placed} of {len(bundles)} on the nodes found: {found}. {advice}."
    )


def order_bundles(placement: Placement, node_of_bundle: Sequence[str]) -> list[int]:
    """The bundles in the order in which ranks fill them: those of one node side by side, the replica's node first and
    its own bundle before all others. Raises ConfigError when the nodes are not as they were asked for."""
    assert len(node_of_bundle) == len(placement.bundles)
    if placement.strategy == "STRICT_SPREAD" and len(set(node_of_bundle)) < len(node_of_bundle):
        raise ConfigError(
            f"placement.stages_on_separate_nodes is true, but Ray put {len(node_of_bundle)} stages on the nodes "
            f"{', '.join(node_of_bundle)}. Does the file override placement_group_strategy?",
            param="placement.stages_on_separate_nodes",
        )
    first_on: dict[str, int] = {}
    for index, node in enumerate(node_of_bundle):
        first_on.setdefault(node, index)
    return sorted(range(len(node_of_bundle)), key=lambda index: (first_on[node_of_bundle[index]], index))


def check_bundles(placement: Placement, actual: Sequence[Bundle]) -> None:
    """Raises ConfigError when the placement group that there is has not the bundles that were planned."""
    if len(actual) != len(placement.bundles) or any(
        has.cpus < wanted.cpus or has.gpus < wanted.gpus for has, wanted in zip(actual, placement.bundles, strict=True)
    ):
        raise ConfigError(
            f"The placement group has the bundles [{'; '.join(map(str, actual))}], but the ranks need "
            f"[{'; '.join(map(str, placement.bundles))}]. Does the file override placement_group_bundles?",
            param="placement",
        )
