"""A step's rows on one of several context-parallel ranks: which it computes, how they attend, which of them are read.

Chunks of at least `MIN_STRIPED_ROWS` rows a rank are striped: each rank computes the rows whose keys it stores. All
others are replicated: their keys are spread over the ranks anyway, so that computing a few rows everywhere costs less
than passing them on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from shoal.kernels.ops import AttentionMetadata
from shoal.kernels.page_format import PageFormat
from shoal.model_shards.parallel.context import ParallelContext
from shoal.model_shards.parallel.context_parallel import StripedMetadata
from shoal.model_shards.parallel.mesh import MeshPosition
from shoal.model_shards.parallel.ring import RingPages, RingQueries
from shoal.model_shards.parallel.stripes import LongArray, Strands, Stripes
from shoal.model_shards.runner.batch import ForwardBatch

IndexArray = npt.NDArray[np.signedinteger[Any]]

MIN_STRIPED_ROWS = 8
"""Of a chunk, on each rank. So few rows take hardly longer than one: their weights are read once."""


@dataclass(frozen=True, slots=True)
class RingShapes:
    """What the bytes on the ring depend on, on one rank."""

    page: PageFormat
    num_heads: int
    activation_dtype: torch.dtype

    def pages_travel(self, size: int, num_pages: int, rows: int) -> bool:
        """Whether the pages are less to send than the queries and what comes back of them. `rows`: of the longest
        stripe of queries. The same on every rank."""
        queries = RingQueries.bytes_sent(size, rows, self.num_heads, self.page.head_dim, self.activation_dtype.itemsize)
        return RingPages.bytes_sent(size, num_pages, self.page) <= queries


def striping(
    position: MeshPosition, page: PageFormat, num_heads: int, activation_dtype: torch.dtype
) -> Callable[[ForwardBatch], StripedBatch] | None:
    """What makes a step this rank's part of it; None where no other rank shares its sequences. `num_heads`: of queries,
    on this rank."""
    if position.cp_size == 1:
        return None
    stripes, shapes = Stripes(position.cp_size, position.cp_rank), RingShapes(page, num_heads, activation_dtype)
    return lambda batch: StripedBatch(batch, stripes, shapes)


class StripedBatch:
    """One rank's part of a `ForwardBatch`, whose slots and block tables are in blocks of all ranks together."""

    def __init__(self, batch: ForwardBatch, stripes: Stripes, shapes: RingShapes) -> None:
        self.batch, self.stripes, self.shapes = batch, stripes, shapes
        self._positions = batch.positions.astype(np.int64, copy=False)
        lengths = np.diff(batch.query_start)
        self._chunk_of_row = np.repeat(np.arange(len(lengths)), lengths)
        self._is_striped = (lengths >= MIN_STRIPED_ROWS * stripes.size)[self._chunk_of_row]
        if len(self._positions) == len(lengths):  # decodes only: the usual step
            self.replicated = Strands.of_single_rows(self._positions)
        else:
            self.replicated = self._strands(np.flatnonzero(~self._is_striped))
        self.striped = [self._striped(stripe) for stripe in range(stripes.size)] if self._is_striped.any() else []
        """The strands of each rank, if there are any."""
        self.rows: LongArray = self.replicated.rows
        """Of the step: those that this rank computes, in its order."""
        if self.striped:
            self.rows = np.concatenate((self.rows, self.striped[stripes.index].rows))

    @property
    def num_tokens(self) -> int:
        return len(self.rows)

    def tensors(self, device: torch.device) -> tuple[torch.Tensor, StripedMetadata]:
        """(token ids of this rank's rows [num_tokens] int64, where they lie), on the device."""
        batch, stripes, rows = self.batch, self.stripes, self.rows
        positions = self._positions[rows]
        token_ids = _long(batch.token_ids[rows], device)
        slots = _long(stripes.own_slots(positions, batch.slots[rows]), device)
        placed = (slots, _long(positions, device))
        tables = batch.block_tables
        own = self._metadata(self.replicated, stripes.index, tables, placed, device)
        count = len(self.replicated.rows)
        homes = self._positions[self.replicated.rows] % stripes.size
        parts = (homes - np.arange(stripes.size)[:, None]) % stripes.size * count + np.arange(count)
        return token_ids, StripedMetadata(
            own.query_start,
            own.seq_lens,
            own.block_tables,
            own.slot_mapping,
            own.positions,
            own.max_query_len,
            own.max_seq_len,
            own.num_decodes,
            num_replicated=count,
            parts=_long(parts, device),
            ring=self._ring(placed, device) if self.striped else None,
        )

    def bring_rows(self, context: ParallelContext, hidden: torch.Tensor, wanted: LongArray) -> torch.Tensor:
        """hidden: of this rank's rows, as far as it holds them (`StepRows`) -> of the step's rows `wanted`, in this
        order, on the first context-parallel rank; no row on the others. Only rows that it lacks travel."""
        size, index = self.stripes.size, self.stripes.index
        owners = np.where(self._is_striped[wanted], self._positions[wanted] % size, 0)
        places = np.zeros(len(self._positions), dtype=np.int64)
        places[self.rows] = np.arange(len(self.rows))
        mine = context.pick_rows(hidden, _long(places[wanted[owners == index]], hidden.device))
        counts = np.bincount(owners, minlength=size).tolist()
        if counts[0] == len(wanted):
            return mine if index == 0 else mine[:0]
        sent = [len(mine)] + [0] * (size - 1)
        brought = context.all_to_all(mine, sent, counts if index == 0 else [0] * size, axis="context")
        if index:
            return brought
        # They come rank after rank.
        order = np.argsort(np.argsort(owners, kind="stable"))
        return brought[_long(order, hidden.device)]

    def _ring(self, placed: tuple[torch.Tensor, torch.Tensor], device: torch.device) -> RingPages | RingQueries:
        size, index, tables = self.stripes.size, self.stripes.index, self.batch.block_tables
        mine, most = self.striped[index], max(len(strands.rows) for strands in self.striped)
        page_ids, table_of_pages = self._pages(mine.chunks)
        sources = [(index - turn) % size for turn in range(size)]
        if self.shapes.pages_travel(size, len(page_ids), most):
            places = np.zeros_like(tables)
            places[mine.chunks] = table_of_pages
            turns = [self._metadata(mine, source, places, placed, device) for source in sources]
            return RingPages(_long(page_ids, device), turns)
        turns = [self._metadata(self.striped[source], index, tables, placed, device) for source in sources]
        return RingQueries([len(strands.rows) for strands in self.striped], turns)

    def _pages(self, chunks: LongArray) -> tuple[IndexArray, LongArray]:
        """(pages that hold the keys of these chunks, each once; their tables in terms of those)."""
        a_block = self.stripes.size * self.shapes.page.block_size
        used = np.arange(self.batch.block_tables.shape[1]) * a_block < self.batch.seq_lens[chunks][:, None]
        page_ids, places = np.unique(self.batch.block_tables[chunks][used], return_inverse=True)
        tables = np.zeros(used.shape, dtype=np.int64)
        tables[used] = places
        return page_ids, tables

    def _metadata(
        self,
        strands: Strands,
        stripe: int,
        tables: IndexArray,
        placed: tuple[torch.Tensor, torch.Tensor],
        device: torch.device,
    ) -> AttentionMetadata:
        """How these rows see the keys of a stripe; `tables`: where those lie, a row for each chunk."""
        seq_lens = self.stripes.keys_seen(strands.last, stripe)
        lengths = np.diff(strands.start)
        return AttentionMetadata(
            query_start=_int(strands.start, device),
            seq_lens=_int(seq_lens, device),
            block_tables=_int(tables[strands.chunks], device),
            slot_mapping=placed[0],
            positions=placed[1],
            max_query_len=int(lengths.max(initial=0)),
            max_seq_len=int(seq_lens.max(initial=0)),
            num_decodes=strands.num_singles,
        )

    def _strands(self, rows: LongArray) -> Strands:
        return Strands.of(rows, self._chunk_of_row, self._positions, self.stripes.size)

    def _striped(self, stripe: int) -> Strands:
        return self._strands(np.flatnonzero(self._is_striped & (self._positions % self.stripes.size == stripe)))


def _long(array: IndexArray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array.astype(np.int64, copy=False)).to(device)


def _int(array: IndexArray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array.astype(np.int32)).to(device)
