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
    """`loads` [num_experts] >= 0. Every expert has a slot, every rank as many slots as the others, and no rank two of
    one expert unless there are more slots than that allows.

    Where groups of experts (`MoEConfig.num_groups`) and ranks divide over the nodes, the experts of a group stay on one
    node: a token, whose experts are of few groups, then visits few nodes. Else nodes make no difference.
    """
    num_experts = len(loads)
    assert num_slots >= num_experts, (num_slots, num_experts)
    assert num_slots % num_ranks == 0, (num_slots, num_ranks)
    if num_groups % num_nodes or num_ranks % num_nodes or num_experts % num_groups:
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


def _replicate(loads: Loads, num_slots: int, num_ranks: int) -> npt.NDArray[np.int64]:
    """How many slots each expert gets: one more, again and again, to whichever has the most load a slot. No more than
    there are ranks, while others may have some: a second on a rank takes no load off it."""
    copies = np.ones(len(loads), dtype=np.int64)
    for _ in range(num_slots - len(loads)):
        spread = copies < num_ranks
        each = np.where(spread, loads / copies, -1.0) if spread.any() else loads / copies
        copies[each.argmax()] += 1
    return copies


def _pack(loads: Loads, kinds: Sequence[int], num_packs: int) -> list[list[int]]:
    """Items into packs of equally many: the heaviest first, each into the lightest pack that has room and none of its
    kind. Returns the items of each pack."""
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
            # All packs with room hold the kind. A full one that does not gives up an item for it, if there is one.
            full = [pack for pack in range(num_packs) if not held[pack][kinds[item]]]
            swaps = [(pack, other) for pack in full for other in packs[pack] if not held[open_packs[0]][kinds[other]]]
            fits = open_packs[0]
            if swaps:
                pack, other = min(swaps, key=lambda swap: abs(loads[swap[1]] - loads[item]))
                move(other, pack, -1)
                move(other, fits)
                fits = pack
        move(item, fits)
    return packs
