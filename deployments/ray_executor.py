"""The ranks of a mesh as Ray actors in the placement group of the replica that owns them.

Ray starts the actors where there is room, and ends them. They share the fate of their owner, so that none outlives a
replica that was killed. Plans and results go over `rank_transport.py`, tensors over NCCL or gloo.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util.placement_group import PlacementGroup, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from shoal.configs.errors import ConfigError, EngineDeadError
from shoal.configs.resolve import Machine
from shoal.deployments.network import interface_of
from shoal.deployments.placement import Bundle, Placement, check_bundles, order_bundles
from shoal.deployments.rank_actor import Introduction, RankActor, RankOrders
from shoal.deployments.rank_transport import GroupEndpoint
from shoal.model_shards.executor.ranked import RankedExecutor, RankEvent
from shoal.model_shards.runner.loading import check_mesh
from shoal.model_shards.weights.open import open_checkpoint

if TYPE_CHECKING:
    from shoal.model_shards.runner.settings import RunnerSettings

logger = logging.getLogger("shoal.ray_executor")

_START_ACTORS_S = 180.0
"""For all actors to be placed and to import torch. Their resources are reserved, so that nothing is waited for but
processes."""
_KILL_S = 5.0
"""For Ray to confirm the end of actors that it was told to kill."""


class RayRanks:
    """Actors for the ranks, started and known to each other, before there is a model. A RankSource."""

    def __init__(self, group: PlacementGroup, placement: Placement, model: str) -> None:
        """`model` as the user named it. Raises ConfigError when the group's nodes are not as the placement wants
        them, EngineDeadError when the actors do not start; with nothing left running."""
        self._placement, self._model = placement, model
        self._actors: list[Any] = []
        try:
            self.nodes = self._start_actors(group)
            """Ray's id of each rank's node."""
            self._ranks = self._introduce()
        except BaseException:
            self.close()
            raise
        for rank, introduction in enumerate(self._ranks):
            position = placement.mesh.position(rank)
            logger.info(
                "%s: pid %d on node %s (%s)", position, introduction.pid, self.nodes[rank][:8], introduction.address
            )

    def machine(self) -> Machine:
        sharing = {rank.address: sum(rank.address == other.address for other in self._ranks) for rank in self._ranks}
        tightest = min(self._ranks, key=lambda rank: rank.available_ram // sharing[rank.address])
        return Machine(
            num_gpus=sum(rank.num_gpus for rank in self._ranks),
            available_ram=tightest.available_ram,
            free_gpu_memory=min(rank.free_gpu_memory for rank in self._ranks),
            ranks=sharing[tightest.address],
        )

    def start(self, settings: RunnerSettings, step_timeout_s: float) -> RayExecutor:
        actors, self._actors = self._actors, []
        return RayExecutor(actors, self._ranks, self._model, settings, step_timeout_s=step_timeout_s)

    def close(self) -> None:
        actors, self._actors = self._actors, []
        for actor in actors:
            ray.kill(actor)

    def _start_actors(self, group: PlacementGroup) -> list[str]:
        """Returns the node of each rank."""
        placement, table = self._placement, placement_group_table(group)
        bundles = [table["bundles"][index] for index in range(len(table["bundles"]))]
        check_bundles(placement, [Bundle(bundle.get("CPU", 0.0), bundle.get("GPU", 0.0)) for bundle in bundles])
        node_of_bundle = [table["bundles_to_node_id"][index] for index in range(len(bundles))]
        remote = ray.remote(RankActor)
        nodes = []
        for place, bundle in enumerate(order_bundles(placement, node_of_bundle)):
            for _ in placement.ranks_of(place):
                options = remote.options(
                    num_cpus=placement.rank.cpus,
                    num_gpus=placement.rank.gpus,
                    max_restarts=0,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
                )
                self._actors.append(options.remote())
                nodes.append(node_of_bundle[bundle])
        return nodes

    def _introduce(self) -> list[Introduction]:
        try:
            ranks: list[Introduction] = ray.get(
                [actor.introduce.remote() for actor in self._actors], timeout=_START_ACTORS_S
            )
        except GetTimeoutError:
            message = (
                f"The {len(self._actors)} rank actors did not start within {_START_ACTORS_S:g} s. Each needs "
                f"{self._placement.rank} of its bundle; does the file give the replica more than its CPU?"
            )
            raise EngineDeadError(message) from None
        except RayError as error:
            raise EngineDeadError(f"The rank actors could not be started: {_short(error)}") from error
        return ranks


class RayExecutor(RankedExecutor):
    """Owns the actors from here on: `close`, or the end of any of them, ends them all."""

    def __init__(
        self,
        actors: list[Any],
        ranks: Sequence[Introduction],
        model: str,
        settings: RunnerSettings,
        *,
        step_timeout_s: float,
    ) -> None:
        config = open_checkpoint(settings.model).config
        super().__init__(settings.mesh, config.vocab_size, step_timeout_s)
        self._actors = actors
        self._endpoint: GroupEndpoint | None = None
        self._loaded: set[int] = set()
        """Ranks that are ready but have not subscribed yet, if any."""
        self._subscribed: set[int] = set()
        self._ends: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
        self._ended: dict[int, str] = {}
        """Rank -> how it ended."""
        self._runs: list[Any] = []
        try:
            check_mesh(config, settings.mesh)
            self._start(ranks, model, settings)
            self._await_ready()
        except BaseException:
            self.close()
            raise

    def _start(self, ranks: Sequence[Introduction], model: str, settings: RunnerSettings) -> None:
        addresses = tuple(rank.address for rank in ranks)
        # On one node nothing has to leave it; otherwise the replica is on rank 0's node.
        host = "127.0.0.1" if len(set(addresses)) == 1 else addresses[0]
        if interface_of(host) is None:
            raise ConfigError(f"Rank 0 is on {host}, which is no address of the replica's node.", param="placement")
        self._endpoint = GroupEndpoint(host, [rank.public_key for rank in ranks])
        port = ray.get(self._actors[0].open_store.remote(host, len(ranks)), timeout=_START_ACTORS_S)
        for rank, actor in enumerate(self._actors):
            sharing = addresses.count(addresses[rank])
            threads = settings.num_threads or max(1, ranks[rank].num_cpus // sharing)
            orders = RankOrders(
                rank=rank,
                model=model,
                settings=replace(settings, num_threads=threads).to_wire(),
                group=self._endpoint.address,
                store=(host, port),
                addresses=addresses,
                step_timeout_s=self._step_timeout_s,
            )
            run = actor.run.remote(orders)
            self._runs.append(run)
            run.future().add_done_callback(lambda done, rank=rank: self._note_end(rank, done.exception()))
        logger.info("waiting for %d ranks to load %s", len(ranks), settings.model.name)

    def _note_end(self, rank: int, error: BaseException | None) -> None:
        """Called by Ray, in a thread of its own, when a rank's main loop has returned or its process is gone."""
        self._ends.put((rank, "ended" if error is None else _how(error)))
        if self._endpoint is not None:
            self._endpoint.wake()

    def _broadcast(self, messages: list[bytes]) -> None:
        if self._endpoint is not None and self._endpoint.complete:  # else they are still being started, and are killed
            self._endpoint.publish(messages)

    def _events(self, timeout_s: float) -> Iterator[RankEvent]:
        assert self._endpoint is not None
        for rank, message in self._endpoint.receive(timeout_s):
            if message[0] == "ready":
                self._loaded.add(rank)
            elif message[0] == "subscribed":
                self._subscribed.add(rank)
            else:
                yield rank, message
                continue
            if rank in self._loaded & self._subscribed:
                yield rank, ["ready"]
        while not self._ends.empty():
            rank, how = self._ends.get()
            self._ended[rank] = how
            yield rank, None

    def _ended_how(self, rank: int) -> str | None:
        return self._ended.get(rank)

    def _end(self, timeout_s: float) -> None:
        """The processes of actors stay when their call has returned: all are killed, and known to be gone."""
        if self._runs and timeout_s:
            ray.wait(self._runs, num_returns=len(self._runs), timeout=timeout_s)
        for actor in self._actors:
            ray.kill(actor)
        if self._runs:
            ray.wait(self._runs, num_returns=len(self._runs), timeout=_KILL_S)

    def _release(self) -> None:
        if self._endpoint is not None:
            self._endpoint.close()


def _how(error: BaseException) -> str:
    return f"died: {_short(error)}" if isinstance(error, RayActorError) else f"failed: {_short(error)}"


def _short(error: BaseException) -> str:
    """Of the page that Ray writes, the line that tells most."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if "cause" in line.lower() or "died" in line.lower()]
    return (told or lines or [type(error).__name__])[-1]
