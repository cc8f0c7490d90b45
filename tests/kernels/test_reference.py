"""The definition of right, against independent formulas."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

CPU = torch.device("cpu")


def close(got: torch.Tensor, expected: torch.Tensor, atol: float = 1e-5) -> None:
    torch.testing.assert_close(got, expected, atol=atol, rtol=1e-5)


def test_attention_of_a_whole_prompt_is_torch_causal_attention(reference, random_batch) -> None:
    batch = random_batch.random((37,), heads=(6, 2))
    q, meta = batch.whole()
    out = reference.paged_attention(q, batch.pages(reference), meta, 0.125)
    expected = F.scaled_dot_product_attention(
        q.transpose(0, 1), batch.k[0].transpose(0, 1), batch.v[0].transpose(0, 1), is_causal=True, enable_gqa=True
    ).transpose(0, 1)
    close(out, expected)


def test_a_window_of_one_sees_only_itself(reference, random_batch) -> None:
    batch = random_batch.random((20,), heads=(2, 2))
    q, meta = batch.whole()
    out, lse = reference.paged_attention_lse(q, batch.pages(reference), meta, 0.5, window=1)
    close(out, batch.v[0])
    close(lse, (q * batch.k[0]).sum(-1) * 0.5)


def test_a_window_as_long_as_the_sequence_changes_nothing(reference, random_batch) -> None:
    batch = random_batch.random((20, 5))
    q, meta = batch.whole()
    pages = batch.pages(reference)
    assert torch.equal(
        reference.paged_attention(q, pages, meta, 0.1, window=20), reference.paged_attention(q, pages, meta, 0.1)
    )


def test_lse_merges_two_halves_exactly(reference, random_batch) -> None:
    """softmax over a union of keys is the lse-weighted mean of the softmaxes over its parts."""
    batch = random_batch.random((48,), heads=(2, 1))
    q, meta = batch.step({0: (47, 48)})
    pages = batch.pages(reference)
    whole, whole_lse = reference.paged_attention_lse(q, pages, meta, 0.125)
    near, near_lse = reference.paged_attention_lse(q, pages, meta, 0.125, window=16)
    scores = torch.einsum("qhd,kd->qhk", q, batch.k[0][:32, 0]) * 0.125
    far, far_lse = torch.softmax(scores, -1) @ batch.v[0][:32, 0], torch.logsumexp(scores, -1)
    close(torch.logaddexp(near_lse, far_lse), whole_lse)
    weight = torch.sigmoid(near_lse - far_lse).unsqueeze(-1)
    close(weight * near + (1 - weight) * far, whole)


def test_rms_norm_by_hand(reference) -> None:
    x = torch.tensor([[3.0, 4.0]])
    out, residual = reference.rms_norm(x, torch.tensor([1.0, 2.0]), 0.0)
    close(out, torch.tensor([[3 / math.sqrt(12.5), 8 / math.sqrt(12.5)]]))
    assert residual is x
    out, residual = reference.rms_norm(x, torch.ones(2), 0.0, residual=torch.tensor([[0.0, -1.0]]))
    close(residual, torch.tensor([[3.0, 3.0]]))
    close(out, torch.ones(1, 2))


def test_rotary_by_a_quarter_turn(reference) -> None:
    """Position 1 rotates both pairs of channels (i, i + 2) by 90 degrees; position 0 by nothing."""
    cos_sin = torch.tensor([[1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0]])
    q = torch.tensor([[[1.0, 2.0, 3.0, 4.0]], [[1.0, 2.0, 3.0, 4.0]]])
    k = q.clone()
    reference.rotary(q, k, torch.tensor([0, 1]), cos_sin)
    assert q.tolist() == k.tolist() == [[[1, 2, 3, 4]], [[-3, -4, 1, 2]]]


def test_store_skips_slot_minus_one(reference, random_batch) -> None:
    batch = random_batch.random((3,), heads=(1, 1))
    pages = batch.pages(reference)
    before = pages.k.clone()
    reference.store_kv(torch.ones(2, 1, 64), torch.ones(2, 1, 64), pages, torch.tensor([-1, 16]))
    changed = (pages.k != before) & ~before.isnan()
    assert changed.flatten(0, 1).any(-1).nonzero().tolist() == [[16, 0]]


def test_activations_by_formula(reference) -> None:
    gate, up = torch.tensor([[-2.0, 0.0, 3.0]]), torch.tensor([[1.0, 5.0, 2.0]])
    x = torch.cat([gate, up], dim=-1)
    close(reference.silu_and_mul(x), gate / (1 + torch.exp(-gate)) * up)
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    close(reference.gelu_tanh_and_mul(x), 0.5 * gate * (1 + torch.tanh(inner)) * up)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_sums_exact_products_in_fp32(reference, dtype: torch.dtype) -> None:
    weight, bias, x = torch.randn(7, 33).to(dtype), torch.randn(7).to(dtype), torch.randn(2, 3, 33)
    prepared = reference.prepare_linear(weight, bias)
    close(reference.linear(x, prepared), (x.double() @ weight.double().T + bias.double()).float())
    assert torch.equal(prepared.rows(torch.tensor([6, 0])), weight[[6, 0]].float())
    assert (prepared.out_features, prepared.in_features, prepared.nbytes) == (7, 33, 4 * (7 * 33 + 7))


def test_a_weight_that_is_no_matrix_is_refused(reference) -> None:
    with pytest.raises(ValueError, match="matrix"):
        reference.prepare_linear(torch.randn(3))
    with pytest.raises(ValueError, match="bias"):
        reference.prepare_linear(torch.randn(3, 2), torch.randn(4))
