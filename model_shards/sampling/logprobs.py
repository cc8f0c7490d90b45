"""Logprobs of the model's own distribution: log-softmax of the raw logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from shoal.model_shards.engine.plan import TokenLogprobs
from shoal.model_shards.sampling.candidates import heads
from shoal.model_shards.sampling.vocab_rows import IdArray, VocabRows, vocab_rows

BAD_LOGITS = "the model produced NaN or infinite logits"
LOWEST_LOGPROB = -9999.0
"""Stands for -inf, which JSON cannot say (OpenAI's convention)."""
_CHUNK_VALUES = 1 << 20


def prompt_logprobs(logits: torch.Tensor, targets: Sequence[int], k: int) -> list[TokenLogprobs]:
    """logits fp32 [n, vocab], one target id a row -> one entry a row with the k most likely tokens.
    Raises ValueError for a row without a distribution (NaN or infinite logits)."""
    return token_logprobs(vocab_rows(logits), targets, [k] * len(targets))


def token_logprobs(rows: VocabRows, targets: Sequence[int], counts: Sequence[int]) -> list[TokenLogprobs]:
    """The entry of target i with its counts[i] most likely tokens, for every row. Logprobs of -inf are clamped to
    LOWEST_LOGPROB; ranks are exact, ties ranked by id. ValueError as in `prompt_logprobs`."""
    step = max(1, _CHUNK_VALUES // rows.columns.vocab)
    entries: list[TokenLogprobs] = []
    for start in range(0, len(targets), step):
        chosen = np.arange(start, min(start + step, len(targets)))
        entries += _entries(rows, chosen, np.asarray(targets[start : start + step]), max(counts[start : start + step]))
    for entry, count in zip(entries, counts, strict=True):
        del entry.top[count:]
    return entries


def _entries(rows: VocabRows, chosen: IdArray, targets: IdArray, k: int) -> list[TokenLogprobs]:
    best, largest = rows.argmax(chosen)
    if not np.isfinite(largest).all():
        raise ValueError(BAD_LOGITS)
    probability = rows.softmax(chosen, np.ones(len(chosen), dtype=np.float32)).take(np.arange(len(chosen)), best)
    log_mass = largest.astype(np.float64) - np.log(probability.astype(np.float64))
    own = np.maximum(rows.take(chosen, targets) - log_mass, LOWEST_LOGPROB).tolist()
    tops: list[list[tuple[int, float]]] = [[] for _ in own]
    if k > 0:
        head = heads(rows, chosen, rows.column_max(chosen), k)
        scores = np.maximum(head.values[:, :k] - log_mass[:, None], LOWEST_LOGPROB)
        columns = zip(head.ids[:, :k].tolist(), scores.tolist(), head.sizes.tolist(), strict=True)
        tops = [list(zip(ids[:size], values[:size], strict=True)) for ids, values, size in columns]
    ranks = rows.ranks(chosen, targets)
    return [TokenLogprobs(*entry) for entry in zip(targets.tolist(), own, ranks, tops, strict=True)]
