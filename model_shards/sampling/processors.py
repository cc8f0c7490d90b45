"""Edits of the logits before the temperature: penalties, then logit_bias, then masks. Sparse, over all rows at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shoal.model_shards.sampling.state import SamplerState
from shoal.model_shards.sampling.vocab_rows import FloatArray, IdArray, VocabRows


def edits_logits(state: SamplerState, eos_token_ids: Sequence[int]) -> bool:
    """Whether `apply_edits` would change this sequence's row now."""
    return state.may_edit and bool(
        state.penalized or len(state.bias_ids) or state.allowed_ids is not None or state.masked_ids(eos_token_ids)
    )


def apply_edits(
    rows: VocabRows, index: Sequence[int], states: Sequence[SamplerState], eos_token_ids: Sequence[int]
) -> None:
    """Edits the rows `index` in place, each as its state asks."""
    _penalize([(row, states[row]) for row in index if states[row].penalized], rows)
    biased = [(row, states[row]) for row in index if len(states[row].bias_ids)]
    if biased:
        where, ids = _places(biased, [state.bias_ids for _, state in biased])
        rows.put(where, ids, rows.take(where, ids) + np.concatenate([state.bias_values for _, state in biased]))
    for row in index:
        allowed = states[row].allowed_ids
        if allowed is not None:
            rows.keep_only(row, allowed)
    masked = [(row, np.array(states[row].masked_ids(eos_token_ids), dtype=np.int64)) for row in index]
    where, ids = _places(masked, [ids for _, ids in masked])
    rows.put(where, ids, -np.inf)


def _penalize(penalized: list[tuple[int, SamplerState]], rows: VocabRows) -> None:
    """Repetition (Keskar et al. 2019, arXiv:1909.05858, with the sign rule of HF: positive logits are divided,
    negative ones multiplied) over prompt and output; then frequency and presence (OpenAI) over the output."""
    if not penalized:
        return
    counts = [state.counts for _, state in penalized]
    where, ids = _places(penalized, [c.ids for c in counts])
    sizes = [len(c.ids) for c in counts]

    def spread(name: str) -> FloatArray:
        return np.repeat(np.array([getattr(state.params, name) for _, state in penalized], dtype=np.float32), sizes)

    count = np.concatenate([c.counts for c in counts])
    repetition = spread("repetition_penalty")
    values = rows.take(where, ids)
    values = np.where(values > 0, values / repetition, values * repetition)
    values -= spread("frequency_penalty") * count
    values -= spread("presence_penalty") * (count > 0)
    rows.put(where, ids, values)


def _places(pairs: Sequence[tuple[int, object]], ids: Sequence[IdArray]) -> tuple[IdArray, IdArray]:
    """(row of each id, all ids) as flat arrays."""
    where = np.repeat(np.array([row for row, _ in pairs], dtype=np.int64), [len(item) for item in ids])
    return where, np.concatenate(ids)
