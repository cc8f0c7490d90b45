"""Rotary tables, pipeline cuts, tensor names and the registry."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path

import pytest
import torch

from shoal.configs.errors import ConfigError, ModelLoadError
from shoal.model_shards.models.config import ModelConfig, MoEConfig, RopeScaling
from shoal.model_shards.models.decoder import checkpoint_names
from shoal.model_shards.models.registry import model_factory
from shoal.model_shards.models.rotary import rotary_table
from shoal.model_shards.models.stage import Stage, count_parameters, cut_stages, layer_parameters
from shoal.model_shards.weights.open import open_checkpoint
from shoal.model_shards.weights.sources import ModelSource

CONFIG = ModelConfig(
    family="llama",
    hidden_size=64,
    num_layers=8,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=128,
    vocab_size=320,
    max_position=512,
    rms_eps=1e-5,
    rope_theta=10000.0,
)


def test_rotary_table_holds_cosines_then_sines() -> None:
    table = rotary_table(CONFIG, 3)
    angle = 2 * 10000.0 ** (-2 / 16)  # position 2, channel pair 1
    assert table.shape == (3, 16)
    assert table[2, 1] == pytest.approx(torch.tensor(angle).cos().item())
    assert table[2, 8 + 1] == pytest.approx(torch.tensor(angle).sin().item())


def test_rotary_factors_divide_each_frequency() -> None:
    factors = tuple(1.0 + i for i in range(8))
    scaled = rotary_table(replace(CONFIG, rope_scaling=RopeScaling("factors", factors=factors)), 8)
    plain = rotary_table(CONFIG, 8)
    for i in range(1, 8):  # the angle of channel i at position 1 + i is the plain one at position 1
        if i + 1 < 8:
            torch.testing.assert_close(scaled[1 + i, i], plain[1, i])


def test_rotary_factors_of_the_wrong_length_are_refused() -> None:
    with pytest.raises(ModelLoadError, match="3 rotary factors for 8 frequencies"):
        rotary_table(replace(CONFIG, rope_scaling=RopeScaling("factors", factors=(1.0, 2.0, 3.0))), 4)


def test_local_table_is_unscaled_with_its_own_base() -> None:
    config = replace(CONFIG, rope_scaling=RopeScaling("linear", factor=8.0), rope_local_theta=500.0)
    torch.testing.assert_close(rotary_table(config, 5, local=True), rotary_table(replace(CONFIG, rope_theta=500.0), 5))


def test_stages_cover_all_layers_in_order() -> None:
    stages = cut_stages(CONFIG, 3)
    assert [layer for stage in stages for layer in stage.layers] == list(range(8))
    assert [(stage.is_first, stage.is_last) for stage in stages] == [(True, False), (False, False), (False, True)]


def test_a_heavy_vocabulary_moves_layers_to_the_middle() -> None:
    """Tables as heavy as three layers: | table + 1 | 4 + 3 spread | 1 + table |."""
    heavy = replace(CONFIG, num_layers=12, vocab_size=3 * 36864 // 64)
    assert [len(stage.layers) for stage in cut_stages(heavy, 3)] == [3, 6, 3]


@pytest.mark.parametrize("vocab_size", [1, 320, 2000, 9000])
@pytest.mark.parametrize("num_layers", [1, 2, 5, 12, 31])
def test_alike_layers_go_to_the_lightest_stage(num_layers: int, vocab_size: int) -> None:
    config = replace(CONFIG, num_layers=num_layers, vocab_size=vocab_size)
    layer, table = layer_parameters(config, 0), vocab_size * config.hidden_size
    for parts in range(1, num_layers + 1):
        load = [layer + table * (part in (0, parts - 1)) for part in range(parts)]
        for _ in range(num_layers - parts):
            load[load.index(min(load))] += layer
        stages = cut_stages(config, parts)
        if parts > 1:
            assert load == [
                len(stage.layers) * layer + table * (part in (0, parts - 1)) for part, stage in enumerate(stages)
            ]
        assert [stage.start for stage in stages[1:]] == [stage.stop for stage in stages[:-1]]


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 7])
def test_the_heaviest_stage_of_unlike_layers_is_as_light_as_can_be(parts: int) -> None:
    """Against every cut there is: one of experts weighs as much as five dense layers."""
    moe = MoEConfig(num_experts=8, experts_per_token=2, expert_size=100, dense_layers=frozenset({0, 1, 2, 5}))
    config = replace(CONFIG, num_layers=9, vocab_size=700, moe=moe)
    weights = [layer_parameters(config, layer) for layer in range(9)]
    assert weights[3] > 4 * weights[0]

    def loads(stops: tuple[int, ...]) -> list[int]:
        loads = [sum(weights[start:stop]) for start, stop in pairwise((0, *stops, 9))]
        for part in {0, parts - 1}:
            loads[part] += 700 * 64
        return loads

    mine = loads(tuple(stage.stop for stage in cut_stages(config, parts)[:-1]))
    possible = [loads(stops) for stops in combinations(range(1, 9), parts - 1)]
    assert max(mine) == min(map(max, possible))
    bounded = [each for each in possible if max(each) == max(mine)]
    assert sum(load**2 for load in mine) == min(sum(load**2 for load in each) for each in bounded)


def test_a_model_as_large_as_any_is_cut_at_once() -> None:
    """The shape of DeepSeek-V3's experts: three dense layers go with the first of them."""
    moe = MoEConfig(256, 8, 2048, shared_size=2048, dense_layers=frozenset(range(3)))
    config = replace(CONFIG, hidden_size=7168, intermediate_size=18432, num_layers=61, vocab_size=129280, moe=moe)
    began = time.process_time()
    assert [len(stage.layers) for stage in cut_stages(config, 4)] == [17, 15, 15, 14]
    assert time.process_time() - began < 2


@pytest.mark.parametrize(
    ("shape", "moe", "total", "active"),
    [
        ((4096, 32, 32, 8, 128, 14336, 32000), MoEConfig(8, 2, 14336), 46.7, 12.9),
        ((2048, 48, 32, 4, 128, 6144, 151936), MoEConfig(128, 8, 768), 30.5, 3.3),
    ],
    ids=["Mixtral 8x7B", "Qwen3-30B-A3B"],
)
def test_parameters_are_those_that_makers_give(
    shape: tuple[int, ...], moe: MoEConfig, total: float, active: float
) -> None:
    names = ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate_size", "vocab_size")
    config = replace(CONFIG, moe=moe, **dict(zip(names, shape, strict=True)))
    assert count_parameters(config) == (pytest.approx(total * 1e9, rel=0.02), pytest.approx(active * 1e9, rel=0.02))


def test_more_stages_than_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match="pipeline_parallel_size 9 is more than the model's 8 layers"):
        cut_stages(CONFIG, 9)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3", "mixtral", "qwen3_moe"])
def test_checkpoint_names_are_those_of_the_files(tiny_checkpoint: Callable[..., Path], family: str) -> None:
    path = tiny_checkpoint(family)
    checkpoint = open_checkpoint(ModelSource(family, "safetensors", path))
    everything = Stage(0, checkpoint.config.num_layers, checkpoint.config.num_layers)
    assert checkpoint_names(checkpoint.config, everything) == checkpoint.names()


def test_an_unknown_family_lists_the_known() -> None:
    with pytest.raises(
        ModelLoadError,
        match=r"'mamba' is not supported. Known: .*mixtral, qwen2, qwen3, qwen3_moe",
    ):
        model_factory("mamba")
