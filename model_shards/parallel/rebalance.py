"""Moving experts between the ranks of a stage, while it serves, to where their loads ask for.

Between two steps, every so many of them, the ranks add up how many rows chose each expert, find the same new placement
from that, and send each other the weights: one layer at a time, so that a rank holds no more than its slots of one
layer twice. A token's result does not depend on where its experts are, so no output changes.
"""

from __future__ import annotations

import hashlib
import logging
import socket
import time
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch

from shoal.configs.units import format_bytes
from shoal.model_shards.parallel.context import ParallelContext, Parcel
from shoal.model_shards.parallel.eplb import Loads, Placement, adjust_placement, place_experts
from shoal.model_shards.parallel.experts import ParallelExperts

logger = logging.getLogger(__name__)

_MEMORY = 0.5
"""What the loads of one interval count in the next."""

_WORTHWHILE = 0.95
"""Experts of a layer move when that takes its imbalance below so much of what it is."""

_NEARLY = 1.03
"""A few changes to a placement do instead of a new one, which would move nearly all experts, where they come so close
to its imbalance."""


class ExpertRebalancer:
    """One rank's part in it. All ranks of the stage call `after_step` after the same steps, idle or not."""

    def __init__(
        self, layers: Sequence[ParallelExperts], context: ParallelContext, interval: int, num_groups: int
    ) -> None:
        """`interval` in steps. On all ranks of the stage at once."""
        self._layers, self._context, self._interval, self._num_groups = layers, context, interval, num_groups
        for layer in layers:
            layer.load.zero_()  # what a warm-up chose says nothing
        self._num_nodes = count_nodes(context, layers[0].load.device)
        self._steps = 0
        self._loads: Loads = np.zeros((len(layers), layers[0].placement.num_experts))
        self.imbalance: float | None = None
        """The busiest rank's load over the mean (`Placement.imbalance`), averaged over the layers, as they were placed
        until the last rebalancing; None before the first."""

    def after_step(self) -> None:
        """Counts the step; after the last of an interval, moves what there is to move."""
        self._steps += 1
        if self._steps % self._interval == 0:
            self.rebalance()

    def rebalance(self) -> None:
        began, sent = time.monotonic(), self._context.traffic["exchange"]
        counted = self._context.all_reduce(torch.stack([layer.load for layer in self._layers]), "expert")
        for layer in self._layers:
            layer.load.zero_()
        loads = counted.cpu().numpy().astype(np.float64)
        if not loads.any():
            return  # all steps of the interval were idle
        self._loads = _MEMORY * self._loads + loads
        before, after, moved = [], [], 0
        for layer, layer_loads in zip(self._layers, self._loads, strict=True):
            old, new = layer.placement, self._better(layer.placement, layer_loads)
            before.append(old.imbalance(layer_loads))
            after.append(new.imbalance(layer_loads))
            if new is not old:
                self._move(layer, new)
                moved += 1
        self.imbalance = float(np.mean(before))
        if self._context.index("expert") == 0:
            logger.info(
                "Experts after %d steps: the busiest rank has %.2f times the mean load; %.2f after %d of %d layers "
                "were rebalanced, in %.2f s (this rank sent %s)",
                self._steps, self.imbalance, np.mean(after), moved, len(self._layers), time.monotonic() - began,
                format_bytes(self._context.traffic["exchange"] - sent),
            )  # fmt: skip

    def _better(self, old: Placement, loads: Loads) -> Placement:
        """A placement for these loads, or the old one where little is to be won."""
        new = place_experts(
            loads, len(old.experts), old.num_ranks, num_groups=self._num_groups, num_nodes=self._num_nodes
        )
        if new.imbalance(loads) >= _WORTHWHILE * old.imbalance(loads):
            return old
        adjusted = adjust_placement(old, loads, _NEARLY * new.imbalance(loads), num_nodes=self._num_nodes)
        return adjusted or keep_slots(old, new)

    def _move(self, layer: ParallelExperts, new: Placement) -> None:
        rank, slots = self._context.index("expert"), new.slots_per_rank
        sends: list[Parcel] = []
        receives: list[Parcel] = []
        written: list[tuple[int, list[torch.Tensor]]] = []
        for source, target in weight_moves(layer.placement, new):
            (source_rank, source_slot), (target_rank, target_slot) = divmod(source, slots), divmod(target, slots)
            if target_rank == rank:
                # Beside the slots, which others may be reading from.
                arriving = [torch.empty_like(tensor) for tensor in layer.slots.tensors(target_slot)]
                written.append((target_slot, arriving))
                if source_rank == rank:
                    _copy(layer.slots.tensors(source_slot), arriving)
                else:
                    receives += [(source_rank, tensor) for tensor in arriving]
            elif source_rank == rank:
                sends += [(target_rank, tensor) for tensor in layer.slots.tensors(source_slot)]
        self._context.exchange(sends, receives)
        for slot, arrived in written:
            _copy(arrived, layer.slots.tensors(slot))
        layer.place(new)


def keep_slots(old: Placement, new: Placement) -> Placement:
    """`new` with the slots of each rank in another order: an expert that the rank has already stays where it is."""
    experts: list[int] = []
    for rank in range(new.num_ranks):
        wanted = Counter(new.on_rank(rank))
        kept: list[int | None] = []
        for expert in old.on_rank(rank):
            kept.append(expert if wanted[expert] > 0 else None)
            wanted[expert] -= 1
        others = iter(sorted((+wanted).elements()))
        experts += [next(others) if expert is None else expert for expert in kept]
    return Placement(tuple(experts), new.num_ranks)


def weight_moves(old: Placement, new: Placement) -> list[tuple[int, int]]:
    """(slot that has it, slot that is to have it) of each expert that `new` has where `old` has another. From the same
    rank where that has it, else from whichever rank has sent least so far."""
    slots_of, slots_per_rank = old.slots_of_experts(), old.slots_per_rank
    sent = [0] * old.num_ranks
    moves = []
    for target, (before, after) in enumerate(zip(old.experts, new.experts, strict=True)):
        if before == after:
            continue
        here = target // slots_per_rank
        source = min(slots_of[after], key=lambda slot: (slot // slots_per_rank != here, sent[slot // slots_per_rank]))
        sent[source // slots_per_rank] += source // slots_per_rank != here
        moves.append((source, target))
    return moves


def _copy(sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)


def count_nodes(context: ParallelContext, device: torch.device) -> int:
    """Of the stage's ranks, where each node has equally many, one after the other; else 1."""
    digest = hashlib.blake2b(socket.gethostname().encode(), digest_size=7).digest()
    mine = torch.tensor([int.from_bytes(digest, "big")], device=device)
    hosts = context.all_gather(mine, dim=0, axis="expert").tolist()
    num_nodes = len(set(hosts))
    share, rest = divmod(len(hosts), num_nodes)
    equal = rest == 0 and all(len(set(hosts[start : start + share])) == 1 for start in range(0, len(hosts), share))
    return num_nodes if equal else 1
