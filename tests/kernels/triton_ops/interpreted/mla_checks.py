"""Latent attention in the interpreter. Pages hold NaN wherever no token was stored."""

from __future__ import annotations

import pytest
import torch

from shoal.kernels.triton_ops.launch import SM80
from shoal.kernels.triton_ops.mla import mla_attention_launches

# A step of chunked prefill: a decode, the tail of a prompt, a whole prompt.
MIXED = {0: (39, 40), 1: (17, 20), 2: (0, 5)}
LENGTHS = (40, 20, 5)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


def stored_by_reference(ops, reference, batch):
    """Pages of `ops` with every token in them, without an interpreted prefill."""
    pages = batch.pages(ops)
    pages.k.copy_(batch.stored(reference).k)
    return pages


@pytest.fixture
def check(triton_ops, reference, latent):
    """Stores all of a batch, then runs a step of it, and compares stored rows, rotated queries and outputs."""

    def run(lengths, chunks, heads, dims, dtype=torch.float32, block_size=16) -> None:
        ops, tolerance = triton_ops(dtype), TOLERANCE[dtype]
        batch = latent.LatentBatch.random(lengths, heads, dims, block_size, dtype)
        pages, expected_pages = stored_by_reference(ops, reference, batch), batch.stored(reference)
        slots = batch.meta(chunks).slot_mapping
        pages.k.flatten(0, 1)[slots] = torch.nan  # what the step stores itself
        out, q_rope = batch.run(ops, pages, chunks)
        torch.testing.assert_close(pages.k, expected_pages.k, atol=tolerance, rtol=tolerance, equal_nan=True)
        expected, rotated = batch.run(reference, expected_pages, chunks)
        assert out.dtype == dtype
        torch.testing.assert_close(q_rope.float(), rotated, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(out.float(), expected, atol=tolerance, rtol=tolerance)

    return run


@pytest.mark.parametrize("heads", [1, 3, 20])
def test_heads_fewer_and_more_than_a_program_has_rows(check, heads: int) -> None:
    check(LENGTHS, MIXED, heads, (32, 16))


@pytest.mark.parametrize("dims", [(512, 64), (40, 10), (16, 8), (6, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_width_and_dtype(check, dims: tuple[int, int], dtype: torch.dtype) -> None:
    check(LENGTHS, MIXED, 4, dims, dtype)


@pytest.mark.parametrize("block_size", [1, 24, 64])
def test_every_block_size(check, block_size: int) -> None:
    check(LENGTHS, MIXED, 2, (32, 16), block_size=block_size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_long_decodes_are_split_and_merged(check, dtype: torch.dtype) -> None:
    """257 keys make two segments; beside them a sequence of one token, which has one of the launch's three."""
    lengths = (257, 1, 600)
    check(lengths, {i: (n - 1, n) for i, n in enumerate(lengths)}, 2, (32, 16), dtype)


def test_a_decode_s_bits_do_not_depend_on_its_neighbours(triton_ops, reference, latent) -> None:
    ops = triton_ops(torch.float32)
    batch = latent.LatentBatch.random((300, 40, 600), 4)
    pages = stored_by_reference(ops, reference, batch)
    together, _ = batch.run(ops, pages, {i: (n - 1, n) for i, n in enumerate(batch.lengths)})
    for i, n in enumerate(batch.lengths):
        assert torch.equal(batch.run(ops, pages, {i: (n - 1, n)})[0][0], together[i])


def test_a_captured_step_s_padding_writes_nothing(triton_ops, reference, latent) -> None:
    """Sequences without a token fill up a captured step: their rows of the output stay as they were."""
    ops = triton_ops(torch.float32)
    batch = latent.LatentBatch.random((300, 40))
    pages, meta = stored_by_reference(ops, reference, batch), batch.meta({0: (299, 300), 1: (39, 40)})
    meta.query_start = torch.tensor([0, 1, 1], dtype=torch.int32)
    out = torch.full((2, 4, 32), 7.0)
    for launch in mla_attention_launches(torch.ones(2, 4, 32), torch.ones(2, 4, 16), pages, meta, 0.1, out, SM80):
        launch.run()
    assert (out[1] == 7.0).all()
    assert not (out[0] == 7.0).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_head_has_its_own_matrix(triton_ops, dtype: torch.dtype) -> None:
    ops = triton_ops(dtype)
    x, weight = torch.randn(7, 8, 24).to(dtype)[:, :5], torch.randn(5, 19, 24).to(dtype)
    out = ops.head_linear(x, ops.prepare_heads(weight.clone()))
    expected = torch.einsum("nhi,hoi->nho", x.float(), weight.float())
    assert out.is_contiguous()
    torch.testing.assert_close(out.float(), expected, atol=TOLERANCE[dtype] * 4, rtol=TOLERANCE[dtype])
