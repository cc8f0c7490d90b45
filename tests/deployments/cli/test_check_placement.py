"""`shoal check`: the files in configs/, and clusters that are only described."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from shoal.deployments.cli.main import main

COMMON = {
    "hidden_act": "silu", "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
    "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False, "head_dim": 128,
}  # fmt: skip
LLAMA = {**COMMON, "model_type": "llama", "vocab_size": 128256, "max_position_embeddings": 131072, "rope_theta": 5e5}
QWEN = {**COMMON, "vocab_size": 151936, "max_position_embeddings": 40960, "rope_theta": 1e6}
CONFIGS: dict[str, dict[str, Any]] = {
    "one-gpu": {
        **QWEN, "model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 12288,
    },
    "tp8": {
        **LLAMA, "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
        "intermediate_size": 28672,
    },
    "tp8-pp2": {
        **LLAMA, "hidden_size": 16384, "num_hidden_layers": 126, "num_attention_heads": 128, "num_key_value_heads": 8,
        "intermediate_size": 53248,
    },
    "moe-ep": {
        **QWEN, "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
        "num_key_value_heads": 4, "intermediate_size": 6144, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
}  # fmt: skip
"""What the models of the files say of themselves: their config.json, as far as it matters."""


def deployment_file(repository: Path, name: str, model: Path) -> Path:
    """A copy that names a directory in the place of a hub id."""
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIGS[name]))
    text = (repository / "configs" / f"{name}.yaml").read_text()
    path = model.parent / f"{name}.yaml"
    path.write_text(re.sub(r"(?m)^(\s+model: ).*$", rf"\g<1>{model}", text))
    return path


def checked(path: Path, capsys: pytest.CaptureFixture[str], *options: str) -> Any:
    assert main(["check", str(path), "--json", *options]) == 0
    return json.loads(capsys.readouterr().out)["shoal"]


@pytest.mark.parametrize(
    ("name", "world", "bundles", "weights_gb"),
    [("one-gpu", 1, 1, 16.4), ("tp8", 8, 1, 141 / 8), ("tp8-pp2", 16, 2, 812 / 16), ("moe-ep", 8, 8, 10.35)],
)
def test_the_files_in_the_tree_fit_their_clusters(
    repository: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    world: int,
    bundles: int,
    weights_gb: float,
) -> None:
    finding = checked(deployment_file(repository, name, tmp_path / "model"), capsys)
    placement = finding["placement"]
    assert [rank["rank"] for rank in placement["ranks"]] == list(range(world))
    assert len(placement["bundles"]) == bundles
    assert sum(bundle["GPU"] for bundle in placement["bundles"]) == world
    assert finding["not_checked"], "the weights are not here"
    for rank in placement["ranks"]:
        assert rank["weights_bytes"] / 1e9 == pytest.approx(weights_gb, rel=0.01)
        assert rank["weights_bytes"] + rank["kv_bytes"] < 72e9, "0.9 of 80 GB"


def test_ranks_are_shown_with_their_stage_layers_and_node(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = deployment_file(repository, "tp8-pp2", tmp_path / "model")
    ranks = checked(path, capsys)["placement"]["ranks"]
    assert [(rank["node"], rank["stage"], rank["tensor"]) for rank in ranks] == [
        (f"node {stage}", stage, tensor) for stage in range(2) for tensor in range(8)
    ]
    assert (ranks[0]["layers"], ranks[15]["layers"]) == ([0, 62], [63, 125])
    # K and V, 63 layers, one head of 128, two bytes
    assert ranks[0]["kv_bytes"] // ranks[0]["kv_tokens"] == pytest.approx(2 * 63 * 128 * 2, rel=1e-3)
    assert main(["check", str(path)]) == 0
    text = capsys.readouterr().out
    assert re.search(r"15 +node 1 +1: layers 63-125 +7/8 +47\.\d+ GiB", text)
    assert "2 bundles of 8 GPUs and 16 CPUs, each on a node of its own" in text


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("tp8-pp2", ("--nodes", "1"), "room for 1 of 2 on the nodes found: node 0 (8 GPUs)"),
        ("tp8", ("--gpus-per-node", "4"), "need 1 time 8 GPUs and 16 CPUs whole on one node"),
        ("tp8", ("--gpu-memory", "16GB"), "leave nothing of the memory budget of 13.41 GiB"),
        ("one-gpu", ("--gpu-memory", "many"), "placement.gpu_memory"),
    ],
)
def test_a_cluster_that_is_too_small_is_refused_with_the_numbers(
    repository: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    options: tuple[str, ...],
    says: str,
) -> None:
    path = deployment_file(repository, name, tmp_path / "model")
    assert main(["check", str(path), *options]) == 2
    assert says in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tensor_parallel_size: 8": "tensor_parallel_size: 6"}, "num_heads 64 cannot be split over"),
        (
            {"tensor_parallel_size: 8": "pipeline_parallel_size: 81", "nodes: 1": "nodes: 11"},
            "81 is more than the model's 80 layers",
        ),
    ],
)
def test_a_mesh_that_does_not_divide_the_model_is_refused(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, str], says: str
) -> None:
    path = deployment_file(repository, "tp8", tmp_path / "model")
    text = path.read_text()
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)
    assert main(["check", str(path)]) == 2
    assert says in " ".join(capsys.readouterr().err.split())


def test_without_gpus_here_or_said_a_model_for_cuda_cannot_be_planned(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    deployment_file(repository, "tp8", tmp_path / "model")
    engine = json.dumps({"device": "cuda", "tensor_parallel_size": 8})
    assert main(["check", str(tmp_path / "model"), "--engine", engine]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "8 ranks need a GPU each, but this machine has 0" in error
    assert "--gpus-per-node 8 --gpu-memory 80GB" in error
    told = ["--gpus-per-node", "4", "--gpu-memory", "80GB"]
    assert main(["check", str(tmp_path / "model"), "--engine", engine, *told, "--nodes", "2"]) == 2
    assert "whole on one node" in capsys.readouterr().err
    told[1] = "8"
    assert main(["check", str(tmp_path / "model"), "--engine", engine, *told]) == 0


def test_what_cannot_be_had_is_said_to_be_unchecked(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The tests look at no network: HF_HUB_OFFLINE is set."""
    assert main(["check", str(repository / "configs" / "tp8.yaml")]) == 0
    text = capsys.readouterr().out
    assert "Not checked: meta-llama/Llama-3.1-70B-Instruct itself: its config.json is not on this machine" in text
    assert "It will start" not in text
