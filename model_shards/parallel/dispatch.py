"""Bringing rows to experts: in the order of the experts' slots, so that each expert's rows are neighbours."""

from __future__ import annotations

import torch


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
