"""Rows on an accelerator. Only maxima (exact in any order) are left to the library's reductions; sums are made as a
tree of element-wise additions, since a library may cut a sum differently for another number of rows."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from shoal.model_shards.sampling.vocab_rows import Columns, FloatArray, IdArray, VocabRows


def to_device(array: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """A copy on the device. From pinned memory, so that the host need not wait until the device has come so far."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


class DeviceRows(VocabRows):
    def __init__(self, values: torch.Tensor) -> None:
        self._values = values.detach()
        self.columns = Columns.of(values.shape[1])

    def __len__(self) -> int:
        return self._values.shape[0]

    def argmax(self, rows: IdArray) -> tuple[IdArray, FloatArray]:
        values, ids = self._some(rows).max(dim=1)
        return _host_ids(ids), _host(values)

    def take(self, rows: IdArray, ids: IdArray) -> FloatArray:
        return _host(self._values[self._index(rows), self._index(ids)])

    def put(self, rows: IdArray, ids: IdArray, values: FloatArray | float) -> None:
        placed = to_device(np.asarray(values, dtype=np.float32), self._values.device)
        self._values[self._index(rows), self._index(ids)] = placed

    def keep_only(self, row: int, ids: IdArray) -> None:
        index = self._index(ids)
        kept = self._values[row, index]
        self._values[row] = -torch.inf
        self._values[row, index] = kept

    def select(self, rows: IdArray) -> DeviceRows:
        return DeviceRows(self._values[self._index(rows)])

    def softmax(self, rows: IdArray, temperatures: FloatArray) -> DeviceRows:
        scaled = self._some(rows) / to_device(temperatures, self._values.device)[:, None]
        weights = torch.exp(scaled - scaled.amax(dim=1, keepdim=True))
        total = _tree_sum(_tree_sum(self._lines(weights, 0.0)))
        return DeviceRows(weights / total[:, None])

    def column_max(self, rows: IdArray) -> FloatArray:
        return _host(self._lines(self._some(rows), -torch.inf).amax(dim=1))

    def column_sum(self, rows: IdArray) -> FloatArray:
        return _host(_tree_sum(self._lines(self._some(rows), 0.0)))

    def column_values(self, rows: IdArray, columns: IdArray, missing: float) -> FloatArray:
        ids = self.columns.ids(columns)
        inside = self._index(np.minimum(ids, self.columns.vocab - 1))
        values = _host(self._values[self._index(rows)[:, None], inside])
        values[ids >= self.columns.vocab] = missing
        return values

    def above(self, row: int, threshold: float) -> tuple[IdArray, FloatArray]:
        ids = torch.nonzero(self._values[row] >= threshold).squeeze(1)
        return _host_ids(ids), _host(self._values[row, ids])

    def kth_largest(self, row: int, k: int) -> float:
        return float(self._values[row].kthvalue(self.columns.vocab - k + 1).values)

    def ranks(self, rows: IdArray, ids: IdArray) -> list[int]:
        values = self._some(rows)
        targets = self._index(ids)[:, None]
        own = values.gather(1, targets)
        before = torch.arange(self.columns.vocab, device=values.device) < targets
        ahead = (values > own) | ((values == own) & before)
        return [1 + count for count in ahead.sum(dim=1).tolist()]

    def _some(self, rows: IdArray) -> torch.Tensor:
        return self._values if len(rows) == len(self) else self._values[self._index(rows)]

    def _index(self, ids: IdArray) -> torch.Tensor:
        return to_device(ids, self._values.device)

    def _lines(self, values: torch.Tensor, missing: float) -> torch.Tensor:
        """[m, vocab] -> [m, columns.length, columns.count]"""
        cut = self.columns
        padded = torch.nn.functional.pad(values, (0, cut.length * cut.count - cut.vocab), value=missing)
        return padded.view(len(values), cut.length, cut.count)


def _tree_sum(values: torch.Tensor) -> torch.Tensor:
    """The sum over axis 1, pairing its first half with its second half until one line is left."""
    while values.shape[1] > 1:
        half = values.shape[1] // 2
        paired = values[:, :half] + values[:, half : 2 * half]
        values = torch.cat((paired, values[:, 2 * half :]), dim=1)
    return values[:, 0]


def _host(values: torch.Tensor) -> FloatArray:
    array: FloatArray = values.cpu().numpy()
    return array


def _host_ids(ids: torch.Tensor) -> npt.NDArray[np.int64]:
    array: npt.NDArray[np.int64] = ids.cpu().numpy()
    return array
