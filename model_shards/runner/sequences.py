"""The sequences a rank knows: their tokens and block tables, kept up to date by diffs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shoal.model_shards.engine.plan import NewSequence, ScheduledChunk
from shoal.model_shards.runner.settings import RunnerSettings
from shoal.model_shards.sampling.params import SamplingParams
from shoal.model_shards.sampling.state import SamplerState

PLACEHOLDER_TOKEN = 0
"""Stands where a failed sequence's token would be, so that chunks planned before the failure was known still fit."""

IntArray = npt.NDArray[np.int32]


@dataclass(slots=True, eq=False)
class LiveSequence:
    """One sequence on this rank. `row` indexes the tables; -1 once it was removed."""

    seq_id: int
    generation: int
    row: int
    num_tokens: int
    """Known tokens, sampled ones included."""
    num_blocks: int
    num_prompt_tokens: int
    sampling: SamplingParams
    sampler_state: SamplerState | None
    """Only on the rank that samples."""
    failure: str | None = None
    """Why it failed inside a step; it samples no more."""


class SequenceTable:
    """Rows of tokens and of block ids, one a live sequence, in memory that stays where it is."""

    def __init__(self, settings: RunnerSettings, *, samples: bool) -> None:
        """`samples`: this rank draws tokens and so keeps the samplers' states."""
        rows = settings.max_num_seqs
        self.samples = samples
        self.tokens: IntArray = np.zeros((rows, settings.max_model_len + 1), dtype=np.int32)  # one drawn past the end
        self.blocks: IntArray = np.zeros((rows, settings.max_blocks_per_sequence), dtype=np.int32)
        self._free_rows = list(range(rows - 1, -1, -1))
        self._live: dict[int, LiveSequence] = {}

    def __len__(self) -> int:
        return len(self._live)

    def __getitem__(self, seq_id: int) -> LiveSequence:
        return self._live[seq_id]

    def add(self, new: NewSequence) -> None:
        assert new.seq_id not in self._live, f"sequence {new.seq_id} is already known"
        assert self._free_rows, f"more than max_num_seqs {len(self.tokens)} live sequences"
        row, count = self._free_rows.pop(), len(new.token_ids)
        self.tokens[row, :count] = new.token_ids
        state = None
        if self.samples:
            state = SamplerState(new.sampling, new.seed, new.sample_index, new.token_ids, new.num_prompt_tokens)
        sequence = LiveSequence(new.seq_id, new.generation, row, count, 0, new.num_prompt_tokens, new.sampling, state)
        self._live[new.seq_id] = sequence
        self._append_blocks(sequence, new.block_ids)

    def remove(self, seq_id: int) -> None:
        sequence = self._live.pop(seq_id)
        self.blocks[sequence.row, : sequence.num_blocks] = 0
        self._free_rows.append(sequence.row)
        sequence.row = -1

    def extend(self, chunk: ScheduledChunk) -> LiveSequence:
        """Appends the chunk's new blocks to its sequence's block table."""
        sequence = self._live[chunk.seq_id]
        if chunk.new_block_ids:
            self._append_blocks(sequence, chunk.new_block_ids)
        return sequence

    def append_token(self, sequence: LiveSequence, token_id: int) -> None:
        """No-op for a sequence that was removed meanwhile."""
        if sequence.row >= 0:
            self.tokens[sequence.row, sequence.num_tokens] = token_id
            sequence.num_tokens += 1

    def _append_blocks(self, sequence: LiveSequence, block_ids: list[int]) -> None:
        end = sequence.num_blocks + len(block_ids)
        assert end <= self.blocks.shape[1], f"sequence {sequence.seq_id} has more blocks than max_model_len"
        self.blocks[sequence.row, sequence.num_blocks : end] = block_ids
        sequence.num_blocks = end
