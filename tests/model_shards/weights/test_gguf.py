"""The GGUF reader on whole, cut and damaged files."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.configs.errors import ModelLoadError
from shoal.model_shards.tokenizer.from_gguf import parts_from_gguf
from shoal.model_shards.weights.ggml_types import GGML_TYPES
from shoal.model_shards.weights.gguf import GGUFFile
from shoal.model_shards.weights.gguf_checkpoint import GGUFCheckpoint


@pytest.fixture
def small_file(tmp_path: Path) -> Path:
    path = tmp_path / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("a.u32", 7)
    writer.add_int64("a.i64", -(2**40))
    writer.add_float32("a.f32", 0.5)
    writer.add_bool("a.bool", True)
    writer.add_string("a.text", "grüß")
    writer.add_array("a.words", ["x", "", "日本"])
    writer.add_array("a.numbers", [1, -2, 3])
    writer.add_tensor("w", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("q", gguf.quants.quantize(np.ones((3, 64), np.float32), Q8_0), raw_dtype=Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


Q8_0 = gguf.GGMLQuantizationType.Q8_0


def test_reads_every_kind_of_metadata_value(small_file: Path) -> None:
    metadata = GGUFFile(small_file).metadata
    assert metadata["general.architecture"] == "llama"
    assert (metadata["a.u32"], metadata["a.i64"], metadata["a.f32"]) == (7, -(2**40), 0.5)
    assert metadata["a.bool"] is True
    assert metadata["a.text"] == "grüß"
    assert metadata["a.words"] == ["x", "", "日本"]
    assert metadata["a.numbers"] == [1, -2, 3]


def test_tensor_shapes_are_in_torch_order_and_bytes_are_rows_of_blocks(small_file: Path) -> None:
    file = GGUFFile(small_file)
    assert file.tensors["w"].shape == (2, 3)
    assert file.rows(file.tensors["w"]).view(np.float32).reshape(2, 3).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert file.tensors["q"].type_name == "Q8_0"
    assert file.rows(file.tensors["q"]).shape == (3, 2, 34)


def test_a_missing_an_empty_and_a_foreign_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"no\.gguf does not exist"):
        GGUFFile(tmp_path / "no.gguf")
    (tmp_path / "empty.gguf").touch()
    with pytest.raises(ModelLoadError, match="is empty"):
        GGUFFile(tmp_path / "empty.gguf")
    (tmp_path / "zip.gguf").write_bytes(b"PK\x03\x04 and more")
    with pytest.raises(ModelLoadError, match="not a GGUF file"):
        GGUFFile(tmp_path / "zip.gguf")


def test_other_versions_are_refused(tmp_path: Path) -> None:
    for version, words in ((1, r"version 1.*versions \(2, 3\)"), (3 << 24, "big-endian")):
        (tmp_path / "v.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", version, 0, 0))
        with pytest.raises(ModelLoadError, match=words):
            GGUFFile(tmp_path / "v.gguf")


def test_a_claimed_count_is_checked_before_anything_is_allocated(tmp_path: Path) -> None:
    path = tmp_path / "huge.gguf"
    text = struct.pack("<Q", 1) + b"k" + struct.pack("<I", 8) + struct.pack("<Q", 2**60)
    array = struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, 6, 2**61)
    strings = struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, 8, 2**50)
    for counts, body in (((0, 1), text), ((0, 1), array), ((0, 1), strings), ((2**62, 0), b""), ((0, 2**62), b"")):
        path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, *counts) + body)
        tracemalloc.start()
        with pytest.raises(ModelLoadError, match=r"needs .* bytes, but only"):
            GGUFFile(path)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
        tracemalloc.stop()


def test_a_file_cut_short_names_the_tensor_that_is_not_whole(small_file: Path) -> None:
    whole = small_file.read_bytes()
    small_file.write_bytes(whole[:-40])
    with pytest.raises(ModelLoadError, match=r"tensor 'q' lies at bytes .* cut short"):
        GGUFFile(small_file)


def test_a_part_of_a_split_model_is_refused_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "part.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint16("split.count", 3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelLoadError, match=r"one of 3 parts.*gguf-split --merge"):
        GGUFFile(path)


def _open_everything(path: Path) -> None:
    """All that can be done with a GGUF file; a damaged one may only raise ModelLoadError."""
    with suppress(ModelLoadError):
        parts_from_gguf(path)
    try:
        checkpoint = GGUFCheckpoint(GGUFFile(path))
    except ModelLoadError:
        return
    for name in checkpoint.names():
        with suppress(ModelLoadError):
            checkpoint.read(name, torch.float32)


FUZZ = settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("damaged") / "damaged.gguf"


@pytest.fixture
def whole_model(tiny_gguf: Callable[..., tuple[Path, Path]]) -> bytes:
    return tiny_gguf("llama", num_hidden_layers=1)[0].read_bytes()


@FUZZ
@given(data=st.data())
def test_truncation_anywhere_never_crashes(whole_model: bytes, damaged: Path, data: st.DataObject) -> None:
    length = data.draw(st.integers(0, len(whole_model) - 1))
    damaged.write_bytes(whole_model[:length])
    with pytest.raises(ModelLoadError):
        GGUFFile(damaged)


@FUZZ
@given(data=st.data())
def test_flipped_bytes_never_crash(whole_model: bytes, damaged: Path, data: st.DataObject) -> None:
    content = bytearray(whole_model)
    header = 7000  # metadata and tensor table; beyond lie weights, where nothing is parsed
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(4, header))] = data.draw(st.integers(0, 255))
    damaged.write_bytes(content)
    tracemalloc.start()
    _open_everything(damaged)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 << 20


def test_the_table_of_types_is_that_of_the_gguf_package() -> None:
    theirs = {kind.value: (kind.name, *gguf.GGML_QUANT_SIZES[kind]) for kind in gguf.GGMLQuantizationType}
    assert theirs.items() <= {type_id: tuple(kind) for type_id, kind in GGML_TYPES.items()}.items()
