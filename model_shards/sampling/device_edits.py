"""The edits of `processors.apply_edits` where the logits lie: the host sends ids and numbers and waits for nothing.

Element by element in fp32, in the same order: the edited logits are the host's, to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from shoal.model_shards.sampling.device_rows import to_device
from shoal.model_shards.sampling.state import SamplerState
from shoal.model_shards.sampling.vocab_rows import IdArray


def apply_edits_on_device(
    values: torch.Tensor, index: Sequence[int], states: Sequence[SamplerState], eos_token_ids: Sequence[int]
) -> None:
    """Edits the rows `index` of the fp32 logits [n, vocab] in place, each as its state asks."""
    penalized = [row for row in index if states[row].penalized]
    if penalized:
        _penalize(values, penalized, states)
    biased = [row for row in index if len(states[row].bias_ids)]
    if biased:
        places = _places(values, biased, [states[row].bias_ids for row in biased])
        bias = np.concatenate([states[row].bias_values for row in biased])
        values[places] = values[places] + to_device(bias, values.device)
    for row in index:
        allowed = states[row].allowed_ids
        if allowed is not None:
            _keep_only(values[row], to_device(allowed, values.device))
    masked = [np.array(states[row].masked_ids(eos_token_ids), dtype=np.int64) for row in index]
    if any(map(len, masked)):
        values[_places(values, index, masked)] = -torch.inf


def _penalize(values: torch.Tensor, rows: Sequence[int], states: Sequence[SamplerState]) -> None:
    """Repetition, then frequency, then presence; see `processors`."""
    counts = [states[row].counts for row in rows]
    sizes = [len(count.ids) for count in counts]

    def spread(name: str) -> torch.Tensor:
        each = np.array([getattr(states[row].params, name) for row in rows], dtype=np.float32)
        return to_device(np.repeat(each, sizes), values.device)

    places = _places(values, rows, [count.ids for count in counts])
    count = to_device(np.concatenate([count.counts for count in counts]), values.device)
    repetition = spread("repetition_penalty")
    logits = values[places]
    logits = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits -= spread("frequency_penalty") * count
    logits -= spread("presence_penalty") * (count > 0)
    values[places] = logits


def _keep_only(row: torch.Tensor, ids: torch.Tensor) -> None:
    kept = row[ids]
    row.fill_(-torch.inf)
    row[ids] = kept


def _places(values: torch.Tensor, rows: Sequence[int], ids: Sequence[IdArray]) -> tuple[torch.Tensor, torch.Tensor]:
    """(row of each id, all ids) as flat indexes into `values`."""
    where = np.repeat(np.array(rows, dtype=np.int64), [len(item) for item in ids])
    return to_device(where, values.device), to_device(np.concatenate(ids), values.device)
