"""The head of the vocabulary in its one total order: larger value first, the lower id first among equals.

Everything that filters (top-k, top-p, min-p) keeps a prefix of that order, so it needs only a long enough head of it.
A head is complete: it holds every id that belongs before its end, ties included. Hence what is computed from it does
not depend on how long it was made, nor on the heads of other rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shoal.model_shards.sampling.vocab_rows import FloatArray, IdArray, VocabRows

_LOWEST = np.finfo(np.float32).min
_SIGN = np.uint32(1 << 31)
_ID_BITS = np.uint64(32)
_ID_MASK = np.uint64((1 << 32) - 1)


@dataclass(slots=True)
class Heads:
    """Candidates of m rows in the total order, padded to one width with -inf."""

    ids: IdArray
    """[m, width]"""
    values: FloatArray
    """[m, width]"""
    sizes: IdArray
    """[m]: how many of a row are candidates; the rest is padding."""
    whole: npt.NDArray[np.bool_]
    """[m]: the head holds every value of the row that is not -inf."""


def heads(rows: VocabRows, index: IdArray, column_max: FloatArray, at_least: int) -> Heads:
    """At least `at_least` candidates of each row in `index` (all of them where there are fewer).

    `column_max` [len(index), columns]: their column maxima, all rows without NaN.
    """
    num_columns = column_max.shape[1]
    if 2 * at_least <= num_columns:
        threshold = np.partition(column_max, num_columns - at_least, axis=1)[:, num_columns - at_least]
        whole = threshold == -np.inf
        owner, ids, values = _from_columns(rows, index, column_max, np.where(whole, _LOWEST, threshold))
    else:
        threshold = np.full(len(index), -np.inf, dtype=np.float32)
        if at_least < rows.columns.vocab:
            threshold[:] = [rows.kth_largest(row, at_least) for row in index.tolist()]
        whole = threshold == -np.inf
        lowest = np.maximum(threshold, _LOWEST).tolist()
        found = [rows.above(row, value) for row, value in zip(index.tolist(), lowest, strict=True)]
        owner = np.repeat(np.arange(len(index)), [len(ids) for ids, _ in found])
        ids = np.concatenate([ids for ids, _ in found])
        values = np.concatenate([values for _, values in found])
    return _sorted_and_padded(owner, ids, values, whole)


def _from_columns(
    rows: VocabRows, index: IdArray, column_max: FloatArray, threshold: FloatArray
) -> tuple[IdArray, IdArray, FloatArray]:
    """(row in `index`, id, value) of all values >= the row's threshold; only columns that reach it are read."""
    owner, column = np.nonzero(column_max >= threshold[:, None])
    values = rows.column_values(index[owner], column, -np.inf)
    which, place = np.nonzero(values >= threshold[owner][:, None])
    return owner[which], column[which] + rows.columns.count * place, values[which, place]


def _sorted_and_padded(owner: IdArray, ids: IdArray, values: FloatArray, whole: npt.NDArray[np.bool_]) -> Heads:
    """`owner` ascending. Sorting one integer a candidate, which holds value and id, needs no stable sort."""
    sizes = np.bincount(owner, minlength=len(whole))
    width = int(sizes.max(initial=1))
    place = np.arange(len(owner)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    keys = np.full((len(whole), width), np.iinfo(np.uint64).max, dtype=np.uint64)
    keys[owner, place] = _keys(values, ids)
    keys.sort(axis=1)
    padding = np.arange(width) >= sizes[:, None]
    sorted_ids, sorted_values = _from_keys(keys)
    sorted_ids[padding], sorted_values[padding] = 0, -np.inf
    return Heads(sorted_ids, sorted_values, sizes, whole)


def _keys(values: FloatArray, ids: IdArray) -> npt.NDArray[np.uint64]:
    """Integers in the total order: the bits of the value, turned so that larger gives smaller, then the id."""
    bits = (values + np.float32(0.0)).view(np.uint32)  # -0.0 becomes 0.0: they are equal
    descending = np.where(bits & _SIGN, bits, ~(bits | _SIGN))
    return (descending.astype(np.uint64) << _ID_BITS) | ids.view(np.uint64)


def _from_keys(keys: npt.NDArray[np.uint64]) -> tuple[IdArray, FloatArray]:
    descending = (keys >> _ID_BITS).astype(np.uint32)
    bits = np.where(descending & _SIGN, descending, ~descending & ~_SIGN)
    return (keys & _ID_MASK).view(np.int64), bits.view(np.float32)
