"""A GGUF file as a Checkpoint: canonical names, Hugging Face conventions, dequantized slice by slice."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from shoal.configs.errors import ModelLoadError
from shoal.kernels.quantized import QuantFormat, QuantizedMatrix
from shoal.model_shards.weights.checkpoint import ALL, Checkpoint, sliced_shape
from shoal.model_shards.weights.gguf import GGUFFile, GGUFTensor
from shoal.model_shards.weights.gguf_config import parse_gguf_config
from shoal.model_shards.weights.gguf_dequant import dequantize
from shoal.model_shards.weights.gguf_packed import pack, packed_format
from shoal.model_shards.weights.names import GGUF_ROPE_FACTORS, canonical_from_gguf


class GGUFCheckpoint(Checkpoint):
    """Undoes on reading what the converter did to the weights:

    - architecture "llama": rows of q and k were reordered so that rotary pairs are neighbours; they are put back;
    - "gemma3": norm weights hold w + 1; the one is taken off.
    """

    def __init__(self, file: GGUFFile, threads: int = 1) -> None:
        """`threads` decode a matrix."""
        self.path = file.path
        self._threads = threads
        self.config = parse_gguf_config(file)
        self._file = file
        self._interleaved_rotary = file.metadata["general.architecture"] == "llama"
        self._tensors: dict[str, GGUFTensor] = {}
        for name, tensor in file.tensors.items():
            if name != GGUF_ROPE_FACTORS:
                self._tensors[canonical_from_gguf(name, file.metadata["general.architecture"])] = tensor

    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensor(name).shape

    def read(self, name: str, dtype: torch.dtype, rows: slice = ALL, cols: slice = ALL) -> torch.Tensor:
        tensor = self._tensor(name)
        if len(tensor.shape) == 1:
            whole = torch.empty(tensor.shape, dtype=torch.float32)
            dequantize(self._file.rows(tensor), tensor.type_id, whole)
            order = self._row_order(name, tensor.shape[0])
            values = whole[rows] if order is None else whole[torch.from_numpy(order[rows])]
            if self.config.norm_offset and name.endswith("norm.weight"):
                values = values - self.config.norm_offset
            return values.to(dtype, copy=True)
        return self._read_matrix(name, tensor, dtype, rows, cols)

    def quant_format(self, name: str) -> QuantFormat | None:
        tensor = self._tensors.get(name)
        return None if tensor is None or len(tensor.shape) != 2 else packed_format(tensor.type_name)

    def read_quantized(self, name: str, rows: slice = ALL, cols: slice = ALL) -> QuantizedMatrix:
        tensor = self._tensor(name)
        blocks, offset = self._blocks(name, tensor, rows, cols)
        try:
            matrix = pack(blocks, tensor.type_id, tensor.type_name)
        except ValueError as error:
            raise ModelLoadError(f"{self.path}: tensor {tensor.name} is corrupt: {error}.") from error
        return matrix.columns(offset, sliced_shape(tensor.shape, rows, cols)[1])

    def _read_matrix(self, name: str, tensor: GGUFTensor, dtype: torch.dtype, rows: slice, cols: slice) -> torch.Tensor:
        if len(tensor.shape) != 2:
            raise ModelLoadError(f"{self.path}: tensor {tensor.name} has {len(tensor.shape)} dims; at most 2 are used.")
        num_rows, num_cols = sliced_shape(tensor.shape, rows, cols)
        blocks, offset = self._blocks(name, tensor, rows, cols)
        values = torch.empty((num_rows, blocks.shape[1] * tensor.block_elements), dtype=dtype)
        dequantize(blocks, tensor.type_id, values, self._threads)
        if values.shape[1] == num_cols:
            return values
        return values[:, offset : offset + num_cols].clone(memory_format=torch.contiguous_format)

    def _blocks(self, name: str, tensor: GGUFTensor, rows: slice, cols: slice) -> tuple[npt.NDArray[np.uint8], int]:
        """Whole blocks that cover a slice, [rows, blocks, block_bytes], and where in them its columns begin."""
        order = self._row_order(name, tensor.shape[0])
        blocks = self._file.rows(tensor)
        blocks = blocks[rows] if order is None else blocks[order[rows]]
        start, stop, _ = cols.indices(tensor.shape[1])
        first_block, last_block = start // tensor.block_elements, -(-stop // tensor.block_elements)
        return blocks[:, first_block:last_block], start - first_block * tensor.block_elements

    def _row_order(self, name: str, num_rows: int) -> np.ndarray[tuple[int], np.dtype[np.int64]] | None:
        """For q and k of "llama" files: which stored row is canonical row i; None when they are stored in order.

        Within a head, stored row 2 i + j is canonical row j * head_dim / 2 + i.
        """
        if not self._interleaved_rotary or not (".q_proj." in name or ".k_proj." in name):
            return None
        if num_rows % self.config.head_dim:
            return None  # the accounting reports the shape
        stored = np.arange(num_rows, dtype=np.int64).reshape(-1, self.config.head_dim // 2, 2)
        return stored.swapaxes(1, 2).reshape(num_rows)

    def _tensor(self, name: str) -> GGUFTensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise ModelLoadError(f"{self.path} has no tensor {name}.")
        return tensor
