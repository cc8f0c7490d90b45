"""Page layouts: what the bytes mean, and what is refused."""

from __future__ import annotations

import pytest
import torch

from shoal.configs.errors import ConfigError
from shoal.kernels.page_format import PageFormat

CPU = torch.device("cpu")


@pytest.mark.parametrize("layout", ["canonical", "cpu_packed"])
def test_canonical_undoes_the_layout(layout, reference, native_ops) -> None:
    ops = reference if layout == "canonical" else native_ops
    page = PageFormat(layout, 16, 2, 32, torch.float32)
    pages = page.allocate(5, CPU)
    k, v = torch.randn(80, 2, 32), torch.randn(80, 2, 32)
    ops.store_kv(k, v, pages, torch.arange(80))
    got_k, got_v = pages.canonical(torch.tensor([4, 1]))
    assert torch.equal(got_k, k.view(5, 16, 2, 32)[[4, 1]])
    assert torch.equal(got_v, v.view(5, 16, 2, 32)[[4, 1]])
    assert page.bytes_per_block * 5 == pages.k.nbytes + pages.v.nbytes


def test_pages_start_as_zeros_and_blocks_copy_whole() -> None:
    pages = PageFormat("cpu_packed", 16, 2, 32, torch.bfloat16).allocate(4, CPU)
    assert not pages.k.any()
    assert not pages.v.any()
    pages.k[1], pages.v[1] = 3, 4
    pages.copy_blocks(torch.tensor([1]), torch.tensor([3]))
    assert pages.k.flatten(1).float().sum(1).tolist() == [0, 3072, 0, 3072]
    assert pages.v.flatten(1).float().sum(1).tolist() == [0, 4096, 0, 4096]


@pytest.mark.parametrize(("block_size", "head_dim"), [(8, 64), (24, 64), (16, 33)])
def test_a_size_the_native_unit_cannot_read_is_refused(block_size, head_dim) -> None:
    with pytest.raises(ConfigError, match="16 divides"):
        PageFormat("cpu_packed", block_size, 2, head_dim, torch.float32)
    PageFormat("canonical", block_size, 2, head_dim, torch.float32)
