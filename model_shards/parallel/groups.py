"""The torch process groups of one rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from shoal.model_shards.parallel.mesh import MeshPosition


@dataclass(frozen=True, slots=True)
class Groups:
    """One group for each axis of the mesh, of the ranks that differ from this one along it alone. Members are in the
    order of their place on the axis."""

    tensor: dist.ProcessGroup | None
    context: dist.ProcessGroup | None
    expert: dist.ProcessGroup | None
    """All ranks of the stage."""
    pipeline: dist.ProcessGroup | None
    """Hidden states travel along it."""
    control: dist.ProcessGroup | None
    """All ranks, over gloo whatever the device: token ids."""

    @classmethod
    def create(
        cls, position: MeshPosition, rendezvous: str | Store, device: torch.device, timeout: timedelta
    ) -> Groups:
        assert not dist.is_initialized(), "a process is one rank of one group"
        world = position.world_size
        where: dict[str, Any] = {"init_method" if isinstance(rendezvous, str) else "store": rendezvous}
        dist.init_process_group("gloo", rank=position.rank, world_size=world, timeout=timeout, **where)
        backend = "nccl" if device.type == "cuda" else "gloo"
        positions = position.shape.positions()

        def mine(place_of: Callable[[MeshPosition], tuple[int, ...]]) -> dist.ProcessGroup | None:
            """The group of those for whom `place_of` gives what it gives for this rank."""
            members: dict[tuple[int, ...], list[int]] = {}
            for each in positions:
                members.setdefault(place_of(each), []).append(each.rank)
            found = None
            # Every rank takes part in making every group, in the same order.
            for place, ranks in members.items():
                group = dist.new_group(ranks, timeout=timeout, backend=backend)
                found = group if place == place_of(position) else found
            return found

        return cls(
            tensor=mine(lambda p: (p.pp_rank, p.dp_rank, p.cp_rank)),
            context=mine(lambda p: (p.pp_rank, p.dp_rank, p.tp_rank)) if position.cp_size > 1 else None,
            expert=mine(lambda p: (p.pp_rank,)) if position.ep_size > 1 else None,
            pipeline=mine(lambda p: (p.dp_rank, p.cp_rank, p.tp_rank)),
            control=dist.group.WORLD,
        )
