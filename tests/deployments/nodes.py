"""More nodes for a cluster of this machine, each a raylet of its own."""

from __future__ import annotations

from typing import Any


def add_node(cluster: Any, num_cpus: int, **resources: float) -> Any:
    """Starts a raylet that joins a LocalCluster; returns Ray's object for it (`kill_all_processes` loses the node). The
    cluster's `stop` ends it like everything else."""
    import ray
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    parameters = RayParams(
        gcs_address=ray.get_runtime_context().gcs_address,
        num_cpus=num_cpus,
        resources=dict(resources),
        object_store_memory=80_000_000,
        temp_dir=str(cluster.token_path.parent / "ray"),
        include_log_monitor=False,
    )
    try:
        node = Node(parameters, head=False, shutdown_at_exit=False, spawn_reaper=False)
    finally:
        cluster._note_descendants()
    return node
