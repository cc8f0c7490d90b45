"""Embedding and head, split over the vocabulary. The split pads the vocabulary; padding is cut off before sampling."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shoal.kernels.quantized import QuantizedMatrix
from shoal.model_shards.parallel.loader import WeightLoader
from shoal.model_shards.parallel.split import vocab_shard_rows
from shoal.model_shards.quantization.schemes import Matrix


@dataclass(frozen=True, slots=True)
class VocabShard:
    """Rows [start, stop) of the vocabulary are this rank's; it stores `padded` rows, the rest zeros."""

    start: int
    stop: int
    padded: int

    @classmethod
    def of_rank(cls, vocab_size: int, tp_size: int, tp_rank: int) -> VocabShard:
        padded = vocab_shard_rows(vocab_size, tp_size)
        start = min(tp_rank * padded, vocab_size)
        return cls(start, min(start + padded, vocab_size), padded)

    def read(self, load: WeightLoader, name: str, shape: tuple[int, int]) -> Matrix:
        weight = load.matrix(name, shape, range(self.start, self.stop))
        missing = self.padded - weight.shape[0]
        if isinstance(weight, QuantizedMatrix):
            return weight.padded(missing)
        return weight if missing == 0 else torch.nn.functional.pad(weight, (0, 0, 0, missing))


class ParallelHead:
    """Hidden states -> logits, of this rank's shard of the vocabulary or of all of it."""

    def __init__(self, load: WeightLoader, name: str, vocab_size: int, hidden_size: int) -> None:
        position = load.context.position
        self.vocab_size = vocab_size
        self.shard = VocabShard.of_rank(vocab_size, position.tp_size, position.tp_rank)
        self.ops, self.context = load.ops, load.context
        self.weight = load.linear([self.shard.read(load, name, (vocab_size, hidden_size))], [])

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """hidden [n, hidden] -> fp32 logits [n, vocab_size] on the stage's first rank, None on the others."""
        logits = self.context.gather(self.ops.linear(hidden, self.weight))
        return None if logits is None else logits[:, : self.vocab_size].float().contiguous()

    def shard_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [n, hidden] -> [n, shard.padded] in the activation dtype; -inf for padding, which nobody may draw."""
        logits = self.ops.linear(hidden, self.weight)
        logits[:, self.shard.stop - self.shard.start :] = -torch.inf
        return logits


class ParallelEmbedding:
    """Token ids -> hidden states in the activation dtype, of the rows that the rank holds. A tied one shares the head's
    weight."""

    def __init__(
        self, load: WeightLoader, name: str, vocab_size: int, hidden_size: int, *, tied_to: ParallelHead | None = None
    ) -> None:
        position = load.context.position
        self.shard = VocabShard.of_rank(vocab_size, position.tp_size, position.tp_rank)
        self.ops, self.context = load.ops, load.context
        self.table: torch.Tensor | None = None
        self.packed = None if tied_to is None else tied_to.weight
        if tied_to is None:
            table = self.shard.read(load, name, (vocab_size, hidden_size))
            if isinstance(table, torch.Tensor):
                self.table = table
            else:
                self.packed = load.linear([table], [])

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids [total] int64, on every rank -> [held, hidden] (`StepRows`)."""
        if self.context.position.tp_size == 1:
            return self._rows(token_ids)
        elsewhere = (token_ids < self.shard.start) | (token_ids >= self.shard.stop)
        hidden = self._rows((token_ids - self.shard.start).masked_fill(elsewhere, 0))
        return self.context.sum_rows(hidden.masked_fill_(elsewhere[:, None], 0))

    def _rows(self, index: torch.Tensor) -> torch.Tensor:
        if self.packed is not None:
            return self.packed.rows(index)
        assert self.table is not None
        return torch.nn.functional.embedding(index, self.table).to(self.ops.activation_dtype)
