"""Where the experts of a layer go, so that the ranks get equal work: busy experts have several slots, and slots are
shared out by load (DeepSeek's expert-parallel load balancer: DeepSeek-AI 2024, arXiv:2412.19437, section 3.4).

Pure functions of the loads: ranks that know the same loads find the same placement.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

Loads = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Placement:
    """Which expert each slot of a layer holds; rank r has the r-th of `num_ranks` equal, contiguous parts."""

    experts: tuple[int, ...]
    num_ranks: int

    @classmethod
    def initial(cls, num_experts: int, num_redundant: int, num_ranks: int) -> Placement:
        """Before anything is known of the loads: in the experts' order; with redundant slots, as for equal loads."""
        if num_redundant == 0:
            return cls(tuple(range(num_experts)), num_ranks)
        return place_experts(np.ones(num_experts), num_experts + num_redundant, num_ranks)

    @property
    def slots_per_rank(self) -> int:
        return len(self.experts) // self.num_ranks

    @property
    def num_experts(self) -> int:
        return max(self.experts) + 1

    def on_rank(self, rank: int) -> tuple[int, ...]:
        return self.experts[rank * self.slots_per_rank : (rank + 1) * self.slots_per_rank]

    def slots_of_experts(self) -> list[list[int]]:
        """For each expert, its slots in ascending order."""
        slots: list[list[int]] = [[] for _ in range(self.num_experts)]
        for slot, expert in enumerate(self.experts):
            slots[expert].append(slot)
        return slots

    def imbalance(self, loads: Loads) -> float:
        """The busiest rank's load over the mean, when rows of an expert are spread evenly over its slots: 1 is best,
        and no rank waits for another. `loads` [num_experts], not all 0."""
        copies = Counter(self.experts)
        each = np.array([loads[expert] / copies[expert] for expert in self.experts])
        ranks = each.reshape(self.num_ranks, -1).sum(axis=1)
        return float(ranks.max() / ranks.mean())


def place_experts(
    loads: Loads, num_slots: int, num_ranks: int, *, num_groups: int = 1, num_nodes: int = 1
) -> Placement:
    """`loads` [num_experts] >= 0. Every expert has a slot, every rank as many slots as the others, at most one for each
    expert, and no rank two of one.

    Where groups of experts (`MoEConfig.num_groups`) and ranks divide over the nodes, the experts of a group stay on one
    node: a token, whose experts are of few groups, then visits few nodes. Else, and where a rank has more slots than a
    node's groups have experts, nodes make no difference.
    """
    num_experts = len(loads)
    assert num_experts <= num_slots <= num_experts * num_ranks, (num_slots, num_experts, num_ranks)
    assert num_slots % num_ranks == 0, (num_slots, num_ranks)
    divides = num_groups % num_nodes == num_ranks % num_nodes == num_experts % num_groups == 0
    if not divides or num_slots // num_ranks > num_experts // num_nodes:
        num_groups = num_nodes = 1
    by_group = np.arange(num_experts).reshape(num_groups, -1)
    nodes = _pack(loads[by_group].sum(axis=1), range(num_groups), num_nodes)
    placed: list[int] = []
    for groups in nodes:
        experts = by_group[sorted(groups)].flatten()
        copies = _replicate(loads[experts], num_slots // num_nodes, num_ranks // num_nodes)
        items = experts.repeat(copies)
        ranks = _pack((loads[experts] / copies).repeat(copies), items.tolist(), num_ranks // num_nodes)
        placed.extend(int(items[item]) for item in chain.from_iterable(ranks))
    return Placement(tuple(placed), num_ranks)


def adjust_placement(old: Placement, loads: Loads, imbalance: float, *, num_nodes: int = 1) -> Placement | None:
    """`old` with as few experts in each other's places as bring its imbalance down to what is asked for, where that can
    be had so: every expert keeps its number of slots, and its node. Again and again the busiest rank changes an expert
    with another rank so that the busier of the two has least. None where no such change helps any more."""
    experts = np.array(old.experts)
    ranks = np.arange(len(experts)) // old.slots_per_rank
    nodes = ranks * num_nodes // old.num_ranks
    held = np.zeros((old.num_ranks, len(loads)), dtype=bool)
    held[ranks, experts] = True
    each = loads[experts] / np.bincount(experts)[experts]
    for _ in experts:
        totals = each.reshape(old.num_ranks, -1).sum(axis=1)
        if totals.max() <= imbalance * totals.mean():
            return Placement(tuple(experts.tolist()), old.num_ranks)
        busiest = int(totals.argmax())
        mine = np.flatnonzero(ranks == busiest)
        lost = each[mine, None] - each
        busier = np.maximum(totals[busiest] - lost, totals[ranks] + lost)  # [slots of the busiest, all slots]
        twice = held[:, experts[mine]][ranks].T | held[busiest, experts]
        busier[twice | (nodes != nodes[mine[0]])] = np.inf
        give, take = divmod(int(busier.argmin()), len(experts))
        if busier[give, take] >= totals[busiest]:
            return None
        pair = np.array([mine[give], take])
        held[ranks[pair], experts[pair]] = False
        experts[pair], each[pair] = experts[pair[::-1]], each[pair[::-1]]
        held[ranks[pair], experts[pair]] = True
    return None


def _replicate(loads: Loads, num_slots: int, num_ranks: int) -> npt.NDArray[np.int64]:
    """How many slots each expert gets: one more, again and again, to whichever has the most load a slot, but no more
    than there are ranks: a second on a rank takes no load off it."""
    copies = np.ones(len(loads), dtype=np.int64)
    for _ in range(num_slots - len(loads)):
        copies[np.where(copies < num_ranks, loads / copies, -1.0).argmax()] += 1
    return copies


def _pack(loads: Loads, kinds: Sequence[int], num_packs: int) -> list[list[int]]:
    """Items into packs of equally many: the heaviest first, each into the lightest pack that has room and none of its
    kind. There are at most as many items of a kind as packs. Returns the items of each pack."""
    room = len(loads) // num_packs
    packs: list[list[int]] = [[] for _ in range(num_packs)]
    weights = [0.0] * num_packs
    held: list[Counter[int]] = [Counter() for _ in range(num_packs)]

    def move(item: int, pack: int, sign: int = 1) -> None:
        weights[pack] += sign * loads[item]
        held[pack][kinds[item]] += sign
        packs[pack].append(item) if sign > 0 else packs[pack].remove(item)

    for item in np.argsort(-loads, kind="stable").tolist():
        open_packs = sorted((pack for pack in range(num_packs) if len(packs[pack]) < room), key=weights.__getitem__)
        fits = next((pack for pack in open_packs if not held[pack][kinds[item]]), None)
        if fits is None:
            # All packs with room hold the kind. So one that does not is full, and has more kinds than the lightest with
            # room, which takes one of those instead.
            full = [pack for pack in range(num_packs) if not held[pack][kinds[item]]]
            swaps = [(pack, other) for pack in full for other in packs[pack] if not held[open_packs[0]][kinds[other]]]
            fits, other = min(swaps, key=lambda swap: abs(loads[swap[1]] - loads[item]))
            move(other, fits, -1)
            move(other, open_packs[0])
        move(item, fits)
    return packs
