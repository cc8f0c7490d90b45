"""`shoal check` and `shoal models`: what is said of a model before anything is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from shoal.deployments.cli.main import main

if TYPE_CHECKING:
    from shoal.model_shards.weights.sources import ModelSource


@pytest.mark.real_model
def test_a_model_is_explained_with_its_ledger(smollm2: ModelSource, capsys: pytest.CaptureFixture[str]) -> None:
    engine = {"kv_cache_memory": "400MiB", "max_model_len": 4096, "kv_dtype": "float32"}
    assert main(["check", "smollm2-135m", "--engine", json.dumps(engine), "--json"]) == 0
    finding = json.loads(capsys.readouterr().out)["smollm2-135m"]
    assert finding["served_as"] == "smollm2-135m"
    assert (finding["model"]["layers"], finding["model"]["kv_heads"], finding["model"]["context"]) == (30, 3, 8192)
    assert finding["engine"]["max_model_len"] == 4096
    memory = finding["memory_of_a_rank"]
    # K and V, 30 layers, 3 heads of 64 floats of 4 bytes
    assert memory["bytes_per_token"] == 2 * 30 * 3 * 64 * 4
    assert memory["num_blocks"] == (400 << 20) // (memory["bytes_per_token"] * memory["block_size"])
    assert {row["what"] for row in memory["ledger"]} >= {"weights", "activations", "KV cache", "sum"}


@pytest.mark.real_model
def test_what_cannot_fit_is_refused_with_the_arithmetic(
    smollm2: ModelSource, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = {"kv_cache_memory": "50MiB", "max_model_len": 8192}
    assert main(["check", "smollm2-135m", "--engine", json.dumps(engine)]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "max_model_len=8192" in error
    assert "512 blocks of 16 tokens x 23040 bytes" in error
    assert "Set max_model_len to 2256 or less" in error


def test_experts_are_told_from_the_configuration_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2, "vocab_size": 320, "max_position_embeddings": 512, "num_local_experts": 4}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mixtral", **shape}))
    engine = {"kv_cache_memory": "16MiB", "dtype": "bfloat16"}
    assert main(["check", str(tmp_path), "--engine", json.dumps(engine), "--json"]) == 0
    finding = json.loads(capsys.readouterr().out)[str(tmp_path)]
    facts, expert = finding["model"], 3 * 64 * 96
    assert (facts["experts"], facts["experts_per_token"]) == (4, 2)
    assert facts["parameters"] == 2 * 320 * 64 + 3 * ((2 * 4 + 2 * 2) * 16 * 64 + 4 * 64 + 4 * expert)
    assert facts["active_parameters"] == facts["parameters"] - 3 * 2 * expert
    weights = {row["what"]: row["bytes"] for row in finding["memory_of_a_rank"]["ledger"]}["weights"]
    assert weights == 2 * (facts["parameters"] - 3 * 4 * 64) + 4 * (3 * 4 * 64 + 7 * 64)  # routers and norms in fp32


def test_an_unknown_setting_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "smollm2-135m", "--engine", '{"max_model_lne": 1}']) == 2
    assert "'max_model_lne'" in capsys.readouterr().err


def test_an_unknown_model_lists_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "no-such-model"]) == 2
    error = capsys.readouterr().err
    assert "'no-such-model'" in error
    assert "smollm2-135m" in error


def test_a_corrupt_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF" + b"\x00" * 8)
    assert main(["check", str(path)]) == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.real_model
def test_the_deployment_file_in_the_tree_is_right(
    smollm2: ModelSource, repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(repository / "configs" / "smollm2-local.yaml")]) == 0
    assert "shoal: served as 'smollm2-135m'" in capsys.readouterr().out


def test_an_option_at_the_wrong_level_is_refused_with_its_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Serve would ignore it and run with the default."""
    path = tmp_path / "app.yaml"
    path.write_text(
        """
applications:
  - name: shoal
    route_prefix: /
    import_path: shoal.deployments.app:build
    args: {engine: {model: smollm2-135m}}
    deployments:
      - name: Gateway
        autoscaling_config:
          {max_ongoing_requests: 10, target_ongoing_requests: 5, min_replicas: 1, max_replicas: 2}
"""
    )
    assert main(["check", str(path)]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "applications[0].deployments[0].autoscaling_config.max_ongoing_requests" in error


def test_a_bad_rule_in_the_deny_list_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rules = tmp_path / "deny.txt"
    rules.write_text("fine\n(broken\n")
    path = tmp_path / "app.yaml"
    path.write_text(
        f"""
applications:
  - name: shoal
    import_path: shoal.deployments.app:build
    args: {{engine: {{model: smollm2-135m}}, guard: {{deny_list: {rules}}}}}
"""
    )
    assert main(["check", str(path)]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "deny.txt" in error
    assert "2" in error


@pytest.mark.parametrize("text", ["[1, 2]", "{unclosed: ", "applications: []"])
def test_a_file_that_deploys_nothing_is_refused(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "app.yaml"
    path.write_text(text)
    assert main(["check", str(path)]) == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.real_model
def test_a_script_is_read_and_encoded(smollm2: ModelSource, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "client-tests.json"
    path.write_text(json.dumps({"tokenizer": "smollm2-135m", "default": {"pieces": ["ok"]}}))
    assert main(["check", f"scripted:{path}"]) == 0
    assert "served as 'client-tests'" in capsys.readouterr().out
    path.write_text(json.dumps({"default": {"pieces": [7]}}))
    assert main(["check", f"scripted:{path}"]) == 2
    assert "$.default.pieces[0]" in capsys.readouterr().err


def test_models_are_listed_with_size_licence_and_whether_they_are_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path))
    assert main(["models", "--json"]) == 0
    models = {model["name"]: model for model in json.loads(capsys.readouterr().out)}
    assert models["smollm2-135m"]["license"] == "Apache-2.0"
    assert models["smollm2-135m"]["cached"] is None
    assert models["smollm2-135m"]["context"] is None
    assert main(["models"]) == 0
    table = capsys.readouterr().out
    assert "smollm2-135m" in table
    assert "gemma3-270m" in table


@pytest.mark.real_model
def test_a_model_in_the_cache_shows_its_context(smollm2: ModelSource, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--json"]) == 0
    models = {model["name"]: model for model in json.loads(capsys.readouterr().out)}
    assert models["smollm2-135m"]["context"] == 8192
    assert models["smollm2-135m"]["cached"] == str(smollm2.path)
