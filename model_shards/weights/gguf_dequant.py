"""Dequantization of GGUF blocks to float32.

The types that most files use (_DECODERS, at the end) are decoded with torch, several times faster than the numpy code
of the `gguf` package; every other type goes through `gguf.quants.dequantize`. Block layouts:
ggml-org/ggml, ggml-common.h. In each layout a nibble byte holds two elements that lie 16 (Q4_0, Q4_1) or 32 (K-quants)
apart, so that the halves of a byte row are runs of consecutive elements.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from shoal.configs.errors import ModelLoadError
from shoal.model_shards.weights.ggml_types import GGML_TYPES

CHUNK_ELEMENTS = 1 << 15
"""Elements decoded at a time: the temporaries stay in a core's L2 cache, and torch does not split operations of this
size among threads, whose barriers cost more than the work (10 x slower on a busy machine)."""

Decoder = Callable[[torch.Tensor, torch.Tensor], None]
"""(blocks uint8 [n, block_bytes], out float32 [n, block_elements]) -> None; writes every element of `out`."""


def dequantize(blocks: npt.NDArray[np.uint8], type_id: int, out: torch.Tensor, threads: int = 1) -> None:
    """Decodes `blocks` (uint8 [..., block_bytes]) into `out` (any float dtype, contiguous, as many elements as the
    blocks hold). Raises ModelLoadError for a type that nothing here can decode."""
    kind = GGML_TYPES[type_id]
    raw = blocks.reshape(-1, kind.block_bytes)
    target = out.view(-1, kind.block_elements)
    assert len(raw) == len(target)
    blocks_per_chunk = max(1, CHUNK_ELEMENTS // kind.block_elements)
    starts = range(0, len(raw), blocks_per_chunk)

    def decode_chunks(mine: range) -> None:
        for start in mine:
            chunk = slice(start, start + blocks_per_chunk)
            _decode_chunk(raw[chunk], kind.name, type_id, target[chunk])

    threads = min(threads, len(starts))
    if threads < 2:
        decode_chunks(starts)
        return
    with ThreadPoolExecutor(threads, "dequantize") as pool:
        # list() raises what a thread raised.
        list(pool.map(decode_chunks, (starts[first::threads] for first in range(threads))))


def _decode_chunk(blocks: npt.NDArray[np.uint8], name: str, type_id: int, out: torch.Tensor) -> None:
    # The copy is what reads the file; torch refuses to share read-only memory without a warning.
    chunk = np.array(blocks)
    decode = _DECODERS.get(name)
    if decode is None:
        out.copy_(torch.from_numpy(_dequantize_with_gguf(chunk, name, type_id)))
    elif out.dtype == torch.float32:
        decode(torch.from_numpy(chunk), out)
    else:
        values = torch.empty(out.shape, dtype=torch.float32)
        decode(torch.from_numpy(chunk), values)
        out.copy_(values)


def _dequantize_with_gguf(chunk: npt.NDArray[np.uint8], name: str, type_id: int) -> npt.NDArray[np.float32]:
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize as gguf_dequantize

    try:
        values = gguf_dequantize(chunk, GGMLQuantizationType(type_id))
    except NotImplementedError:
        raise ModelLoadError(
            f"Tensors of ggml type {name} cannot be decoded here. Use a file with another quantization "
            "(Q8_0, Q6_K, Q5_K, Q4_K, Q4_0, ...)."
        ) from None
    return np.ascontiguousarray(values, dtype=np.float32)


def _half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """The fp16 number at byte `start` of each block, as float32 [n, 1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _decode_f32(blocks: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(blocks.view(torch.float32))


def _decode_f16(blocks: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(blocks.view(torch.float16))


def _decode_bf16(blocks: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(blocks.view(torch.bfloat16))


def _decode_q4_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """| d fp16 | 16 bytes |: (nibble - 8) * d; low nibbles are elements 0-15, high nibbles 16-31."""
    scale = _half(blocks, 0)
    nibbles = blocks[:, 2:]
    out[:, :16].copy_(nibbles & 15)
    out[:, 16:].copy_(nibbles >> 4)
    out.sub_(8).mul_(scale)


def _decode_q4_1(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """| d fp16 | m fp16 | 16 bytes |: nibble * d + m, ordered as Q4_0."""
    scale, minimum = _half(blocks, 0), _half(blocks, 2)
    nibbles = blocks[:, 4:]
    out[:, :16].copy_(nibbles & 15)
    out[:, 16:].copy_(nibbles >> 4)
    out.mul_(scale).add_(minimum)


def _decode_q8_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """| d fp16 | 32 signed bytes |: byte * d."""
    out.copy_(blocks[:, 2:].view(torch.int8))
    out.mul_(_half(blocks, 0))


@lru_cache(maxsize=1)
def _fifth_bit_table() -> torch.Tensor:
    """int64 [256]: for each byte its 8 bits, lowest first, as 8 bytes of 0 or 16 (the fifth bit of a 5-bit number)."""
    bits = torch.arange(256, dtype=torch.uint8).unsqueeze(1) >> torch.arange(8, dtype=torch.uint8)
    return ((bits & 1) << 4).view(torch.int64).flatten()


def fifth_bits(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [n, m] -> its bits, lowest first, each as 0 or 16: uint8 [n, 8 m]."""
    return _fifth_bit_table()[packed.int()].view(torch.uint8)


def _decode_q5_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """| d fp16 | 4 bytes: fifth bits | 16 bytes |: (5-bit number - 16) * d, ordered as Q4_0."""
    fifth = fifth_bits(blocks[:, 2:6])
    nibbles = blocks[:, 6:]
    out[:, :16].copy_((nibbles & 15) | fifth[:, :16])
    out[:, 16:].copy_((nibbles >> 4) | fifth[:, 16:])
    out.sub_(16).mul_(_half(blocks, 0))


def _decode_q5_1(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """| d fp16 | m fp16 | 4 bytes: fifth bits | 16 bytes |: 5-bit number * d + m, ordered as Q4_0."""
    fifth = fifth_bits(blocks[:, 4:8])
    nibbles = blocks[:, 8:]
    out[:, :16].copy_((nibbles & 15) | fifth[:, :16])
    out[:, 16:].copy_((nibbles >> 4) | fifth[:, 16:])
    out.mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def q4_k_scales(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The head that Q4_K and Q5_K share, | d fp16 | dmin fp16 | 12 bytes: 8 x (6-bit scale, 6-bit min) |, as
    d * scale and dmin * min, each float32 [n, 8, 1]. The first four of each lie in the low 6 bits of bytes 0-3 and 4-7;
    the last four have their low 4 bits in a nibble of bytes 8-11 and their high 2 bits above the first four."""
    packed = blocks[:, 4:16]
    first, second, last = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = torch.cat([first & 63, (last & 15) | ((first >> 2) & 48)], dim=1).float()
    minima = torch.cat([second & 63, (last >> 4) | ((second >> 2) & 48)], dim=1).float()
    return scales.mul_(_half(blocks, 0)).unsqueeze(-1), minima.mul_(_half(blocks, 2)).unsqueeze(-1)


def _decode_q5_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """| head | 32 bytes qh | 128 bytes |: as Q4_K, with the fifth bit of element i of sub-block s in bit s of qh[i]."""
    scales, minima = q4_k_scales(blocks)
    high = blocks[:, 16:48].unsqueeze(1)
    nibbles = blocks[:, 48:].view(-1, 4, 32)
    even = torch.arange(0, 8, 2, dtype=torch.uint8).view(1, 4, 1)
    pairs = out.view(-1, 4, 2, 32)
    pairs[:, :, 0].copy_((nibbles & 15) | (((high >> even) & 1) << 4))
    pairs[:, :, 1].copy_((nibbles >> 4) | (((high >> (even + 1)) & 1) << 4))
    out.view(-1, 8, 32).mul_(scales).sub_(minima)


def _decode_q4_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """| head | 128 bytes |: nibble * d * scale - dmin * min, for each of 8 sub-blocks of 32; each run of 32 bytes holds
    sub-block 2j in its low and 2j + 1 in its high nibbles."""
    scales, minima = q4_k_scales(blocks)
    nibbles = blocks[:, 16:].view(-1, 4, 32)
    pairs = out.view(-1, 4, 2, 32)
    pairs[:, :, 0].copy_(nibbles & 15)
    pairs[:, :, 1].copy_(nibbles >> 4)
    out.view(-1, 8, 32).mul_(scales).sub_(minima)


def _decode_q6_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """| 128 bytes ql | 64 bytes qh | 16 int8 scales | d fp16 |: (low 4 bits + 16 * high 2 bits - 32) * d * scale of its
    16 elements. Each half block (128 elements) has 64 bytes of ql and 32 of qh: its element 32 r + i takes ql byte
    32 (r mod 2) + i (low nibble for r < 2) and bits 2r, 2r + 1 of qh byte i."""
    low = blocks[:, :128].view(-1, 2, 2, 32)
    high = blocks[:, 128:192].view(-1, 2, 1, 32)
    scales = blocks[:, 192:208].view(torch.int8).float().mul_(_half(blocks, 208))
    halves = out.view(-1, 2, 2, 2, 32)
    shifted = torch.cat([high << 4, high << 2], dim=2)
    halves[:, :, 0].copy_((low & 15) | (shifted & 48))
    shifted = torch.cat([high, high >> 2], dim=2)
    halves[:, :, 1].copy_((low >> 4) | (shifted & 48))
    out.sub_(32).view(-1, 16, 16).mul_(scales.unsqueeze(-1))


_DECODERS: dict[str, Decoder] = {
    "F32": _decode_f32,
    "F16": _decode_f16,
    "BF16": _decode_bf16,
    "Q4_0": _decode_q4_0,
    "Q4_1": _decode_q4_1,
    "Q5_0": _decode_q5_0,
    "Q5_1": _decode_q5_1,
    "Q8_0": _decode_q8_0,
    "Q4_K": _decode_q4_k,
    "Q5_K": _decode_q5_k,
    "Q6_K": _decode_q6_k,
}
