"""A cluster of several nodes on this machine, each a raylet of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Nodes:
    """A LocalCluster, whose head is the first node, and the raylets that joined it."""

    cluster: Any
    others: list[Any] = field(default_factory=list)

    def add(self, num_cpus: int) -> None:
        """Starts one more."""
        import ray
        from ray._private.node import Node
        from ray._private.parameter import RayParams

        parameters = RayParams(
            gcs_address=ray.get_runtime_context().gcs_address,
            num_cpus=num_cpus,
            object_store_memory=80_000_000,
            temp_dir=str(self.cluster.token_path.parent / "ray"),
            include_log_monitor=False,
        )
        try:
            node = Node(parameters, head=False, shutdown_at_exit=False, spawn_reaper=False)
        finally:
            self.cluster._note_descendants()
        self.others.append(node)

    def lose(self, index: int) -> None:
        """Ends a node as a power cut would, and its workers with it."""
        self.cluster._note_descendants()
        self.others.pop(index).kill_all_processes(check_alive=False, allow_graceful=False)


@contextmanager
def cluster_of_nodes(num_cpus: list[int]) -> Iterator[Nodes]:
    """A node for each number of CPUs, and Serve with its proxy. Afterwards no process may be left."""
    from shoal.deployments.local_cluster import ClusterOptions, LocalCluster, descendants, free_port

    before = {pid for pid, _ in descendants(os.getpid())}
    nodes = Nodes(LocalCluster(ClusterOptions(port=free_port(), ingress="proxy", num_cpus=num_cpus[0])))
    try:
        nodes.cluster.start()
        for count in num_cpus[1:]:
            nodes.add(count)
        nodes.cluster.start_serve()
        yield nodes
    finally:
        for node in nodes.others:
            node.kill_all_processes(check_alive=False, allow_graceful=True)
        nodes.cluster.stop()
    assert {pid for pid, _ in descendants(os.getpid())} <= before


def rank_processes() -> list[int]:
    """Ids of the rank actors' processes that run below this one."""
    from shoal.deployments.local_cluster import descendants

    found = []
    for pid, _ in descendants(os.getpid()):
        try:
            title = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if title.startswith(b"ray::RankActor"):
            found.append(pid)
    return found
