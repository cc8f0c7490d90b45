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

    Latent pages (`latent`) have one vector a token for all heads: K is [num_blocks, block_size, 1, head_dim] in either
    layout, and V has width 0, since the values are the first channels of the keys.
    """

    layout: Layout
    block_size: int
    """Tokens (slots) per block."""
    num_kv_heads: int
    """On this rank."""
    head_dim: int
    dtype: torch.dtype
    is_latent: bool = False

    @classmethod
    def latent(cls, layout: Layout, block_size: int, width: int, dtype: torch.dtype) -> PageFormat:
        """Multi-head latent attention (DeepSeek-AI 2024, arXiv:2405.04434): `width` numbers a token, the normed latent
        and behind it the rotated key that all heads share."""
        return cls(layout, block_size, 1, width, dtype, is_latent=True)

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
        vectors = 1 if self.is_latent else 2
        return vectors * self.block_size * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    def k_shape(self, num_blocks: int) -> tuple[int, ...]:
        if self.layout == "cpu_packed" and not self.is_latent:
            return (num_blocks, self.num_kv_heads, self.head_dim // 2, self.block_size, 2)
        return (num_blocks, self.block_size, self.num_kv_heads, self.head_dim)

    def v_shape(self, num_blocks: int) -> tuple[int, ...]:
        if self.is_latent:
            return (num_blocks, self.block_size, 1, 0)
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
        """K and V of these blocks as [len(block_ids), block_size, num_kv_heads, head_dim] (a copy); the V of latent
        pages has width 0."""
        k, v = self.k[block_ids], self.v[block_ids]
        if self.format.layout == "cpu_packed" and not self.format.is_latent:
            k = k.permute(0, 3, 1, 2, 4).flatten(3)
            v = v.transpose(1, 2)
        return k, v

    def copy_blocks(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copies whole blocks (copy-on-write), block ids as int64 [n]."""
        self.k[targets] = self.k[sources]
        self.v[targets] = self.v[sources]
