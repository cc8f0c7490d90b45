"""What a checkpoint is to the rest of Shoal, and the accounting of its tensors while one rank loads."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path

import torch

from shoal.configs.errors import ModelLoadError
from shoal.kernels.quantized import QuantFormat, QuantizedMatrix
from shoal.model_shards.models.config import ModelConfig
from shoal.model_shards.weights.names import LM_HEAD

logger = logging.getLogger(__name__)

ALL = slice(None)
MAX_LISTED = 10
"""Tensor names listed per kind of problem in one error."""


class Checkpoint(ABC):
    """The weights of one model, read lazily: opening maps files and reads tables, `read` copies what is asked for.

    Names, shapes and conventions are those of Hugging Face whatever the file format: `[out, in]` matrices, rotary
    halves split (not interleaved), Gemma norm weights without the added one. Reading is safe from several threads.
    """

    path: Path
    config: ModelConfig

    @abstractmethod
    def names(self) -> frozenset[str]:
        """Canonical names of all tensors that belong to the decoder."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Full shape of a tensor. Raises ModelLoadError when there is none of this name."""

    @abstractmethod
    def read(self, name: str, dtype: torch.dtype, rows: slice = ALL, cols: slice = ALL) -> torch.Tensor:
        """The tensor, or a slice of it (step 1; `rows` of the first dim, `cols` of the second), converted to `dtype` in
        contiguous memory that the caller owns. Raises ModelLoadError when it is missing or cannot be decoded."""

    def quant_format(self, name: str) -> QuantFormat | None:
        """What `read_quantized` gives for a tensor; None: it is not stored quantized, or there is none of this name.
        Reads headers only."""
        return None

    def read_quantized(self, name: str, rows: slice = ALL, cols: slice = ALL) -> QuantizedMatrix:
        """A matrix whose `quant_format` is not None, or a slice of it that begins and ends between groups of 32
        columns. Raises ModelLoadError when it cannot be decoded."""
        raise ModelLoadError(f"{self.path}: tensor {name} is not stored quantized.")


class CheckpointReader:
    """Reads a Checkpoint for one rank and keeps account of every tensor.

    `read` never fails for a missing or misshapen tensor: it notes the problem and hands out NaNs of the right shape, so
    that `finish`, which must be called once the model is built, can name all problems in one error.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self._present = checkpoint.names()
        self._seen: set[str] = set()
        self._missing: list[str] = []
        self._misshapen: list[str] = []

    @property
    def names_read(self) -> frozenset[str]:
        """What this rank has asked for so far; hand it to the other ranks' `finish`."""
        return frozenset(self._seen)

    def read(
        self, name: str, full_shape: tuple[int, ...], dtype: torch.dtype, rows: slice = ALL, cols: slice = ALL
    ) -> torch.Tensor:
        """The slice (`rows` of the first, `cols` of the second dim) of the tensor whose full shape must be
        `full_shape`."""
        first_time = name not in self._seen
        self._seen.add(name)
        if name not in self._present:
            if first_time:
                self._missing.append(name)
            return _placeholder(full_shape, dtype, rows, cols)
        shape = self.checkpoint.shape(name)
        if shape != full_shape:
            if first_time:
                self._misshapen.append(f"{name} is {list(shape)}, expected {list(full_shape)}")
            return _placeholder(full_shape, dtype, rows, cols)
        return self.checkpoint.read(name, dtype, rows, cols)

    def read_quantized(
        self, name: str, full_shape: tuple[int, int], rows: slice = ALL, cols: slice = ALL
    ) -> QuantizedMatrix | None:
        """Like `read`, as it is stored; None where the tensor is not stored quantized, is missing or misshapen: `read`
        it then, which notes what is wrong."""
        if self.checkpoint.quant_format(name) is None or self.checkpoint.shape(name) != full_shape:
            return None
        self._seen.add(name)
        return self.checkpoint.read_quantized(name, rows, cols)

    def finish(self, other_ranks_names: Iterable[str] = ()) -> None:
        """Raises one ModelLoadError that names every tensor missing, misshapen, or present but read by no rank.

        `other_ranks_names` are the `names_read` of the other ranks (pipeline stages read different layers). A tied
        model that also ships `lm_head.weight` is fine: the tensor is ignored with one log line.
        """
        extra = self._present - self._seen - set(other_ranks_names)
        if LM_HEAD in extra and self.checkpoint.config.tie_embeddings:
            logger.info("ignoring %s: the config ties it to the embedding", LM_HEAD)
            extra -= {LM_HEAD}
        extra -= self._nextn_layers(extra)
        problems = [
            _listed("missing", self._missing),
            _listed("unexpected", sorted(extra)),
            _listed("of the wrong shape", self._misshapen),
        ]
        text = "; ".join(problem for problem in problems if problem)
        if text:
            raise ModelLoadError(
                f"Checkpoint {self.checkpoint.path} does not fit a {self.checkpoint.config.family} model with "
                f"{self.checkpoint.config.num_layers} layers: {text}. Check that the files are complete and that the "
                "config belongs to these weights."
            )

    def _nextn_layers(self, extra: frozenset[str]) -> set[str]:
        """What belongs to the layers that predict further tokens."""
        config = self.checkpoint.config
        prefixes = tuple(f"model.layers.{config.num_layers + i}." for i in range(config.num_nextn_layers))
        found = {name for name in extra if name.startswith(prefixes)}
        if found:
            logger.info("ignoring %d tensors of %d layers for predicting further tokens", len(found), len(prefixes))
        return found


def _listed(kind: str, items: list[str]) -> str:
    if not items:
        return ""
    more = f" and {len(items) - MAX_LISTED} more" if len(items) > MAX_LISTED else ""
    return f"{len(items)} tensors {kind} ({', '.join(items[:MAX_LISTED])}{more})"


def _placeholder(full_shape: tuple[int, ...], dtype: torch.dtype, rows: slice, cols: slice) -> torch.Tensor:
    return torch.full(sliced_shape(full_shape, rows, cols), float("nan"), dtype=dtype)


def sliced_shape(full_shape: tuple[int, ...], rows: slice, cols: slice) -> tuple[int, ...]:
    """The shape of `tensor[rows, cols]` (`tensor[rows]` for one dim); only steps of 1."""
    shape = list(full_shape)
    for dim, part in zip(range(len(shape)), (rows, cols), strict=False):
        start, stop, step = part.indices(shape[dim])
        assert step == 1, "checkpoint slices have step 1"
        shape[dim] = max(0, stop - start)
    return tuple(shape)
