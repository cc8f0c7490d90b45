"""Norms, rotary embedding, activations and the page store on the CPU, against the reference."""

from __future__ import annotations

import pytest
import torch

from shoal.kernels.page_format import PageFormat

ROWS = [0, 1, 3, 70]


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("hidden", [1, 17, 576, 1152])
def test_rms_norm(cpu_ops, reference, rows, hidden) -> None:
    x, residual, weight = torch.randn(rows, hidden) * 3, torch.randn(rows, hidden), torch.randn(hidden)
    kept = residual.clone()
    for added in (None, residual):
        got, expected = (ops.rms_norm(x, weight, 1e-5, added) for ops in (cpu_ops, reference))
        close(got[0], expected[0])
        assert torch.equal(got[1], expected[1])
    assert torch.equal(residual, kept)


def test_rms_norm_of_a_view(cpu_ops, reference) -> None:
    wide, weight = torch.randn(5, 3, 64), torch.randn(64)
    close(cpu_ops.rms_norm(wide[:, 1], weight, 1e-6)[0], reference.rms_norm(wide[:, 1], weight, 1e-6)[0])


def test_rms_norm_of_zeros_is_zero(cpu_ops) -> None:
    assert not cpu_ops.rms_norm(torch.zeros(2, 32), torch.ones(32), 1e-6)[0].any()


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dim", [64, 80, 256])
def test_head_rms_norm_of_a_view(cpu_ops, reference, rows, dim) -> None:
    fused, weight = torch.randn(rows, 7, dim), torch.randn(dim)
    close(cpu_ops.head_rms_norm(fused[:, 2:6], weight, 1e-6), reference.head_rms_norm(fused[:, 2:6], weight, 1e-6))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dim", [32, 64, 80, 256])
def test_rotary_in_place_in_the_fused_projection(cpu_ops, reference, rows, dim) -> None:
    angles = torch.rand(100, dim // 2) * 6
    cos_sin, positions = torch.cat([angles.cos(), angles.sin()], -1), torch.randint(0, 100, (rows,))
    fused = torch.randn(rows, 8, dim)
    results = []
    for ops in (cpu_ops, reference):
        own = fused.clone()
        ops.rotary(own[:, :4], own[:, 4:6], positions, cos_sin)
        results.append(own)
    close(*results)
    assert torch.equal(results[0][:, 6:], fused[:, 6:])


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", [1, 5, 8, 1536, 2049])
@pytest.mark.parametrize("name", ["silu_and_mul", "gelu_tanh_and_mul"])
def test_gated_activations(cpu_ops, reference, rows, width, name) -> None:
    x = torch.randn(rows, 2 * width) * 4
    close(getattr(cpu_ops, name)(x), getattr(reference, name)(x))


@pytest.mark.parametrize("name", ["silu_and_mul", "gelu_tanh_and_mul"])
def test_activations_far_out(cpu_ops, reference, name) -> None:
    gate = torch.tensor([[-1e30, -200.0, -90.0, -30.0, 0.0, 30.0, 90.0, 1e30]])
    x = torch.cat([gate, torch.ones_like(gate)], dim=-1)
    close(getattr(cpu_ops, name)(x), getattr(reference, name)(x))
    x[0, 2] = torch.nan
    assert getattr(cpu_ops, name)(x).isnan().tolist()[0] == [False, False, True, False, False, False, False, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_size", [16, 32])
def test_store_writes_its_slots_and_no_other(cpu_ops, reference, dtype, block_size) -> None:
    fused = torch.randn(50, 9, 64) * torch.logspace(-30, 30, 50)[:, None, None]
    fused[3, :, 0], fused[4, :, 1], fused[5, :, 2] = torch.nan, torch.inf, 3.4e38  # 3.4e38 rounds to inf in bfloat16
    k, v = fused[:, 2:5], fused[:, 5:8]
    slots = torch.randperm(8 * block_size)[:50]
    slots[10] = -1
    stored = []
    for ops in (cpu_ops, reference):
        pages = PageFormat(ops.layout, block_size, 3, 64, dtype).allocate(8, torch.device("cpu"))
        ops.store_kv(k, v, pages, slots)
        stored.append(pages.canonical(torch.arange(8)))
    for got, expected in zip(*stored, strict=True):
        torch.testing.assert_close(got, expected, atol=0, rtol=0, equal_nan=True)


def test_rows_have_the_same_bits_in_any_batch(native_ops) -> None:
    x, weight = torch.randn(40, 576), torch.randn(576)
    for operator in (lambda x: native_ops.rms_norm(x, weight, 1e-5)[0], native_ops.silu_and_mul):
        whole = operator(x)
        assert all(torch.equal(operator(x[i : i + 1])[0], whole[i]) for i in range(40))
