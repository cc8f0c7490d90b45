"""The merge of partial attention in the interpreter: the operator's default in torch says what is right."""

from __future__ import annotations

import pytest
import torch

from shoal.kernels.ops import Ops

NOTHING = -torch.inf


@pytest.mark.parametrize("head_dim", [16, 80, 128, 256])
@pytest.mark.parametrize("tokens", [0, 1, 37])
def test_parts_merge_as_the_reference_merges_them(triton_ops, reference, tokens: int, head_dim: int) -> None:
    packed, other = torch.randn(2, tokens, 3, head_dim + 1) * 3  # as they travel: the log-sum-exp behind the output
    lse, other_lse = packed[..., -1], other[..., -1]
    lse[::3], other_lse[::2] = NOTHING, NOTHING
    expected, expected_lse = packed[..., :-1].clone(), lse.clone()
    Ops.merge_attention(reference, expected, expected_lse, other[..., :-1], other_lse)
    triton_ops(torch.bfloat16).merge_attention(packed[..., :-1], lse, other[..., :-1], other_lse)
    torch.testing.assert_close(packed[..., :-1], expected, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(lse, expected_lse, atol=2e-6, rtol=1e-5)
    assert not packed[..., :-1].isnan().any()


def test_a_nan_stays_in_its_row(triton_ops) -> None:
    out, other, lse, other_lse = torch.randn(4, 1, 64), torch.randn(4, 1, 64), torch.zeros(4, 1), torch.zeros(4, 1)
    lse[1], other_lse[2] = torch.nan, torch.nan
    triton_ops(torch.float32).merge_attention(out, lse, other, other_lse)
    assert out[[1, 2]].isnan().all()
    assert not out[[0, 3]].isnan().any()
