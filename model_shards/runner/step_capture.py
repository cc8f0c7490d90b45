"""Small steps as programs, for a CPU: captured when their size comes a second time, replayed from then on.

A program is made for a number of tokens, whatever sequences they belong to: there are as many sequences as tokens,
and those beyond the step's have no tokens. What changes from step to step (token ids, positions, slots, block tables,
lengths) is copied into tensors that stay where they are. The models know nothing of it.

A capture costs about three times what a replay of its program saves, so it pays from the third replay on; a program is
small beside the weights that it reads. So there is room for all of them and none is ever dropped: whatever sizes come,
and in whatever order, each is captured once.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import torch

from shoal.kernels.capture import Program
from shoal.kernels.ops import AttentionMetadata
from shoal.kernels.page_format import KVPages
from shoal.model_shards.models.decoder import Decoder
from shoal.model_shards.runner.batch import ForwardBatch
from shoal.model_shards.runner.captured import CapturedSteps, Computed, Result
from shoal.model_shards.runner.footprint import MAX_CAPTURED_TOKENS, captured_bytes, has_programs, max_logit_rows
from shoal.model_shards.runner.settings import RunnerSettings

logger = logging.getLogger(__name__)

_Key = tuple[int, bool]
"""(tokens of the step, whether the logits of every row are part of it)"""


class StepCapture(CapturedSteps):
    """The programs of one rank, where there can be any (`footprint.has_programs`)."""

    def __init__(self, model: Decoder, pages: Sequence[KVPages], settings: RunnerSettings) -> None:
        self._model, self._pages, self._settings = model, pages, settings
        self.max_tokens = min(MAX_CAPTURED_TOKENS, settings.max_num_batched_tokens)
        self._capturer = None
        if has_programs(model.config, settings.mesh):
            rows = min(self.max_tokens, settings.max_num_seqs)
            pool_bytes = captured_bytes(model.config, self.max_tokens, rows, model.ops.activation_dtype)
            self._capturer = model.ops.capturer(pool_bytes)
        self._programs: dict[_Key, Program[Result]] = {}
        self._seen: set[_Key] = set()
        self._logit_rows = max_logit_rows(model.config.vocab_size, "cpu")
        self._inputs = _Inputs(model, settings, self.max_tokens)
        self.replays = 0

    @property
    def nbytes(self) -> int:
        """Of all recordings; what they compute is in the capturer's pool."""
        return sum(program.nbytes for program in self._programs.values())

    def __len__(self) -> int:
        return len(self._programs)

    def run(self, batch: ForwardBatch, received: torch.Tensor | None) -> Computed | None:
        """The step by a program, or None: it has to run by itself. `received`: the previous stage's hidden states,
        None on the first stage."""
        count = batch.num_tokens
        if self._capturer is None or count > self.max_tokens:
            return None
        with_logits = self._model.stage.is_last and count <= self._logit_rows and batch.every_row_samples
        key = (count, with_logits)
        program = self._programs.get(key)
        if program is None and key not in self._seen:
            self._seen.add(key)
            return None
        if not self._inputs.fill(batch, received):
            return None
        if program is None:
            hidden, logits = self._capture(key)
        else:
            self.replays += 1
            hidden, logits = program.replay()
        return Computed(hidden, logits, torch.from_numpy(batch.sample_rows))

    def _capture(self, key: _Key) -> Result:
        assert self._capturer is not None
        model, pages, (count, with_logits) = self._model, self._pages, key
        inputs, meta = self._inputs.of_size(count, decodes_only=with_logits)

        def step() -> Result:
            hidden = model.forward(inputs, pages, meta)
            return hidden, model.logits(hidden) if with_logits else None

        result, program = self._capturer.capture(step)
        if program is None:
            logger.info("Steps run operator by operator: %s.", self._capturer.refusal)
            self._capturer = None
            self._programs.clear()
        else:
            self._programs[key] = program
        return result


class _Inputs:
    """What a step is told, in tensors that never move. A step of n tokens sees the first n rows of each. They are in
    the host's memory, written through numpy: a fraction of what torch takes for a copy of a few numbers."""

    def __init__(self, model: Decoder, settings: RunnerSettings, rows: int) -> None:
        self._config, self._settings = model.config, settings
        self.hidden: torch.Tensor | None = None
        """What the previous stage sent; on the first stage there are token ids instead."""
        if not model.stage.is_first:
            self.hidden = torch.zeros(rows, model.config.hidden_size, dtype=model.ops.activation_dtype)
        self.token_ids = np.zeros(rows, dtype=np.int64)
        self.positions = np.zeros(rows, dtype=np.int64)
        self.slots = np.zeros(rows, dtype=np.int64)
        self.query_start = np.zeros(rows + 1, dtype=np.int32)
        self.seq_lens = np.zeros(rows, dtype=np.int32)
        self.tables = np.zeros((rows, settings.max_blocks_per_sequence), dtype=np.int32)

    def of_size(self, count: int, *, decodes_only: bool) -> tuple[torch.Tensor, AttentionMetadata]:
        """The model's inputs for `count` tokens of any sequences of any length."""
        meta = AttentionMetadata(
            query_start=torch.from_numpy(self.query_start[: count + 1]),
            seq_lens=torch.from_numpy(self.seq_lens[:count]),
            block_tables=torch.from_numpy(self.tables[:count]),
            slot_mapping=torch.from_numpy(self.slots[:count]),
            positions=torch.from_numpy(self.positions[:count]),
            max_query_len=1 if decodes_only else count,
            max_seq_len=self._settings.max_model_len,
            num_decodes=count if decodes_only else 0,
        )
        return torch.from_numpy(self.token_ids[:count]) if self.hidden is None else self.hidden[:count], meta

    def fill(self, batch: ForwardBatch, received: torch.Tensor | None) -> bool:
        """False for token ids that no embedding has: programs do not check their inputs."""
        count, sequences = batch.num_tokens, len(batch.chunks)
        if self.hidden is not None:
            assert received is not None, "a later stage computes on what it received"
            self.hidden[:count] = received
        elif not 0 <= batch.token_ids.min() <= batch.token_ids.max() < self._config.vocab_size:
            return False
        else:
            self.token_ids[:count] = batch.token_ids
        self.positions[:count] = batch.positions
        self.slots[:count] = batch.slots
        self.query_start[: sequences + 1] = batch.query_start
        self.seq_lens[:sequences] = batch.seq_lens
        # A block table is read up to its sequence's length; what an earlier step left beyond does not matter.
        self.tables[:sequences, : batch.block_tables.shape[1]] = batch.block_tables
        if sequences < count:
            self.query_start[sequences + 1 : count + 1] = count
            self.seq_lens[sequences:count] = 0
        return True
