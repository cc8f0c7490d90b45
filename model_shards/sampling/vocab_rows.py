"""Rows over the vocabulary, and the few whole-row operations that sampling is made of.

A row of `vocab` values is seen as a matrix of `count` columns: column j holds the ids j, j + count, j + 2 * count, ...
One sequential pass gives the maximum or the sum of every column; what follows then looks at a few columns only:

    top k       the k-th largest column maximum bounds the k-th largest value from below, so the columns whose maximum
                reaches it hold all of the top k
    draw        by inverse CDF: first a column by the column sums, then a value inside that column

Whole rows stay where they lie; what comes to the host, as numpy arrays, is small.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

IdArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]
_COLUMN_LENGTH = 32


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

    @property
    def last_line(self) -> int:
        """The first id of the last line."""
        return (self.length - 1) * self.count

    def ids(self, columns: IdArray) -> IdArray:
        """[len(columns), length] ids; those >= vocab are the missing places of short columns."""
        return columns[:, None] + self.count * np.arange(self.length)


class VocabRows(ABC):
    """fp32 values [n, vocab]; edits happen in place. `rows` arguments are ascending row numbers without repetition.

    Every result of a row depends on that row alone, to the last bit: an implementation reduces each row in an order
    that is fixed by `vocab`, whatever other rows it works on at the same time.
    """

    columns: Columns

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def argmax(self, rows: IdArray) -> tuple[IdArray, FloatArray]:
        """(ids, values) of the largest, the lowest id among equals; the value is NaN where the row has one."""

    @abstractmethod
    def take(self, rows: IdArray, ids: IdArray) -> FloatArray:
        """values[rows[i], ids[i]]; rows may repeat."""

    @abstractmethod
    def put(self, rows: IdArray, ids: IdArray, values: FloatArray | float) -> None:
        """values[rows[i], ids[i]] = values[i]; rows may repeat."""

    @abstractmethod
    def keep_only(self, row: int, ids: IdArray) -> None:
        """Everything else in the row becomes -inf."""

    @abstractmethod
    def select(self, rows: IdArray) -> VocabRows:
        """A copy of these rows."""

    @abstractmethod
    def softmax(self, rows: IdArray, temperatures: FloatArray) -> VocabRows:
        """softmax(values / temperature) of these rows. NaN where a row has NaN, +inf or nothing finite."""

    @abstractmethod
    def column_max(self, rows: IdArray) -> FloatArray:
        """[len(rows), columns.count]; NaN where the column has one."""

    @abstractmethod
    def column_sum(self, rows: IdArray) -> FloatArray:
        """[len(rows), columns.count]"""

    @abstractmethod
    def column_values(self, rows: IdArray, columns: IdArray, missing: float) -> FloatArray:
        """[len(rows), columns.length]: column columns[i] of row rows[i] (rows may repeat), `missing` in places beyond
        the vocabulary."""

    @abstractmethod
    def above(self, row: int, threshold: float) -> tuple[IdArray, FloatArray]:
        """(ids ascending, values) of the row's values >= threshold, by a pass over all of it."""

    @abstractmethod
    def kth_largest(self, row: int, k: int) -> float:
        """k = 1 for the largest."""

    @abstractmethod
    def ranks(self, rows: IdArray, ids: IdArray) -> list[int]:
        """1 where values[rows[i], ids[i]] is the row's largest; among equals the lower id comes first."""


def vocab_rows(values: torch.Tensor) -> VocabRows:
    """The rows of a fp32 tensor [n, vocab] on any device. Shares its memory where it is contiguous."""
    from shoal.model_shards.sampling.device_rows import DeviceRows
    from shoal.model_shards.sampling.host_rows import HostRows

    assert values.dtype == torch.float32, f"logits must be fp32, not {values.dtype}"
    assert values.ndim == 2
    return HostRows(values) if values.device.type == "cpu" else DeviceRows(values)
