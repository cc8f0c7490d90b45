"""What may stand for a model, and what is said when it cannot be found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.configs.errors import ConfigError, ModelLoadError
from shoal.model_shards.weights.sources import KNOWN_MODELS, ModelSource, cache_dir, resolve_model


def test_a_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "tiny.Q4_0.gguf"
    path.touch()
    assert resolve_model(str(path)) == ModelSource("tiny.Q4_0", "gguf", path)
    with pytest.raises(ModelLoadError, match=r"other\.gguf does not exist"):
        resolve_model(str(tmp_path / "other.gguf"))


def test_a_directory_of_safetensors(tiny_checkpoint: Callable[..., Path]) -> None:
    directory = tiny_checkpoint("llama")
    assert resolve_model(f"{directory}/") == ModelSource(directory.name, "safetensors", directory)


def test_a_directory_with_one_gguf_file_or_several(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"neither config\.json nor"):
        resolve_model(str(tmp_path))
    (tmp_path / "a.gguf").touch()
    assert resolve_model(str(tmp_path)).path == tmp_path / "a.gguf"
    (tmp_path / "b.gguf").touch()
    with pytest.raises(ConfigError, match=r"holds 2 GGUF files; name one of them: a\.gguf, b\.gguf"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize("name", ["nonsense", "smollm2", "a/b/c", "../x", ""])
def test_an_unknown_name_lists_what_is_known(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        resolve_model(name)
    assert caught.value.param == "model"
    for known in KNOWN_MODELS:
        assert known in caught.value.message
    assert "Hugging Face id" in caught.value.message


def test_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.pth").touch()
    with pytest.raises(ConfigError, match=r"neither a \.gguf file nor a directory"):
        resolve_model(str(tmp_path / "model.pth"))


def test_a_hub_id_offline_says_what_to_do() -> None:
    with pytest.raises(ModelLoadError, match="HF_HUB_OFFLINE is set") as caught:
        resolve_model("some-organisation/some-model")
    assert "smollm2-135m" in caught.value.message


def test_a_hub_id_from_the_local_cache(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    def snapshot_download(model_id: str, *, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        assert model_id == "org/tiny"
        assert "*.bin" not in allow_patterns
        assert "consolidated*.safetensors" in ignore_patterns
        return str(tiny_checkpoint("llama"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert resolve_model("org/tiny") == ModelSource("tiny", "safetensors", tiny_checkpoint("llama"))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path))
    with pytest.raises(ModelLoadError, match=r"has no config\.json"):
        resolve_model("org/tiny")


def test_the_cache_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "own"))
    assert cache_dir() == tmp_path / "own" / "models"
    monkeypatch.delenv("SHOAL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "shoal" / "models"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "shoal" / "models"


@pytest.mark.real_model
def test_names_are_not_case_sensitive(smollm2: ModelSource) -> None:
    assert resolve_model("SmolLM2-135M") == smollm2
    assert smollm2.name == "smollm2-135m"
