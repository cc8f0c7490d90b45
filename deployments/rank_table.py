"""What each rank of a model would hold, and where: said before anything starts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from shoal.configs.units import format_bytes
from shoal.deployments.placement import REPLICA_CPUS, Bundle, Placement, order_bundles

if TYPE_CHECKING:
    from shoal.kvcache.planner import MemoryPlan
    from shoal.model_shards.models.config import ModelConfig
    from shoal.model_shards.quantization.schemes import WeightScheme


@dataclass(frozen=True, slots=True)
class RankRow:
    rank: int
    node: str
    stage: int
    layers: tuple[int, int]
    """First and last."""
    tensor: int
    data: int
    context: int
    expert: int
    weights_bytes: int
    """Of the heaviest rank of its stage."""
    kv_bytes: int
    kv_tokens: int
    """Slots for tokens, of all sequences of its data-parallel part."""


def rank_rows(
    placement: Placement,
    node_of_bundle: Sequence[str],
    model: ModelConfig,
    scheme: WeightScheme,
    memory: MemoryPlan,
) -> list[RankRow]:
    """`memory` is the plan of the heaviest rank: the number of blocks is the same on all."""
    from shoal.model_shards.models.stage import cut_stages
    from shoal.model_shards.runner.footprint import stage_weights_bytes

    mesh = placement.mesh
    stages = cut_stages(model, mesh.pp_size)
    weights = [stage_weights_bytes(model, stage, scheme, mesh) for stage in stages]
    most_layers = max(len(stage.layers) for stage in stages)
    rows = []
    for place, bundle in enumerate(order_bundles(placement, node_of_bundle)):
        for rank in placement.ranks_of(place):
            position = mesh.position(rank)
            stage = stages[position.pp_rank]
            rows.append(
                RankRow(
                    rank=rank,
                    node=node_of_bundle[bundle],
                    stage=position.pp_rank,
                    layers=(stage.start, stage.stop - 1),
                    tensor=position.tp_rank,
                    data=position.dp_rank,
                    context=position.cp_rank,
                    expert=position.ep_rank,
                    weights_bytes=weights[position.pp_rank],
                    kv_bytes=memory.kv_bytes * len(stage.layers) // most_layers,
                    kv_tokens=memory.num_tokens,
                )
            )
    return rows


def placement_facts(placement: Placement, rows: Iterable[RankRow]) -> dict[str, Any]:
    """For JSON."""
    return {
        "strategy": placement.strategy,
        "bundles": [bundle.to_ray() for bundle in placement.bundles],
        "ranks": [asdict(row) for row in rows],
    }


def render(placement: Placement, rows: Sequence[RankRow]) -> str:
    """A table of plain text, with the axes that there are."""
    mesh = placement.mesh
    axes = [("tensor", mesh.tp_size), ("data", mesh.dp_size), ("context", mesh.cp_size), ("expert", mesh.ep_size)]
    shown = [(name, size) for name, size in axes if size > 1]
    lines = [["rank", "node", "stage", *(name for name, _ in shown), "weights", "KV cache"]]
    for row in rows:
        lines.append(
            [
                str(row.rank),
                row.node,
                f"{row.stage}: layers {row.layers[0]}-{row.layers[1]}",
                *(f"{getattr(row, name)}/{size}" for name, size in shown),
                format_bytes(row.weights_bytes),
                f"{format_bytes(row.kv_bytes)} ({row.kv_tokens:,} tokens)",
            ]
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    table = ["  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    count, together = len(placement.bundles), placement.ranks_per_bundle
    bundle = Bundle(together * placement.rank.cpus, together * placement.rank.gpus)
    how = "each on a node of its own" if placement.strategy == "STRICT_SPREAD" else "on as few nodes as have room"
    asked = f"{count} bundles of {bundle}, {how}" if count > 1 else f"1 bundle of {bundle}"
    more = f"the first has {REPLICA_CPUS:g} CPU more, for the replica"
    return "\n".join([f"asked of Ray: {asked}; {more}", *table])
