"""What a layer is said to be made of is what its code asks the checkpoint for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.configs.errors import ConfigError
from shoal.kernels.registry import select_ops
from shoal.model_shards.models.config import ModelConfig
from shoal.model_shards.models.decoder import checkpoint_names
from shoal.model_shards.models.registry import model_factory
from shoal.model_shards.models.shapes import MatrixShape, Split, layer_shapes
from shoal.model_shards.models.stage import cut_stages
from shoal.model_shards.parallel.context import ParallelContext
from shoal.model_shards.parallel.loader import WeightLoader
from shoal.model_shards.parallel.mesh import MeshShape
from shoal.model_shards.quantization.schemes import DenseScheme
from shoal.model_shards.weights.checkpoint import CheckpointReader
from shoal.model_shards.weights.open import open_checkpoint
from shoal.model_shards.weights.sources import ModelSource

CPU = torch.device("cpu")
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("gemma3", {}),
    ("mixtral", {}),
    ("qwen3_moe", {"attention_bias": True}),
    ("deepseek_v3", {"attention_bias": True}),
    ("deepseek_v3", {"q_lora_rank": None}),
]


class Noting(CheckpointReader):
    """Notes the part of each tensor that was read."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.parts: dict[str, tuple[int, ...]] = {}

    def read(self, name: str, *args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = super().read(name, *args, **kwargs)
        self.parts[name] = tuple(tensor.shape)
        return tensor


def load(path: Path, mesh: MeshShape, rank: int) -> tuple[ModelConfig, Noting]:
    """One rank's part, without the other ranks: layers send nothing while they are loaded."""
    checkpoint = open_checkpoint(ModelSource(path.name, "safetensors", path))
    reader, groups = Noting(checkpoint), None if mesh.world_size == 1 else object()
    context: Any = ParallelContext(mesh.position(rank), groups)  # type: ignore[arg-type]
    ops = select_ops(CPU, torch.float32, backend="reference")
    loader = WeightLoader(reader, ops, context, DenseScheme(torch.float32), CPU)
    stage = cut_stages(checkpoint.config, mesh.pp_size)[mesh.position(rank).pp_rank]
    model_factory(checkpoint.config.family)(checkpoint.config, stage, loader, 64)
    return checkpoint.config, reader


@pytest.mark.parametrize(("family", "overrides"), CASES, ids=lambda value: value if isinstance(value, str) else "")
def test_a_stage_reads_what_is_said(
    tiny_checkpoint: Callable[..., Path], family: str, overrides: dict[str, Any]
) -> None:
    path, mesh = tiny_checkpoint(family, **overrides), MeshShape(pp_size=2)
    for rank in range(2):
        config, reader = load(path, mesh, rank)
        assert reader.names_read == checkpoint_names(config, cut_stages(config, 2)[rank])


@pytest.mark.parametrize(("family", "overrides"), CASES, ids=lambda value: value if isinstance(value, str) else "")
def test_a_tensor_parallel_rank_reads_the_part_that_is_said(
    tiny_checkpoint: Callable[..., Path], family: str, overrides: dict[str, Any]
) -> None:
    config, reader = load(tiny_checkpoint(family, **overrides), MeshShape(4 if family == "mixtral" else 2), 1)
    tp_size = 4 if family == "mixtral" else 2  # four ranks and two KV heads
    for layer in range(config.num_layers):
        shapes = layer_shapes(config, layer)
        for projections in [shapes.projections, *shapes.experts]:
            for matrix in [matrix for projection in projections for matrix in projection.matrices]:
                assert reader.parts[f"{matrix.name}.weight"] == matrix.rank_shape(config, tp_size), matrix
        if shapes.router is not None:
            router = shapes.router.out_features, shapes.router.in_features
            assert reader.parts[f"{shapes.router.name}.weight"] == router
        assert all(reader.parts[name] == (size,) for name, size in shapes.vectors.items())


def test_what_does_not_divide_is_refused_with_the_name(tiny_checkpoint: Callable[..., Path]) -> None:
    config, _ = load(tiny_checkpoint("llama"), MeshShape(), 0)
    with pytest.raises(ConfigError, match=r"model\.x: output features 10 cannot be split over .* 3"):
        MatrixShape("model.x", 10, 4, Split.ROWS).rank_shape(config, 3)
    with pytest.raises(ConfigError, match=r"model\.x: input features 4 cannot be split"):
        MatrixShape("model.x", 10, 4, Split.COLUMNS).rank_shape(config, 3)
