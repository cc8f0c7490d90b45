"""Both kinds of checkpoint give the same tensors, by slices too, and every tensor is accounted for."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file, save_file

from shoal.configs.errors import ModelLoadError
from shoal.model_shards.weights.checkpoint import Checkpoint, CheckpointReader
from shoal.model_shards.weights.open import open_checkpoint
from shoal.model_shards.weights.sources import resolve_model

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3")
TinyCheckpoint = Callable[..., Path]
TinyGGUF = Callable[..., tuple[Path, Path]]


def _open(path: Path) -> Checkpoint:
    return open_checkpoint(resolve_model(str(path)))


@pytest.mark.parametrize("family", FAMILIES)
def test_gguf_gives_the_tensors_of_the_directory_it_was_made_of(family: str, tiny_gguf: TinyGGUF) -> None:
    path, directory = tiny_gguf(family)
    ours, theirs = _open(path), _open(directory)
    assert ours.names() == theirs.names()
    for name in theirs.names():
        assert ours.shape(name) == theirs.shape(name)
        torch.testing.assert_close(
            ours.read(name, torch.float32), theirs.read(name, torch.float32), rtol=0, atol=1e-6, msg=name
        )


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_gguf_config_equals_the_directory_s(family: str, tiny_gguf: TinyGGUF) -> None:
    overrides: dict[str, object] = {"num_hidden_layers": 7}  # so that Gemma's pattern of six shows
    if family == "gemma3":
        overrides |= {"layer_types": None, "query_pre_attn_scalar": 32}
    path, directory = tiny_gguf(family, **overrides)
    ours, theirs = _open(path).config, _open(directory).config
    for field in theirs.__slots__:
        value, expected = getattr(ours, field), getattr(theirs, field)
        if field == "query_scale":
            continue  # compared as softmax_scale
        if isinstance(expected, float):
            assert value == pytest.approx(expected, rel=1e-6), field  # GGUF keeps 32 bits
        else:
            assert value == expected, field
    assert ours.softmax_scale == pytest.approx(theirs.softmax_scale)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slices_of_a_gguf_are_slices_of_the_whole(
    kind: str, dtype: torch.dtype, tiny_gguf: TinyGGUF, gguf_writing: ModuleType
) -> None:
    checkpoint = _open(tiny_gguf("llama", matrices=gguf_writing.Quant[kind])[0])
    for name in ("model.layers.1.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight", "model.norm.weight"):
        whole = checkpoint.read(name, dtype)
        assert whole.dtype == dtype
        for rows, cols in [(slice(16, 48), slice(None)), (slice(None), slice(32, 64)), (slice(3, 40), slice(5, 37))]:
            part = checkpoint.read(name, dtype, rows, cols)
            assert part.is_contiguous()
            assert torch.equal(part, whole[rows] if whole.ndim == 1 else whole[rows, cols])


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_slices_of_safetensors_are_slices_of_the_whole(family: str, tiny_checkpoint: TinyCheckpoint) -> None:
    checkpoint = _open(tiny_checkpoint(family))
    for name in sorted(checkpoint.names())[:12]:
        whole = checkpoint.read(name, torch.bfloat16)
        part = checkpoint.read(name, torch.bfloat16, slice(8, 24), slice(4, 12))
        assert part.is_contiguous()
        assert torch.equal(part, whole[8:24] if whole.ndim == 1 else whole[8:24, 4:12])


def test_what_is_read_is_the_caller_s_own_memory(tiny_gguf: TinyGGUF) -> None:
    for path in tiny_gguf("llama"):
        checkpoint = _open(path)
        for name in ("model.embed_tokens.weight", "model.norm.weight"):
            checkpoint.read(name, torch.float32).fill_(7)
            assert not (checkpoint.read(name, torch.float32) == 7).all()


def test_shards_with_an_index(tiny_checkpoint: TinyCheckpoint) -> None:
    whole, sharded = _open(tiny_checkpoint("qwen3")), _open(tiny_checkpoint("qwen3", max_shard_size="100KB"))
    assert len(list(sharded.path.glob("*.safetensors"))) > 3
    assert sharded.names() == whole.names()
    for name in whole.names():
        assert torch.equal(sharded.read(name, torch.float32), whole.read(name, torch.float32))


@pytest.fixture
def own_copy(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> Callable[..., Path]:
    """A checkpoint that a test may damage."""
    import shutil

    def make(family: str, **overrides: object) -> Path:
        return Path(shutil.copytree(tiny_checkpoint(family, **overrides), tmp_path / family))

    return make


def test_index_that_names_an_absent_shard_fails_and_names_it(own_copy: Callable[..., Path]) -> None:
    """Case O-22."""
    directory = own_copy("qwen3", max_shard_size="100KB")
    shard = sorted(directory.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelLoadError, match=shard.name):
        _open(directory)


def test_a_shard_without_a_tensor_that_the_index_names(own_copy: Callable[..., Path]) -> None:
    directory = own_copy("qwen3", max_shard_size="100KB")
    shard = sorted(directory.glob("*.safetensors"))[1]
    tensors = load_file(shard)
    lost = sorted(tensors)[0]
    save_file({name: value for name, value in tensors.items() if name != lost} or {"x": torch.zeros(1)}, shard)
    with pytest.raises(ModelLoadError, match=rf"no shard holds: {lost}"):
        _open(directory)


def test_a_cut_safetensors_file_is_named(own_copy: Callable[..., Path]) -> None:
    file = own_copy("llama") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors is not a usable safetensors file"):
        _open(file.parent)


def test_pickled_weights_are_refused_with_what_to_do(own_copy: Callable[..., Path]) -> None:
    directory = own_copy("llama")
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match="convert them to safetensors"):
        _open(directory)


def test_quantized_safetensors_are_refused(own_copy: Callable[..., Path]) -> None:
    file = own_copy("llama") / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(4, 4, dtype=torch.int8)
    save_file(tensors, file)
    with pytest.raises(ModelLoadError, match=r"up_proj.weight is of type I8"):
        _open(file.parent)


def _read_all(checkpoint: Checkpoint, **changed: tuple[int, ...] | None) -> CheckpointReader:
    """Reads everything a llama of the config needs; `changed` asks for other shapes (None: not at all)."""
    reader = CheckpointReader(checkpoint)
    for name in sorted(
        checkpoint.names() - {"lm_head.weight"} if checkpoint.config.tie_embeddings else checkpoint.names()
    ):
        key = name.replace(".", "_")
        shape = changed.get(key, checkpoint.shape(name))
        if shape is not None:
            reader.read(name, shape, torch.float32)
    return reader


def test_accounting_names_missing_unexpected_and_misshapen_tensors_in_one_error(
    tiny_checkpoint: TinyCheckpoint,
) -> None:
    reader = _read_all(_open(tiny_checkpoint("llama")), model_norm_weight=(65,), lm_head_weight=None)
    placeholder = reader.read("model.layers.9.self_attn.q_proj.weight", (64, 64), torch.float32, slice(0, 32))
    assert placeholder.shape == (32, 64)
    assert placeholder.isnan().all()
    with pytest.raises(ModelLoadError) as caught:
        reader.finish()
    assert "1 tensors missing (model.layers.9.self_attn.q_proj.weight)" in caught.value.message
    assert "1 tensors unexpected (lm_head.weight)" in caught.value.message
    assert "model.norm.weight is [64], expected [65]" in caught.value.message


def test_accounting_caps_its_lists(tiny_checkpoint: TinyCheckpoint) -> None:
    reader = _read_all(_open(tiny_checkpoint("llama")))
    for layer in range(10, 40):
        reader.read(f"model.layers.{layer}.mlp.up_proj.weight", (128, 64), torch.float32)
    with pytest.raises(ModelLoadError, match=r"30 tensors missing \(.* and 20 more\)"):
        reader.finish()


def test_accounting_over_ranks(tiny_checkpoint: TinyCheckpoint) -> None:
    checkpoint = _open(tiny_checkpoint("llama"))
    first, second = CheckpointReader(checkpoint), CheckpointReader(checkpoint)
    for index, name in enumerate(sorted(checkpoint.names())):
        (first, second)[index % 2].read(name, checkpoint.shape(name), torch.float32)
    first.finish(second.names_read)
    second.finish(first.names_read)
    with pytest.raises(ModelLoadError, match="unexpected"):
        first.finish()


def test_tied_model_with_an_extra_lm_head_ignores_it_with_one_line(
    own_copy: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    """Case O-21."""
    directory = own_copy("llama", tie_word_embeddings=True)
    tensors = load_file(directory / "model.safetensors")
    tensors["lm_head.weight"] = torch.full((320, 64), 7.0)
    save_file(tensors, directory / "model.safetensors")
    checkpoint = _open(directory)
    assert checkpoint.config.tie_embeddings
    with caplog.at_level(logging.INFO, logger="shoal"):
        _read_all(checkpoint).finish()
    assert sum("lm_head.weight" in record.getMessage() for record in caplog.records) == 1


def test_gguf_with_output_weight_is_untied(tiny_gguf: TinyGGUF) -> None:
    assert not _open(tiny_gguf("qwen2")[0]).config.tie_embeddings
    assert _open(tiny_gguf("qwen2", tie_word_embeddings=True)[0]).config.tie_embeddings


def test_a_missing_tensor_is_named(tiny_gguf: TinyGGUF) -> None:
    for path in tiny_gguf("llama"):
        with pytest.raises(ModelLoadError, match=r"no tensor model\.nothing"):
            _open(path).read("model.nothing", torch.float32)


def test_a_gguf_tensor_the_family_does_not_have_is_unexpected(tiny_gguf: TinyGGUF) -> None:
    """Qwen3's q_norm in a file that says qwen2 keeps the file's name, and the accounting reports it."""
    path, _ = tiny_gguf("qwen3")
    path.write_bytes(path.read_bytes().replace(b"qwen3", b"qwen2"))
    checkpoint = _open(path)
    assert "blk.0.attn_q_norm.weight" in checkpoint.names()
    reader = CheckpointReader(checkpoint)
    with pytest.raises(ModelLoadError, match=r"blk.0.attn_k_norm.weight"):
        reader.finish(name for name in checkpoint.names() if name.startswith("model."))


def test_gemma_with_vision_gives_its_decoder(own_copy: Callable[..., Path]) -> None:
    import json

    directory = own_copy("gemma3")
    plain = _open(directory)
    expected = {name: plain.read(name, torch.float32) for name in plain.names()}
    tensors = load_file(directory / "model.safetensors")
    renamed = {f"language_model.{name}": value for name, value in tensors.items()}
    renamed["vision_tower.vision_model.embeddings.weight"] = torch.zeros(3)
    renamed["multi_modal_projector.mm_input_projection_weight"] = torch.zeros(3)
    save_file(renamed, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    outer = {"model_type": "gemma3", "text_config": config, "architectures": ["Gemma3ForConditionalGeneration"]}
    (directory / "config.json").write_text(json.dumps(outer))
    checkpoint = _open(directory)
    assert checkpoint.config == plain.config
    assert checkpoint.names() == set(expected)
    for name, value in expected.items():
        assert torch.equal(checkpoint.read(name, torch.float32), value)


@pytest.mark.real_model
def test_smollm2_equals_the_gguf_package_and_transformers_row_order(smollm2: object) -> None:
    """One quantized matrix of a real file: our rows of q are the converter's order undone."""
    import gguf
    import numpy as np

    checkpoint = open_checkpoint(smollm2)  # type: ignore[arg-type]
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(checkpoint.path).tensors}
    stored = tensors["blk.4.attn_q.weight"]
    raw = np.array(gguf.quants.dequantize(stored.data, stored.tensor_type)).reshape(576, 576)
    expected = raw.reshape(9, 32, 2, 576).swapaxes(1, 2).reshape(576, 576)
    ours = checkpoint.read("model.layers.4.self_attn.q_proj.weight", torch.float32)
    assert np.array_equal(ours.numpy(), expected)
    assert checkpoint.config.tie_embeddings
    assert checkpoint.shape("model.embed_tokens.weight") == (49_152, 576)
