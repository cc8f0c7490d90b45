"""What the rows of a step's logits are drawn with, as one matrix of words: one copy brings it to the device.

A draw's random numbers are Philox4x32-10 (Salmon et al., SC 2011) of the counter (position, sample index) under the key
seed, so that they are a function of the request alone; see `model_shards.sampling.philox`, which makes the same ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

SEED, SAMPLE_INDEX, POSITION, TOP_K, TEMPERATURE, TOP_P, MIN_P = range(7)
"""Columns. Seed, sample index, output position and top_k are integers; the last three the bits of a double.
Temperature 0 is greedy; a top_k of 0 or of the vocabulary and more, top_p 1 and min_p 0 are off."""
WORDS = 8
"""Of a row: the columns, padded so that every row is aligned alike."""
FAILED_FLAG = 1
"""In the second row of `Ops.sample`'s result: no token, for the row's logits hold NaN, +inf or nothing but -inf."""

DrawMatrix = npt.NDArray[np.int64]


def pack_draws(
    seeds: Sequence[int], counters: Sequence[tuple[int, int]], top_k: Sequence[int], shape: npt.NDArray[np.float64]
) -> DrawMatrix:
    """int64 [n, WORDS]. `seeds` are taken modulo 2**64, `counters` are (sample index, output position), `shape` [n, 3]
    holds temperature, top_p and min_p."""
    draws = np.zeros((len(seeds), WORDS), dtype=np.int64)
    draws[:, SEED] = np.array([seed % 2**64 for seed in seeds], dtype=np.uint64).view(np.int64)
    draws[:, SAMPLE_INDEX : POSITION + 1] = counters
    draws[:, TOP_K] = top_k
    draws[:, TEMPERATURE : MIN_P + 1] = shape.view(np.int64)
    return draws
