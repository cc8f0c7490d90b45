"""GGUF blocks as quantized matrices, without widening them first.

| ggml type | becomes | what changes |
|---|---|---|
| Q4_0, Q4_1, Q8_0 | INT4, INT4_MIN, INT8 | nothing |
| Q5_0 | INT8 | nothing: q - 16 and the scale are kept |
| Q4_K | INT4_MIN | products of a block's scale with its 6-bit scales and minima are rounded to fp16 (2 ** -11) |
| other quantized types | INT8 | each element, by at most 1/253 of the largest magnitude of its group of 32 |
| F32, F16, BF16 | stays dense | |
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from shoal.kernels.quantized import GROUP, QuantFormat, QuantizedMatrix, quantize_int8
from shoal.model_shards.weights.ggml_types import GGML_TYPES
from shoal.model_shards.weights.gguf_dequant import dequantize, fifth_bits, q4_k_scales

Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""(quants uint8 [n, 16 or 32], scales float16 [n], minima float16 [n] or None) of n groups."""

_CHUNK_BLOCKS = 1 << 14
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})


def packed_format(type_name: str) -> QuantFormat | None:
    """What a tensor of this ggml type becomes; None: it stays dense."""
    if type_name in _FLOATS or (type_name.startswith("I") and type_name[1:].isdigit()):
        return None
    return _DIRECT[type_name][0] if type_name in _DIRECT else QuantFormat.INT8


def pack(blocks: npt.NDArray[np.uint8], type_id: int, type_name: str) -> QuantizedMatrix:
    """Blocks uint8 [rows, blocks, block_bytes] of a quantized type. Raises ModelLoadError for a type that cannot be
    decoded here, ValueError for scales that are not finite."""
    rows = len(blocks)
    if type_name not in _DIRECT:
        values = torch.empty((rows, blocks.shape[1] * GGML_TYPES[type_id].block_elements))
        dequantize(blocks, type_id, values)
        return quantize_int8(values)
    kind, split = _DIRECT[type_name]
    raw = blocks.reshape(-1, blocks.shape[2])
    # The copy is what reads the file; torch refuses to share read-only memory without a warning.
    chunks = [
        split(torch.from_numpy(np.array(raw[start : start + _CHUNK_BLOCKS])))
        for start in range(0, len(raw), _CHUNK_BLOCKS)
    ]
    quants, scales, minima = (
        None if parts[0] is None else torch.cat([part for part in parts if part is not None])
        for parts in zip(*chunks, strict=True)
    )
    assert quants is not None
    assert scales is not None
    quants = quants.view(rows, -1, kind.quant_bytes)
    return QuantizedMatrix(
        kind, quants.shape[1] * GROUP, quants, scales.view(rows, -1), None if minima is None else minima.view(rows, -1)
    )


def _half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    return blocks[:, start : start + 2].contiguous().view(torch.float16).squeeze(1)


def _q4_0(blocks: torch.Tensor) -> Parts:
    return blocks[:, 2:].contiguous(), _half(blocks, 0), None


def _q4_1(blocks: torch.Tensor) -> Parts:
    return blocks[:, 4:].contiguous(), _half(blocks, 0), _half(blocks, 2)


def _q8_0(blocks: torch.Tensor) -> Parts:
    return blocks[:, 2:].contiguous(), _half(blocks, 0), None


def _q5_0(blocks: torch.Tensor) -> Parts:
    nibbles = blocks[:, 6:]
    quants = torch.cat([nibbles & 15, nibbles >> 4], dim=1) | fifth_bits(blocks[:, 2:6])
    return quants - 16, _half(blocks, 0), None  # wraps: the byte of the signed number


def _q4_k(blocks: torch.Tensor) -> Parts:
    """Each 32 bytes hold the elements of two sub-blocks, one in the low and one in the high nibbles; a group of ours
    holds its own first and second half."""
    scales, minima = q4_k_scales(blocks)
    nibbles = blocks[:, 16:].view(-1, 4, 1, 2, 16)
    low, high = nibbles & 15, nibbles >> 4
    halves = torch.cat([low, high], dim=2)  # [n, 4, sub-block, half, 16]
    quants = halves[:, :, :, 0] | halves[:, :, :, 1] << 4
    return quants.reshape(-1, 16), scales.flatten().half(), (-minima).flatten().half()


_DIRECT: dict[str, tuple[QuantFormat, Callable[[torch.Tensor], Parts]]] = {
    "Q4_0": (QuantFormat.INT4, _q4_0),
    "Q4_1": (QuantFormat.INT4_MIN, _q4_1),
    "Q8_0": (QuantFormat.INT8, _q8_0),
    "Q5_0": (QuantFormat.INT8, _q5_0),
    "Q4_K": (QuantFormat.INT4_MIN, _q4_k),
}
