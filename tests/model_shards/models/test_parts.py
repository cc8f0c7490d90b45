"""Rotary tables, pipeline cuts, tensor names and the registry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shoal.configs.errors import ConfigError, ModelLoadError
from shoal.model_shards.models.config import ModelConfig, RopeScaling
from shoal.model_shards.models.decoder import checkpoint_names
from shoal.model_shards.models.registry import model_factory
from shoal.model_shards.models.rotary import rotary_table
from shoal.model_shards.models.stage import Stage, cut_stages
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


def test_more_stages_than_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match="pipeline_parallel_size 9 is more than the model's 8 layers"):
        cut_stages(CONFIG, 9)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3"])
def test_checkpoint_names_are_those_of_the_files(tiny_checkpoint: Callable[..., Path], family: str) -> None:
    path = tiny_checkpoint(family)
    checkpoint = open_checkpoint(ModelSource(family, "safetensors", path))
    everything = Stage(0, checkpoint.config.num_layers, checkpoint.config.num_layers)
    assert checkpoint_names(checkpoint.config, everything) == checkpoint.names()


def test_an_unknown_family_lists_the_known() -> None:
    with pytest.raises(ModelLoadError, match=r"'mamba' is not supported. Known: gemma3, llama, mistral, qwen2, qwen3"):
        model_factory("mamba")
