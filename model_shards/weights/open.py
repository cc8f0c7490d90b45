"""Opens the checkpoint of a resolved model."""

from __future__ import annotations

from shoal.model_shards.weights.checkpoint import Checkpoint
from shoal.model_shards.weights.sources import ModelSource


def open_checkpoint(source: ModelSource) -> Checkpoint:
    """Maps the files and reads headers and config; no weights are read yet. Raises ModelLoadError."""
    if source.kind == "gguf":
        from shoal.model_shards.weights.gguf import GGUFFile
        from shoal.model_shards.weights.gguf_checkpoint import GGUFCheckpoint

        return GGUFCheckpoint(GGUFFile(source.path))
    from shoal.model_shards.weights.safetensors_dir import SafetensorsCheckpoint

    return SafetensorsCheckpoint(source.path)
