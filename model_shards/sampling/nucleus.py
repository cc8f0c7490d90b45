"""Where top_p and min_p cut a row off, from the candidates that the shards of its vocabulary give.

Each shard gives its first few tokens and its mass, sum of exp((logit - its largest) / temperature). What the filters
keep is a prefix of the total order, so when it lies within the candidates, its size tells the draw all that the rest of
the row could. The mass of a whole row is rounded otherwise by whoever draws from all of it: a size is given only where
no rounding could move the cut. Rows without one are drawn from all of their logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from shoal.model_shards.sampling.order_keys import key_values
from shoal.model_shards.sampling.params import SamplingParams
from shoal.model_shards.sampling.vocab_rows import IdArray

DoubleArray = npt.NDArray[np.float64]

UNSETTLED = 0
"""In place of a size."""
_BEYOND = np.iinfo(np.int64).max
_LOGIT_ERROR = 2.0**-21
"""Of an exponent, times its size: logit / temperature is rounded to fp32 before the exponential."""
_WEIGHT_ERROR = 1e-9
"""Relative, of a weight in fp64."""


def shard_mass(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """The mass of each row of a shard: fp32 logits [n, width], temperatures fp32 [n] -> fp64 [n]. 0 where the shard
    holds nothing but -inf."""
    largest = logits.amax(dim=1, keepdim=True)
    weights = (logits - largest).div_(temperatures[:, None]).exp_()
    return weights.sum(dim=1, dtype=torch.float64).masked_fill(largest[:, 0] == -torch.inf, 0.0)


def nucleus_sizes(keys: IdArray, masses: DoubleArray, params: Sequence[SamplingParams], sum_error: float) -> IdArray:
    """keys [n, shards, count], each shard's in order, masses [n, shards] -> [n]: tokens that top_p and min_p keep, or
    UNSETTLED. `sum_error`: relative, of whoever sums the weights of a whole row. A row that has no distribution keeps
    its first token, which shows it."""
    largest = key_values(torch.from_numpy(keys[:, :, 0])).numpy().astype(np.float64)
    merged = np.sort(keys.reshape(len(keys), -1), axis=1)[:, ::-1].copy()
    values = key_values(torch.from_numpy(merged)).numpy().astype(np.float64)
    temperature = np.array([p.temperature for p in params])[:, None]
    # What a shard did not give comes after the last that it gave.
    complete = np.count_nonzero(merged >= keys[:, :, -1].max(axis=1)[:, None], axis=1)
    first = values[:, :1]
    with np.errstate(invalid="ignore"):  # rows without a distribution are told apart below
        weights = np.exp((values - first) / temperature)
        mass = np.sum(masses * np.exp((largest - first) / temperature), axis=1)
    error = sum_error + _LOGIT_ERROR * (1.0 + np.abs(first[:, 0]) / temperature[:, 0])
    top_p, min_p = np.array([p.top_p for p in params]), np.array([p.min_p for p in params])
    goal = np.where(top_p < 1.0, top_p * mass, np.inf)
    running = np.cumsum(weights, axis=1)
    sizes = []
    for sign in (-1.0, 1.0):
        short = _count(running < (goal * (1.0 + sign * error))[:, None], complete)
        kept = _count(weights >= (min_p * (1.0 - sign * _WEIGHT_ERROR))[:, None], complete)
        reached = np.where(short < complete, short + 1, _BEYOND)
        sizes.append(np.minimum(reached, np.where(kept < complete, np.maximum(kept, 1), _BEYOND)))
    settled = (sizes[0] == sizes[1]) & (sizes[1] != _BEYOND)
    return np.where(np.isfinite(first[:, 0]), np.where(settled, sizes[0], UNSETTLED), 1)


def _count(inside: npt.NDArray[np.bool_], complete: IdArray) -> IdArray:
    """How many of each row's first `complete` are, up to the first that is not."""
    inside = inside & (np.arange(inside.shape[1]) < complete[:, None])
    return np.asarray(np.cumprod(inside, axis=1).sum(axis=1), dtype=np.int64)
