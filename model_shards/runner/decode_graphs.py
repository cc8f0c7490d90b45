"""Decode steps as programs that are made at start-up, for a GPU: a capture takes longer than many steps there, and no
request is to wait for one.

Programs are made for a few numbers of sequences. A step of one token a sequence runs as the smallest that holds it,
filled up with sequences that have no token: their rows are computed from nothing, stored nowhere and read by nobody.
All other steps run operator by operator: they have enough work to hide the calls behind it.

How attention splits a sequence's keys depends on the sequence alone, so it gives the same bits captured or not. Matrix
products are the vendor's, which chooses an algorithm by the number of rows: a step that is filled up may differ in the
last bits from the same step alone; one that fills its program does not.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Sequence
from functools import partial

import torch

from shoal.configs.units import format_bytes
from shoal.kernels.capture import Capturer, Program
from shoal.kernels.page_format import KVPages
from shoal.model_shards.models.decoder import Decoder
from shoal.model_shards.parallel.context import ParallelContext
from shoal.model_shards.runner.batch import ForwardBatch
from shoal.model_shards.runner.captured import CapturedSteps, Computed, Result
from shoal.model_shards.runner.device_inputs import DeviceInputs
from shoal.model_shards.runner.footprint import captured_bytes, max_logit_rows

logger = logging.getLogger(__name__)

_PROGRESS_S = 5.0


class DecodeGraphs(CapturedSteps):
    """The programs of one rank. With tensor parallelism all ranks of a stage have them or none: a program's sums are
    over as many rows as it has, and must meet their like."""

    def __init__(
        self,
        model: Decoder,
        pages: Sequence[KVPages],
        inputs: DeviceInputs,
        context: ParallelContext,
        sizes: list[int],
    ) -> None:
        """`sizes` ascending, in sequences. Nothing is captured before `prepare`."""
        self._model, self._pages, self._inputs, self._context, self._sizes = model, pages, inputs, context, sizes
        self._programs: dict[int, Program[Result]] = {}
        # Whole logits are on one rank, and of so many rows at once only. Gathering them stays outside of programs.
        whole = context.position.tp_size == 1 and sizes[-1] <= max_logit_rows(model.config.vocab_size, "cuda")
        self._with_logits = model.stage.is_last and whole
        self._buffers: _Buffers | None = None
        self.replays = 0

    @property
    def nbytes(self) -> int:
        return sum(program.nbytes for program in self._programs.values())

    def __len__(self) -> int:
        return len(self._programs)

    @torch.inference_mode()
    def prepare(self) -> None:
        """Captures every size, the largest first: the pool is then as large as it must be. A refusal is logged, and
        leaves this rank (and those of its stage) without programs. On all ranks of a stage at once."""
        model, rows = self._model, self._sizes[-1]
        if not self._context.queues_sums:
            return _without("the sums over the ranks wait in the host")
        if self._context.position.ep_size > 1:
            return _without("how many rows travel to each rank's experts must be known in the host")
        if self._context.position.cp_size > 1:
            return _without("how rows see the keys of context-parallel ranks is not in a program's inputs")
        capturer = model.ops.capturer(captured_bytes(model.config, rows, rows, model.ops.activation_dtype))
        if capturer is None:
            return _without(f"nothing captures the {model.ops.name} operators on this device")
        began = time.monotonic()
        self._buffers = _Buffers(model, rows, self._pages[0].k.device, with_logits=self._with_logits)
        refusal = self._capture_all(capturer)
        if refusal is not None:
            self._programs.clear()
            return _without(refusal)
        took = time.monotonic() - began
        logger.info(
            "Decode steps of %d sizes up to %d sequences captured in %.1f s and %s",
            len(self._sizes), rows, took, format_bytes(self.nbytes),
        )  # fmt: skip

    def _capture_all(self, capturer: Capturer) -> str | None:
        """Why not, if not."""
        reported = time.monotonic()
        for done, size in enumerate(reversed(self._sizes)):
            if time.monotonic() - reported > _PROGRESS_S:
                reported = time.monotonic()
                logger.info("Decode steps of %d of %d sizes captured", done, len(self._sizes))
            self._inputs.clear(size)
            _, program = capturer.capture(partial(self._step, size))
            if not self._on_all_ranks(program is not None):
                return capturer.refusal or "another rank of the stage could not capture them"
            assert program is not None
            self._programs[size] = program
        return None

    def run(self, batch: ForwardBatch, received: torch.Tensor | None) -> Computed | None:
        count = batch.num_tokens
        if not self._programs or count > self._sizes[-1] or not batch.every_row_samples:
            return None
        size = self._sizes[bisect_left(self._sizes, count)]
        self._inputs.place_decodes(batch, size)
        assert self._buffers is not None
        if self._buffers.received is not None:
            assert received is not None, "a later stage computes on what it received"
            self._buffers.received[:count] = received
        hidden, logits = self._programs[size].replay()
        self.replays += 1
        return Computed(hidden[:count], None if logits is None else logits[:count])

    def _step(self, size: int) -> Result:
        step, buffers = self._inputs.decodes_of_size(size), self._buffers
        assert buffers is not None
        inputs = step.token_ids if buffers.received is None else buffers.received[:size]
        computed = self._model.forward(inputs, self._pages, step.meta)
        hidden = buffers.hidden[:size].copy_(computed)
        if buffers.logits is None:
            return hidden, None
        logits = self._model.logits(computed)
        assert logits is not None, "without tensor parallelism every rank has whole logits"
        return hidden, buffers.logits[:size].copy_(logits)

    def _on_all_ranks(self, captured: bool) -> bool:
        if self._context.position.tp_size == 1:
            return captured
        ranks = self._context.all_reduce(torch.full((1,), float(captured), device=self._pages[0].k.device))
        return ranks.item() == self._context.position.tp_size


def _without(reason: str) -> None:
    logger.warning("Decode steps run operator by operator: %s.", reason)


class _Buffers:
    """What programs read and write outside of their pool, one for all of them: each would else hold its own results."""

    def __init__(self, model: Decoder, rows: int, device: torch.device, *, with_logits: bool) -> None:
        shape, dtype = (rows, model.config.hidden_size), model.ops.activation_dtype
        self.received = None if model.stage.is_first else torch.zeros(shape, dtype=dtype, device=device)
        """What the previous stage sent; on the first stage there are token ids instead."""
        self.hidden = torch.zeros(shape, dtype=dtype, device=device)
        self.logits = torch.zeros(rows, model.config.vocab_size, device=device) if with_logits else None
