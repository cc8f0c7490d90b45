"""How the keys and values of one layer lie in memory. The pool holds pages of bytes; the tag says how to read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from shoal.configs.errors import ConfigError
from shoal.kernels.huge_pages import lazy_zeros

Layout = Literal["canonical", "cpu_packed"]


@dataclass(frozen=True, slots=True)
class PageFormat:
    """The page layout of one layer on one rank.

    canonical (reference, Triton): K and V are each [num_blocks, block_size, num_kv_heads, head_dim].
    cpu_packed (native CPU unit):  K is [num_blocks, num_kv_heads, head_dim / 2, block_size, 2], so that one vector
    load holds one pair of channels of consecutive tokens and dot products need no horizontal sums; V is
    [num_blocks, num_kv_heads, block_size, head_dim]. The block size is a multiple of 16.
    """

    layout: Layout
    block_size: int
    """Tokens (slots) per block."""
    num_kv_heads: int
    """On this rank."""
    head_dim: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.layout == "cpu_packed" and (self.block_size % 16 or self.head_dim % 2):
            raise ConfigError(
                f"The CPU's page layout needs a block size that 16 divides and an even head_dim, not {self.block_size} "
                f"and {self.head_dim}; choose block_size 16 or 32, or the backend 'torch_cpu'.",
                param="block_size",
            )

    @property
    def bytes_per_block(self) -> int:
        """K and V of one block in one layer."""
        return 2 * self.block_size * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    def k_shape(self, num_blocks: int) -> tuple[int, ...]:
        if self.layout == "cpu_packed":
            return (num_blocks, self.num_kv_heads, self.head_dim // 2, self.block_size, 2)
        return (num_blocks, self.block_size, self.num_kv_heads, self.head_dim)

    def v_shape(self, num_blocks: int) -> tuple[int, ...]:
        if self.layout == "cpu_packed":
            return (num_blocks, self.num_kv_heads, self.block_size, self.head_dim)
        return (num_blocks, self.block_size, self.num_kv_heads, self.head_dim)

    def allocate(self, num_blocks: int, device: torch.device) -> KVPages:
        """Zeroed pages, so that padded reads of the null block are finite. The host's take memory as they fill:
        in small pages, since a step should not wait for the zeros of huge ones."""
        shapes = self.k_shape(num_blocks), self.v_shape(num_blocks)
        if device.type == "cpu":
            k, v = (lazy_zeros(shape, self.dtype, huge_pages=False) for shape in shapes)
        else:
            k, v = (torch.zeros(shape, dtype=self.dtype, device=device) for shape in shapes)
        return KVPages(self, k, v)


@dataclass(frozen=True, slots=True)
class KVPages:
    """The pages of one layer: `k` and `v` in the shapes that `format` gives."""

    format: PageFormat
    k: torch.Tensor
    v: torch.Tensor

    def canonical(self, block_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of these blocks as [len(block_ids), block_size, num_kv_heads, head_dim] (a copy)."""
        k, v = self.k[block_ids], self.v[block_ids]
        if self.format.layout == "cpu_packed":
            k = k.permute(0, 3, 1, 2, 4).flatten(3)
            v = v.transpose(1, 2)
        return k, v

    def copy_blocks(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copies whole blocks (copy-on-write), block ids as int64 [n]."""
        self.k[targets] = self.k[sources]
        self.v[targets] = self.v[sources]
