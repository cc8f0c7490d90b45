"""Matrices of groups (experts), each packed as that of a linear weight, multiplied by one native call; and how rows
come to their groups and back (`experts.cpp`)."""

from __future__ import annotations

import numpy as np
import torch

from shoal.kernels.cpu.native import Native
from shoal.kernels.ops import GroupedWeight, Routing


class PackedGroups(GroupedWeight):
    """`packed`: what each group's matrix became, all in one form, without bias. They stay where they lie."""

    def __init__(self, native: Native, packed: list[torch.Tensor], out_features: int, in_features: int) -> None:
        self._native, self._packed = native, packed
        self.num_groups, self.out_features, self.in_features = len(packed), out_features, in_features
        # Asked for once, not in every step; a program that was recorded reads the array as it runs.
        self._table = np.array([tensor.data_ptr() for tensor in packed], dtype=np.uint64)
        self._addresses = self._table.ctypes.data

    def slot_tensors(self, slot: int) -> list[torch.Tensor]:
        return [self._packed[slot]]

    def multiply(self, x: torch.Tensor, starts: torch.Tensor, out: torch.Tensor) -> None:
        """Rows starts[g] : starts[g + 1] of out = those of x times the matrix of group g; x [rows, in_features] with
        contiguous columns, starts int32 and out contiguous."""
        self._native.grouped_linear(
            x.data_ptr(), x.stride(0), self._addresses, self._packed[0].itemsize, starts.data_ptr(), self.num_groups,
            out.data_ptr(), self.out_features, self.in_features, torch.get_num_threads(),
        )  # fmt: skip


class PackedQuantizedGroups(PackedGroups):
    """The same of quantized matrices of one format."""

    def __init__(
        self, native: Native, packed: list[torch.Tensor], out_features: int, in_features: int, code: int
    ) -> None:
        super().__init__(native, packed, out_features, in_features)
        self._code = code

    def multiply(self, x: torch.Tensor, starts: torch.Tensor, out: torch.Tensor) -> None:
        self._native.grouped_quantized_linear(
            self._code, x.data_ptr(), x.stride(0), self._addresses, starts.data_ptr(), self.num_groups, out.data_ptr(),
            self.out_features, self.in_features, torch.get_num_threads(),
        )  # fmt: skip


def choose_experts(
    native: Native, logits: torch.Tensor, bias: torch.Tensor | None, routing: Routing
) -> tuple[torch.Tensor, torch.Tensor]:
    """`Ops.choose_experts` of contiguous tensors."""
    shape = len(logits), routing.experts_per_token
    assert (logits.shape[1], logits.dtype) == (routing.num_experts, torch.float32), (logits.shape, logits.dtype)
    assert bias is None or (bias.shape, bias.dtype) == (logits.shape[1:], torch.float32), bias
    ids, weights = torch.empty(shape, dtype=torch.int64), torch.empty(shape)
    native.choose_experts(
        logits.data_ptr(), None if bias is None else bias.data_ptr(), len(logits), routing.num_experts,
        routing.experts_per_token, routing.num_groups, routing.groups_per_token, routing.scoring == "sigmoid",
        routing.normalize, routing.scale, ids.data_ptr(), weights.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return ids, weights


def group_rows(
    native: Native, x: torch.Tensor, groups: torch.Tensor, num_groups: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`Ops.group_rows` of x with contiguous columns and contiguous `groups`."""
    (count, width), choices = x.shape, groups.shape[1]
    assert (groups.shape, groups.dtype) == ((count, choices), torch.int64), (groups.shape, groups.dtype)
    out, places = torch.empty((count * choices, width)), torch.empty((count, choices), dtype=torch.int64)
    starts = torch.empty((num_groups + 1,), dtype=torch.int32)
    native.group_rows(
        x.data_ptr(), x.stride(0), width, groups.data_ptr(), count, choices, num_groups, out.data_ptr(),
        places.data_ptr(), starts.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return out, starts, places


def combine_experts(native: Native, results: torch.Tensor, places: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """`Ops.combine_experts` of contiguous tensors."""
    (count, choices), width = places.shape, results.shape[1]
    assert (places.dtype, weights.dtype, results.dtype) == (torch.int64, torch.float32, torch.float32)
    assert weights.shape == places.shape, (weights.shape, places.shape)
    out = torch.empty((count, width))
    native.combine_experts(
        results.data_ptr(), width, places.data_ptr(), weights.data_ptr(), count, choices, out.data_ptr(),
        torch.get_num_threads(),
    )  # fmt: skip
    return out
