"""GGUF metadata -> ModelConfig. Keys of the model that are not understood are refused by name."""

from __future__ import annotations

import math
from typing import Any

from shoal.configs.errors import ModelLoadError
from shoal.model_shards.models.config import Family, ModelConfig, RopeScaling
from shoal.model_shards.weights.config_check import check_config, check_num_layers
from shoal.model_shards.weights.gguf import GGUFFile
from shoal.model_shards.weights.gguf_vocab import bos_token_id, end_token_ids
from shoal.model_shards.weights.names import GGUF_ROPE_FACTORS, LAYER_NAMES

# Mistral files say "llama"; the families compute the same.
_FAMILIES: dict[str, Family] = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3"}

# Keys below "<architecture>." that say nothing about the decoder's results.
_HARMLESS = frozenset({"vocab_size", "tensor_data_layout", "rope.scaling.finetuned", "use_parallel_residual"})

_GEMMA_PATTERN = 6
"""Every sixth layer of Gemma 3 attends to everything; files written before 2026 do not say so."""
_GEMMA_LOCAL_THETA = 10_000.0
_GEMMA_27B_LAYERS = 62
"""Gemma 3 27B alone scales queries by sqrt(hidden / heads) instead of sqrt(head_dim); no key says so."""


def parse_gguf_config(file: GGUFFile) -> ModelConfig:
    """Raises ModelLoadError naming the key that is missing, malformed or not supported."""
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in _FAMILIES:
        raise ModelLoadError(
            f"{file.path} holds a model of architecture {architecture!r}, which is not supported. "
            f"Supported: {', '.join(sorted(_FAMILIES))} (Mistral files say llama)."
        )
    if not file.tensors:
        raise ModelLoadError(f"{file.path} holds a vocabulary only, no weights. Use the complete model file.")
    return _Parser(file, architecture).parse()


class _Parser:
    """Takes values out of the metadata and remembers which, so that what is left can be refused."""

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self.file = file
        self.architecture = architecture
        self.used: set[str] = set(_HARMLESS)

    def parse(self) -> ModelConfig:
        hidden = self.integer("embedding_length")
        heads = self.integer("attention.head_count")
        head_dim = self.integer("attention.key_length", hidden // max(heads, 1))
        layers = self.integer("block_count")
        self.must_equal("attention.value_length", head_dim)
        self.must_equal("rope.dimension_count", head_dim)
        for key in ("expert_count", "expert_used_count", "leading_dense_block_count"):
            self.must_equal(key, 0)
        self.must_equal("attention.causal", True)
        config = ModelConfig(
            family=_FAMILIES[self.architecture],
            hidden_size=hidden,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=self.integer("attention.head_count_kv", heads),
            head_dim=head_dim,
            intermediate_size=self.integer("feed_forward_length"),
            vocab_size=self.embedding_rows(hidden),
            max_position=self.integer("context_length"),
            rms_eps=self.number("attention.layer_norm_rms_epsilon"),
            rope_theta=self.number("rope.freq_base", 1e6 if self.architecture == "gemma3" else 1e4),
            rope_scaling=self.rope_scaling(head_dim),
            tie_embeddings="output.weight" not in self.file.tensors,
            qkv_bias=self.has_bias("attn_q"),
            output_bias=self.has_bias("attn_output"),
            mlp_bias=self.has_bias("ffn_up"),
            qk_norm="attn_q_norm" in LAYER_NAMES[self.architecture],
            bos_token_id=bos_token_id(self.file.metadata),
            eos_token_ids=end_token_ids(self.file.metadata, str(self.file.path)),
            **(self.gemma(hidden, heads, layers) if self.architecture == "gemma3" else {}),
        )
        self.refuse_unknown()
        check_config(config, str(self.file.path))
        return config

    def gemma(self, hidden: int, heads: int, layers: int) -> dict[str, Any]:
        check_num_layers(layers, str(self.file.path))
        self.must_equal("attention.sliding_window_pattern", _GEMMA_PATTERN)
        for key in ("attn_logit_softcapping", "final_logit_softcapping"):
            self.must_equal(key, 0.0)
        sliding = frozenset(layer for layer in range(layers) if (layer + 1) % _GEMMA_PATTERN)
        return {
            "activation": "gelu_tanh",
            "rope_local_theta": self.number("rope.freq_base_swa", _GEMMA_LOCAL_THETA),
            "query_scale": (hidden / heads) ** -0.5 if layers == _GEMMA_27B_LAYERS else None,
            "sliding_window": self.integer("attention.sliding_window"),
            "sliding_layers": sliding,
            "embedding_scale": math.sqrt(hidden),
            "norm_offset": 1.0,
            "sandwich_norms": True,
        }

    def rope_scaling(self, head_dim: int) -> RopeScaling | None:
        kind = self.take("rope.scaling.type", "none")
        factor = self.number("rope.scaling.factor", self.number("rope.scale_linear", 1.0))
        self.take("rope.scaling.original_context_length", 0)
        self.must_equal("rope.scaling.attn_factor", 1.0)
        if kind not in ("none", "linear"):
            raise ModelLoadError(
                f"{self.file.path}: {self.key('rope.scaling.type')} {kind!r} is not supported (none and linear are)."
            )
        if GGUF_ROPE_FACTORS in self.file.tensors:
            if factor != 1.0:
                raise ModelLoadError(f"{self.file.path}: {GGUF_ROPE_FACTORS} and a linear factor exclude each other.")
            return RopeScaling("factors", factors=self.rope_factors(head_dim))
        return RopeScaling("linear", factor=factor) if factor not in (0.0, 1.0) else None

    def rope_factors(self, head_dim: int) -> tuple[float, ...]:
        tensor = self.file.tensors[GGUF_ROPE_FACTORS]
        if tensor.shape != (head_dim // 2,):
            raise ModelLoadError(
                f"{self.file.path}: {GGUF_ROPE_FACTORS} has shape {list(tensor.shape)}, expected [{head_dim // 2}]."
            )
        import torch  # seconds, which only files with such a tensor take

        from shoal.model_shards.weights.gguf_dequant import dequantize

        factors = torch.empty(head_dim // 2)
        dequantize(self.file.rows(tensor), tensor.type_id, factors)
        return tuple(factors.tolist())

    def embedding_rows(self, hidden: int) -> int:
        tensor = self.file.tensors.get("token_embd.weight")
        if tensor is None or len(tensor.shape) != 2 or tensor.shape[1] != hidden:
            found = "missing" if tensor is None else f"of shape {list(tensor.shape)}"
            raise ModelLoadError(
                f"{self.file.path}: token_embd.weight is {found}; [vocabulary, {hidden}] was expected."
            )
        return tensor.shape[0]

    def has_bias(self, part: str) -> bool:
        return f"blk.0.{part}.bias" in self.file.tensors

    def key(self, name: str) -> str:
        return f"{self.architecture}.{name}"

    def take(self, name: str, default: Any = None) -> Any:
        self.used.add(name)
        return self.file.metadata.get(self.key(name), default)

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.take(name, default)
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]  # one entry a layer, all the same
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.bad(name, value, "a positive integer (the same for all layers)")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.take(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.bad(name, value, "a finite number")
        return float(value)

    def must_equal(self, name: str, wanted: Any) -> None:
        value = self.take(name, wanted)
        if value != wanted:
            raise ModelLoadError(f"{self.file.path}: {self.key(name)} is {value!r}; only {wanted!r} is supported.")

    def bad(self, name: str, value: Any, expected: str) -> ModelLoadError:
        found = "missing" if value is None else f"{value!r:.80}"
        return ModelLoadError(f"{self.file.path}: metadata key {self.key(name)} is {found}; expected {expected}.")

    def refuse_unknown(self) -> None:
        prefix = f"{self.architecture}."
        known = {self.key(name) for name in self.used}
        unknown = sorted(key for key in self.file.metadata if key.startswith(prefix) and key not in known)
        if unknown:
            raise ModelLoadError(
                f"{self.file.path}: metadata {', '.join(unknown[:10])} may change the model's results and is not "
                "understood by this version of Shoal."
            )
