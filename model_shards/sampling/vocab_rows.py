"""Rows over the vocabulary, and the few whole-row operations that sampling is made of.

A row of `vocab` values is seen as a matrix of `num_columns` columns: column j holds the ids j, j + num_columns,
j + 2 * num_columns, ... One sequential pass gives the maximum or the sum of every column; what follows then looks at a
few columns only:

    top k       the k-th largest column maximum bounds the k-th largest value from below, so the columns whose maximum
                reaches it hold all of the top k
    draw        by inverse CDF: first a column by the column sums, then a value inside that column

Whole rows stay where they lie; what crosses to the host is small.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

IdArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]
_COLUMN_LENGTH = 64


@dataclass(frozen=True, slots=True)
class Columns:
    """How a row of `vocab` ids is cut. The last line of the matrix may be short; columns differ by one at most."""

    vocab: int
    length: int
    count: int

    @classmethod
    def of(cls, vocab: int) -> Columns:
        count = -(-vocab // min(_COLUMN_LENGTH, vocab))
        return cls(vocab, -(-vocab // count), count)

    def ids(self, columns: IdArray) -> IdArray:
        """[len(columns), length] ids; those >= vocab are the missing places of short columns."""
        return columns[:, None] + self.count * np.arange(self.length)


class VocabRows:
    """fp32 values [n, vocab] on the host. Edits happen in place. Every result of a row depends on that row alone, to
    the last bit: each is reduced by itself, in an order fixed by `vocab`."""

    def __init__(self, values: torch.Tensor) -> None:
        assert values.dtype == torch.float32
        assert values.ndim == 2
        self._tensor = values.detach().cpu().contiguous()
        self._values: FloatArray = self._tensor.numpy()
        self.columns = Columns.of(values.shape[1])

    def __len__(self) -> int:
        return len(self._values)

    def argmax(self, rows: IdArray) -> tuple[IdArray, FloatArray]:
        """(ids, values) of the largest, the lowest id among equals; of the first NaN where there is one."""
        if len(rows) == len(self):
            ids = self._values.argmax(axis=1)
        else:
            ids = np.array([self._values[row].argmax() for row in rows], dtype=np.int64)
        return ids, self._values[rows, ids]

    def take(self, rows: IdArray, ids: IdArray) -> FloatArray:
        """values[rows[i], ids[i]]"""
        taken: FloatArray = self._values[rows, ids]
        return taken

    def put(self, rows: IdArray, ids: IdArray, values: FloatArray | float) -> None:
        self._values[rows, ids] = values

    def keep_only(self, row: int, ids: IdArray) -> None:
        """Everything else in the row becomes -inf."""
        kept = self._values[row, ids]
        self._values[row] = -np.inf
        self._values[row, ids] = kept

    def select(self, rows: IdArray) -> VocabRows:
        """A copy of these rows."""
        return VocabRows(torch.from_numpy(self._values[rows]))

    def softmax(self, rows: IdArray, temperatures: FloatArray) -> VocabRows:
        """softmax(values / temperature) of these rows. NaN where a row has NaN, +inf or nothing finite.

        (torch runs the rows in parallel, each on one core; it has no cheaper way to divide than one more pass, and
        numpy's needs no second parallel region.)
        """
        if len(rows) == len(self) and (temperatures == 1.0).all():
            scaled = self._tensor
        else:
            scaled = torch.from_numpy(self._values[rows])
            np.divide(scaled.numpy(), temperatures[:, None], out=scaled.numpy())
        return VocabRows(torch.softmax(scaled, dim=1))

    def column_max(self, rows: IdArray) -> FloatArray:
        """[len(rows), columns.count]; NaN where the column has one."""
        return self._reduce(np.maximum, rows)

    def column_sum(self, rows: IdArray) -> FloatArray:
        """[len(rows), columns.count]"""
        return self._reduce(np.add, rows)

    def column_values(self, rows: IdArray, columns: IdArray, missing: float) -> FloatArray:
        """[len(rows), columns.length]: column columns[i] of row rows[i], `missing` in places beyond the vocabulary."""
        ids = self.columns.ids(columns)
        values: FloatArray = self._values[rows[:, None], np.minimum(ids, self.columns.vocab - 1)]
        values[ids >= self.columns.vocab] = missing
        return values

    def above(self, row: int, threshold: float) -> tuple[IdArray, FloatArray]:
        """(ids ascending, values) of the row's values >= threshold, by a pass over all of it."""
        ids = np.flatnonzero(self._values[row] >= threshold)
        return ids, self._values[row, ids]

    def kth_largest(self, row: int, k: int) -> float:
        return float(np.partition(self._values[row], -k)[-k])

    def rank(self, row: int, token_id: int) -> int:
        """1 for the largest; among equals the lower id comes first."""
        values = self._values[row]
        value = values[token_id]
        return 1 + int(np.count_nonzero(values > value)) + int(np.count_nonzero(values[:token_id] == value))

    def _reduce(self, operation: np.ufunc, rows: IdArray) -> FloatArray:
        cut = self.columns
        full = (cut.length - 1) * cut.count
        rest = cut.vocab - full
        result = np.empty((len(rows), cut.count), dtype=np.float32)
        for out, row in zip(result, rows, strict=True):
            values = self._values[row]
            if full:
                operation.reduce(values[:full].reshape(-1, cut.count), axis=0, out=out)
                operation(out[:rest], values[full:], out=out[:rest])
            else:
                out[:] = values
        return result
