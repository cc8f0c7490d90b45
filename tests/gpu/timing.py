"""Times the Triton kernels against roofs measured in the same run, and beside torch's attention."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from shoal.kernels.draws import pack_draws
from shoal.kernels.ops import AttentionMetadata, HeadNorms
from shoal.kernels.page_format import KVPages, PageFormat
from shoal.kernels.triton_ops.table import TritonOps

DTYPE = torch.bfloat16
REPETITIONS = 20
FLUSH_BYTES = 2**30
"""Written before each repetition: it empties the L2 cache, and lasts long enough (0.2 ms on an H200) for the host to
queue what is timed, so that no launch latency is in the time."""


class Stopwatch:
    """Median device time of a call; on a CPU (dry run) it only makes the call and measures nothing."""

    def __init__(self, device: torch.device) -> None:
        self.real = device.type == "cuda"
        self._flush = torch.empty(FLUSH_BYTES if self.real else 1, dtype=torch.uint8, device=device)

    def ms(self, call: Callable[[], object]) -> float | None:
        if not self.real:
            call()
            return None
        for _ in range(3):
            call()
        times = []
        for _ in range(REPETITIONS):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._flush.zero_()
            start.record()
            call()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop))
        return statistics.median(times)


@dataclass(frozen=True)
class Roofs:
    """What this GPU does at best, measured: GB/s of a large copy (read + written), TFLOP/s of a square bf16 matmul."""

    copy_gb_s: float | None
    matmul_tflop_s: float | None


@dataclass(frozen=True)
class Timing:
    """One kernel in one shape. `fraction` is of the copy bandwidth ("GB/s") or of the matmul rate ("TFLOP/s")."""

    name: str
    ms: float | None
    rate: float | None
    unit: str
    fraction: float | None
    torch_ms: float | None = None


@dataclass(frozen=True)
class _Work:
    """A call and the least that it must move (GB) or compute (TFLOP)."""

    name: str
    call: Callable[[], object]
    amount: float
    unit: str
    beside: Callable[[], object] | None = None


def run_timings(device: torch.device, stopwatch: Stopwatch, *, small: bool) -> tuple[Roofs, list[Timing]]:
    ops = TritonOps(device, DTYPE)
    roofs = measure_roofs(device, stopwatch, small)
    timings = []
    for group in (
        _decodes(ops, device, small),
        _prefills(ops, device, small),
        _rows(ops, device, small),
        _sampling(ops, device, small),
        _grouped(ops, device, small),
    ):
        for work in group:
            ms = stopwatch.ms(work.call)
            torch_ms = None if work.beside is None else stopwatch.ms(work.beside)
            roof = roofs.copy_gb_s if work.unit == "GB/s" else roofs.matmul_tflop_s
            rate = None if ms is None else work.amount / ms * 1e3
            fraction = None if rate is None or roof is None else rate / roof
            timings.append(Timing(work.name, ms, rate, work.unit, fraction, torch_ms))
    return roofs, timings


def measure_roofs(device: torch.device, stopwatch: Stopwatch, small: bool) -> Roofs:
    """What fractions are of. Measured anew wherever something is timed."""
    source = torch.empty(2**10 if small else 2**31, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_ms = stopwatch.ms(lambda: target.copy_(source))
    size = 16 if small else 8192
    a, b = torch.randn(2, size, size, device=device).to(DTYPE)
    matmul_ms = stopwatch.ms(lambda: a @ b)
    return Roofs(
        None if copy_ms is None else 2 * source.nbytes / copy_ms / 1e6,
        None if matmul_ms is None else 2 * size**3 / matmul_ms / 1e9,
    )


def _pages(num_seqs: int, length: int, heads: int, head_dim: int, device: torch.device) -> tuple[KVPages, torch.Tensor]:
    """Random pages for so many sequences, and their block tables in random order."""
    blocks = length // 16
    pages = PageFormat("canonical", 16, heads, head_dim, DTYPE).allocate(1 + num_seqs * blocks, device)
    pages.k.normal_()
    pages.v.normal_()
    order = torch.randperm(num_seqs * blocks, device=device).int() + 1
    return pages, order.view(num_seqs, blocks)


def _metadata(num_seqs: int, length: int, queries: int, tables: torch.Tensor) -> AttentionMetadata:
    device = tables.device
    unused = torch.zeros(num_seqs * queries, dtype=torch.int64, device=device)
    return AttentionMetadata(
        query_start=torch.arange(0, num_seqs * queries + 1, queries, dtype=torch.int32, device=device),
        seq_lens=torch.full((num_seqs,), length, dtype=torch.int32, device=device),
        block_tables=tables,
        slot_mapping=unused,
        positions=unused,
        max_query_len=queries,
        max_seq_len=length,
        num_decodes=num_seqs if queries == 1 else 0,
    )


def _contiguous(pages: KVPages, tables: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V as torch's attention wants them: [num_seqs, heads, length, head_dim]."""

    def gather(x: torch.Tensor) -> torch.Tensor:
        return x[tables.long()].flatten(1, 2).transpose(1, 2).contiguous()

    return gather(pages.k), gather(pages.v)


def _decodes(ops: TritonOps, device: torch.device, small: bool) -> Iterator[_Work]:
    shapes = [(1, 2048, 32, 8, 128), (64, 2048, 32, 8, 128), (32, 8192, 32, 8, 128), (64, 2048, 28, 4, 128)]
    shapes += [(64, 2048, 4, 1, 256), (64, 2048, 9, 3, 64), (4, 65536, 32, 8, 128)]
    for num_seqs, length, heads, kv_heads, head_dim in [(2, 32, 4, 2, 64)] if small else shapes:
        pages, tables = _pages(num_seqs, length, kv_heads, head_dim, device)
        meta = _metadata(num_seqs, length, 1, tables)
        q = torch.randn(num_seqs, heads, head_dim, device=device).to(DTYPE)
        scale = head_dim**-0.5
        k, v = _contiguous(pages, tables)
        moved = k.nbytes + v.nbytes + 2 * q.nbytes
        name = f"decode, {num_seqs} x {length} keys, {heads}/{kv_heads} heads of {head_dim}"
        yield _Work(
            name,
            partial(ops.paged_attention, q, pages, meta, scale),
            moved / 1e9,
            "GB/s",
            partial(F.scaled_dot_product_attention, q.unsqueeze(2), k, v, enable_gqa=True),
        )


def _prefills(ops: TritonOps, device: torch.device, small: bool) -> Iterator[_Work]:
    shapes = [(1, 8192, 8192, 32, 8, 128), (1, 16384, 2048, 32, 8, 128), (16, 1024, 1024, 32, 8, 128)]
    shapes += [(1, 8192, 8192, 9, 3, 64), (1, 8192, 8192, 8, 4, 256)]
    for num_seqs, length, queries, heads, kv_heads, head_dim in [(1, 32, 16, 4, 2, 64)] if small else shapes:
        pages, tables = _pages(num_seqs, length, kv_heads, head_dim, device)
        meta = _metadata(num_seqs, length, queries, tables)
        q = torch.randn(num_seqs * queries, heads, head_dim, device=device).to(DTYPE)
        # Heads repeated beforehand: torch's causal_lower_right has no grouped heads.
        k, v = (x.repeat_interleave(heads // kv_heads, 1) for x in _contiguous(pages, tables))
        dense_q = q.view(num_seqs, queries, heads, head_dim).transpose(1, 2).contiguous()
        mask = causal_lower_right(queries, length)
        visible = queries * (length - queries) + queries * (queries + 1) / 2
        name = f"prefill, {num_seqs} x {queries} of {length} tokens, {heads}/{kv_heads} heads of {head_dim}"
        scale = head_dim**-0.5
        yield _Work(
            name,
            partial(ops.paged_attention, q, pages, meta, scale),
            4 * head_dim * heads * num_seqs * visible / 1e12,
            "TFLOP/s",
            partial(F.scaled_dot_product_attention, dense_q, k, v, attn_mask=mask),
        )


def _rows(ops: TritonOps, device: torch.device, small: bool) -> Iterator[_Work]:
    """Bytes are those that must move: each input read once, each output written once."""
    tokens, hidden, inner = (4, 64, 128) if small else (16384, 4096, 14336)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=DTYPE)

    x, residual, weight = random(tokens, hidden), random(tokens, hidden), torch.ones(hidden, device=device)
    yield _Work("rms_norm with residual", lambda: ops.rms_norm(x, weight, 1e-5, residual), 4 * x.nbytes / 1e9, "GB/s")
    q, k = random(tokens, 32, 128), random(tokens, 8, 128)
    v, head_weight = torch.empty_like(k), torch.ones(128, device=device)
    yield _Work("head_rms_norm", lambda: ops.head_rms_norm(q, head_weight, 1e-6), 2 * q.nbytes / 1e9, "GB/s")
    positions = torch.arange(tokens, device=device)
    angles = torch.randn(tokens, 128, device=device)
    moved = (2 * (q.nbytes + k.nbytes) + angles.nbytes) / 1e9
    yield _Work("rotary", lambda: ops.rotary(q, k, positions, angles), moved, "GB/s")
    pages = PageFormat("canonical", 16, 8, 128, DTYPE).allocate(-(-tokens // 16), device)
    slots = torch.randperm(tokens, device=device)
    yield _Work("store_kv", lambda: ops.store_kv(k, v, pages, slots), 4 * k.nbytes / 1e9, "GB/s")
    meta = _metadata(tokens, 16, 1, torch.zeros(tokens, 1, dtype=torch.int32, device=device))
    meta.slot_mapping, meta.positions = slots, positions
    norms = HeadNorms(head_weight, head_weight, 1e-6)
    moved += 2 * v.nbytes / 1e9
    for name, norm in (("rotary_store_kv", None), ("rotary_store_kv with head norms", norms)):
        yield _Work(name, partial(ops.rotary_store_kv, (q, k, v), angles, pages, meta, norm), moved, "GB/s")
    rows = torch.randperm(tokens, device=device)[: max(1, tokens // 4)]
    yield _Work(
        "rms_norm_rows, every fourth", lambda: ops.rms_norm_rows(x, rows, weight, 1e-5), x.nbytes / 2 / 1e9, "GB/s"
    )
    gates = random(tokens, 2 * inner)
    yield _Work("silu_and_mul", lambda: ops.silu_and_mul(gates), 1.5 * gates.nbytes / 1e9, "GB/s")
    yield _Work("gelu_tanh_and_mul", lambda: ops.gelu_tanh_and_mul(gates), 1.5 * gates.nbytes / 1e9, "GB/s")


def _grouped(ops: TritonOps, device: torch.device, small: bool) -> Iterator[_Work]:
    """Products of experts, the rows chosen at random: few wait for the matrices that are visited, many for the tensor
    cores. Beside one product of the vendor's an expert, whose sizes the host knows."""
    shapes = [(128, 8, 1536, 2048), (128, 8, 2048, 768), (8, 2, 28672, 4096)]
    for experts, chosen, outputs, inputs in [(4, 2, 32, 16)] if small else shapes:
        matrices = torch.randn(experts, outputs, inputs, device=device, dtype=DTYPE)
        weight = ops.prepare_grouped(matrices)
        for tokens in (3,) if small else (1, 16, 64, 512, 8192):
            choices = torch.rand(tokens, experts).argsort(dim=1)[:, :chosen]
            starts = torch.bincount(choices.flatten(), minlength=experts).cumsum(0).tolist()
            x = torch.randn(tokens * chosen, inputs, device=device, dtype=DTYPE)
            bounds = list(pairwise([0, *starts]))
            visited = sum(start < stop for start, stop in bounds) * outputs * inputs * DTYPE.itemsize
            few = tokens * chosen <= 16 * experts
            moved = visited + x.nbytes + tokens * chosen * outputs * DTYPE.itemsize
            yield _Work(
                f"grouped product, {tokens} x {chosen} of {experts} experts of {outputs} x {inputs}",
                partial(ops.grouped_linear, x, weight, torch.tensor([0, *starts], dtype=torch.int32, device=device)),
                moved / 1e9 if few else 2 * tokens * chosen * outputs * inputs / 1e12,
                "GB/s" if few else "TFLOP/s",
                partial(_one_by_one, x, matrices, bounds),
            )


def _one_by_one(x: torch.Tensor, matrices: torch.Tensor, bounds: list[tuple[int, int]]) -> None:
    for matrix, (start, stop) in zip(matrices, bounds, strict=True):
        if start < stop:
            F.linear(x[start:stop], matrix)


def _sampling(ops: TritonOps, device: torch.device, small: bool) -> Iterator[_Work]:
    """Bytes are those of one pass over the logits, the least that any sampler reads; beside torch's argmax, softmax and
    multinomial draw, or, where tokens are filtered, the same after a sort."""
    for rows, vocab in [(2, 500)] if small else [(1, 128256), (32, 128256), (128, 128256), (128, 32000)]:
        logits = torch.randn(rows, vocab, device=device) * 3
        logits[:, 1000:] -= 5
        kinds = {"greedy": (0.0, 1.0, 0.0, 0), "plain": (0.8, 1.0, 0.0, 0), "top_p 0.9": (1.0, 0.9, 0.0, 0)}
        kinds["top_k 50, top_p 0.9"] = (1.0, 0.9, 0.0, 50)
        for name, (temperature, top_p, min_p, top_k) in kinds.items():
            shape = np.array([[temperature, top_p, min_p]] * rows)
            draws = pack_draws(list(range(rows)), [(0, 0)] * rows, [top_k] * rows, shape)
            placed = torch.from_numpy(draws).to(device)
            torch_s = partial(torch.argmax, logits, dim=1) if name == "greedy" else partial(_torch_draw, logits, top_p)
            title = f"sampling, {rows} x {vocab}, {name}"
            yield _Work(title, partial(ops.sample, logits, placed), logits.nbytes / 1e9, "GB/s", torch_s)


def _torch_draw(logits: torch.Tensor, top_p: float) -> torch.Tensor:
    probabilities = torch.softmax(logits, dim=-1)
    if top_p >= 1.0:
        return torch.multinomial(probabilities, 1)
    probabilities, ids = probabilities.sort(dim=-1, descending=True)
    probabilities[probabilities.cumsum(dim=-1) - probabilities >= top_p] = 0
    return ids.gather(1, torch.multinomial(probabilities, 1))


def render(roofs: Roofs, timings: list[Timing]) -> str:
    """The table, one kernel a line; "-" is what was not measured."""

    def number(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    lines = [
        f"copy {number(roofs.copy_gb_s, '.0f')} GB/s, bf16 matmul {number(roofs.matmul_tflop_s, '.0f')} TFLOP/s",
        "| kernel | ms | achieved | of the roof | torch ms | torch / ours |",
        "|---|---|---|---|---|---|",
    ]
    for row in timings:
        ratio = None if row.ms is None or row.torch_ms is None else row.torch_ms / row.ms
        cells = [row.name, number(row.ms, ".4f"), f"{number(row.rate, '.0f')} {row.unit}", number(row.fraction, ".0%")]
        lines.append("| " + " | ".join([*cells, number(row.torch_ms, ".4f"), number(ratio, ".2f")]) + " |")
    return "\n".join(lines)
