"""Family -> factory of its decoder, imported when asked for."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import cast

from shoal.configs.errors import ModelLoadError
from shoal.model_shards.models.config import ModelConfig
from shoal.model_shards.models.decoder import Decoder
from shoal.model_shards.models.stage import Stage
from shoal.model_shards.parallel.loader import WeightLoader

ModelFactory = Callable[[ModelConfig, Stage, WeightLoader, int], Decoder]

_FACTORIES = {
    "llama": "llama:make_llama",
    "mistral": "llama:make_llama",
    "qwen2": "llama:make_llama",
    "qwen3": "llama:make_llama",
    "gemma3": "gemma3:make_gemma3",
    "mixtral": "llama:make_llama",
    "qwen3_moe": "llama:make_llama",
    "deepseek_v3": "deepseek:make_deepseek",
}


def model_factory(family: str) -> ModelFactory:
    """Raises ModelLoadError, which lists the known families, for an unknown one."""
    if family not in _FACTORIES:
        raise ModelLoadError(f"Model family {family!r} is not supported. Known: {', '.join(sorted(_FACTORIES))}.")
    module, name = _FACTORIES[family].split(":")
    return cast(ModelFactory, getattr(import_module(f"shoal.model_shards.models.{module}"), name))
