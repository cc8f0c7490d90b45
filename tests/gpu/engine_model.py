"""Random models for the engine's checks: weights by name and seed, alike in memory, in a file and in transformers."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from shoal.model_shards.models.config import ModelConfig
from shoal.model_shards.models.decoder import checkpoint_names
from shoal.model_shards.models.stage import Stage
from shoal.model_shards.parallel.context import ParallelContext
from shoal.model_shards.runner.model_runner import ModelRunner
from shoal.model_shards.runner.settings import RunnerSettings
from shoal.model_shards.weights.checkpoint import ALL, Checkpoint
from shoal.model_shards.weights.sources import ModelSource

BLOCK_SIZE = 16
_NORM_SPREAD = 0.1


def llama_8b() -> ModelConfig:
    """The shape of Llama 3.1 8B; its rotary scaling costs no time and is left out."""
    return ModelConfig(
        family="llama",
        hidden_size=4096,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=14336,
        vocab_size=128256,
        max_position=8192,
        rms_eps=1e-5,
        rope_theta=10000.0,
    )


def tiny(family: str, *, smallest: bool = False) -> ModelConfig:
    """Deep and wide enough for every operator, and small enough for fp32 references. `smallest`: for Triton's
    interpreter."""
    layers, hidden, heads, inner, vocab = (2, 64, (4, 2), 96, 256) if smallest else (4, 1024, (16, 4), 2816, 8192)
    return ModelConfig(
        family=family,  # type: ignore[arg-type]
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=16 if smallest else 64,
        intermediate_size=inner,
        vocab_size=vocab,
        max_position=64 if smallest else 2048,
        rms_eps=1e-5,
        rope_theta=10000.0,
        qk_norm=family == "qwen3",
    )


class RandomCheckpoint(Checkpoint):
    """Normal numbers of such sizes that hidden states and logits stay near 1. A tensor depends on its name and the
    seed, and is rounded to bfloat16: models of every dtype have the same weights."""

    def __init__(self, config: ModelConfig, seed: int, device: torch.device) -> None:
        self.config, self.path = config, Path(f"random-{config.family}")
        self._seed, self._device = seed, device
        self._shapes = dict(_shapes(config))

    def names(self) -> frozenset[str]:
        return frozenset(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def read(self, name: str, dtype: torch.dtype, rows: slice = ALL, cols: slice = ALL) -> torch.Tensor:
        whole = self.tensor(name).to(dtype)
        return whole[rows].clone() if whole.ndim == 1 else whole[rows, cols].clone()

    def tensor(self, name: str) -> torch.Tensor:
        """bfloat16, on the device."""
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()) ^ self._seed)
        shape = self._shapes[name]
        numbers = torch.randn(shape, generator=generator, device=self._device, dtype=torch.float32)
        if len(shape) == 1:
            numbers = 1 + _NORM_SPREAD * numbers
        elif name != "model.embed_tokens.weight":
            numbers /= shape[1] ** 0.5
        return numbers.bfloat16()

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: self.tensor(name) for name in sorted(self._shapes)}

    def write(self, directory: Path) -> Path:
        """As Hugging Face lays it out."""
        from safetensors.torch import save_file

        tensors = {name: tensor.cpu().contiguous() for name, tensor in self.tensors().items()}
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        (directory / "config.json").write_text(json.dumps(hf_fields(self.config)))
        return directory


def hf_fields(config: ModelConfig) -> dict[str, Any]:
    """The `config.json` of such a model, as every version of transformers since its family came reads it."""
    architectures = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
    return {
        "model_type": config.family,
        "architectures": [architectures[config.family]],
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.rms_eps,
        "rope_theta": config.rope_theta,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def transformers_model(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Any:
    """With weights of its own and torch's attention. Raises ImportError where transformers is missing or too new or old
    for its surroundings, which it says in a RuntimeError."""
    try:
        from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM, Qwen3ForCausalLM  # noqa: F401
    except RuntimeError as error:
        raise ImportError(str(error)) from error

    fields = {name: value for name, value in hf_fields(config).items() if name not in ("architectures", "torch_dtype")}
    hf_config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(hf_config, attn_implementation="sdpa")
    finally:
        torch.set_default_dtype(before)
    return model.to(device=device, dtype=dtype).eval()


def make_runner(
    source: RandomCheckpoint | Path, device: torch.device, dtype: torch.dtype, *, backend: str, **limits: int
) -> ModelRunner:
    """`source`: weights in memory, or a directory that the engine reads by itself. `limits`: num_blocks and the
    engine's `max_...`."""
    path = source if isinstance(source, Path) else source.path
    settings = RunnerSettings(
        model=ModelSource(path.name, "safetensors", path),
        device=str(device),
        dtype=dtype,
        kv_dtype=dtype,
        block_size=BLOCK_SIZE,
        backend=backend,
        **limits,
    )
    if isinstance(source, Path):
        return ModelRunner(settings, ParallelContext.single())
    with mock.patch("shoal.model_shards.runner.loading.open_checkpoint", return_value=source):
        return ModelRunner(settings, ParallelContext.single())


def _shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    matrices = {
        "embed_tokens": (config.vocab_size, hidden),
        "lm_head": (config.vocab_size, hidden),
        "q_proj": (query, hidden),
        "k_proj": (kv, hidden),
        "v_proj": (kv, hidden),
        "o_proj": (hidden, query),
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
        "q_norm": (config.head_dim,),
        "k_norm": (config.head_dim,),
    }
    for name in checkpoint_names(config, Stage(0, config.num_layers, config.num_layers)):
        yield name, matrices.get(name.split(".")[-2], (hidden,))
