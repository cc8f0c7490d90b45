"""One source for every vector width: each is built for this CPU (the compiler splits what it has no registers for),
and all give the same bits where each lane is one output."""

from __future__ import annotations

import pytest
import torch

from shoal.kernels.cpu.build import build
from shoal.kernels.cpu.native import Native
from shoal.kernels.cpu.ops import CpuOps


@pytest.fixture(scope="module", params=[4, 16])
def ops_of_width(request, native_ops, tmp_path_factory) -> CpuOps:
    flags = (f"-DSHOAL_VL={request.param}", "-O2")  # -O2: products and sums fuse, as at -O3
    ops = CpuOps(Native(build(tmp_path_factory.mktemp("native"), flags)))
    assert f"{request.param} floats a vector" in ops.explain()["linear"]
    return ops


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_has_the_same_bits_in_every_width(ops_of_width, native_ops, dtype) -> None:
    weight, bias, x = torch.randn(77, 500).to(dtype), torch.randn(77), torch.randn(40, 500)
    for rows in (1, 3, 40):
        got, expected = (ops.linear(x[:rows], ops.prepare_linear(weight, bias)) for ops in (ops_of_width, native_ops))
        assert torch.equal(got, expected)
    index = torch.tensor([76, 3, 40])
    assert torch.equal(ops_of_width.prepare_linear(weight).rows(index), weight[index].float())


@pytest.mark.parametrize("head_dim", [64, 80, 96])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_equals_the_reference_in_every_width(ops_of_width, reference, random_batch, head_dim, dtype) -> None:
    batch = random_batch.random((290, 70, 1), (6, 2), head_dim, dtype=dtype)
    q, meta = batch.step({1: (69, 70), 2: (0, 1), 0: (30, 290)})
    out, lse = ops_of_width.paged_attention_lse(q, batch.pages(ops_of_width), meta, 0.1, 150)
    expected, expected_lse = reference.paged_attention_lse(q, batch.pages(reference), meta, 0.1, 150)
    torch.testing.assert_close(out, expected, atol=5e-6, rtol=1e-5)
    torch.testing.assert_close(lse, expected_lse, atol=5e-6, rtol=1e-5)


@pytest.mark.parametrize("dims", [(64, 16), (40, 10)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_latent_attention_equals_the_reference_in_every_width(ops_of_width, reference, latent, dims, dtype) -> None:
    batch, chunks = latent.LatentBatch.random((290, 70, 1), 3, dims, dtype=dtype), {1: (69, 70), 0: (250, 290)}
    pages, expected_pages = batch.stored(ops_of_width), batch.stored(reference)
    expected_pages.k.copy_(pages.k)
    out, q_rope = batch.run(ops_of_width, pages, chunks)
    q = torch.cat([batch.q[i][start:end] for i, (start, end) in chunks.items()])
    expected = reference.paged_mla_attention(q, q_rope, expected_pages, batch.meta(chunks), batch.scale)
    torch.testing.assert_close(out, expected, atol=5e-6, rtol=1e-5)


def test_pointwise_equals_the_reference_in_every_width(ops_of_width, reference) -> None:
    x, weight = torch.randn(5, 2 * 77), torch.randn(2 * 77)
    for name in ("silu_and_mul", "gelu_tanh_and_mul"):
        torch.testing.assert_close(getattr(ops_of_width, name)(x), getattr(reference, name)(x), atol=2e-6, rtol=2e-6)
    got, expected = (ops.rms_norm(x, weight, 1e-5, x)[0] for ops in (ops_of_width, reference))
    torch.testing.assert_close(got, expected, atol=2e-6, rtol=2e-6)
