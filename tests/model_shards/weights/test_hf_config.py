"""config.json of every family, in the spelling of transformers 4 and 5, against transformers' own reading of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from shoal.configs.errors import ModelLoadError
from shoal.model_shards.models.config import ModelConfig, MoEConfig, RopeScaling
from shoal.model_shards.weights.hf_config import parse_hf_config

BASE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 512,
}


def _parse(directory: Path, model_type: str, generation: dict[str, Any] | None = None, **keys: Any) -> ModelConfig:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**BASE, "model_type": model_type, **keys}))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return parse_hf_config(directory)


def _sliding_layers(directory: Path) -> frozenset[int]:
    kinds = transformers.AutoConfig.from_pretrained(directory).layer_types
    return frozenset(layer for layer, kind in enumerate(kinds) if kind == "sliding_attention")


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3", "gemma3_text", "mixtral", "qwen3_moe"])
def test_absent_keys_take_transformers_defaults(tmp_path: Path, model_type: str) -> None:
    ours = _parse(tmp_path, model_type)
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    rope = theirs.rope_parameters
    assert ours.rms_eps == theirs.rms_norm_eps
    assert ours.tie_embeddings == theirs.tie_word_embeddings
    assert ours.rope_theta == rope.get("full_attention", rope)["rope_theta"]
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
    assert ours.sliding_window == (theirs.sliding_window if model_type in ("mistral", "gemma3_text") else None)
    assert ours.activation == ("gelu_tanh" if model_type == "gemma3_text" else "silu")


def test_gemma_defaults_of_a_nearly_empty_text_config(tmp_path: Path) -> None:
    """The 4B vision-language checkpoint names six keys; the others are the class's."""
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    text |= {"sliding_window": 1024, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "gemma3", "text_config": text, "eos_token_id": [1, 106]})
    )
    ours = parse_hf_config(tmp_path)
    theirs = transformers.Gemma3TextConfig(**text)
    for name in ("vocab_size", "head_dim", "hidden_size", "intermediate_size", "sliding_window"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert (ours.num_heads, ours.num_kv_heads) == (theirs.num_attention_heads, theirs.num_key_value_heads)
    assert ours.max_position == theirs.max_position_embeddings
    assert ours.query_scale == theirs.query_pre_attn_scalar**-0.5
    assert ours.rope_scaling == RopeScaling("linear", factor=8.0)
    assert ours.rope_local_theta == theirs.rope_parameters["sliding_attention"]["rope_theta"]
    assert ours.sliding_layers == {i for i, kind in enumerate(theirs.layer_types) if kind == "sliding_attention"}
    assert ours.eos_token_ids == (1, 106)


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_theta": 5e5, "rope_scaling": LLAMA3},
        {"rope_parameters": {"rope_theta": 5e5, **LLAMA3}},
    ],
    ids=["transformers-4", "transformers-5"],
)
def test_llama3_rope_in_both_spellings(tmp_path: Path, keys: dict[str, Any]) -> None:
    config = _parse(tmp_path, "llama", **keys)
    assert config.rope_theta == 5e5
    assert config.rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)


def test_linear_rope_in_the_oldest_spelling(tmp_path: Path) -> None:
    config = _parse(tmp_path, "llama", rope_scaling={"type": "linear", "factor": 2.0})
    assert config.rope_scaling == RopeScaling("linear", factor=2.0)


def test_gemma_rope_in_both_spellings(tmp_path: Path) -> None:
    linear = {"rope_type": "linear", "factor": 8.0}
    old = _parse(tmp_path, "gemma3_text", rope_theta=2e6, rope_local_base_freq=2e4, rope_scaling=linear)
    by_layer = {
        "full_attention": {"rope_theta": 2e6, **linear},
        "sliding_attention": {"rope_theta": 2e4, "rope_type": "default"},
    }
    new = _parse(tmp_path, "gemma3_text", rope_parameters=by_layer)
    assert old == new
    assert (new.rope_theta, new.rope_local_theta) == (2e6, 2e4)
    assert new.rope_scaling == RopeScaling("linear", factor=8.0)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type 'yarn' is not supported"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "mscale": 3}}, "mscale"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'"),
        ({"rope_parameters": {"rope_theta": 1.0, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"hidden_act": "relu"}, "hidden_act 'relu'"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "only LlamaForCausalLM"),
        ({"model_type": "mamba"}, "model_type 'mamba'.*Supported: .*gemma3_text, llama"),
        ({"num_hidden_layers": "8"}, "num_hidden_layers is '8'"),
        ({"num_hidden_layers": 10**9}, "layers cannot be right"),
        ({"num_attention_heads": None}, "num_attention_heads is missing"),
        ({"num_key_value_heads": 3}, "4 query heads cannot be shared among 3"),
        ({"head_dim": 15}, "head_dim is 15"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
        ({"eos_token_id": [2, "x"]}, "eos_token_id"),
        ({"eos_token_id": 320}, "special token id 320 lies outside"),
    ],
)
def test_what_changes_results_and_is_not_supported_is_refused_by_name(
    tmp_path: Path, keys: dict[str, Any], words: str
) -> None:
    with pytest.raises(ModelLoadError, match=words):
        _parse(tmp_path, **{"model_type": "llama", **keys})


def test_keys_that_the_family_does_not_read_are_ignored(tmp_path: Path) -> None:
    config = _parse(tmp_path, "llama", unsloth_fixed=True, logits_scaling=4.0, sliding_window=12, pretraining_tp=2)
    assert config.sliding_window is None


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
@pytest.mark.parametrize(
    "keys",
    [
        {"use_sliding_window": False, "sliding_window": 100, "max_window_layers": 2},
        {"use_sliding_window": True, "sliding_window": 100, "max_window_layers": 5},
        {"use_sliding_window": True, "sliding_window": 100, "max_window_layers": 0},
        {"use_sliding_window": True, "sliding_window": None},
        {"use_sliding_window": True, "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"] * 4},
    ],
)
def test_qwen_windows_as_transformers_reads_them(tmp_path: Path, model_type: str, keys: dict[str, Any]) -> None:
    config = _parse(tmp_path, model_type, **keys)
    assert config.sliding_layers == _sliding_layers(tmp_path)
    if config.sliding_layers:
        assert config.sliding_window == keys["sliding_window"]


@pytest.mark.parametrize("keys", [{}, {"sliding_window_pattern": 3}, {"sliding_window": 7}])
def test_gemma_windows_as_transformers_reads_them(tmp_path: Path, keys: dict[str, Any]) -> None:
    config = _parse(tmp_path, "gemma3_text", **keys)
    assert config.sliding_layers == _sliding_layers(tmp_path)


def test_mistral_window_is_in_every_layer_unless_null(tmp_path: Path) -> None:
    assert _parse(tmp_path, "mistral", sliding_window=64).sliding_layers == frozenset(range(8))
    assert _parse(tmp_path, "mistral", sliding_window=None).window(0) is None
    assert _parse(tmp_path, "mixtral", sliding_window=64).sliding_layers == frozenset(range(8))
    assert _parse(tmp_path, "mixtral").window(0) is None


def test_windows_of_qwen3_moe_are_in_every_layer_or_none(tmp_path: Path) -> None:
    """Unlike Qwen3, it reads neither max_window_layers nor layer_types."""
    window = {"sliding_window": 64, "max_window_layers": 4}
    assert _parse(tmp_path, "qwen3_moe", use_sliding_window=True, **window).sliding_layers == frozenset(range(8))
    assert _parse(tmp_path, "qwen3_moe", **window).sliding_layers == frozenset()
    with pytest.raises(ModelLoadError, match="layer_types is not supported for qwen3_moe"):
        _parse(tmp_path, "qwen3_moe", use_sliding_window=True, layer_types=["full_attention"] * 8)


def test_experts_of_mixtral(tmp_path: Path) -> None:
    assert _parse(tmp_path, "mixtral").moe == MoEConfig(8, 2, 128)
    assert _parse(tmp_path, "mixtral", num_local_experts=4, num_experts_per_tok=1).moe == MoEConfig(4, 1, 128)


def test_experts_of_qwen3_moe(tmp_path: Path) -> None:
    """The file of transformers 4 says num_experts; 5 writes num_local_experts."""
    assert _parse(tmp_path, "qwen3_moe").moe == MoEConfig(128, 8, 768, normalize=False)
    sizes = {"num_experts_per_tok": 2, "moe_intermediate_size": 96, "norm_topk_prob": True}
    expected = MoEConfig(16, 2, 96, normalize=True)
    assert _parse(tmp_path, "qwen3_moe", num_experts=16, **sizes).moe == expected
    assert _parse(tmp_path, "qwen3_moe", num_local_experts=16, **sizes).moe == expected
    assert _parse(tmp_path, "qwen3_moe").qk_norm


@pytest.mark.parametrize(
    ("keys", "dense"),
    [
        ({}, set()),
        ({"mlp_only_layers": [0, 3]}, {0, 3}),
        ({"decoder_sparse_step": 2}, {0, 2, 4, 6}),
        ({"decoder_sparse_step": 3, "mlp_only_layers": [2, 100]}, {0, 1, 2, 3, 4, 6, 7}),
    ],
)
def test_layers_without_experts_as_transformers_builds_them(
    tmp_path: Path, keys: dict[str, Any], dense: set[int]
) -> None:
    config = _parse(tmp_path, "qwen3_moe", num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16, **keys)
    assert config.moe is not None
    assert config.moe.dense_layers == dense
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(tmp_path))
    built = {index for index, layer in enumerate(model.model.layers) if not hasattr(layer.mlp, "experts")}
    assert built == dense


@pytest.mark.parametrize(
    ("model_type", "keys", "words"),
    [
        ("mixtral", {"num_experts_per_tok": 9}, "cannot choose 9 of 8 experts"),
        ("mixtral", {"num_local_experts": 0}, "num_local_experts is 0"),
        ("mixtral", {"num_local_experts": 10**6}, "1000000 experts cannot be right"),
        ("mixtral", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ("mixtral", {"architectures": ["MixtralForTokenClassification"]}, "only MixtralForCausalLM"),
        ("qwen3_moe", {"num_experts": 8, "num_local_experts": 4}, "num_experts and num_local_experts contradict"),
        ("qwen3_moe", {"mlp_only_layers": "all"}, "mlp_only_layers is 'all'"),
        ("qwen3_moe", {"mlp_only_layers": list(range(8))}, "no layer with experts"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ("qwen3_moe", {"moe_intermediate_size": -1}, "moe_intermediate_size is -1"),
        ("qwen3_moe", {"norm_topk_prob": 1}, "norm_topk_prob is 1"),
        ("qwen2_moe", {}, "model_type 'qwen2_moe' is not supported"),
        ("gpt_oss", {}, "model_type 'gpt_oss' is not supported"),
    ],
)
def test_experts_that_cannot_be_are_refused_by_name(
    tmp_path: Path, model_type: str, keys: dict[str, Any], words: str
) -> None:
    with pytest.raises(ModelLoadError, match=words):
        _parse(tmp_path, model_type, **keys)


@pytest.mark.parametrize(
    "kinds", [["sliding_attention"] * 3, ["full_attention"] * 7 + ["linear_attention"], "sliding_attention"]
)
def test_layer_types_must_fit(tmp_path: Path, kinds: Any) -> None:
    with pytest.raises(ModelLoadError, match="layer_types"):
        _parse(tmp_path, "gemma3_text", layer_types=kinds)


def test_end_of_sequence_comes_from_the_generation_config_first(tmp_path: Path) -> None:
    assert _parse(tmp_path / "a", "llama", eos_token_id=5).eos_token_ids == (5,)
    assert _parse(tmp_path / "b", "llama", {"eos_token_id": [7, 5]}, eos_token_id=5).eos_token_ids == (7, 5)
    assert _parse(tmp_path / "c", "llama", {"temperature": 0.6}, eos_token_id=[5, 6]).eos_token_ids == (5, 6)


def test_biases_by_family(tmp_path: Path) -> None:
    llama = _parse(tmp_path, "llama", attention_bias=True, mlp_bias=True)
    assert (llama.qkv_bias, llama.output_bias, llama.mlp_bias) == (True, True, True)
    qwen2 = _parse(tmp_path, "qwen2")
    assert (qwen2.qkv_bias, qwen2.output_bias, qwen2.mlp_bias) == (True, False, False)
    mistral = _parse(tmp_path, "mistral", attention_bias=True)
    assert (mistral.qkv_bias, mistral.output_bias) == (False, False)


@pytest.mark.parametrize("content", ["", "{", "[1]", "null", '{"a": NaN', "[" * 100_000])
def test_a_damaged_config_file_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        parse_hf_config(tmp_path)
