"""Times each CPU operator against what the machine allows (measured in the same run) and against torch.

    python tests/benchmarks/kernels_cpu.py [--threads N] [--clock wall|cpu] [--only NAME] [--json FILE]

The roofline of an operator is the slower of reading its bytes (weights, pages, activations; all sets are larger than
the last-level cache) and of its multiply-adds at fp32 peak. `--clock cpu` with one thread counts only the time that
this process got, which is what a shared machine can measure.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F

from shoal.kernels.ops import AttentionMetadata, Ops
from shoal.kernels.page_format import PageFormat
from shoal.kernels.registry import select_ops

CPU = torch.device("cpu")
SET_BYTES = 96 << 20  # memory that one round goes through
TIME_S = 0.6  # an operator is repeated for so long

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


@dataclass(frozen=True)
class Case:
    """One round of an operator over a set of `calls` inputs; bytes and flops are of one call."""

    name: str
    calls: int
    bytes: float
    flops: float
    run: Callable[[int], object]
    torch: Callable[[int], object] | None = None


@dataclass(frozen=True)
class Result:
    name: str
    microseconds: float
    gb_s: float
    gflop_s: float
    roofline: float
    torch_ratio: float | None


class Bench:
    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.read_gb_s, self.peak_gflop_s = self._probe()

    def seconds(self, run: Callable[[int], object], calls: int) -> float:
        """Median over the rounds, of one call."""
        for i in range(calls):
            run(i)
        rounds: list[float] = []
        begin = time.perf_counter()
        while len(rounds) < 3 or time.perf_counter() - begin < TIME_S:
            start = self.clock()
            for i in range(calls):
                run(i)
            rounds.append((self.clock() - start) / calls)
        return statistics.median(rounds)

    def measure(self, case: Case) -> Result:
        took = self.seconds(case.run, case.calls)
        bound = max(case.bytes / (self.read_gb_s * 1e9), case.flops / (self.peak_gflop_s * 1e9))
        other = None if case.torch is None else self.seconds(case.torch, case.calls) / took
        return Result(case.name, took * 1e6, case.bytes / took / 1e9, case.flops / took / 1e9, bound / took, other)

    def _probe(self) -> tuple[float, float]:
        """(GB/s of reading, GFLOP/s of multiply-adds) with torch's number of threads."""
        with tempfile.TemporaryDirectory() as folder:
            library = Path(folder) / "probe.so"
            source = Path(__file__).with_name("kernels_probe.c")
            flags = ["-O3", "-march=native", "-fopenmp", "-shared", "-fPIC"]
            subprocess.run(["gcc", *flags, str(source), "-o", str(library)], check=True)
            probe = ctypes.CDLL(str(library))
        probe.multiply_add.restype, probe.read_all.restype = ctypes.c_int64, ctypes.c_uint64
        words, sink, steps = torch.ones(SET_BYTES // 8, dtype=torch.int64), ctypes.c_float(), 2_000_000
        address, count = ctypes.c_void_p(words.data_ptr()), ctypes.c_int64(len(words))
        reading = self.seconds(lambda _: probe.read_all(address, count), 1)
        adding = self.seconds(lambda _: probe.multiply_add(ctypes.c_int64(steps), ctypes.byref(sink)), 1)
        a_thread = probe.multiply_add(ctypes.c_int64(steps), ctypes.byref(sink))
        return SET_BYTES / reading / 1e9, 2 * a_thread * torch.get_num_threads() / adding / 1e9


def linear_cases(ops: Ops) -> Iterator[Case]:
    for dtype in (torch.float32, torch.bfloat16):
        for outputs, inputs, row_counts in ((3072, 576, (1, 2, 4, 8, 16, 32, 64, 512)), (576, 1536, (1, 32, 512))):
            calls = -(-SET_BYTES // (outputs * inputs * dtype.itemsize))
            plain = [torch.randn(outputs, inputs) for _ in range(calls)]
            packed = [ops.prepare_linear(weight.to(dtype)) for weight in plain]
            for rows in row_counts:
                x = torch.randn(rows, inputs)
                used = 8 if rows > 64 else calls  # compute bound: a smaller set tells the same
                yield Case(
                    f"linear {outputs}x{inputs} {str(dtype)[6:]} rows {rows}",
                    used,
                    outputs * inputs * dtype.itemsize + 4 * rows * (inputs + outputs),
                    2 * rows * outputs * inputs,
                    lambda i, x=x, w=packed: ops.linear(x, w[i]),
                    lambda i, x=x, w=plain: F.linear(x, w[i]),
                )


def grouped_cases(ops: Ops) -> Iterator[Case]:
    """Experts in the shapes of Qwen3-30B-A3B, a quarter of them; torch multiplies one after the other. Bytes are those
    of the experts that are visited."""
    experts, chosen, outputs, inputs = 32, 8, 1536, 2048
    plain = torch.randn(experts, outputs, inputs)
    weight = ops.prepare_grouped(matrix.bfloat16() for matrix in plain)
    for tokens in (1, 4, 16, 64, 256):
        choices = torch.rand(tokens, experts).argsort(dim=1)[:, :chosen]
        counts = torch.bincount(choices.flatten(), minlength=experts)
        starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()
        x, visited, bounds = (
            torch.randn(tokens * chosen, inputs),
            int((counts > 0).sum()),
            list(pairwise(starts.tolist())),
        )

        def one_by_one(_: int, x: torch.Tensor = x, bounds: list[tuple[int, int]] = bounds) -> None:
            for matrix, (start, stop) in zip(plain, bounds, strict=True):
                if start < stop:
                    F.linear(x[start:stop], matrix)

        yield Case(
            f"grouped {outputs}x{inputs} bfloat16, {tokens} x {chosen} of {experts}",
            1,
            visited * outputs * inputs * 2 + 4 * len(x) * (inputs + outputs),
            2 * len(x) * outputs * inputs,
            lambda _, x=x, starts=starts: ops.grouped_linear(x, weight, starts),
            one_by_one,
        )


def attention_cases(ops: Ops) -> Iterator[Case]:
    shapes = [  # sequences, queries of each, context with them, query and kv heads, head_dim
        (1, 1, 512, 9, 3, 64),
        (1, 1, 4096, 9, 3, 64),
        (32, 1, 512, 9, 3, 64),
        (32, 1, 2048, 9, 3, 64),
        (32, 1, 512, 12, 2, 128),
        (32, 1, 512, 4, 4, 64),
        (1, 512, 512, 9, 3, 64),
        (1, 256, 2048, 9, 3, 64),
    ]
    for dtype in (torch.bfloat16, torch.float32):
        for shape in shapes:
            yield attention_case(ops, dtype, *shape)


def attention_case(
    ops: Ops, dtype: torch.dtype, sequences: int, queries: int, context: int, heads: int, kv_heads: int, dim: int
) -> Case:
    page = PageFormat(ops.layout, 16, kv_heads, dim, dtype)
    blocks = sequences * (context // 16)
    layers = max(1, min(60, SET_BYTES // (blocks * page.bytes_per_block)))
    pages = [page.allocate(blocks + 1, CPU) for _ in range(layers)]
    for layer in pages:
        layer.k.normal_(), layer.v.normal_()
    q = torch.randn(sequences * queries, heads, dim)
    meta = AttentionMetadata(
        query_start=torch.arange(sequences + 1, dtype=torch.int32) * queries,
        seq_lens=torch.full((sequences,), context, dtype=torch.int32),
        block_tables=(torch.randperm(blocks) + 1).int().view(sequences, -1),
        slot_mapping=torch.empty(0, dtype=torch.int64),
        positions=torch.empty(0, dtype=torch.int64),
        max_query_len=queries,
        max_seq_len=context,
    )
    gathered = meta.block_tables.flatten().long()

    def torch_attention(i: int) -> torch.Tensor:
        k, v = (x.reshape(sequences, context, kv_heads, dim) for x in pages[i].canonical(gathered))
        mask = torch.ones(queries, context, dtype=torch.bool).tril(context - queries)
        query = q.view(sequences, queries, heads, dim).transpose(1, 2)
        key, value = (x.transpose(1, 2).float() for x in (k, v))
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)

    pairs = sequences * queries * (context - (queries - 1) / 2)
    return Case(
        f"attention {sequences}x{queries} of {context}, {heads}/{kv_heads} heads, {dim} {str(dtype)[6:]}",
        layers,
        blocks * page.bytes_per_block + 8 * q.numel(),
        4 * pairs * heads * dim,
        lambda i: ops.paged_attention(q, pages[i], meta, 0.125),
        torch_attention,
    )


def pointwise_cases(ops: Ops) -> Iterator[Case]:
    """Between the products everything is in a cache: the roofline says little, torch's time says more."""
    for rows in (1, 32, 512):
        x, residual, weight = torch.randn(rows, 576), torch.randn(rows, 576), torch.ones(576)
        yield Case(
            f"rms_norm + residual 576, rows {rows}", 20, 16 * x.numel(), 4 * x.numel(),
            lambda i, x=x, r=residual, w=weight: ops.rms_norm(x, w, 1e-5, r),
            lambda i, x=x, r=residual, w=weight: F.rms_norm(x + r, (576,), w, 1e-5),
        )  # fmt: skip
        gate = torch.randn(rows, 3072)
        yield Case(
            f"silu_and_mul 1536, rows {rows}", 20, 6 * gate.numel(), 8 * gate.numel(),
            lambda i, x=gate: ops.silu_and_mul(x),
            lambda i, x=gate: F.silu(x[:, :1536]) * x[:, 1536:],
        )  # fmt: skip
        fused, positions, table = torch.randn(rows, 15, 64), torch.arange(rows), torch.randn(2048, 64)
        yield Case(
            f"rotary 9 + 3 heads, rows {rows}", 20, 8 * 12 * 64 * rows, 3 * 12 * 64 * rows,
            lambda i, x=fused, p=positions, t=table: ops.rotary(x[:, :9], x[:, 9:12], p, t),
        )  # fmt: skip
        pages = PageFormat(ops.layout, 16, 3, 64, torch.bfloat16).allocate(64, CPU)
        slots = torch.randperm(1024)[:rows]
        yield Case(
            f"store_kv 3 heads, rows {rows}", 20, 6 * 6 * 64 * rows, 0,
            lambda i, x=fused, p=pages, s=slots: ops.store_kv(x[:, 9:12], x[:, 12:], p, s),
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--only", default="", help="only operators whose name contains this")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    bench, ops = Bench(CLOCKS[options.clock]), select_ops(CPU, torch.float32, backend="cpu")
    limits = f"read {bench.read_gb_s:.1f} GB/s, fp32 {bench.peak_gflop_s:.0f} GFLOP/s"
    print(f"backend {ops.name}, {options.threads} threads, {options.clock} clock; the machine: {limits}")
    print(f"{'operator':58} {'us':>10} {'GB/s':>7} {'GF/s':>7} {'roofline':>9} {'vs torch':>9}")
    results: list[Result] = []
    for cases in (linear_cases, grouped_cases, attention_cases, pointwise_cases):
        for case in cases(ops):
            if options.only not in case.name:
                continue
            r = bench.measure(case)
            ratio = "" if r.torch_ratio is None else f"{r.torch_ratio:8.2f}x"
            print(
                f"{r.name:58} {r.microseconds:10.1f} {r.gb_s:7.1f} {r.gflop_s:7.1f} {r.roofline:9.0%} {ratio}",
                flush=True,
            )
            results.append(r)
    if options.json is not None:
        report = {"threads": options.threads, "clock": options.clock, "read_gb_s": bench.read_gb_s}
        report |= {"peak_gflop_s": bench.peak_gflop_s, "results": [asdict(r) for r in results]}
        options.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
