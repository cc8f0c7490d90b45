"""GGUF metadata that says something about the results is understood or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import gguf
import numpy as np
import pytest

from shoal.configs.errors import ModelLoadError
from shoal.model_shards.models.config import ModelConfig, RopeScaling
from shoal.model_shards.weights.gguf import GGUFFile
from shoal.model_shards.weights.gguf_config import parse_gguf_config


@pytest.fixture
def config_of(gguf_writing: ModuleType, tmp_path: Path) -> Callable[..., ModelConfig]:
    """config_of(architecture, {key: value or None}, tensors={name: array}) for a file with an embedding only."""

    def make(architecture: str, changes: dict[str, Any], tensors: dict[str, np.ndarray] | None = None) -> ModelConfig:
        keys: dict[str, Any] = {
            "block_count": 8,
            "context_length": 512,
            "embedding_length": 64,
            "feed_forward_length": 128,
            "attention.head_count": 4,
            "attention.head_count_kv": 2,
            "attention.layer_norm_rms_epsilon": 1e-5,
        }
        if architecture == "gemma3":
            keys["attention.sliding_window"] = 16
        keys.update(changes)
        path = tmp_path / "config.gguf"
        writer = gguf.GGUFWriter(path, architecture)
        gguf_writing.write_byte_vocab(writer)
        for key, value in keys.items():
            if value is not None:
                gguf_writing._add(writer, f"{architecture}.{key}", value)
        arrays = {"token_embd.weight": np.zeros((320, 64), np.float32)} if tensors is None else tensors
        for name, array in arrays.items():
            writer.add_tensor(name, array)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return parse_gguf_config(GGUFFile(path))

    return make


ConfigOf = Callable[..., ModelConfig]


def test_defaults(config_of: ConfigOf) -> None:
    config = config_of("llama", {})
    assert (config.head_dim, config.rope_theta, config.rope_scaling) == (16, 1e4, None)
    assert (config.bos_token_id, config.eos_token_ids) == (256, (257,))
    assert config.vocab_size == 320


@pytest.mark.parametrize(
    ("architecture", "changes", "words"),
    [
        ("llama", {"expert_count": 8}, "llama.expert_count is 8; only 0 is supported"),
        ("llama", {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}, "rope.scaling.type 'yarn'"),
        ("llama", {"rope.dimension_count": 8}, "rope.dimension_count is 8; only 16"),
        ("llama", {"attention.value_length": 8}, "attention.value_length"),
        ("llama", {"logit_scale": 0.5}, "llama.logit_scale may change"),
        ("llama", {"attention.head_count_kv": [2, 2, 2, 2, 2, 2, 2, 1]}, "attention.head_count_kv"),
        ("llama", {"block_count": None}, "llama.block_count is missing"),
        ("llama", {"block_count": 0}, "llama.block_count is 0"),
        ("llama", {"block_count": 4_000_000}, "layers cannot be right"),
        ("llama", {"embedding_length": 72}, "token_embd.weight is of shape"),
        ("llama", {"attention.layer_norm_rms_epsilon": float("nan")}, "expected a finite number"),
        ("gemma3", {"attention.sliding_window_pattern": 5}, "sliding_window_pattern is 5"),
        ("gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ("qwen2", {"attention.sliding_window": 64}, "qwen2.attention.sliding_window may change"),
        ("mamba", {}, "architecture 'mamba'.*Supported: gemma3, llama"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    config_of: ConfigOf, architecture: str, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ModelLoadError, match=words):
        config_of(architecture, changes)


def test_a_vocabulary_without_weights_is_refused(config_of: ConfigOf) -> None:
    with pytest.raises(ModelLoadError, match="vocabulary only"):
        config_of("llama", {}, tensors={})


def test_heads_given_once_a_layer(config_of: ConfigOf) -> None:
    assert config_of("llama", {"attention.head_count_kv": [2] * 8}).num_kv_heads == 2


def test_linear_rope_scaling(config_of: ConfigOf) -> None:
    changes = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    assert config_of("gemma3", changes).rope_scaling == RopeScaling("linear", factor=8.0)
    assert config_of("llama", {"rope.scale_linear": 2.0}).rope_scaling == RopeScaling("linear", factor=2.0)


def test_llama3_rope_factors_come_from_their_tensor(config_of: ConfigOf) -> None:
    embedding = np.zeros((320, 64), np.float32)
    factors = np.array([1, 1, 1, 2, 4, 8, 8, 8], np.float32)
    config = config_of("llama", {}, tensors={"token_embd.weight": embedding, "rope_freqs.weight": factors})
    assert config.rope_scaling == RopeScaling("factors", factors=(1, 1, 1, 2, 4, 8, 8, 8))
    with pytest.raises(ModelLoadError, match=r"rope_freqs\.weight has shape"):
        config_of("llama", {}, tensors={"token_embd.weight": embedding, "rope_freqs.weight": factors[:5]})


def test_gemma_27b_scales_queries_by_hidden_over_heads(config_of: ConfigOf) -> None:
    assert config_of("gemma3", {"attention.key_length": 32}).query_scale is None
    config = config_of("gemma3", {"attention.key_length": 32, "block_count": 62})
    assert config.query_scale == (64 / 4) ** -0.5
