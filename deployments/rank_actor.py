"""One rank of a model as a Ray actor. Ray places it, hands it what it needs to join, and ends it; nothing of a step
goes through Ray."""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import zmq

from shoal.deployments.network import interface_towards
from shoal.deployments.rank_transport import GroupAddress, RankEndpoint

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from shoal.model_shards.runner.settings import RunnerSettings

_STORE_TIMEOUT = timedelta(seconds=300)
"""For the other ranks to come to the rendezvous: their processes may have to read torch from a cold disk."""


@dataclass(frozen=True, slots=True)
class Introduction:
    """What a rank says of itself before it knows the others."""

    address: str
    """Of its node."""
    pid: int
    public_key: bytes
    """Z85; its secret stays in the process."""
    num_gpus: int
    free_gpu_memory: int
    available_ram: int
    num_cpus: int
    """That its process may use."""


@dataclass(frozen=True, slots=True)
class RankOrders:
    """What a rank is told."""

    rank: int
    model: str
    """As the user named it: files may lie elsewhere on this node than on the replica's."""
    settings: dict[str, Any]
    """RunnerSettings as plain values."""
    group: GroupAddress
    store: tuple[str, int]
    """Host and port of rank 0's rendezvous."""
    addresses: tuple[str, ...]
    """Of all ranks' nodes."""
    step_timeout_s: float


class RankActor:
    """`introduce`, on rank 0 also `open_store`, then `run`, which takes until the rank ends."""

    def __init__(self) -> None:
        self._keys = zmq.curve_keypair()
        self._store: Store | None = None

    def introduce(self) -> Introduction:
        import ray

        from shoal.model_shards.engine.machine import measure_machine

        machine = measure_machine()
        return Introduction(
            address=str(ray.util.get_node_ip_address()),
            pid=os.getpid(),
            public_key=self._keys[0],
            num_gpus=machine.num_gpus,
            free_gpu_memory=machine.free_gpu_memory,
            available_ram=machine.available_ram,
            num_cpus=len(os.sched_getaffinity(0)),
        )

    def open_store(self, host: str, world_size: int) -> int:
        """Listens for the other ranks, on this address alone; returns the port. The socket is bound here and handed to
        the store, so that nobody can take the port in between."""
        import torch.distributed as dist

        listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        port = int(listener.getsockname()[1])
        self._store = dist.TCPStore(  # type: ignore[attr-defined]  # its stub names no export
            host, port, world_size, True, _STORE_TIMEOUT, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        return port

    def run(self, orders: RankOrders) -> None:
        """Serves plans until the executor says stop or the rank fails."""
        from shoal.model_shards.executor.rank import RankStart, serve_rank
        from shoal.model_shards.runner.settings import RunnerSettings

        settings = RunnerSettings.from_wire(orders.settings)
        link = RankEndpoint(orders.group, orders.rank, settings.mesh.position(orders.rank).dp_rank, self._keys)

        def prepare() -> RankStart:
            _choose_interface(orders.addresses[orders.rank], orders.addresses)
            here = _with_files_here(settings, orders.model)
            return RankStart(orders.rank, here, self._join(orders), orders.step_timeout_s)

        try:
            serve_rank(link, prepare)
        finally:
            link.close()

    def _join(self, orders: RankOrders) -> Store:
        import torch.distributed as dist

        if self._store is None:
            self._store = dist.TCPStore(*orders.store, len(orders.addresses), False, _STORE_TIMEOUT)  # type: ignore[attr-defined]
        return self._store


def _choose_interface(own: str, addresses: tuple[str, ...]) -> None:
    """Gloo and NCCL would take the interface of the host's name, which may be no way to the peers. What the operator
    has set stays."""
    interface = interface_towards(own, addresses)
    if interface is not None and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)


def _with_files_here(settings: RunnerSettings, model: str) -> RunnerSettings:
    """The model's files where this node has them; fetched, where it has none."""
    from shoal.model_shards.weights.sources import resolve_model

    if settings.model.path.exists():
        return settings
    return replace(settings, model=resolve_model(model, progress=False))
