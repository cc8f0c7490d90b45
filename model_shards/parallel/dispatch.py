"""Bringing rows to the experts' slots, and what became of them back, where ranks hold whole experts.

    sort by slot -> exchange counts -> rows to the slots' ranks -> (experts) -> results back -> the rows' own order

Every row arrives: there is no capacity beyond which rows are dropped. Every rank takes part in every exchange, whether
or not it has rows or gets some. The counts are wanted in the host's memory, to size what follows: on a GPU the one
place in a layer where the host waits for the device.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch

from shoal.model_shards.parallel.context import ParallelContext


def sort_by_slot(slots: torch.Tensor, num_slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    """slots int64 [m], each in [0, num_slots) -> (order int64 [m]: the rows, slot by slot, in their own order within
    one; starts int32 [num_slots + 1]: those of slot s are order[starts[s] : starts[s + 1]]). Does not wait for the
    device."""
    ordered, order = torch.sort(slots, stable=True)
    bounds = torch.arange(num_slots + 1, device=slots.device)
    return order, torch.searchsorted(ordered, bounds, out_int32=True)


def inverse(order: torch.Tensor) -> torch.Tensor:
    """The permutation that undoes `order` int64 [m]."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


@dataclass(frozen=True, slots=True)
class Arrivals:
    """The rows that one exchange brought to this rank, and what it takes to answer them."""

    rows: torch.Tensor
    """[received, hidden], slot by slot."""
    starts: torch.Tensor
    """int32 [slots of this rank + 1]: rows starts[s] : starts[s + 1] are for its s-th slot."""
    places: torch.Tensor
    """int64 [n, k]: where the answers to this rank's own rows will be in what `answer` gives."""
    _order: torch.Tensor
    """Where each of `rows` was as it arrived, rank by rank."""
    _sent: list[int]
    _received: list[int]
    """Rows to and from each rank."""


class ExpertDispatch:
    """The exchanges over the ranks of a stage, each of which has `num_slots` slots: rank r has slots r * num_slots :
    (r + 1) * num_slots of the layer."""

    def __init__(self, context: ParallelContext, num_slots: int) -> None:
        self._context, self._num_slots = context, num_slots
        self.rows: Counter[str] = Counter()
        """Rows "sent" and "received" so far, a rank's own to itself included."""

    def send(self, x: torch.Tensor, slots: torch.Tensor) -> Arrivals:
        """x [n, hidden], slots int64 [n, k]: each row goes to k slots of the layer. On all ranks of the stage."""
        ranks, num_slots = self._context.size("expert"), self._num_slots
        departure, starts = sort_by_slot(slots.flatten(), ranks * num_slots)
        leaving = starts.diff()
        even = [num_slots] * ranks
        arriving = self._context.all_to_all(leaving, even, even)
        sent, received = torch.stack((leaving, arriving)).view(2, ranks, num_slots).sum(2).tolist()
        rows = self._context.all_to_all(x[departure // slots.shape[1]], sent, received)
        # From each rank the rows come slot by slot; now slot by slot over all ranks.
        each = torch.arange(num_slots, device=x.device).repeat(ranks)
        order, starts = sort_by_slot(torch.repeat_interleave(each, arriving, output_size=len(rows)), num_slots)
        self.rows.update(sent=sum(sent), received=sum(received))
        return Arrivals(rows[order], starts, inverse(departure).view(slots.shape), order, sent, received)

    def answer(self, arrivals: Arrivals, results: torch.Tensor) -> torch.Tensor:
        """results [received, hidden], one for each of `arrivals.rows` -> [n * k, hidden]: those of the rows that this
        rank sent, at `arrivals.places`. On all ranks of the stage."""
        return self._context.all_to_all(results[inverse(arrivals._order)], arrivals._received, arrivals._sent)
