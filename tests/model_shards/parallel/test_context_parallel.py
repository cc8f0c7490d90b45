"""Striped attention of several ranks against plain attention over the whole sequences in float64."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.kernels.ops import AttentionMetadata, Ops
from shoal.kernels.page_format import KVPages, PageFormat
from shoal.kernels.registry import select_ops
from shoal.model_shards.engine.plan import ScheduledChunk
from shoal.model_shards.parallel.context import ParallelContext
from shoal.model_shards.parallel.context_parallel import ContextParallelAttention, StripedMetadata
from shoal.model_shards.parallel.mesh import MeshShape
from shoal.model_shards.parallel.ring import RingPages, RingQueries
from shoal.model_shards.parallel.stripes import Strands, Stripes
from shoal.model_shards.runner.batch import ForwardBatch
from shoal.model_shards.runner.striped_batch import MIN_STRIPED_ROWS, RingShapes, StripedBatch

CPU = torch.device("cpu")
SCALE = 0.2


@dataclass(frozen=True)
class Travels(RingShapes):
    """Ring shapes that say what is to travel."""

    pages: bool = True

    def pages_travel(self, size: int, num_pages: int, rows: int) -> bool:
        return self.pages


def forward_batch(chunks: list[tuple[int, int]], tokens_per_block: int, seed: int = 0) -> ForwardBatch:
    """`chunks` are (start, rows); blocks are shuffled, 0 is the null block."""
    starts, lengths = (np.array(column) for column in zip(*chunks, strict=True))
    counts = -(-(starts + lengths) // tokens_per_block)
    ids = np.random.default_rng(seed).permutation(counts.sum()) + 1
    tables = np.zeros((len(chunks), counts.max()), dtype=np.int32)
    for i, mine in enumerate(np.split(ids, np.cumsum(counts)[:-1])):
        tables[i, : len(mine)] = mine
    query_start = np.concatenate(([0], np.cumsum(lengths)))
    positions = np.concatenate([np.arange(start, start + count) for start, count in chunks])
    chunk_of_row = np.repeat(np.arange(len(chunks)), lengths)
    blocks, offsets = np.divmod(positions, tokens_per_block)
    return ForwardBatch(
        chunks=[ScheduledChunk(i, start, count, [], True) for i, (start, count) in enumerate(chunks)],
        sequences=[],
        query_start=query_start,
        seq_lens=starts + lengths,
        block_tables=tables,
        token_ids=np.arange(len(positions), dtype=np.int32),
        positions=positions,
        slots=tables[chunk_of_row, blocks].astype(np.int64) * tokens_per_block + offsets,
        sampling=[],
        sample_rows=query_start[1:] - 1,
    )


class Case:
    """One step over sequences of known queries, keys and values."""

    def __init__(
        self, chunks: list[tuple[int, int]], size: int, heads: tuple[int, int] = (4, 2), dim: int = 32, seed: int = 0
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.size, self.chunks, self.page_args = size, chunks, (16, heads[1], dim)
        self.batch = forward_batch(chunks, 16 * size, seed)
        lengths = [start + count for start, count in chunks]
        self.q = [torch.randn(n, heads[0], dim, generator=generator) for n in lengths]
        self.k, self.v = ([torch.randn(n, heads[1], dim, generator=generator) for n in lengths] for _ in range(2))

    def rows(self, values: list[torch.Tensor]) -> torch.Tensor:
        """Of the step."""
        return torch.cat([x[start:] for x, (start, _) in zip(values, self.chunks, strict=True)])

    def expected(self, window: int | None = None) -> torch.Tensor:
        outs = []
        for (start, _), q, k, v in zip(self.chunks, self.q, self.k, self.v, strict=True):
            group = q.shape[1] // k.shape[1]
            keys, values = (x.double().repeat_interleave(group, 1) for x in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q[start:].double(), keys) * SCALE
            position, key = torch.arange(start, len(q))[:, None], torch.arange(len(q))
            hidden = (key > position) if window is None else (key > position) | (key <= position - window)
            weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1)
            outs.append(torch.einsum("hqk,khd->qhd", weights, values))
        return torch.cat(outs).float()

    def pages(self, ops: Ops, stripes: Stripes) -> KVPages:
        """A rank's pages before the step: what earlier steps stored there, and NaN."""
        block_size, kv_heads, dim = self.page_args
        pages = PageFormat(ops.layout, block_size, kv_heads, dim, torch.float32).allocate(
            int(self.batch.block_tables.max()) + 1, CPU
        )
        pages.k.fill_(torch.nan), pages.v.fill_(torch.nan)
        for table, (start, _), k, v in zip(self.batch.block_tables, self.chunks, self.k, self.v, strict=True):
            blocks, offsets = np.divmod(np.arange(start), block_size * self.size)
            slots = stripes.own_slots(
                np.arange(start), table[blocks].astype(np.int64) * block_size * self.size + offsets
            )
            ops.store_kv(k[:start], v[:start], pages, torch.from_numpy(slots))
        return pages

    def on_rank(
        self, context: ParallelContext, ops: Ops, *, pages_travel: bool, window: int | None
    ) -> tuple[torch.Tensor, StripedMetadata, StripedBatch]:
        """(output of a rank's rows, what its step was)."""
        stripes = Stripes(self.size, context.position.cp_rank)
        pages = self.pages(ops, stripes)
        shapes = Travels(pages.format, self.q[0].shape[1], torch.float32, pages_travel)
        striped = StripedBatch(self.batch, stripes, shapes)
        _, meta = striped.tensors(CPU)
        mine = torch.from_numpy(striped.rows)
        ops.store_kv(self.rows(self.k)[mine], self.rows(self.v)[mine], pages, meta.slot_mapping)
        attention = ContextParallelAttention(ops, context)
        return attention(self.rows(self.q)[mine], pages, meta, SCALE, window), meta, striped

    def run(
        self, module: ModuleType, ops: Ops, *, pages_travel: bool = True, window: int | None = None
    ) -> tuple[torch.Tensor, list[Any]]:
        """(output of each row of the step, what each rank's step was). Replicated rows are checked to be the same
        everywhere, and every row to be computed somewhere."""
        ranks = module.ThreadRanks(self.size)
        results = ranks.call(lambda context: self.on_rank(context, ops, pages_travel=pages_travel, window=window))
        ranks.close()
        out, computed = torch.zeros_like(self.rows(self.q)), torch.zeros(len(self.batch.positions), dtype=torch.bool)
        for values, _, striped in results:
            mine = torch.from_numpy(striped.rows)
            again = computed[mine]
            torch.testing.assert_close(values[again], out[mine][again], atol=0, rtol=0, equal_nan=True)
            out[mine], computed[mine] = values, True
        assert computed.all()
        return out, [
            (meta, context.traffic, striped)
            for (_, meta, striped), context in zip(results, ranks.contexts, strict=True)
        ]


def striped_rows(size: int) -> int:
    return MIN_STRIPED_ROWS * size


@pytest.fixture(params=["reference", "cpu"])
def ops(request: pytest.FixtureRequest) -> Ops:
    return select_ops(CPU, torch.float32, backend=request.param)


@given(data=st.data())
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_step_attends_as_on_one_rank(thread_ranks: ModuleType, ops: Ops, data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 5), label="ranks")
    start, rows = st.integers(0, 150), st.one_of(st.just(1), st.integers(1, 40), st.integers(60, 130))
    chunks = data.draw(st.lists(st.tuples(start, rows), min_size=1, max_size=5), label="chunks")
    heads = data.draw(st.sampled_from([(1, 1), (4, 2), (6, 1)]), label="heads")
    case = Case(chunks, size, heads, seed=data.draw(st.integers(0, 100)))
    window = data.draw(st.none() | st.integers(1, 30).map(lambda n: n * size), label="window")
    for pages_travel in (True, False):
        out, _ = case.run(thread_ranks, ops, pages_travel=pages_travel, window=window)
        torch.testing.assert_close(out, case.expected(window), atol=1e-5, rtol=1e-5)


def test_a_rows_bits_depend_on_neither_chunks_nor_neighbours_nor_what_travels(thread_ranks: ModuleType) -> None:
    """Decoded, in a short piece, in a long one, with the pages or the queries on the ring: the same sums."""
    ops, size = select_ops(CPU, torch.float32, backend="cpu"), 3
    whole = Case([(0, 400)], size)
    expected, _ = whole.run(thread_ranks, ops)
    for start, count in ((0, 399), (1, 399), (399, 1), (398, 2), (380, 20), (277, 100)):
        case = Case([(start, count), (50, 1), (7, 60)], size)
        for values in ("q", "k", "v"):
            getattr(case, values)[0] = getattr(whole, values)[0][: start + count]
        for pages_travel in (True, False):
            out, _ = case.run(thread_ranks, ops, pages_travel=pages_travel)
            assert torch.equal(out[:count], expected[start : start + count])


@pytest.mark.parametrize("size", [2, 3, 8])
def test_first_tokens_have_keys_on_some_ranks_only(thread_ranks: ModuleType, ops: Ops, size: int) -> None:
    """The first token of all is stored on one rank; on the others it sees nothing, and nothing may become NaN."""
    case = Case([(0, 1), (1, 1), (0, 2), (size - 1, 3), (0, striped_rows(size))], size)
    for pages_travel in (True, False):
        out, _ = case.run(thread_ranks, ops, pages_travel=pages_travel)
        torch.testing.assert_close(out, case.expected(), atol=1e-5, rtol=1e-5)


def test_a_nan_stays_in_its_row(thread_ranks: ModuleType, ops: Ops) -> None:
    """A broken sequence must be seen as NaN by the sampler, and must not touch the others."""
    case = Case([(20, 1), (20, 1), (0, 50), (0, 50)], 2)
    case.q[1][20] = torch.nan
    case.q[3][7] = torch.nan
    for pages_travel in (True, False):
        out, _ = case.run(thread_ranks, ops, pages_travel=pages_travel)
        assert torch.nonzero(out.isnan().all(-1).all(-1)).flatten().tolist() == [1, 2 + 50 + 7]
        assert out.isnan().sum() == 2 * out[0].numel()


def work(meta: AttentionMetadata) -> int:
    """Pairs of query and key: what a rank computes in one turn."""
    counts, lengths = meta.query_start.diff().tolist(), meta.seq_lens.tolist()
    return sum(
        max(0, length - count + 1 + j) for count, length in zip(counts, lengths, strict=True) for j in range(count)
    )


@pytest.mark.parametrize("chunks", [[(0, 4096)], [(0, 4099)], [(10_001, 1000)], [(5, 2048), (999, 700), (0, 3001)]])
@pytest.mark.parametrize("pages_travel", [True, False])
def test_eight_ranks_have_the_same_work_in_every_turn(chunks: list[tuple[int, int]], pages_travel: bool) -> None:
    size = 8
    batch = forward_batch(chunks, 16 * size)
    shapes = Travels(PageFormat("canonical", 16, 1, 8, torch.float32), 1, torch.float32, pages_travel)
    turns = []
    for rank in range(size):
        meta = StripedBatch(batch, Stripes(size, rank), shapes).tensors(CPU)[1]
        assert meta.ring is not None
        turns.append([work(turn) for turn in meta.ring.turns])
    by_rank = [sum(turn) for turn in turns]
    total = sum(n * start + n * (n + 1) // 2 for start, n in chunks)
    assert sum(by_rank) == total, "every query meets every key that it may see once"
    assert max(by_rank) * size / total <= 1.01
    # All wait for the slowest in each turn.
    assert sum(max(turn) for turn in zip(*turns, strict=True)) * size / total <= 1.01


def test_contiguous_shares_would_be_far_from_that() -> None:
    rows = np.arange(4096).reshape(8, 512)
    by_rank = (rows + 1).sum(1)
    assert by_rank.max() / by_rank.mean() > 1.87


def test_keys_seen_and_slots_are_those_of_the_positions() -> None:
    positions, size, block_size = np.arange(200), 3, 4
    slots = np.array([7 + p // (size * block_size) for p in positions]) * (size * block_size) + positions % (
        size * block_size
    )
    for rank in range(size):
        stripes = Stripes(size, rank)
        mine = positions[positions % size == rank]
        assert stripes.keys_seen(positions).tolist() == [int((mine <= p).sum()) for p in positions]
        assert (
            stripes.keys_seen(positions, (rank + 1) % size).tolist()
            == Stripes(size, (rank + 1) % size).keys_seen(positions).tolist()
        )
        own = stripes.own_slots(positions, slots)
        assert (own[positions % size != rank] == -1).all()
        # The n-th key of a rank lies in slot n of its pages, page after page.
        assert own[mine].tolist() == [(7 + n // block_size) * block_size + n % block_size for n in range(len(mine))]


def test_strands_are_the_rows_of_a_stripe_with_single_ones_first() -> None:
    chunk_of_row, positions = np.array([0, 0, 0, 0, 0, 1, 2]), np.array([5, 6, 7, 8, 9, 3, 4])
    strands = Strands.of(np.arange(7), chunk_of_row, positions, 3)
    #          chunk 0: rows 1 and 4 (positions 6, 9), rows 2 (7), rows 0 and 3 (5, 8)
    assert strands.rows.tolist() == [2, 5, 6, 1, 4, 0, 3]
    assert strands.start.tolist() == [0, 1, 2, 3, 5, 7]
    assert strands.chunks.tolist() == [0, 1, 2, 0, 0]
    assert strands.last.tolist() == [7, 3, 4, 9, 8]
    assert strands.num_singles == 3


def in_a_process(rank: int, rendezvous: str) -> None:
    """One of two ranks over gloo: a decode and a long piece, either way, and what was sent for them."""
    ops = select_ops(CPU, torch.float32, backend="cpu")
    context = ParallelContext.connect(MeshShape(cp_size=2).position(rank), rendezvous, CPU, 60.0)
    case, part = Case([(70, 1), (200, 130)], 2), 4 * (32 + 1) * 4
    for pages_travel, shifted, exchanged in (
        (True, 11 * 2 * 2 * 16 * 32 * 4, 0),  # 330 positions are 11 pages; K and V of 2 heads in each
        (False, 65 * 4 * 32 * 4, 65 * part),
    ):
        context.traffic.clear()
        values, _, striped = case.on_rank(context, ops, pages_travel=pages_travel, window=None)
        torch.testing.assert_close(values, case.expected()[striped.rows], atol=1e-5, rtol=1e-5)
        assert context.traffic == Counter(all_gather=part, shift=shifted, all_to_all=exchanged)
    context.close()


def test_processes_send_what_the_formulas_say(tmp_path: Path) -> None:
    program = (
        "import importlib.util, sys\n"
        "spec = importlib.util.spec_from_file_location('case', sys.argv[1])\n"
        "sys.modules['case'] = module = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "module.in_a_process(int(sys.argv[2]), sys.argv[3])\n"
    )
    rendezvous = f"file://{tmp_path / 'rendezvous'}"
    ranks = [subprocess.Popen([sys.executable, "-c", program, __file__, str(rank), rendezvous]) for rank in range(2)]
    try:
        assert [rank.wait(120) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def test_bytes_on_the_ring_are_those_of_the_formulas(thread_ranks: ModuleType) -> None:
    ops = select_ops(CPU, torch.float32, backend="cpu")
    size, rows, heads, dim = 3, 130, 4, 32
    case = Case([(200, rows)], size, (heads, 2), dim)
    page = PageFormat("cpu_packed", 16, 2, dim, torch.float32)
    pages = -(-330 // (16 * size))
    for pages_travel, expected in (
        (True, (size - 1) * pages * 2 * 16 * 2 * dim * 4),
        (False, (size - 1) * 44 * heads * dim * 4),
    ):
        _, steps = case.run(thread_ranks, ops, pages_travel=pages_travel)
        assert [traffic["shift"] for _, traffic, _ in steps] == [expected] * size
    assert RingPages.bytes_sent(size, pages, page) == (size - 1) * pages * 2 * 16 * 2 * dim * 4
    assert RingQueries.bytes_sent(size, 44, heads, dim, 4) == (size - 1) * 44 * heads * (2 * dim + 1) * 4


def test_what_is_less_to_send_travels() -> None:
    """8 query heads to a key-value head, bf16: pages as long as the whole is at most some 12 times the piece."""
    shapes = RingShapes(PageFormat("canonical", 16, 1, 128, torch.bfloat16), 8, torch.bfloat16)
    kind = {}
    for start in (0, 8192, 65_536, 1 << 20):
        batch = forward_batch([(start, 2048)], 16 * 4)
        kind[start] = type(StripedBatch(batch, Stripes(4, 1), shapes).tensors(CPU)[1].ring).__name__
    assert kind == {0: "RingPages", 8192: "RingPages", 65_536: "RingQueries", 1 << 20: "RingQueries"}


def test_short_pieces_and_decodes_are_on_every_rank() -> None:
    size = 4
    chunks = [(100, 1), (0, striped_rows(size) - 1), (40, striped_rows(size)), (3, 1)]
    steps = [
        StripedBatch(
            forward_batch(chunks, 64),
            Stripes(size, rank),
            Travels(PageFormat("canonical", 16, 1, 8, torch.float32), 1, torch.float32),
        )
        for rank in range(size)
    ]
    everywhere = 2 + striped_rows(size) - 1
    assert [step.num_tokens for step in steps] == [everywhere + MIN_STRIPED_ROWS] * size
    assert len({tuple(step.rows[:everywhere]) for step in steps}) == 1
    assert steps[0].rows[:2].tolist() == [0, everywhere + striped_rows(size) - 1], "decodes come first"
    striped = [set(step.rows[everywhere:].tolist()) for step in steps]
    assert sum(map(len, striped)) == len(set.union(*striped)) == striped_rows(size)


def test_steps_of_single_rows_need_no_sorting() -> None:
    positions = np.array([7, 3, 100])
    quick, thorough = Strands.of_single_rows(positions), Strands.of(np.arange(3), np.arange(3), positions, 4)
    for name in ("rows", "start", "chunks", "last"):
        assert getattr(quick, name).tolist() == getattr(thorough, name).tolist()
