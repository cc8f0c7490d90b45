"""GGUF blocks kept quantized stand for the numbers that dequantizing gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from shoal.configs.errors import ModelLoadError
from shoal.kernels.quantized import QuantFormat
from shoal.model_shards.weights.gguf_dequant import dequantize
from shoal.model_shards.weights.gguf_packed import pack, packed_format
from shoal.model_shards.weights.open import open_checkpoint
from shoal.model_shards.weights.sources import ModelSource

Quant = gguf.GGMLQuantizationType
EXACT = {"Q4_0": "INT4", "Q4_1": "INT4_MIN", "Q8_0": "INT8", "Q5_0": "INT8"}
ROUNDED = ("Q5_1", "Q5_K", "Q6_K", "Q3_K", "Q2_K", "IQ4_NL", "IQ4_XS", "MXFP4")


def random_blocks(name: str, rows: int, blocks: int) -> np.ndarray:
    """Valid random blocks: whatever the bytes are, but for their fp16 numbers, which are moderate."""
    kind = Quant[name]
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(len(name) + rows)
    if name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4"):
        values = rng.standard_normal((rows, blocks * elements), dtype=np.float32)
        return gguf.quants.quantize(values, kind).reshape(rows, blocks, size)
    raw = rng.integers(0, 256, (rows, blocks, size), dtype=np.uint8)
    offsets = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q3_K": (108,), "Q2_K": (80, 82)}.get(name, (0,))
    for at in offsets:
        raw[..., at : at + 2] = (rng.random((rows, blocks, 1)) * 0.01 + 1e-3).astype(np.float16).view(np.uint8)
    return raw


def both(name: str, rows: int = 5, blocks: int = 3) -> tuple[QuantFormat, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(format, kept quantized, dequantized, the largest magnitude of each element's group of 32)."""
    raw = random_blocks(name, rows, blocks)
    values = torch.empty(rows, blocks * gguf.GGML_QUANT_SIZES[Quant[name]][0])
    dequantize(raw, Quant[name], values)
    matrix = pack(raw, Quant[name], name)
    assert matrix.format is packed_format(name)
    assert matrix.shape == values.shape
    peaks = values.view(rows, -1, 32).abs().amax(2, keepdim=True).expand(-1, -1, 32).reshape(values.shape)
    return matrix.format, matrix.dequantize(), values, peaks


@pytest.mark.parametrize("name", EXACT)
def test_exact_types(name: str) -> None:
    kind, kept, values, _ = both(name)
    assert kind.name == EXACT[name]
    assert torch.equal(kept, values)


def test_many_blocks_are_packed_in_chunks() -> None:
    _, kept, values, _ = both("Q4_1", rows=130, blocks=300)
    assert torch.equal(kept, values)


def test_q4_k_keeps_its_quants_and_rounds_its_scales() -> None:
    kind, kept, values, peaks = both("Q4_K")
    assert kind is QuantFormat.INT4_MIN
    # Scale and minimum each err by 2 ** -11 of themselves; their parts of a value may cancel, not those errors.
    assert (kept - values).abs().max() <= peaks.max() * 3 * 2.0**-11
    assert (kept - values).square().mean().sqrt() < 5e-4 * values.square().mean().sqrt()


@pytest.mark.parametrize("name", ROUNDED)
def test_other_types_are_rounded_to_8_bits(name: str) -> None:
    kind, kept, values, peaks = both(name)
    assert kind is QuantFormat.INT8
    assert ((kept - values).abs() <= peaks / 253 + 1e-7).all()


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_floats_stay_dense(name: str) -> None:
    assert packed_format(name) is None


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("kind", [Quant.Q4_0, Quant.Q4_1, Quant.Q8_0])
def test_slices_of_a_checkpoint_in_canonical_order(
    tiny_gguf: Callable[..., tuple[Path, Path]], family: str, kind: Quant
) -> None:
    """Rows of q and k are put back in order without being dequantized."""
    path, _ = tiny_gguf(family, matrices=kind)
    checkpoint = open_checkpoint(ModelSource("tiny", "gguf", path))
    for name in sorted(checkpoint.names()):
        shape = checkpoint.shape(name)
        if len(shape) != 2:
            assert checkpoint.quant_format(name) is None, name
            continue
        for rows in (slice(None), slice(3, shape[0] // 2)):
            for cols in (slice(None), slice(32, 64), slice(0, 32)):
                kept = checkpoint.read_quantized(name, rows, cols)
                assert torch.equal(kept.dequantize(), checkpoint.read(name, torch.float32, rows, cols)), name


def test_a_scale_that_is_not_finite_is_named(tiny_gguf: Callable[..., tuple[Path, Path]]) -> None:
    path, _ = tiny_gguf("llama", matrices=Quant.Q8_0)
    checkpoint = open_checkpoint(ModelSource("tiny", "gguf", path))
    offset = checkpoint._tensors["model.layers.0.mlp.down_proj.weight"].offset  # type: ignore[attr-defined]
    content = bytearray(path.read_bytes())
    content[offset : offset + 2] = np.float16(np.inf).tobytes()
    path.with_suffix(".broken.gguf").write_bytes(content)
    broken = open_checkpoint(ModelSource("tiny", "gguf", path.with_suffix(".broken.gguf")))
    with pytest.raises(ModelLoadError, match=r"blk\.0\.ffn_down\.weight is corrupt.*not finite"):
        broken.read_quantized("model.layers.0.mlp.down_proj.weight")


def test_what_is_not_quantized_says_so(tiny_gguf: Callable[..., tuple[Path, Path]]) -> None:
    path, directory = tiny_gguf("llama")
    for source in (ModelSource("tiny", "gguf", path), ModelSource("tiny", "safetensors", directory)):
        checkpoint = open_checkpoint(source)
        assert checkpoint.quant_format("model.embed_tokens.weight") is None
        assert checkpoint.quant_format("no.such.tensor") is None
