"""The total order of a row's tokens (larger logit first, the lower id first among equals) as integers: one number that
holds both is compared, sorted and sent as one. NaN comes before everything, so that it cannot be overlooked."""

from __future__ import annotations

import torch

_MAX_ID = (1 << 31) - 1
_LOW = (1 << 32) - 1


def order_keys(values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """fp32 values and int64 ids, of shapes that broadcast -> int64, larger for what comes first."""
    bits = (values + 0.0).view(torch.int32).to(torch.int64)  # -0.0 becomes 0.0: they are equal
    ascending = torch.where(bits < 0, bits ^ _MAX_ID, bits).masked_fill(values.isnan(), _MAX_ID)
    return (ascending << 32) + (_MAX_ID - ids)


def top_keys(values: torch.Tensor, first_id: int, count: int) -> torch.Tensor:
    """The first `count` of the total order of each row: fp32 [n, width], whose ids begin with `first_id` -> int64
    [n, count], descending."""
    if count == 1:
        largest, ids = values.max(dim=1, keepdim=True)  # the first of the largest
        return order_keys(largest, ids + first_id)
    if values.device.type != "cpu":  # the host does not look at what is computed
        return _top_of_keys(values, first_id, count)
    # Floats take an eighth of the time of keys, but which of the values equal to the last are taken is anyone's guess.
    found, ids = torch.topk(values, count, dim=1)
    keys = order_keys(found, ids + first_id)
    crowded = (values >= found[:, -1:]).sum(dim=1) > count
    if crowded.any():
        keys[crowded] = _top_of_keys(values[crowded], first_id, count)
    return keys.sort(dim=1, descending=True).values


def _top_of_keys(values: torch.Tensor, first_id: int, count: int) -> torch.Tensor:
    ids = torch.arange(first_id, first_id + values.shape[1], device=values.device)
    return torch.topk(order_keys(values, ids), count, dim=1).values


def key_values(keys: torch.Tensor) -> torch.Tensor:
    """The fp32 logits in keys."""
    ascending = keys >> 32
    bits = torch.where(ascending < 0, ascending ^ _MAX_ID, ascending)
    return bits.to(torch.int32).view(torch.float32)


def key_ids(keys: torch.Tensor) -> torch.Tensor:
    """The int64 ids in keys."""
    return _MAX_ID - (keys & _LOW)
