"""Which rank goes where, and what cannot go anywhere."""

from __future__ import annotations

import math
from typing import Any

import pytest

from shoal.configs.app import PlacementConfig
from shoal.configs.errors import ConfigError
from shoal.deployments.placement import (
    Bundle,
    Node,
    Placement,
    check_bundles,
    lay_out,
    order_bundles,
    plan_placement,
)
from shoal.model_shards.parallel.mesh import MeshShape


def plan(mesh: MeshShape, device: Any = "cuda", **settings: Any) -> Placement:
    return plan_placement(mesh, PlacementConfig(**settings), device)


def gpu_nodes(*counts: int) -> list[Node]:
    return [Node(f"n{index}", 64.0, float(count)) for index, count in enumerate(counts)]


def layout(placement: Placement, node_of_bundle: list[str]) -> list[str]:
    """The node of each rank."""
    order = order_bundles(placement, node_of_bundle)
    return [node_of_bundle[bundle] for place, bundle in enumerate(order) for _ in placement.ranks_of(place)]


def test_a_bundle_is_what_must_stay_together() -> None:
    mesh = MeshShape(tp_size=8, pp_size=2)
    usual = plan(mesh, cpus_per_rank=2)
    assert usual.bundles == (Bundle(17, 8), Bundle(16, 8))
    assert (usual.strategy, usual.ranks_per_bundle) == ("PACK", 8)
    assert plan(mesh, stages_on_separate_nodes=True).strategy == "STRICT_SPREAD"
    across = plan(mesh, tensor_parallel_across_nodes=True)
    assert across.bundles == (Bundle(2, 1), *[Bundle(1, 1)] * 15)
    experts = MeshShape(tp_size=2, dp_size=4, expert_parallel=True, pp_size=2)
    assert len(plan(experts).bundles) == 8, "one for each group of tensor-parallel ranks"
    assert plan(experts, stages_on_separate_nodes=True).bundles == (Bundle(9, 8), Bundle(8, 8))
    assert plan(mesh, "cpu").bundles[1].to_ray() == {"CPU": 8.0}


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match="contradict each other"):
        plan(MeshShape(2, 2), stages_on_separate_nodes=True, tensor_parallel_across_nodes=True)


def test_few_nodes_are_taken_or_one_a_stage() -> None:
    mesh = MeshShape(tp_size=2, pp_size=3)
    assert lay_out(plan(mesh), gpu_nodes(8, 8, 8)) == ["n0", "n0", "n0"]
    assert lay_out(plan(mesh), gpu_nodes(4, 8)) == ["n0", "n0", "n1"]
    assert lay_out(plan(mesh, stages_on_separate_nodes=True), gpu_nodes(8, 8, 8)) == ["n0", "n1", "n2"]
    assert lay_out(plan(mesh), [Node("plenty", math.inf, 6.0)]) == ["plenty"] * 3


def test_the_first_bundle_goes_where_the_replica_fits_too() -> None:
    nodes = [Node("small", 2.0, 2.0), Node("large", 3.0, 2.0)]
    assert lay_out(plan(MeshShape(tp_size=2, pp_size=2)), nodes) == ["large", "small"]


@pytest.mark.parametrize(
    ("mesh", "settings", "nodes", "says"),
    [
        (
            MeshShape(tp_size=16),
            {},
            gpu_nodes(8, 8),
            r"16 ranks \(tensor_parallel_size 16\) need 1 time 16 GPUs and 16 CPUs whole on one node.*"
            r"room for 0 of 1 on the nodes found: n0 \(8 GPUs and 64 CPUs\), n1 .*"
            r"Lower tensor_parallel_size, or set placement.tensor_parallel_across_nodes",
        ),
        (MeshShape(8, 3), {}, gpu_nodes(8, 8), r"tensor_parallel_size 8 x pipeline_parallel_size 3.*room for 2 of 3"),
        (
            MeshShape(4, 2),
            {"stages_on_separate_nodes": True},
            gpu_nodes(8),
            r"2 times 4 GPUs and 4 CPUs whole on one node, each on another node.*room for 1 of 2",
        ),
        (MeshShape(2), {}, [], "on the nodes found: none"),
        (MeshShape(2), {"cpus_per_rank": 40}, gpu_nodes(8), "room for 0 of 1"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(
    mesh: MeshShape, settings: dict[str, Any], nodes: list[Node], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        lay_out(plan(mesh, **settings), nodes)


def test_ranks_of_a_stage_are_side_by_side_and_rank_0_is_in_the_replicas_bundle() -> None:
    placement = plan(MeshShape(tp_size=2, pp_size=4))
    assert layout(placement, ["b", "a", "b", "a"]) == ["b"] * 4 + ["a"] * 4
    assert order_bundles(placement, ["b", "a", "b", "a"]) == [0, 2, 1, 3]


def test_what_ray_made_is_checked() -> None:
    placement = plan(MeshShape(tp_size=2, pp_size=2), stages_on_separate_nodes=True)
    with pytest.raises(ConfigError, match="2 stages on the nodes a, a"):
        order_bundles(placement, ["a", "a"])
    check_bundles(placement, placement.bundles)
    for wrong in ([Bundle(3, 2)], [Bundle(2, 2), Bundle(2, 2)], [Bundle(3, 2), Bundle(2, 1)]):
        with pytest.raises(ConfigError, match="override placement_group_bundles"):
            check_bundles(placement, wrong)
