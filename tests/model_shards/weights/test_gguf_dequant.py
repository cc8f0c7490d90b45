"""Every GGUF block type decodes to the same bits as the `gguf` package's own numpy code."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize as reference
from gguf.quants import quantize

from shoal.configs.errors import ModelLoadError
from shoal.model_shards.weights.gguf_dequant import _DECODERS, CHUNK_ELEMENTS, dequantize

Quant = gguf.GGMLQuantizationType
FLOATS = ("F32", "F16", "BF16")
# Every type that the package can decode; it has no decoder for these.
UNDECODABLE = {"Q8_1", "Q8_K", "F64", "I8", "I16", "I32", "I64"}
TYPES = [
    kind.name
    for kind in Quant
    if (kind.name not in UNDECODABLE and kind in gguf.quants._type_traits) or kind.name in FLOATS
]


def _random_blocks(name: str, count: int, seed: int = 0) -> np.ndarray:
    """Valid random blocks: any bytes are, but for scales, which are kept finite so that values can be compared."""
    _, block_bytes = gguf.GGML_QUANT_SIZES[Quant[name]]
    raw = np.random.default_rng(seed).integers(0, 256, (count, block_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        values = reference(raw, Quant[name]).reshape(count, -1)
    bad = ~np.isfinite(values.astype(np.float32)).all(axis=1)
    raw[bad] = 0
    return raw


def _decode(name: str, raw: np.ndarray, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    elements, _ = gguf.GGML_QUANT_SIZES[Quant[name]]
    out = torch.full((len(raw) * elements,), float("nan"), dtype=dtype)
    dequantize(raw, int(Quant[name]), out)
    return out


@pytest.mark.parametrize("name", TYPES)
def test_equals_the_gguf_package(name: str) -> None:
    raw = _random_blocks(name, 300)
    expected = torch.from_numpy(np.array(reference(raw, Quant[name]), dtype=np.float32)).flatten()
    assert torch.equal(_decode(name, raw), expected)


def test_the_common_types_have_a_fast_decoder() -> None:
    assert set(_DECODERS) >= {"Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K", "F32", "F16", "BF16"}


@pytest.mark.parametrize("name", ["Q8_0", "Q6_K", "Q3_K"])
def test_more_than_one_chunk_and_a_ragged_end(name: str) -> None:
    elements, _ = gguf.GGML_QUANT_SIZES[Quant[name]]
    raw = _random_blocks(name, CHUNK_ELEMENTS // elements + 3)
    expected = torch.from_numpy(np.array(reference(raw, Quant[name]), dtype=np.float32)).flatten()
    assert torch.equal(_decode(name, raw), expected)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_K", "BF16", "IQ4_NL"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_dtypes_are_the_rounded_float32(name: str, dtype: torch.dtype) -> None:
    raw = _random_blocks(name, 40)
    assert torch.equal(_decode(name, raw, dtype).nan_to_num(), _decode(name, raw).to(dtype).nan_to_num())


@pytest.mark.parametrize(
    ("name", "error"), [("Q8_0", 0.01), ("Q5_1", 0.06), ("Q5_0", 0.06), ("Q4_1", 0.1), ("Q4_0", 0.11)]
)
def test_gaussian_weights_come_back_within_the_format_s_error(name: str, error: float) -> None:
    weights = np.random.default_rng(1).normal(size=(64, 512)).astype(np.float32)
    decoded = _decode(name, quantize(weights, Quant[name]).reshape(-1, gguf.GGML_QUANT_SIZES[Quant[name]][1]))
    difference = decoded.numpy().reshape(weights.shape) - weights
    assert np.sqrt((difference**2).mean() / (weights**2).mean()) < error


def test_a_type_that_nothing_decodes_is_named() -> None:
    with pytest.raises(ModelLoadError, match="Q8_K"):
        _decode("Q8_K", np.zeros((2, gguf.GGML_QUANT_SIZES[Quant.Q8_K][1]), np.uint8))


@pytest.mark.parametrize("threads", [2, 3, 64])
def test_threads_change_nothing(threads: int) -> None:
    raw = _random_blocks("Q4_1", 5 * CHUNK_ELEMENTS // 32 + 7)
    one, many = (torch.empty(len(raw) * 32, dtype=torch.bfloat16) for _ in range(2))
    dequantize(raw, int(Quant.Q4_1), one)
    dequantize(raw, int(Quant.Q4_1), many, threads)
    assert torch.equal(one, many)


def test_what_goes_wrong_on_a_thread_is_raised() -> None:
    raw = np.zeros((5 * CHUNK_ELEMENTS, 1), dtype=np.uint8)
    with pytest.raises(ModelLoadError, match="I8"):
        dequantize(raw, int(Quant.I8), torch.empty(len(raw)), threads=2)
