"""How many bytes of KV cache a token takes, layer group by layer group, on one rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """Layers that store the same number of bytes a token and see the same window."""

    num_layers: int
    bytes_per_token_and_layer: int
    window: int | None = None
    """Sliding window: a token sees itself and the window - 1 before it. None: all before it."""

    @classmethod
    def heads(
        cls, num_layers: int, num_kv_heads: int, head_dim: int, element_bytes: int, window: int | None = None
    ) -> KVCacheSpec:
        """K and V of `num_kv_heads` heads (those of this rank, see `kv_heads_per_rank`)."""
        return cls(num_layers, 2 * num_kv_heads * head_dim * element_bytes, window)

    @classmethod
    def latent(cls, num_layers: int, latent_dim: int, rope_dim: int, element_bytes: int) -> KVCacheSpec:
        """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): one compressed vector and one rotary key for all
        heads, so every tensor-parallel rank stores all of it."""
        return cls(num_layers, (latent_dim + rope_dim) * element_bytes)

    @property
    def bytes_per_token(self) -> int:
        """In all layers of the group."""
        return self.num_layers * self.bytes_per_token_and_layer

    def bytes_per_block(self, block_size: int) -> int:
        return block_size * self.bytes_per_token

    def bytes_read(self, num_tokens: int) -> int:
        """What a decode step of a sequence of this length reads: a sliding window reads no more than the window."""
        seen = num_tokens if self.window is None else min(num_tokens, self.window)
        return seen * self.bytes_per_token


def kv_heads_per_rank(num_kv_heads: int, tensor_parallel_size: int) -> int:
    """At least one: with more ranks than KV heads, heads are replicated and a token costs more over all ranks."""
    return -(-num_kv_heads // tensor_parallel_size)


def decoder_specs(
    windows: Sequence[int | None], num_kv_heads: int, head_dim: int, element_bytes: int
) -> tuple[KVCacheSpec, ...]:
    """The groups of a decoder whose layer i has the window windows[i]; `num_kv_heads` of one rank."""
    return tuple(
        KVCacheSpec.heads(count, num_kv_heads, head_dim, element_bytes, window)
        for window, count in Counter(windows).items()
    )


def bytes_per_token(specs: Sequence[KVCacheSpec]) -> int:
    """Over all groups. Sequences have one block table for all layers, so layers with a window hold every token too."""
    return sum(spec.bytes_per_token for spec in specs)
