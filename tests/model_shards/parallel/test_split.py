"""How a mesh shares out heads, features and the vocabulary."""

from __future__ import annotations

import pytest

from shoal.configs.errors import ConfigError
from shoal.model_shards.parallel.embedding import VocabShard
from shoal.model_shards.parallel.mesh import MeshShape
from shoal.model_shards.parallel.split import HeadSplit, split_evenly


def test_ranks_are_numbered_stage_by_stage() -> None:
    position = MeshShape(tp_size=2, pp_size=3).position(5)
    assert (position.tp_rank, position.pp_rank, position.rank) == (1, 2, 5)
    assert position.is_last_stage
    assert position.sampling_rank == 4
    assert str(position) == "rank 5 (tensor 1/2, stage 2/3)"


def test_every_rank_of_a_mesh_has_a_place_of_its_own() -> None:
    shape = MeshShape(tp_size=2, pp_size=2, dp_size=3, cp_size=2, expert_parallel=True)
    positions = shape.positions()
    assert [position.rank for position in positions] == list(range(24))
    assert len({(p.tp_rank, p.pp_rank, p.dp_rank, p.cp_rank) for p in positions}) == 24
    assert [p.ep_rank for p in positions] == [*range(12), *range(12)]
    assert [p.rank for p in positions if p.samples] == [12, 16, 20]
    assert {p.sampling_rank for p in positions if p.dp_rank == 1} == {16}
    assert str(positions[23]) == "rank 23 (tensor 1/2, stage 1/2, data 2/3, context 1/2)"


def test_what_does_not_divide_is_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match="intermediate_size 100 cannot be split over tensor_parallel_size 3"):
        split_evenly("intermediate_size", 100, 3, 0)
    with pytest.raises(ConfigError, match="num_heads 9 cannot be split over tensor_parallel_size 2"):
        HeadSplit.of_rank(9, 3, 2, 0)
    with pytest.raises(ConfigError, match="num_kv_heads 4 cannot be shared out over tensor_parallel_size 6"):
        HeadSplit.of_rank(12, 4, 6, 0)


@pytest.mark.parametrize(("kv_heads", "tp_size"), [(1, 2), (2, 4), (2, 8), (4, 4), (8, 2), (8, 1)])
def test_each_rank_holds_the_kv_heads_that_its_queries_read(kv_heads: int, tp_size: int) -> None:
    num_heads = 8
    for rank in range(tp_size):
        split = HeadSplit.of_rank(num_heads, kv_heads, tp_size, rank)
        assert {head // (num_heads // kv_heads) for head in split.query} == set(split.kv)
        group = split.num_heads // split.num_kv_heads  # what the attention operator assumes
        for i, head in enumerate(split.query):
            assert split.kv[i // group] == head // (num_heads // kv_heads)


@pytest.mark.parametrize(("vocab_size", "tp_size"), [(320, 2), (321, 2), (5, 4), (7, 1)])
def test_vocabulary_shards_cover_it_once_and_have_one_size(vocab_size: int, tp_size: int) -> None:
    shards = [VocabShard.of_rank(vocab_size, tp_size, rank) for rank in range(tp_size)]
    assert [row for shard in shards for row in range(shard.start, shard.stop)] == list(range(vocab_size))
    assert len({shard.padded for shard in shards}) == 1
