"""Small steps as programs: captured when their size comes a second time, replayed from then on.

A program is made for a number of tokens, whatever sequences they belong to: there are as many sequences as tokens,
and those beyond the step's have no tokens. What changes from step to step (token ids, positions, slots, block tables,
lengths) is copied into tensors that stay where they are. The models know nothing of it.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shoal.kernels.capture import Program
from shoal.kernels.ops import AttentionMetadata
from shoal.kernels.page_format import KVPages
from shoal.model_shards.models.decoder import Decoder
from shoal.model_shards.runner.batch import ForwardBatch
from shoal.model_shards.runner.footprint import MAX_CAPTURED_TOKENS, PROGRAM_BYTES, captured_bytes, max_logit_rows
from shoal.model_shards.runner.settings import RunnerSettings

logger = logging.getLogger(__name__)

_Result = tuple[torch.Tensor, torch.Tensor | None]
_Key = tuple[int, bool]
"""(tokens of the step, whether the logits of every row are part of it)"""


@dataclass(slots=True)
class Computed:
    """What the model gave for one step. Memory of a program: valid until the next step."""

    hidden: torch.Tensor
    """[num_tokens, hidden_size]."""
    logits: torch.Tensor | None = None
    """[num_tokens, vocab_size], when a program computed them along."""


class StepCapture:
    """The programs of one rank. Tensor parallelism runs without: its sums wait for other processes."""

    def __init__(self, model: Decoder, pages: Sequence[KVPages], settings: RunnerSettings) -> None:
        self._model, self._pages, self._settings = model, pages, settings
        self.max_tokens = min(MAX_CAPTURED_TOKENS, settings.max_num_batched_tokens)
        self._capturer = None
        if settings.tensor_parallel_size == 1:
            pool_bytes = captured_bytes(model.config, self.max_tokens, model.ops.activation_dtype)
            self._capturer = model.ops.capturer(pool_bytes)
        self._programs: OrderedDict[_Key, Program[_Result]] = OrderedDict()
        self._seen: set[_Key] = set()
        self._logit_rows = max_logit_rows(model.config.vocab_size)
        self._inputs = _Inputs(model, settings, self.max_tokens, pages[0].k.device)
        self.replays = 0

    @property
    def nbytes(self) -> int:
        """Of all recordings; what they compute is in the capturer's pool."""
        return sum(program.nbytes for program in self._programs.values())

    def __len__(self) -> int:
        return len(self._programs)

    def run(self, batch: ForwardBatch, inputs: torch.Tensor) -> Computed | None:
        """The step by a program, or None: it has to run by itself. `inputs`: what `Decoder.forward` takes."""
        count = batch.num_tokens
        if self._capturer is None or count > self.max_tokens:
            return None
        with_logits = self._model.stage.is_last and count <= self._logit_rows and batch.every_row_samples
        key = (count, with_logits)
        program = self._programs.get(key)
        if program is None and key not in self._seen:
            self._seen.add(key)
            return None
        if not self._inputs.fill(batch, inputs):
            return None
        if program is None:
            return self._capture(key)
        self._programs.move_to_end(key)
        self.replays += 1
        return Computed(*program.replay())

    def _capture(self, key: _Key) -> Computed:
        assert self._capturer is not None
        model, pages, (count, with_logits) = self._model, self._pages, key
        inputs, meta = self._inputs.of_size(count, decodes_only=with_logits)

        def step() -> _Result:
            hidden = model.forward(inputs, pages, meta)
            return hidden, model.logits(hidden) if with_logits else None

        result, program = self._capturer.capture(step)
        if program is None:
            logger.info("Steps run operator by operator: %s.", self._capturer.refusal)
            self._capturer = None
            self._programs.clear()
        else:
            self._programs[key] = program
            while self.nbytes > PROGRAM_BYTES and len(self._programs) > 1:
                self._programs.popitem(last=False)
        return Computed(*result)


class _Inputs:
    """What a step is told, in tensors that never move. A step of n tokens sees the first n rows of each."""

    def __init__(self, model: Decoder, settings: RunnerSettings, rows: int, device: torch.device) -> None:
        self._model, self._settings = model, settings
        if model.stage.is_first:
            self.inputs = torch.zeros(rows, dtype=torch.int64, device=device)
        else:
            self.inputs = torch.zeros(rows, model.config.hidden_size, dtype=model.ops.activation_dtype, device=device)
        self.positions = torch.zeros(rows, dtype=torch.int64, device=device)
        self.slots = torch.zeros(rows, dtype=torch.int64, device=device)
        self.query_start = torch.zeros(rows + 1, dtype=torch.int32, device=device)
        self.seq_lens = torch.zeros(rows, dtype=torch.int32, device=device)
        self.tables = torch.zeros(rows, settings.max_blocks_per_sequence, dtype=torch.int32, device=device)

    def of_size(self, count: int, *, decodes_only: bool) -> tuple[torch.Tensor, AttentionMetadata]:
        """The model's inputs for `count` tokens of any sequences of any length."""
        meta = AttentionMetadata(
            query_start=self.query_start[: count + 1],
            seq_lens=self.seq_lens[:count],
            block_tables=self.tables[:count],
            slot_mapping=self.slots[:count],
            positions=self.positions[:count],
            max_query_len=1 if decodes_only else count,
            max_seq_len=self._settings.max_model_len,
            num_decodes=count if decodes_only else 0,
        )
        return self.inputs[:count], meta

    def fill(self, batch: ForwardBatch, inputs: torch.Tensor) -> bool:
        """False for token ids that no embedding has: programs do not check their inputs."""
        if self._model.stage.is_first and not 0 <= inputs.min() <= inputs.max() < self._model.config.vocab_size:
            return False
        meta, count, sequences = batch.meta, batch.num_tokens, len(batch.chunks)
        self.inputs[:count] = inputs
        self.positions[:count] = meta.positions
        self.slots[:count] = meta.slot_mapping
        self.query_start[: sequences + 1] = meta.query_start
        self.seq_lens[:sequences] = meta.seq_lens
        # A block table is read up to its sequence's length; what an earlier step left beyond does not matter.
        self.tables[:sequences, : meta.block_tables.shape[1]] = meta.block_tables
        if sequences < count:
            self.query_start[sequences + 1 : count + 1] = count
            self.seq_lens[sequences:count] = 0
        return True
