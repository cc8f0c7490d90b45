"""Sampling where the logits lie: the host queues everything and copies once, when it wants to know.

The same chain as on the host, with the same uniforms. What is drawn differs from the host's token only where a uniform
or a cut falls between the two ways to round the row's weights: about once in a million draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from shoal.kernels.draws import FAILED_FLAG, DrawMatrix, pack_draws
from shoal.kernels.ops import Ops
from shoal.model_shards.sampling.device_edits import apply_edits_on_device
from shoal.model_shards.sampling.device_rows import DeviceRows, to_device
from shoal.model_shards.sampling.draw import FAILED
from shoal.model_shards.sampling.drawn import Drawn
from shoal.model_shards.sampling.logprobs import BAD_LOGITS
from shoal.model_shards.sampling.processors import edits_logits
from shoal.model_shards.sampling.state import SamplerState

_UNSOUND = 2 * FAILED_FLAG
"""Added to the flag of an edited row that had no distribution before its edits."""


@dataclass(slots=True)
class Launched:
    """Draws that are queued on the device and may not have been made yet."""

    answer: torch.Tensor
    """int64 [2, n] on the device: token ids (`answer[0]` may feed the next step as it is), then flags, 0 for good."""
    edited: list[int]
    asked: list[int]
    raw: DeviceRows | None

    def collect(self) -> Drawn:
        """Waits for the device: the step's one copy to the host."""
        token_ids, flags = self.answer.cpu().numpy()
        errors = dict.fromkeys(np.flatnonzero(flags & _UNSOUND).tolist(), BAD_LOGITS)
        return Drawn(np.where(flags == 0, token_ids, FAILED), errors, self.edited, self.asked, self.raw)


class DeviceSampler:
    """`ops` are those of the device that holds the logits, with `device_sampling`."""

    def __init__(self, ops: Ops, eos_token_ids: Sequence[int]) -> None:
        self._ops = ops
        self._eos_token_ids = tuple(eos_token_ids)

    def launch(self, logits: torch.Tensor, states: Sequence[SamplerState]) -> Launched:
        """One token for each sequence: logits fp32 [len(states), vocab], which are consumed. Waits for nothing."""
        asked = [row for row, state in enumerate(states) if state.params.logprobs is not None]
        raw = DeviceRows(logits).select(np.array(asked)) if asked else None
        edited = [row for row, state in enumerate(states) if edits_logits(state, self._eos_token_ids)]
        unsound = None
        if edited:
            unsound = ~torch.isfinite(logits.amax(dim=1))
            apply_edits_on_device(logits, edited, states, self._eos_token_ids)
        answer = self._ops.sample(logits, to_device(_draws(states), logits.device))
        if unsound is not None:
            answer[1] += _UNSOUND * unsound
        return Launched(answer, edited, asked, raw)


def _draws(states: Sequence[SamplerState]) -> DrawMatrix:
    params = [state.params for state in states]
    return pack_draws(
        [state.seed for state in states],
        [(state.sample_index, state.num_output_tokens) for state in states],
        [p.top_k for p in params],
        np.array([(0.0 if p.greedy else p.temperature, p.top_p, p.min_p) for p in params]),
    )
