"""Sums over ranks in the order of the ranks, for gloo, whose own sums are taken in an order that depends on where an
element lies in the tensor: with more than two ranks, a token's hidden state would differ in its last bits with the
number of tokens beside it. What travels is what a ring would send: each rank gets its part of every other's tensor.

NCCL chooses its order by the size of the tensor too; the operators on a GPU are not invariant to the batch either.
"""

from __future__ import annotations

import torch
import torch.distributed as dist


def ordered_reduce_scatter(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """x [size * n, ...] on each of the group's ranks -> the sum's rows index * n : (index + 1) * n."""
    received = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, x.contiguous(), group=group)
    parts = received.view(dist.get_world_size(group), -1, *x.shape[1:])
    total = parts[0] + parts[1]
    for part in parts[2:]:
        total += part
    return total


def ordered_all_reduce(x: torch.Tensor, group: dist.ProcessGroup) -> None:
    """The sum, in place; the same bits on every rank, and those of `ordered_reduce_scatter`."""
    size = dist.get_world_size(group)
    flat = x.reshape(-1)
    padded = torch.nn.functional.pad(flat, (0, -len(flat) % size))
    share = ordered_reduce_scatter(padded, group)
    whole = torch.empty_like(padded)
    dist.all_gather_single(whole, share, group=group)
    x.copy_(whole[: len(flat)].view_as(x))
