"""DeepSeek-V3: rotary scaling, logits in every variant, text under every schedule, bytes of the cache, refusals."""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from shoal.configs.errors import ConfigError, ModelLoadError
from shoal.kernels.quantized import quantize_int8
from shoal.kvcache.spec import bytes_per_token
from shoal.model_shards.models.config import ModelConfig
from shoal.model_shards.models.rotary import rotary_table
from shoal.model_shards.models.shapes import layer_shapes
from shoal.model_shards.parallel.mesh import MeshShape
from shoal.model_shards.quantization.schemes import DenseScheme
from shoal.model_shards.runner.footprint import kv_bytes_per_block, kv_specs, weights_bytes
from shoal.model_shards.runner.loading import check_mesh
from shoal.model_shards.sampling.params import SamplingParams
from shoal.model_shards.weights.hf_config import parse_hf_config

TOLERANCE = 1e-4
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.7,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "q in one": {"q_lora_rank": None},
    "yarn": {"rope_parameters": YARN},
    "yarn without magnitudes": {"rope_parameters": {**YARN, "mscale": None, "mscale_all_dim": None}},
    "halves": {"rope_interleave": False},
    "dense only": {"first_k_dense_replace": 3},
    "biases": {"attention_bias": True},
    "one group": {"n_group": 1, "topk_group": 1, "n_shared_experts": 2, "norm_topk_prob": False},
}

# What `config.json` of deepseek-ai/DeepSeek-V3 says, but for its fp8.
V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 129280,
}

TinyCheckpoint = Callable[..., Path]


def parse(tmp_path: Path, **changes: Any) -> ModelConfig:
    content = {key: value for key, value in {**V3, **changes}.items() if value is not ...}
    (tmp_path / "config.json").write_text(json.dumps(content))
    return parse_hf_config(tmp_path)


def prompt(length: int = 90, seed: int = 0) -> list[int]:
    return torch.randint(0, 300, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def oracle_logits(path: Path, token_ids: list[int]) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([token_ids])).logits[0]
    return logits


def our_logits(driver: ModuleType, path: Path, token_ids: list[int], chunk: int | None = None, **changes: Any) -> Any:
    runner = driver.make_runner(path, **changes)
    hidden = driver.watch_hidden(runner)
    for plan in driver.Driver(runner.settings).prefill_plans({1: token_ids}, chunk):
        assert runner.execute(plan).errors == {}
    return driver.all_logits(runner, hidden)


# --- rotary ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 1.0},
        {"beta_fast": 4, "beta_slow": 2},
        {"factor": 1.0},
        {"mscale": None},
        {"mscale_all_dim": None},
        {"beta_fast": 1, "beta_slow": 1},
    ],
)
@pytest.mark.parametrize("dim", [8, 64])
def test_yarn_is_transformers(tmp_path: Path, dim: int, changes: dict[str, Any]) -> None:
    from transformers import DeepseekV3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import yarn_apply_mscale

    rope = {key: value for key, value in {**YARN, **changes}.items() if value is not None}
    frequencies, amplitude = ROPE_INIT_FUNCTIONS["yarn"](DeepseekV3Config(qk_rope_head_dim=dim, rope_parameters=rope))
    angles = torch.outer(torch.arange(200.0), frequencies)
    expected = torch.cat((angles.cos(), angles.sin()), dim=1) * amplitude
    config = parse(tmp_path, qk_rope_head_dim=dim, rope_scaling=..., rope_parameters=rope)
    torch.testing.assert_close(rotary_table(config, 200), expected, atol=2e-5, rtol=0)
    assert config.softmax_scale == pytest.approx(yarn_apply_mscale(rope, (128 + dim) ** -0.5))


def test_yarn_in_both_spellings(tmp_path: Path) -> None:
    rope = {"rope_theta": 10000, **V3["rope_scaling"], "rope_type": "yarn"}
    del rope["type"]
    assert parse(tmp_path) == parse(tmp_path, rope_scaling=..., rope_theta=..., rope_parameters=rope)


# --- logits and text --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_of_every_variant_equal_transformers(
    tiny_checkpoint: TinyCheckpoint, driver: ModuleType, variant: str
) -> None:
    path = tiny_checkpoint("deepseek_v3", **VARIANTS[variant])
    expected = oracle_logits(path, prompt())
    torch.testing.assert_close(our_logits(driver, path, prompt()), expected, atol=TOLERANCE, rtol=0)


def test_a_latent_of_bfloat16_is_near(tiny_checkpoint: TinyCheckpoint, driver: ModuleType) -> None:
    """The pages alone are rounded; dense layers only, so that no choice of experts flips."""
    path = tiny_checkpoint("deepseek_v3", first_k_dense_replace=3)
    expected = oracle_logits(path, prompt())
    ours = our_logits(driver, path, prompt(), kv_dtype=torch.bfloat16)
    assert (ours - expected).abs().max() < 0.01 * expected.abs().max()


@pytest.mark.parametrize("chunk", [1, 7, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_give_the_same_bits(
    tiny_checkpoint: TinyCheckpoint, driver: ModuleType, chunk: int, dtype: torch.dtype
) -> None:
    path = tiny_checkpoint("deepseek_v3", rope_parameters=YARN)
    invariant = driver.make_runner(path).model.ops.batch_invariant
    whole = our_logits(driver, path, prompt(), dtype=dtype, kv_dtype=dtype)
    chunked = our_logits(driver, path, prompt(), chunk, dtype=dtype, kv_dtype=dtype)
    torch.testing.assert_close(chunked, whole, atol=0 if invariant else TOLERANCE, rtol=0)


def test_text_is_the_same_however_it_is_scheduled(tiny_checkpoint: TinyCheckpoint) -> None:
    """Alone, in a batch, in chunks, from cached prefixes, and in so few blocks that sequences are preempted."""
    from shoal.model_shards.llm import LLM

    path = str(tiny_checkpoint("deepseek_v3", rope_parameters=YARN))
    shared = prompt(48)
    prompts = [shared + prompt(n, n) for n in (1, 9, 20)] + [prompt(30, 7), shared[:40]]
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    block_bytes = 16 * 3 * 32 * 4

    def texts(*, batched: bool = True, **options: Any) -> tuple[list[list[int]], Any]:
        settings = {"dtype": "float32", "max_model_len": 128, "num_threads": 1, "kv_cache_memory": 100 * block_bytes}
        with LLM(path, **{**settings, **options}) as llm:
            answers = llm.generate(prompts, params) if batched else [llm.generate([p], params)[0] for p in prompts]
            stats = llm._engine.stats()
        return [answer.outputs[0].token_ids for answer in answers], (answers, stats)

    alone, _ = texts(batched=False, enable_prefix_caching=False)
    assert texts(enable_prefix_caching=False)[0] == alone
    assert texts(prefill_chunk_size=5)[0] == alone
    again, (answers, _) = texts(batched=False)
    assert again == alone
    assert answers[1].num_cached_tokens == 48
    preempted, (_, stats) = texts(kv_cache_memory=16 * block_bytes, prefill_chunk_size=16)
    assert preempted == alone
    assert stats.preemptions_total > 0


@pytest.mark.parametrize("dense", [1, 3])
def test_steps_run_as_programs(tiny_checkpoint: TinyCheckpoint, driver: ModuleType, dense: int) -> None:
    prompts = [[65, 66, 67], list(range(10, 60)), [200] * 17]
    path = tiny_checkpoint("deepseek_v3", first_k_dense_replace=dense)
    runner = driver.make_runner(path)
    if runner.model.ops.name != "cpu":
        pytest.skip("nothing captures steps here (no native unit)")
    mine = driver.generate(runner.execute, runner.settings, prompts, 12, chunk_size=7)
    assert runner.captured.replays > 0
    eager = driver.make_runner(path)
    eager.captured.run = lambda *_: None
    assert driver.generate(eager.execute, eager.settings, prompts, 12, chunk_size=7) == mine


def test_quantized_weights_keep_the_order_of_the_rows(tiny_checkpoint: TinyCheckpoint, driver: ModuleType) -> None:
    """Rows are reordered as they are quantized: a wrong one would change more than rounding does."""
    weight = torch.randn(6, 40)
    order = torch.tensor([3, 0, 5, 1])
    assert torch.equal(quantize_int8(weight).reordered(order).dequantize(), quantize_int8(weight).dequantize()[order])
    path = tiny_checkpoint("deepseek_v3", first_k_dense_replace=3)
    expected = oracle_logits(path, prompt())
    assert (our_logits(driver, path, prompt(), weights="int8") - expected).abs().max() < 0.1 * expected.abs().max()


# --- bytes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tp_size", [1, 2, 8, 16])
def test_a_token_of_v3_takes_70272_bytes_on_every_rank(tmp_path: Path, tp_size: int) -> None:
    config = parse(tmp_path)
    assert bytes_per_token(kv_specs(config, range(61), torch.bfloat16, tp_size)) == 70_272
    assert kv_bytes_per_block(config, 64, torch.bfloat16, tp_size) == 64 * 70_272


def test_v3_has_671_billion_parameters(tmp_path: Path) -> None:
    config = parse(tmp_path)
    assert config.num_nextn_layers == 1
    assert config.moe is not None
    assert sorted(config.moe.dense_layers) == [0, 1, 2]
    total = weights_bytes(config, DenseScheme(torch.bfloat16)) / 2
    assert total == pytest.approx(671.0e9, rel=1e-3)
    # Heads are split, the down projections are on every rank: a layer's attention on 8 ranks.
    shapes = layer_shapes(config, 0)
    elements = [
        math.prod(matrix.rank_shape(config, 8))
        for matrix in [*shapes.unpacked, *(m for p in shapes.projections[:3] for m in p.matrices)]
    ]
    assert sum(elements) == 128 // 8 * (256 * 512 + 192 * 1536 + 128 * 7168) + (1536 + 576) * 7168


def test_scores_of_v3_are_scaled_by_its_magnitude(tmp_path: Path) -> None:
    config = parse(tmp_path)
    assert config.softmax_scale == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2)
    assert config.rope_scaling is not None
    assert config.rope_scaling.amplitude == 1.0


# --- what is refused or ignored ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, "fp8 in blocks.*bfloat16"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"num_key_value_heads": 64}, "num_key_value_heads"),
        ({"topk_method": "greedy"}, "topk_method 'greedy'"),
        ({"scoring_func": "softmax"}, "scoring_func 'softmax'"),
        ({"moe_layer_freq": 2}, "moe_layer_freq 2"),
        ({"sliding_window": 4096}, "sliding_window 4096"),
        ({"n_group": 0}, "n_group is 0"),
        ({"n_group": 7}, "256 experts do not make 7 equal groups"),
        ({"kv_lora_rank": 0}, "kv_lora_rank is 0"),
        ({"q_lora_rank": None, "attention_bias": True}, "attention_bias"),
        ({"rope_scaling": {**V3["rope_scaling"], "truncate": False}}, "truncate"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "original_max_position_embeddings is missing"),
        ({"architectures": ["DeepseekV3ForSequenceClassification"]}, "only DeepseekV3ForCausalLM"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelLoadError, match=words):
        parse(tmp_path, **changes)


def test_meshes_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    config = parse(tmp_path)
    check_mesh(config, MeshShape(tp_size=8))
    with pytest.raises(ConfigError, match="num_heads 128 cannot be split over tensor_parallel_size 3"):
        check_mesh(config, MeshShape(tp_size=3))
    with pytest.raises(ConfigError, match="multi-head latent attention"):
        check_mesh(replace(config, moe=None), MeshShape(cp_size=2))


def test_layers_for_further_tokens_are_ignored_with_one_line(
    tiny_checkpoint: TinyCheckpoint, driver: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from safetensors.torch import load_file, save_file

    source, path = tiny_checkpoint("deepseek_v3"), tmp_path / "with_nextn"
    shutil.copytree(source, path)
    tensors = load_file(path / "model.safetensors")
    tensors |= {f"model.layers.3.{name}.weight": torch.zeros(4) for name in ("eh_proj", "enorm", "shared_head.norm")}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config.pop("num_mtp_layers", None)
    (path / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    with caplog.at_level(logging.INFO):
        ours = our_logits(driver, path, prompt(20))
    assert torch.equal(ours, our_logits(driver, source, prompt(20)))
    assert sum("ignoring 3 tensors of 1 layers" in record.getMessage() for record in caplog.records) == 1
    (path / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 0}))
    with pytest.raises(ModelLoadError, match=r"unexpected \(model\.layers\.3\.eh_proj\.weight"):
        driver.make_runner(path)
