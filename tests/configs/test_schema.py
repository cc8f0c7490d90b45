"""What a user may write about the engine, and how a mistake is answered."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from shoal.configs.errors import ConfigError
from shoal.configs.schema import EngineConfig, parse_engine_config


def test_sizes_are_written_as_people_write_them() -> None:
    config = parse_engine_config({"model": "m", "kv_cache_memory": "512MiB", "memory_budget": 1 << 30})
    assert (config.kv_cache_memory, config.memory_budget) == (512 << 20, 1 << 30)
    assert parse_engine_config({"model": "m", "kv_cache_memory": None}).kv_cache_memory is None


@pytest.mark.parametrize(
    ("values", "param", "message"),
    [
        ({"model": "m", "max_seqs": 3}, "max_seqs", "known settings: model, served_model_name"),
        ({"model": "m", "max_num_seqs": 0}, "max_num_seqs", "got 0"),
        ({"model": "m", "dtype": "int3"}, "dtype", "float32"),
        ({"model": "m", "kv_cache_memory": "lots"}, "kv_cache_memory", "write for example 512MiB"),
        ({"model": "m", "scheduling_policy": "lottery"}, "scheduling_policy", "fcfs"),
        ({}, "model", "required"),
    ],
)
def test_a_mistake_names_the_setting(values: dict[str, object], param: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse_engine_config(values)
    assert caught.value.param is not None
    assert caught.value.param.startswith(param)


def test_it_cannot_be_changed_afterwards() -> None:
    config = EngineConfig(model="m")
    with pytest.raises(ValidationError):
        config.model = "other"
