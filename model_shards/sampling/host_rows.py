"""Rows in the memory of the host, each worked on by itself on the calling thread.

numpy's reductions are vectorised and never split a row; its exponentials are slower than those of torch's softmax. One
row at a time keeps torch from opening a parallel region: it would gain a millisecond on an idle machine, and lose the
scheduler's time slice (8 ms and more) whenever another process holds one of the cores.
"""

from __future__ import annotations

import numpy as np
import torch

from shoal.model_shards.sampling.vocab_rows import Columns, FloatArray, IdArray, VocabRows


class HostRows(VocabRows):
    def __init__(self, values: torch.Tensor) -> None:
        self._tensor = values.detach().contiguous()
        self._values: FloatArray = self._tensor.numpy()
        self.columns = Columns.of(values.shape[1])

    def __len__(self) -> int:
        return len(self._values)

    def argmax(self, rows: IdArray) -> tuple[IdArray, FloatArray]:
        if len(rows) == len(self):
            ids = self._values.argmax(axis=1)
        else:
            ids = np.array([self._values[row].argmax() for row in rows], dtype=np.int64)
        return ids, self._values[rows, ids]

    def take(self, rows: IdArray, ids: IdArray) -> FloatArray:
        taken: FloatArray = self._values[rows, ids]
        return taken

    def put(self, rows: IdArray, ids: IdArray, values: FloatArray | float) -> None:
        self._values[rows, ids] = values

    def keep_only(self, row: int, ids: IdArray) -> None:
        kept = self._values[row, ids]
        self._values[row] = -np.inf
        self._values[row, ids] = kept

    def select(self, rows: IdArray) -> HostRows:
        return HostRows(torch.from_numpy(self._values[rows]))

    def softmax(self, rows: IdArray, temperatures: FloatArray) -> HostRows:
        result = torch.empty(len(rows), self.columns.vocab)
        scaled = torch.empty(self.columns.vocab)
        for out, row, temperature in zip(result, rows.tolist(), temperatures, strict=True):
            source = self._tensor[row]
            if temperature != 1.0:
                np.divide(self._values[row], temperature, out=scaled.numpy())
                source = scaled
            torch.softmax(source, dim=0, out=out)
        return HostRows(result)

    def column_max(self, rows: IdArray) -> FloatArray:
        return self._reduce(np.maximum, rows)

    def column_sum(self, rows: IdArray) -> FloatArray:
        return self._reduce(np.add, rows)

    def column_values(self, rows: IdArray, columns: IdArray, missing: float) -> FloatArray:
        ids = self.columns.ids(columns)
        # One flat index is read twice as fast as a pair; what lies beyond the row is replaced below.
        places = ids + self.columns.vocab * rows[:, None]
        values = self._values.reshape(-1).take(places, mode="clip")
        values[ids >= self.columns.vocab] = missing
        return values

    def above(self, row: int, threshold: float) -> tuple[IdArray, FloatArray]:
        ids = np.flatnonzero(self._values[row] >= threshold)
        return ids, self._values[row, ids]

    def kth_largest(self, row: int, k: int) -> float:
        return float(np.partition(self._values[row], -k)[-k])

    def ranks(self, rows: IdArray, ids: IdArray) -> list[int]:
        ranks = []
        for row, token_id in zip(rows.tolist(), ids.tolist(), strict=True):
            values = self._values[row]
            value = values[token_id]
            larger, tied_before = values > value, values[:token_id] == value
            ranks.append(1 + int(np.count_nonzero(larger)) + int(np.count_nonzero(tied_before)))
        return ranks

    def _reduce(self, operation: np.ufunc, rows: IdArray) -> FloatArray:
        cut = self.columns
        rest = cut.vocab - cut.last_line
        result = np.empty((len(rows), cut.count), dtype=np.float32)
        for out, row in zip(result, rows, strict=True):
            values = self._values[row]
            if cut.last_line:
                operation.reduce(values[: cut.last_line].reshape(-1, cut.count), axis=0, out=out)
                operation(out[:rest], values[cut.last_line :], out=out[:rest])
            else:
                out[:] = values
        return result
