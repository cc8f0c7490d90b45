"""Hugging Face `config.json` (as written by transformers 4 and 5) -> ModelConfig.

For each family the set of keys that transformers' modelling code reads is known; each is a field here, or must have its
neutral value, else it is refused by name. Other keys cannot change the results of these families and are ignored.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.configs.errors import ModelLoadError
from shoal.model_shards.models.config import Activation, Family, ModelConfig
from shoal.model_shards.weights.config_check import check_config, check_num_layers
from shoal.model_shards.weights.hf_deepseek import DEEPSEEK_DEFAULTS, refuse_fp8, with_latents
from shoal.model_shards.weights.hf_fields import Fields
from shoal.model_shards.weights.hf_moe import parse_moe
from shoal.model_shards.weights.hf_rope import parse_rope

logger = logging.getLogger(__name__)

MAX_JSON_BYTES = 64 << 20

_ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}

# Keys that some modelling code reads and the values at which they change nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "quantization_config": (None,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "use_bidirectional_attention": (None, False),
    "partial_rotary_factor": (None, 1, 1.0),
    "is_decoder": (None, False, True),
    "is_encoder_decoder": (None, False),
    "add_cross_attention": (None, False),
    "tie_encoder_decoder": (None, False),
}


@dataclass(frozen=True, slots=True)
class _FamilyRules:
    """What transformers assumes when a key is absent, and which keys the family reads."""

    family: Family
    architecture: str
    defaults: Mapping[str, Any]
    has_attention_bias: bool = False
    has_mlp_bias: bool = False
    always_qkv_bias: bool = False


_COMMON = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "hidden_act": "silu", "attention_bias": False}
_QWEN = {**_COMMON, "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
_GEMMA = {
    **_COMMON,
    "tie_word_embeddings": True,
    "hidden_act": "gelu_pytorch_tanh",
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "bos_token_id": 2,
    "eos_token_id": 1,
}

_RULES: dict[str, _FamilyRules] = {
    "llama": _FamilyRules(
        "llama",
        "LlamaForCausalLM",
        {**_COMMON, "mlp_bias": False, "bos_token_id": 1, "eos_token_id": 2},
        has_attention_bias=True,
        has_mlp_bias=True,
    ),
    "mistral": _FamilyRules(
        "mistral",
        "MistralForCausalLM",
        {**_COMMON, "num_key_value_heads": 8, "sliding_window": 4096, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "qwen2": _FamilyRules("qwen2", "Qwen2ForCausalLM", {**_QWEN, "num_key_value_heads": 32}, always_qkv_bias=True),
    "qwen3": _FamilyRules(
        "qwen3",
        "Qwen3ForCausalLM",
        {**_QWEN, "num_key_value_heads": 32, "head_dim": 128},
        has_attention_bias=True,
    ),
    "mixtral": _FamilyRules(
        "mixtral",
        "MixtralForCausalLM",
        {
            **_COMMON,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "num_key_value_heads": 8,
            "num_experts_per_tok": 2,
            "num_local_experts": 8,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "qwen3_moe": _FamilyRules(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        {
            **_COMMON,
            "num_key_value_heads": 4,
            "use_sliding_window": False,
            "sliding_window": 4096,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "decoder_sparse_step": 1,
        },
        has_attention_bias=True,
    ),
    "gemma3_text": _FamilyRules("gemma3", "Gemma3ForCausalLM", _GEMMA, has_attention_bias=True),
    "deepseek_v3": _FamilyRules(
        "deepseek_v3", "DeepseekV3ForCausalLM", {**_COMMON, **DEEPSEEK_DEFAULTS}, has_attention_bias=True
    ),
}


def parse_hf_config(directory: Path) -> ModelConfig:
    """Reads `config.json` and, for the end-of-sequence ids, `generation_config.json`. Raises ModelLoadError naming the
    key that is missing, malformed or not supported."""
    path = directory / "config.json"
    raw = read_json(path)
    where = str(path)
    architectures = raw.get("architectures")
    if raw.get("model_type") == "gemma3" and isinstance(raw.get("text_config"), dict):
        # The text half of a vision-language checkpoint; ids and tying may stand outside of it.
        outer: dict[str, Any] = {
            key: raw[key] for key in ("bos_token_id", "eos_token_id", "tie_word_embeddings") if key in raw
        }
        raw = {**outer, **raw["text_config"], "model_type": "gemma3_text"}
        architectures = None
    rules = _RULES.get(str(raw.get("model_type")))
    if rules is None:
        raise ModelLoadError(
            f"{where}: model_type {raw.get('model_type')!r} is not supported. Supported: {', '.join(sorted(_RULES))} "
            "and gemma3 (text only)."
        )
    if architectures and rules.architecture not in architectures:
        raise ModelLoadError(
            f"{where}: architectures is {architectures}; only {rules.architecture} can be served for this model_type."
        )
    refuse_fp8(raw, where)
    for key, allowed in _NEUTRAL.items():
        if key in raw and raw[key] not in allowed:
            raise ModelLoadError(f"{where}: {key} is {_short(raw[key])}, which is not supported.")
    fields = Fields(raw, rules.defaults, where)
    config = _build(fields, rules, end_token_ids(directory, fields.token_ids("eos_token_id")))
    check_config(config, where)
    return config


def _build(fields: Fields, rules: _FamilyRules, eos: tuple[int, ...]) -> ModelConfig:
    layers = fields.integer("num_hidden_layers")
    check_num_layers(layers, fields.where)
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    attention_bias = rules.has_attention_bias and fields.flag("attention_bias")
    window, sliding_layers = _sliding(fields, rules, layers)
    rope = parse_rope(fields, rules.family)
    bos = fields.token_ids("bos_token_id")
    gemma: dict[str, Any] = {}
    if rules.family == "gemma3":
        gemma = {
            "query_scale": fields.number("query_pre_attn_scalar") ** -0.5,
            "embedding_scale": math.sqrt(hidden),
            "norm_offset": 1.0,
            "sandwich_norms": True,
        }
    config = ModelConfig(
        family=rules.family,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=fields.integer("num_key_value_heads", heads),
        head_dim=fields.integer("head_dim", hidden // heads),
        intermediate_size=fields.integer("intermediate_size"),
        vocab_size=fields.integer("vocab_size"),
        max_position=fields.integer("max_position_embeddings"),
        rms_eps=fields.number("rms_norm_eps"),
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        rope_local_theta=rope.local_theta,
        activation=_activation(fields, rules),
        tie_embeddings=fields.flag("tie_word_embeddings"),
        qkv_bias=rules.always_qkv_bias or attention_bias,
        output_bias=attention_bias,
        mlp_bias=rules.has_mlp_bias and fields.flag("mlp_bias"),
        qk_norm=rules.family in ("qwen3", "qwen3_moe", "gemma3"),
        sliding_window=window,
        sliding_layers=sliding_layers,
        moe=parse_moe(fields, rules.family, layers),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=eos,
        **gemma,
    )
    return with_latents(fields, config, rope.softmax_factor) if rules.family == "deepseek_v3" else config


def _activation(fields: Fields, rules: _FamilyRules) -> Activation:
    key = "hidden_activation" if rules.family == "gemma3" and fields.has("hidden_activation") else "hidden_act"
    name = fields.text(key)
    if name not in _ACTIVATIONS:
        raise ModelLoadError(
            f"{fields.where}: {key} {name!r} is not supported. Supported: {', '.join(sorted(_ACTIVATIONS))}."
        )
    return _ACTIVATIONS[name]


def _sliding(fields: Fields, rules: _FamilyRules, layers: int) -> tuple[int | None, frozenset[int]]:
    """The window and the layers that have it."""
    family = rules.family
    if family in ("llama", "deepseek_v3") or not (fields.present("sliding_window")):
        if family != "llama" and "sliding_attention" in (fields.raw.get("layer_types") or []):
            raise ModelLoadError(f"{fields.where}: layer_types names sliding_attention, but sliding_window is null.")
        return None, frozenset()
    if family in ("qwen2", "qwen3", "qwen3_moe") and not fields.flag("use_sliding_window"):
        return None, frozenset()
    window = fields.integer("sliding_window")
    if family in ("mistral", "mixtral", "qwen3_moe"):
        if fields.has("layer_types"):
            raise ModelLoadError(f"{fields.where}: layer_types is not supported for {family}, whose layers are alike.")
        return window, frozenset(range(layers))
    if fields.has("layer_types"):
        return window, _listed_layers(fields, layers)
    if family == "gemma3":
        key = "sliding_window_pattern" if fields.has("sliding_window_pattern") else "_sliding_window_pattern"
        pattern = fields.integer(key, 6)
        return window, frozenset(layer for layer in range(layers) if (layer + 1) % pattern)
    first = fields.integer("max_window_layers", minimum=0)
    return window, frozenset(range(first, layers))


def _listed_layers(fields: Fields, layers: int) -> frozenset[int]:
    kinds = fields.raw["layer_types"]
    known = ("sliding_attention", "full_attention")
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in known for kind in kinds):
        raise ModelLoadError(
            f"{fields.where}: layer_types must list {' or '.join(known)} for each of the {layers} layers."
        )
    return frozenset(layer for layer, kind in enumerate(kinds) if kind == "sliding_attention")


def end_token_ids(directory: Path, config_ids: tuple[int, ...]) -> tuple[int, ...]:
    """End-of-sequence ids: those of `generation_config.json` when it names any (transformers' generate stops at these),
    else the config's."""
    path = directory / "generation_config.json"
    if not path.is_file():
        return config_ids
    return Fields(read_json(path), {}, str(path)).token_ids("eos_token_id") or config_ids


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises ModelLoadError when it is missing, too large, or not a JSON object."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ModelLoadError(f"{path} is larger than {MAX_JSON_BYTES >> 20} MiB, which no such file is.")
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelLoadError(f"{path} does not exist; a model directory must have it.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} cannot be read as JSON: {error}.") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path} holds a JSON {type(content).__name__}, not an object.")
    return content


def _short(value: Any) -> str:
    return f"{value!r:.100}"
