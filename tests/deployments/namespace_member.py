"""One machine of a cluster, as a program that runs in a network namespace of its own. It ends when its input does.

head ADDRESS DIRECTORY CONFIG.json     a head node; reads "joined", then deploys, and listens on ADDRESS:8000
node ADDRESS DIRECTORY GCS_ADDRESS     one more node
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any


def start_node(address: str, directory: str, gcs_address: str | None) -> Any:
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    parameters = RayParams(
        node_ip_address=address,
        gcs_address=gcs_address,
        num_cpus=3,
        object_store_memory=80_000_000,
        temp_dir=directory,
        include_dashboard=False,
        include_log_monitor=False,
        no_monitor=True,
    )
    return Node(parameters, head=gcs_address is None, shutdown_at_exit=False, spawn_reaper=True)


def serve(node: Any, address: str, config: str) -> None:
    import ray
    from ray import serve as ray_serve

    from shoal.configs.app import AppConfig
    from shoal.deployments.address import Address
    from shoal.deployments.app import build_graph

    print(node.gcs_address, flush=True)
    assert sys.stdin.readline() == "joined\n"
    ray.init(address=node.gcs_address, log_to_driver=False)
    try:
        ray_serve.start(proxy_location="Disabled")
        application = build_graph(AppConfig.model_validate_json(Path(config).read_bytes()), Address(address, 8000))
        ray_serve.run_many([ray_serve.RunTarget(application, "shoal", None)], wait_for_applications_running=True)
        print("serving", flush=True)
        sys.stdin.read()
        ray_serve.shutdown()
    finally:
        ray.shutdown()


def main(role: str, address: str, directory: str, last: str) -> None:
    node = start_node(address, directory, None if role == "head" else last)
    try:
        if role == "head":
            serve(node, address, last)
        else:
            print("joined", flush=True)
            sys.stdin.read()
    finally:
        with contextlib.suppress(Exception):
            node.kill_all_processes(check_alive=False, allow_graceful=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
