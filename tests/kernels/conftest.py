"""Builders of paged batches, shared by the tests of all backends."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch

from shoal.configs.errors import ConfigError
from shoal.kernels.ops import AttentionMetadata, Ops
from shoal.kernels.page_format import KVPages, PageFormat
from shoal.kernels.registry import select_ops

CPU = torch.device("cpu")


@dataclass(frozen=True)
class PagedBatch:
    """Sequences with their whole history of queries, keys and values; any chunk of it can be made a step."""

    lengths: tuple[int, ...]
    block_size: int
    q: list[torch.Tensor]
    k: list[torch.Tensor]
    v: list[torch.Tensor]
    block_tables: torch.Tensor
    num_blocks: int
    dtype: torch.dtype

    @classmethod
    def random(
        cls,
        lengths: tuple[int, ...],
        heads: tuple[int, int] = (4, 2),
        head_dim: int = 64,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> PagedBatch:
        generator = torch.Generator().manual_seed(seed)

        def normal(num_heads: int) -> list[torch.Tensor]:
            return [torch.randn(n, num_heads, head_dim, generator=generator) for n in lengths]

        counts = [-(-n // block_size) for n in lengths]
        shuffled = torch.randperm(sum(counts), generator=generator).int() + 1  # block 0 is the null block
        tables = torch.zeros(len(lengths), max(counts) + 1, dtype=torch.int32)
        for i, ids in enumerate(shuffled.split(counts)):
            tables[i, : len(ids)] = ids
        q, k, v = normal(heads[0]), normal(heads[1]), normal(heads[1])
        return cls(lengths, block_size, q, k, v, tables, sum(counts) + 1, dtype)

    def slots(self, i: int) -> torch.Tensor:
        position = torch.arange(self.lengths[i])
        return self.block_tables[i, position // self.block_size].long() * self.block_size + position % self.block_size

    def pages(self, ops: Ops) -> KVPages:
        """Pages that hold every key and value; every slot that no sequence owns is NaN, so that a read shows."""
        _, kv_heads, head_dim = self.k[0].shape
        page = PageFormat(ops.layout, self.block_size, kv_heads, head_dim, self.dtype)
        pages = page.allocate(self.num_blocks, CPU)
        pages.k.fill_(torch.nan)
        pages.v.fill_(torch.nan)
        for i in range(len(self.lengths)):
            ops.store_kv(self.k[i], self.v[i], pages, self.slots(i))
        return pages

    def step(self, chunks: dict[int, tuple[int, int]]) -> tuple[torch.Tensor, AttentionMetadata]:
        """The queries [start, end) of each sequence in `chunks` as one step: (q, metadata)."""
        q = torch.cat([self.q[i][start:end] for i, (start, end) in chunks.items()])
        query_lens = [end - start for start, end in chunks.values()]
        meta = AttentionMetadata(
            query_start=torch.tensor([0, *query_lens]).cumsum(0).int(),
            seq_lens=torch.tensor([end for _, end in chunks.values()], dtype=torch.int32),
            block_tables=self.block_tables[list(chunks)].contiguous(),
            slot_mapping=torch.cat([self.slots(i)[start:end] for i, (start, end) in chunks.items()]),
            positions=torch.cat([torch.arange(start, end) for start, end in chunks.values()]),
            max_query_len=max(query_lens),
            max_seq_len=max(end for _, end in chunks.values()),
            num_decodes=next((n for n, length in enumerate(query_lens) if length != 1), len(query_lens)),
        )
        return q, meta

    def whole(self) -> tuple[torch.Tensor, AttentionMetadata]:
        return self.step({i: (0, n) for i, n in enumerate(self.lengths)})


@pytest.fixture(scope="session")
def random_batch() -> type[PagedBatch]:
    return PagedBatch


@pytest.fixture(scope="session")
def latent() -> ModuleType:
    """The helpers of `latent.py` beside this file."""
    name = "shoal_tests_latent"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / "latent.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@pytest.fixture(scope="session")
def reference() -> Ops:
    return select_ops(CPU, torch.float32, backend="reference")


@pytest.fixture(scope="session")
def native_ops() -> Ops:
    """The native CPU table; a machine without a compiler skips its tests."""
    try:
        ops = select_ops(CPU, torch.float32, backend="cpu")
    except ConfigError as error:  # pragma: no cover
        pytest.fail(str(error))
    if ops.name != "cpu":
        pytest.skip("no native unit here (no C++ compiler, or SHOAL_NATIVE=0)")
    return ops


@pytest.fixture(params=["cpu", "torch_cpu"])
def cpu_ops(request: pytest.FixtureRequest) -> Ops:
    if request.param == "cpu":
        ops: Ops = request.getfixturevalue("native_ops")
        return ops
    return select_ops(CPU, torch.float32, backend="torch_cpu")


@pytest.fixture
def threads() -> object:
    """Sets the number of threads; the old number comes back after the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
