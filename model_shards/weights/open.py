"""Opens the checkpoint of a resolved model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shoal.model_shards.weights.sources import ModelSource

if TYPE_CHECKING:
    from shoal.model_shards.models.config import ModelConfig
    from shoal.model_shards.weights.checkpoint import Checkpoint


def open_checkpoint(source: ModelSource, threads: int = 1) -> Checkpoint:
    """Maps the files and reads headers and config; no weights are read yet. Later, `threads` work on one tensor. Raises
    ModelLoadError."""
    if source.kind == "gguf":
        from shoal.model_shards.weights.gguf import open_gguf
        from shoal.model_shards.weights.gguf_checkpoint import GGUFCheckpoint

        return GGUFCheckpoint(open_gguf(source.path), threads)
    from shoal.model_shards.weights.safetensors_dir import SafetensorsCheckpoint

    return SafetensorsCheckpoint(source.path)


def read_config(source: ModelSource) -> ModelConfig:
    """The config alone, without importing torch. Raises ModelLoadError for files that hold no supported model."""
    if source.kind == "gguf":
        from shoal.model_shards.weights.gguf import open_gguf
        from shoal.model_shards.weights.gguf_config import parse_gguf_config

        return parse_gguf_config(open_gguf(source.path))
    from shoal.model_shards.weights.hf_config import parse_hf_config

    return parse_hf_config(source.path)


def weight_files(source: ModelSource) -> list[Path]:
    """The files that hold the weights."""
    return [source.path] if source.kind == "gguf" else sorted(source.path.glob("*.safetensors"))
