"""Every Triton kernel beside its reference on random inputs: the comparisons that `check.py` makes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from latent import latent_outputs
from paged import paged_case

from shoal.kernels.draws import FAILED_FLAG, pack_draws
from shoal.kernels.ops import AttentionMetadata, HeadNorms, Ops
from shoal.kernels.page_format import PageFormat
from shoal.kernels.reference.ops import ReferenceOps
from shoal.kernels.reference.sampling import sample as reference_sample
from shoal.kernels.triton_ops.table import TritonOps

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ALLOWED = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-4}
"""Largest |kernel - reference| / (1 + |reference|), the reference in fp32 from the same rounded inputs."""
LSE_ALLOWED = 1e-4


@dataclass(frozen=True)
class Check:
    """One comparison. `error` is the largest difference, relative above 1 and absolute below."""

    name: str
    error: float
    allowed: float

    @property
    def passed(self) -> bool:
        return self.error <= self.allowed  # a NaN is not


def run_checks(device: torch.device, seed: int, *, small: bool) -> list[Check]:
    """All comparisons; prints each. `small` keeps shapes to what the interpreter can do in seconds."""
    reference = ReferenceOps(device, torch.float32)
    checks = []
    for dtype in DTYPES:
        ops = TritonOps(device, dtype)
        comparisons = [
            _attention(ops, reference, device, dtype, seed, small),
            _invariance(ops, device, dtype, seed, small),
            _rotary_store(ops, device, dtype, small),
            _sampling(ops, device, dtype, seed, small),
            _grouped(ops, device, dtype, small),
            _latent(ops, reference, device, dtype, small),
        ]
        for comparison in (*comparisons, _rows(ops, reference, device, dtype, small), _store(ops, device, dtype)):
            for name, error, allowed in comparison:
                check = Check(f"{name}, {str(dtype).removeprefix('torch.')}", error, allowed)
                print(f"  {'ok   ' if check.passed else 'WRONG'} {check.name}: {error:.2g}", flush=True)
                checks.append(check)
    return checks


Comparison = Iterator[tuple[str, float, float]]


def difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    actual, expected = actual.float(), expected.float()
    error = ((actual - expected).abs() / (1 + expected.abs())).max().item()
    return error if actual.isfinite().all() else float("nan")


def _attention(
    ops: Ops, reference: Ops, device: torch.device, dtype: torch.dtype, seed: int, small: bool
) -> Comparison:
    for i, shape in enumerate(_attention_shapes(small)):
        sequences = shape.pop("sequences")
        case = paged_case(sequences, dtype=dtype, seed=seed + i, device=device.type, **shape)
        out, lse = ops.paged_attention_lse(case.q, case.pages, case.meta, case.scale, case.window)
        expected, expected_lse = reference.paged_attention_lse(
            case.reference_q, case.reference_pages, case.reference_meta, case.scale, case.window
        )
        name = f"paged attention, {'/'.join(map(str, shape['heads']))} heads of {shape['head_dim']}"
        name += f", window {case.window}, {len(sequences)} sequences"
        yield name, difference(out, expected), ALLOWED[dtype]
        yield f"log-sum-exp of {name}", difference(lse, expected_lse), LSE_ALLOWED


def _attention_shapes(small: bool) -> list[dict[str, Any]]:
    """Steps with decodes (short, split, of the most segments), chunks in the middle of prompts and whole prompts."""
    if small:
        mixed = [(5, 1), (300, 1), (40, 9)]
        return [{"sequences": mixed, "heads": (2, 1), "head_dim": 64}]
    mixed = [(1, 1), (17, 1), (700, 1), (256, 1), (9000, 1), (2048, 513), (300, 300), (1000, 1), (33, 32), (5000, 129)]
    decodes = [(1 + 97 * i, 1) for i in range(40)]
    shapes: list[dict[str, Any]] = [
        {"heads": (32, 8), "head_dim": 128},
        {"heads": (32, 8), "head_dim": 128, "window": 1024, "block_size": 32},
        {"heads": (9, 3), "head_dim": 64},
        {"heads": (28, 4), "head_dim": 128, "window": 100},
        {"heads": (4, 1), "head_dim": 256, "window": 512},
        {"heads": (8, 4), "head_dim": 256},
        {"heads": (32, 32), "head_dim": 96},
        {"heads": (24, 1), "head_dim": 64},
    ]
    return [{"sequences": mixed, **shape} for shape in shapes] + [{"sequences": decodes, **shapes[0]}]


def _invariance(ops: Ops, device: torch.device, dtype: torch.dtype, seed: int, small: bool) -> Comparison:
    """A decode alone and in a batch, bit for bit."""
    longest = 700 if small else 20000
    case = paged_case(
        [(300, 1), (longest, 1), (40, 30)], heads=(8, 2), head_dim=64, dtype=dtype, seed=seed, device=device.type
    )
    together = ops.paged_attention(case.q, case.pages, case.meta, case.scale)
    alone = replace(
        case.meta,
        query_start=case.meta.query_start[:2].clone(),
        seq_lens=case.meta.seq_lens[:1].clone(),
        block_tables=case.meta.block_tables[:1].clone(),
        max_query_len=1,
        max_seq_len=300,
        num_decodes=1,
    )
    single = ops.paged_attention(case.q[:1], case.pages, alone, case.scale)
    yield "decode alone against in a batch", difference(together[:1], single), 0.0


def _rows(ops: Ops, reference: Ops, device: torch.device, dtype: torch.dtype, small: bool) -> Comparison:
    """The operators that work on rows: norms, rotary, activations, the matrix product."""
    tokens, hidden = (3, 576) if small else (777, 4096)
    allowed = ALLOWED[dtype]

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device).to(dtype)

    x, residual = random(tokens, hidden), random(tokens, hidden)
    weight = torch.randn(hidden, device=device)
    yield (
        "rms_norm",
        difference(ops.rms_norm(x, weight, 1e-5)[0], reference.rms_norm(x.float(), weight, 1e-5)[0]),
        allowed,
    )
    actual, expected = (table.rms_norm(x, weight, 1e-5, residual) for table in (ops, reference))
    yield "rms_norm with residual", difference(actual[0], expected[0]), allowed
    yield "residual of rms_norm", difference(actual[1], expected[1]), allowed
    rows = torch.randint(0, tokens, (5,), device=device)
    gathered = ops.rms_norm_rows(x, rows, weight, 1e-5)
    yield "rms_norm_rows", difference(gathered, ops.rms_norm(x, weight, 1e-5)[0][rows]), 0.0

    fused = random(tokens, 15, 128)
    head_weight = torch.randn(128, device=device)
    normed = ops.head_rms_norm(fused[:, 2:9], head_weight, 1e-6)
    yield (
        "head_rms_norm",
        difference(normed, reference.head_rms_norm(fused[:, 2:9].float(), head_weight, 1e-6)),
        allowed,
    )

    positions = torch.randint(0, 64, (tokens,), device=device)
    cos_sin = torch.randn(64, 128, device=device)
    rotated, expected_rotated = fused.clone(), fused.float()
    for table, target in ((ops, rotated), (reference, expected_rotated)):
        table.rotary(target[:, :9], target[:, 9:12], positions, cos_sin)
    yield "rotary", difference(rotated, expected_rotated), allowed

    gates = random(tokens, 2 * 3000) * 3
    for activation in ("silu_and_mul", "gelu_tanh_and_mul"):
        expected_product = getattr(reference, activation)(gates.float())
        yield activation, difference(getattr(ops, activation)(gates), expected_product), allowed

    matrix, bias = random(256, hidden) / hidden**0.5, random(256)
    product = ops.linear(x, ops.prepare_linear(matrix.clone(), bias.clone()))
    yield "linear", difference(product, x.float() @ matrix.float().T + bias.float()), allowed


def _grouped(ops: Ops, device: torch.device, dtype: torch.dtype, small: bool) -> Comparison:
    """Experts with many rows, with few and with none; rows of no expert are NaN, so that a read shows."""
    experts, outputs, inputs = (5, 48, 40) if small else (64, 1536, 2048)
    weight = torch.randn(experts, outputs, inputs, device=device).to(dtype) / inputs**0.5
    prepared = ops.prepare_grouped(weight)
    for rows in (9, 200) if small else (1, 64, 500, 20000):
        bounds = torch.randint(0, rows, (experts - 1,), device=device).square() // rows  # most in the last ones
        starts = torch.cat([bounds.new_zeros(1), bounds.sort().values, bounds.new_full((1,), rows)]).int()
        x = torch.randn(rows + 3, inputs, device=device).to(dtype)
        x[rows:] = torch.nan
        out = ops.grouped_linear(x, prepared, starts)
        expected = torch.cat(
            [
                x[start:stop].float() @ matrix.float().T
                for matrix, (start, stop) in zip(weight, pairwise(starts.tolist()), strict=True)
            ]
        )
        yield f"grouped product of {rows} rows", difference(out[:rows], expected), ALLOWED[dtype]


def _latent(ops: Ops, reference: Ops, device: torch.device, dtype: torch.dtype, small: bool) -> Comparison:
    for name, actual, expected in latent_outputs(ops, reference, device, dtype, small=small):
        yield name, difference(actual, expected), ALLOWED[dtype]


def _rotary_store(ops: Ops, device: torch.device, dtype: torch.dtype, small: bool) -> Comparison:
    """The fused operator beside the three that it stands for, on views of one projection."""
    tokens, (heads, kv_heads, dim) = (5, (4, 2, 64)) if small else (777, (32, 8, 128))
    slots = torch.randperm(2 * tokens, device=device)[:tokens]
    slots[::5] = -1
    meta = AttentionMetadata(
        query_start=torch.zeros(1, dtype=torch.int32, device=device),
        seq_lens=torch.zeros(0, dtype=torch.int32, device=device),
        block_tables=torch.zeros(0, 0, dtype=torch.int32, device=device),
        slot_mapping=slots,
        positions=torch.randint(0, 64, (tokens,), device=device),
        max_query_len=1,
        max_seq_len=1,
    )
    cos_sin, weight = torch.randn(64, dim, device=device), torch.randn(dim, device=device)
    fused = torch.randn(tokens, heads + 2 * kv_heads, dim, device=device).to(dtype)
    for norms in (None, HeadNorms(weight, weight.flip(0), 1e-6)):
        results = []
        for run in (type(ops).rotary_store_kv, Ops.rotary_store_kv):
            pages = PageFormat("canonical", 16, kv_heads, dim, dtype).allocate(2 * tokens // 16 + 1, device)
            q, k, v = torch.split_with_sizes(fused.clone(), [heads, kv_heads, kv_heads], dim=1)
            results.append((run(ops, (q, k, v), cos_sin, pages, meta, norms), pages.k, pages.v))
        name = "rotary_store_kv" if norms is None else "rotary_store_kv with head norms"
        for part, actual, expected in zip(("queries", "keys", "values"), *results, strict=True):
            yield f"{name}, {part}", difference(actual, expected), ALLOWED[dtype] if part != "values" else 0.0


def _sampling(ops: Ops, device: torch.device, dtype: torch.dtype, seed: int, small: bool) -> Comparison:
    """Tokens of random rows beside those of full sorts in float64. Where they differ, the device's must be one that a
    uniform moved by a millionth would have drawn: sums are rounded otherwise."""
    for vocab in (300,) if small else (32000, 128256, 151936, 262144):
        rows = 5 if small else 64
        logits = (3 * torch.randn(rows, vocab, device=device)).to(dtype)
        logits[:, 1000:] -= 5
        draws = _random_draws(rows, seed).to(device)
        actual, flags = ops.sample(logits, draws)
        expected, _ = reference_sample(logits, draws)
        wrong = [
            row for row in torch.nonzero(actual != expected).flatten().tolist() if not _near(logits, draws, actual, row)
        ]
        name = f"sampling from {vocab}"
        yield f"{name}, wrong tokens", float(len(wrong)), 0.0
        yield f"{name}, flags of good rows", float(flags.sum()), 0.0
        alone = torch.cat([ops.sample(logits[row : row + 1], draws[row : row + 1])[0] for row in range(rows)])
        yield f"{name}, tokens that depend on the batch", float((alone != actual).sum()), 0.0
        logits[1::2, vocab // 2] = torch.nan
        broken = torch.arange(rows, device=device) % 2 * FAILED_FLAG
        yield f"{name}, wrong flags of rows with NaN", float((ops.sample(logits, draws)[1] != broken).sum()), 0.0


def _random_draws(rows: int, seed: int) -> torch.Tensor:
    kinds = [(0.0, 1.0, 0.0, 0), (0.8, 1.0, 0.0, 0), (1.0, 0.9, 0.0, 0), (1.3, 0.95, 0.02, 50), (2.0, 0.999, 0.0, 0)]
    chosen = [kinds[row % len(kinds)] for row in range(rows)]
    shape = np.array([kind[:3] for kind in chosen])
    seeds = [seed * 1_000_003 + row for row in range(rows)]
    return torch.from_numpy(
        pack_draws(seeds, [(row % 3, row) for row in range(rows)], [kind[3] for kind in chosen], shape)
    )


def _near(logits: torch.Tensor, draws: torch.Tensor, actual: torch.Tensor, row: int) -> bool:
    """Whether the reference draws the same token from a slightly different row: the logits moved by a few roundings."""
    moved = logits[row : row + 1].double() * torch.tensor([[1 - 2e-6], [1 - 1e-6], [1 + 1e-6], [1 + 2e-6]]).to(
        logits.device
    )
    tokens, _ = reference_sample(moved, draws[row : row + 1].repeat(len(moved), 1))
    return bool((tokens == actual[row]).any())


def _store(ops: Ops, device: torch.device, dtype: torch.dtype) -> Comparison:
    pages = PageFormat("canonical", 16, 8, 128, dtype).allocate(40, device)
    k, v = torch.randn(2, 100, 8, 128, device=device).to(dtype)
    slots = torch.randperm(640, device=device)[:100]
    slots[::7] = -1
    kept = slots >= 0
    ops.store_kv(k, v, pages, slots)
    for name, pool, source in (("keys", pages.k, k), ("values", pages.v, v)):
        expected = torch.zeros(640, 8, 128, dtype=dtype, device=device)
        expected[slots[kept]] = source[kept]
        yield f"store_kv, {name}", difference(pool.flatten(0, 1), expected), 0.0
