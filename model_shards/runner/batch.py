"""A step's chunks as arrays, and as the tensors that a model takes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from shoal.kernels.ops import AttentionMetadata
from shoal.model_shards.engine.plan import ScheduledChunk
from shoal.model_shards.runner.sequences import IntArray, LiveSequence, SequenceTable

LongArray = npt.NDArray[np.int64]


@dataclass(slots=True)
class ForwardBatch:
    """The chunks of one step in batch order: those of one token first, as `AttentionMetadata.num_decodes` wants them.

    Row query_start[i] + j of every array is token j of chunk i:  | chunk 0 | chunk 1 | chunk 2          |
    """

    chunks: list[ScheduledChunk]
    sequences: list[LiveSequence]
    query_start: LongArray
    """[num_chunks + 1]."""
    seq_lens: LongArray
    """[num_chunks]: tokens of each sequence after this step."""
    block_tables: IntArray
    """[num_chunks, blocks of the longest sequence]."""
    token_ids: IntArray
    """[num_tokens], like positions and slots."""
    positions: LongArray
    slots: LongArray
    sampling: list[LiveSequence]
    """The sequences that draw a token, in the plan's order."""
    sample_rows: LongArray
    """[len(sampling)]: the row that each of them draws from, its last."""

    @property
    def num_tokens(self) -> int:
        return len(self.positions)

    @property
    def every_row_samples(self) -> bool:
        """A step of decodes only (or of one-token prompts), each of which draws a token."""
        return len(self.chunks) == self.num_tokens and all(chunk.samples for chunk in self.chunks)

    def tensors(self, device: torch.device) -> tuple[torch.Tensor, AttentionMetadata]:
        """(token ids [num_tokens] int64, where the tokens lie), on the device."""

        def tensor(array: npt.NDArray[np.generic], dtype: type[np.generic]) -> torch.Tensor:
            return torch.from_numpy(array.astype(dtype, copy=False)).to(device)

        lengths = np.diff(self.query_start)
        meta = AttentionMetadata(
            query_start=tensor(self.query_start, np.int32),
            seq_lens=tensor(self.seq_lens, np.int32),
            block_tables=tensor(self.block_tables, np.int32),
            slot_mapping=tensor(self.slots, np.int64),
            positions=tensor(self.positions, np.int64),
            max_query_len=int(lengths.max()),
            max_seq_len=int(self.seq_lens.max()),
            num_decodes=int((lengths == 1).sum()),
        )
        return tensor(self.token_ids, np.int64), meta


def build_batch(
    chunks: list[ScheduledChunk], sequences: list[LiveSequence], table: SequenceTable, block_size: int
) -> ForwardBatch:
    """`sequences[i]` belongs to `chunks[i]`, whose tokens must be known and whose blocks are in the table."""
    longer = any(chunk.num_tokens > 1 for chunk in chunks)
    sampling = [sequence for chunk, sequence in zip(chunks, sequences, strict=True) if chunk.samples]
    places = np.flatnonzero([chunk.samples for chunk in chunks])
    if longer:
        order = sorted(range(len(chunks)), key=lambda i: chunks[i].num_tokens > 1)  # stable
        chunks, sequences = [chunks[i] for i in order], [sequences[i] for i in order]
        places = np.argsort(order)[places]
    rows = np.array([sequence.row for sequence in sequences])
    starts = np.array([chunk.start for chunk in chunks])
    if longer:
        lengths = np.array([chunk.num_tokens for chunk in chunks])
        query_start = np.zeros(len(chunks) + 1, dtype=np.int64)
        np.cumsum(lengths, out=query_start[1:])
        token_rows = np.repeat(rows, lengths)
        positions = np.arange(query_start[-1]) + np.repeat(starts - query_start[:-1], lengths)
        seq_lens = starts + lengths
    else:
        query_start = np.arange(len(chunks) + 1)
        token_rows, positions, seq_lens = rows, starts, starts + 1
    blocks, offsets = np.divmod(positions, block_size)
    slots = np.multiply(table.blocks[token_rows, blocks], block_size, dtype=np.int64) + offsets
    longest = max(chunk.start + chunk.num_tokens for chunk in chunks)
    return ForwardBatch(
        chunks,
        sequences,
        query_start,
        seq_lens,
        table.blocks[rows, : -(-longest // block_size)],
        table.tokens[token_rows, positions],
        positions,
        slots,
        sampling,
        query_start[1:][places] - 1,
    )
