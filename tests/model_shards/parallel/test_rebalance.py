"""What moves between two placements, and what does not. That it does move: expert_ranks.py and model_ranks.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.model_shards.parallel.eplb import Placement, place_experts
from shoal.model_shards.parallel.rebalance import count_nodes, keep_slots, weight_moves


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_moves_make_the_new_placement_of_the_old(data: st.DataObject) -> None:
    num_ranks = data.draw(st.sampled_from([2, 3, 4]), label="ranks")
    slots = data.draw(st.integers(1, 5), label="slots a rank") * num_ranks
    num_experts = data.draw(st.integers(max(1, slots // num_ranks), slots), label="experts")
    loads = st.lists(st.integers(0, 100), min_size=num_experts, max_size=num_experts).map(lambda x: np.array(x, float))
    old, wanted = (place_experts(data.draw(loads), slots, num_ranks) for _ in range(2))
    new = keep_slots(old, wanted)
    moves = weight_moves(old, new)
    held = list(old.experts)
    for source, target in moves:
        held[target] = old.experts[source]
    assert tuple(held) == new.experts
    for rank in range(num_ranks):
        assert sorted(new.on_rank(rank)) == sorted(wanted.on_rank(rank))
        arriving = {new.experts[target] for _, target in moves if target // new.slots_per_rank == rank}
        assert arriving.isdisjoint(old.on_rank(rank)), "a rank was sent what it has"


def test_experts_stay_in_their_slots_where_they_can() -> None:
    old = Placement((0, 1, 2, 3), 2)
    assert keep_slots(old, Placement((1, 0, 3, 2), 2)) == old
    assert keep_slots(old, Placement((3, 1, 2, 0), 2)).experts == (3, 1, 2, 0)
    assert weight_moves(old, Placement((3, 1, 2, 0), 2)) == [(3, 0), (0, 3)]


def test_those_who_have_an_expert_take_turns_in_sending_it() -> None:
    old = Placement((0, 1, 0, 2, 3, 4, 5, 6), 4)
    new = Placement((0, 1, 0, 2, 0, 4, 0, 6), 4)
    assert weight_moves(old, new) == [(0, 4), (2, 6)]


@pytest.mark.parametrize(
    ("hosts", "num_nodes"),
    [([7, 7, 7, 7], 1), ([7, 7, 9, 9], 2), ([7, 9, 7, 9], 1), ([7, 7, 7, 9], 1), ([1, 2, 3, 4], 4)],
)
def test_nodes_count_where_each_has_equally_many_ranks_in_a_row(hosts: list[int], num_nodes: int) -> None:
    context = SimpleNamespace(all_gather=lambda mine, **_: torch.tensor(hosts))
    assert count_nodes(cast(Any, context), torch.device("cpu")) == num_nodes
