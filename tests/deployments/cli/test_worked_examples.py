"""The worked examples of docs/parallelism.md are what `shoal check` says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shoal.deployments.cli.main import main

DOCUMENT = Path(__file__).resolve().parents[3] / "docs/parallelism.md"

LLAMA_2_70B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}
DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
    "num_nextn_predict_layers": 1,
}

Capture = pytest.CaptureFixture[str]


def check(directory: Path, config: dict[str, Any], engine: dict[str, Any], cluster: str, capsys: Capture) -> Any:
    """What `shoal check --json` finds, or the text of its refusal."""
    (directory / "config.json").write_text(json.dumps(config))
    settings = json.dumps({"device": "cuda", **engine})
    code = main(["check", str(directory), "--engine", settings, "--json", *cluster.split()])
    captured = capsys.readouterr()
    return " ".join(captured.err.split()) if code else next(iter(json.loads(captured.out).values()))


def row(finding: Any) -> tuple[list[str], int, int]:
    """(ledger lines, bytes a token, tokens) of the heaviest rank."""
    memory = finding["memory_of_a_rank"]
    return memory["text"].splitlines(), memory["bytes_per_token"], memory["tokens"]


@pytest.mark.parametrize("tp", [4, 8])
def test_llama_2_70b(tmp_path: Path, capsys: Capture, tp: int) -> None:
    found = check(
        tmp_path,
        LLAMA_2_70B,
        {"tensor_parallel_size": tp},
        "--nodes 1 --gpus-per-node 8 --gpu-memory 80GB",
        capsys,
    )
    ledger, bytes_per_token, tokens = row(found)
    assert bytes_per_token * tp == 327_680 == 320 << 10
    weights = " ".join(ledger[0].split()[1:3])
    line = next(line for line in DOCUMENT.read_text().splitlines() if line.startswith(f"| {tp} |"))
    assert f"| {tp} | {weights} | {bytes_per_token >> 10} KiB | {tokens:,}" in line


def test_llama_2_70b_on_two_gpus_is_refused_with_the_arithmetic(tmp_path: Path, capsys: Capture) -> None:
    cluster = "--nodes 1 --gpus-per-node 8 --gpu-memory 80GB"
    refusal = check(tmp_path, LLAMA_2_70B, {"tensor_parallel_size": 2}, cluster, capsys)
    assert "Weights 64.24 GiB + activations 3.426 GiB" in refusal
    assert "628.7 MiB too much" in refusal
    assert "628.7 MiB too much" in DOCUMENT.read_text()


@pytest.mark.parametrize(("tp", "dp", "budget"), [(1, 16, 512), (8, 2, 1024)])
def test_deepseek_v3(tmp_path: Path, capsys: Capture, tp: int, dp: int, budget: int) -> None:
    engine = {
        "tensor_parallel_size": tp,
        "data_parallel_size": dp,
        "expert_parallel": True,
        "max_model_len": 16384,
        "max_num_seqs": 128,
        "max_num_batched_tokens": budget,
    }
    found = check(tmp_path, DEEPSEEK_V3, engine, "--nodes 2 --gpus-per-node 8 --gpu-memory 141GB", capsys)
    ledger, bytes_per_token, tokens = row(found)
    assert bytes_per_token == 61 * (512 + 64) * 2 == 70_272, "the latent is whole on each rank"
    weights, activations = (" ".join(line.split()[1:3]) for line in ledger[:2])
    mesh = f"| t {tp}, D {dp}, EP 16 |" if tp > 1 else f"| D {dp}, EP 16 |"
    line = next(line for line in DOCUMENT.read_text().splitlines() if line.startswith(mesh))
    assert line.startswith(f"{mesh} {weights}")
    assert f"| {activations} | {tokens:,} |" in line
