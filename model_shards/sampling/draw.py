"""Draws tokens from filtered and unfiltered rows by inverse CDF, with uniforms that the caller gives.

A row's token is a function of its own values, parameters and uniforms: no result depends, to the last bit, on which
other rows are drawn with it. (Sums that decide are taken in float64, sequentially, or row by row.)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shoal.model_shards.sampling.candidates import Heads, heads
from shoal.model_shards.sampling.vocab_rows import IdArray, VocabRows

DoubleArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

FAILED = -1
"""In place of a token id: the row has no distribution (NaN, infinity, or every token masked)."""
_HEAD_SIZES = (64, 1024)
"""Candidates to try with before all of the vocabulary is sorted."""
_CHUNK_VALUES = 1 << 20
"""Whole-row work runs over so many values at a time: temporaries of a few MB stay near the core."""


@dataclass(slots=True)
class Draws:
    """What to draw, one entry a row of `index`: parameters as columns."""

    index: IdArray
    """Row numbers in the VocabRows."""
    temperature: DoubleArray
    top_k: IdArray
    """0, or the size of the vocabulary and more: off."""
    top_p: DoubleArray
    min_p: DoubleArray
    uniforms: DoubleArray
    """[m, 2] in [0, 1)"""

    def __len__(self) -> int:
        return len(self.index)

    def subset(self, chosen: IdArray) -> Draws:
        return Draws(
            self.index[chosen],
            self.temperature[chosen],
            self.top_k[chosen],
            self.top_p[chosen],
            self.min_p[chosen],
            self.uniforms[chosen],
        )

    @property
    def filtered(self) -> BoolArray:
        return (self.top_k > 0) | (self.top_p < 1.0) | (self.min_p > 0.0)


def draw(rows: VocabRows, draws: Draws) -> IdArray:
    """The token of each draw, FAILED where the row has none to give."""
    draws.top_k[draws.top_k >= rows.columns.vocab] = 0
    tokens = np.full(len(draws), FAILED, dtype=np.int64)
    filtered = draws.filtered
    for chosen, drawer in ((np.flatnonzero(filtered), draw_filtered), (np.flatnonzero(~filtered), draw_plain)):
        if len(chosen):
            tokens[chosen] = drawer(rows, draws.subset(chosen))
    return tokens


def draw_plain(rows: VocabRows, draws: Draws) -> IdArray:
    """From softmax(values / temperature): a column by its sum, then a value inside the column. No sort."""
    tokens = np.full(len(draws), FAILED, dtype=np.int64)
    for part in _chunks(len(draws), rows.columns.vocab):
        weights = rows.softmax(draws.index[part], draws.temperature[part].astype(np.float32))
        local = np.arange(len(weights))
        sums = weights.column_sum(local).astype(np.float64)
        alive = np.flatnonzero(np.isfinite(sums).all(axis=1))
        uniforms = draws.uniforms[part][alive]
        column = invert_cdf(sums[alive], uniforms[:, 0])
        values = weights.column_values(local[alive], column, 0.0).astype(np.float64)
        place = invert_cdf(values, uniforms[:, 1])
        tokens[part.start + alive] = column + rows.columns.count * place
    return tokens


def draw_filtered(rows: VocabRows, draws: Draws) -> IdArray:
    """From the prefix of the total order that top_k, then top_p, then min_p leave. Heads of the vocabulary grow until
    they hold the prefix; most rows are done after the first."""
    tokens = np.full(len(draws), FAILED, dtype=np.int64)
    column_max = rows.column_max(draws.index)
    row_max = column_max.max(axis=1)
    pending = np.isfinite(row_max)
    needs_mass = np.flatnonzero(pending & (draws.top_k == 0) & (draws.top_p < 1.0))
    mass = np.ones(len(draws))
    mass[needs_mass] = _mass(rows, draws.subset(needs_mass))
    pending &= np.isfinite(mass)
    for size in (*_HEAD_SIZES, rows.columns.vocab):
        due = np.flatnonzero(pending & (draws.top_k <= size))
        for part in _chunks(len(due), size):
            chosen = due[part]
            head = heads(rows, draws.index[chosen], column_max[chosen], size)
            found, settled = _draw_from_heads(head, draws.subset(chosen), mass[chosen])
            tokens[chosen[settled]] = found[settled]
            pending[chosen[settled]] = False
    return tokens


def _draw_from_heads(head: Heads, draws: Draws, mass: DoubleArray) -> tuple[IdArray, BoolArray]:
    """(tokens, which of them are settled: the head was long enough to hold all that the filters keep). `mass` [m] of
    the whole row counts where top_p comes without top_k."""
    last = np.arange(len(draws)), head.sizes - 1
    weights = np.exp((head.values.astype(np.float64) - head.values[:, :1]) / draws.temperature[:, None])
    running = np.cumsum(weights, axis=1)
    limited = draws.top_k > 0
    kept = np.where(limited, np.minimum(draws.top_k, head.sizes), head.sizes)
    total = np.where(limited, running[np.arange(len(draws)), kept - 1], mass)
    settled = limited | head.whole

    nucleus = draws.top_p < 1.0
    goal = np.where(nucleus, draws.top_p * total, np.inf)
    settled |= running[last] >= goal
    kept = np.minimum(kept, np.count_nonzero(running < goal[:, None], axis=1) + 1)

    settled |= weights[last] < draws.min_p
    kept = np.minimum(kept, np.count_nonzero(weights >= np.maximum(draws.min_p, 1e-300)[:, None], axis=1))

    inside = np.arange(weights.shape[1]) < kept[:, None]
    place = invert_cdf(np.where(inside, weights, 0.0), draws.uniforms[:, 0])
    return head.ids[np.arange(len(draws)), place], settled


def invert_cdf(weights: DoubleArray, uniforms: DoubleArray) -> IdArray:
    """weights [m, width] >= 0 with a positive sum, uniforms [m] in [0, 1) -> index i with probability weights[i] / sum.
    Never an index of weight 0."""
    running = np.cumsum(weights, axis=1)
    place = np.count_nonzero(running <= (uniforms * running[:, -1])[:, None], axis=1)
    last = weights.shape[1] - 1 - np.argmax(weights[:, ::-1] > 0, axis=1)
    return np.asarray(np.minimum(place, last), dtype=np.int64)


def _mass(rows: VocabRows, draws: Draws) -> DoubleArray:
    """[m]: the sum of exp((value - max) / temperature) over the whole row: one over the largest probability."""
    mass = np.empty(len(draws))
    for part in _chunks(len(draws), rows.columns.vocab):
        weights = rows.softmax(draws.index[part], draws.temperature[part].astype(np.float32))
        _, largest = weights.argmax(np.arange(len(weights)))
        mass[part] = 1.0 / largest.astype(np.float64)
    return mass


def _chunks(count: int, width: int) -> list[slice]:
    step = max(1, _CHUNK_VALUES // width)
    return [slice(start, min(start + step, count)) for start in range(0, count, step)]
