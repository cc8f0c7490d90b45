"""How sizes are shared out over tensor-parallel ranks. What does not divide is refused with the numbers."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.configs.errors import ConfigError


def split_evenly(what: str, size: int, parts: int, index: int) -> range:
    """The `index`-th of `parts` equal, contiguous parts of `size`."""
    if size % parts:
        raise ConfigError(
            f"{what} {size} cannot be split over tensor_parallel_size {parts}: {size} / {parts} is not whole. "
            f"Use a tensor_parallel_size that divides {size}.",
            param="tensor_parallel_size",
        )
    share = size // parts
    return range(index * share, (index + 1) * share)


def vocab_shard_rows(vocab_size: int, parts: int) -> int:
    """Rows of the embedding and head on each rank: the vocabulary is padded so that it divides."""
    return -(-vocab_size // parts)


@dataclass(frozen=True, slots=True)
class HeadSplit:
    """The attention heads of one rank, as ranges of the model's heads.

    Query heads are split evenly. So are KV heads while there is at least one a rank; with more ranks than KV heads,
    neighbouring ranks hold the same one (grouped-query attention: Ainslie et al. 2023, arXiv:2305.13245).
    """

    query: range
    kv: range

    @classmethod
    def of_rank(cls, num_heads: int, num_kv_heads: int, tp_size: int, tp_rank: int) -> HeadSplit:
        query = split_evenly("num_heads", num_heads, tp_size, tp_rank)
        if tp_size <= num_kv_heads:
            return cls(query, split_evenly("num_kv_heads", num_kv_heads, tp_size, tp_rank))
        if tp_size % num_kv_heads:
            raise ConfigError(
                f"num_kv_heads {num_kv_heads} cannot be shared out over tensor_parallel_size {tp_size}: one must be "
                f"a multiple of the other. Use a tensor_parallel_size that divides or is a multiple of it.",
                param="tensor_parallel_size",
            )
        kv_head = tp_rank // (tp_size // num_kv_heads)
        return cls(query, range(kv_head, kv_head + 1))

    @property
    def num_heads(self) -> int:
        return len(self.query)

    @property
    def num_kv_heads(self) -> int:
        return len(self.kv)
