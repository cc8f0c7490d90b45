"""A step's chunks as tensors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from shoal.kernels.ops import AttentionMetadata
from shoal.model_shards.engine.plan import ScheduledChunk
from shoal.model_shards.runner.sequences import LiveSequence, SequenceTable


@dataclass(slots=True)
class ForwardBatch:
    """The chunks of one step in batch order: those of one token first, as `AttentionMetadata.num_decodes` wants them.

    Row query_start[i] + j of every tensor is token j of chunk i:  | chunk 0 | chunk 1 | chunk 2          |
    """

    chunks: list[ScheduledChunk]
    sequences: list[LiveSequence]
    query_start: npt.NDArray[np.int64]
    """[num_chunks + 1]."""
    token_ids: torch.Tensor
    """[num_tokens] int64, on the device."""
    meta: AttentionMetadata

    @property
    def num_tokens(self) -> int:
        return int(self.query_start[-1])

    @property
    def every_row_samples(self) -> bool:
        """A step of decodes only (or of one-token prompts), each of which draws a token."""
        return len(self.chunks) == self.num_tokens and all(chunk.samples for chunk in self.chunks)


def build_batch(
    chunks: list[ScheduledChunk],
    sequences: list[LiveSequence],
    table: SequenceTable,
    block_size: int,
    device: torch.device,
) -> ForwardBatch:
    """`sequences[i]` belongs to `chunks[i]`, whose tokens must be known and whose blocks are in the table."""
    if any(chunk.num_tokens > 1 for chunk in chunks):
        order = sorted(range(len(chunks)), key=lambda i: chunks[i].num_tokens > 1)  # stable
        chunks, sequences = [chunks[i] for i in order], [sequences[i] for i in order]
    rows = np.array([sequence.row for sequence in sequences])
    starts = np.array([chunk.start for chunk in chunks])
    lengths = np.array([chunk.num_tokens for chunk in chunks])
    ends = starts + lengths
    query_start = np.zeros(len(chunks) + 1, dtype=np.int64)
    np.cumsum(lengths, out=query_start[1:])
    max_query_len, max_seq_len = int(lengths.max()), int(ends.max())
    if max_query_len == 1:
        token_rows, positions = rows, starts
    else:
        token_rows = np.repeat(rows, lengths)
        positions = np.arange(query_start[-1]) + np.repeat(starts - query_start[:-1], lengths)
    block_ids = table.blocks[token_rows, positions // block_size].astype(np.int64)
    slots = block_ids * block_size + positions % block_size
    block_tables = table.blocks[rows, : -(-max_seq_len // block_size)]

    def tensor(array: npt.NDArray[np.generic], dtype: type[np.generic]) -> torch.Tensor:
        return torch.from_numpy(array.astype(dtype, copy=False)).to(device)

    meta = AttentionMetadata(
        query_start=tensor(query_start, np.int32),
        seq_lens=tensor(ends, np.int32),
        block_tables=tensor(block_tables, np.int32),
        slot_mapping=tensor(slots, np.int64),
        positions=tensor(positions, np.int64),
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
        num_decodes=int((lengths == 1).sum()),
    )
    token_ids = tensor(table.tokens[token_rows, positions], np.int64)
    return ForwardBatch(chunks, sequences, query_start, token_ids, meta)
