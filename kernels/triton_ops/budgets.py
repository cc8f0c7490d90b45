"""What each kernel may take of a GPU, checked by compiling it ahead of time for sm_80, sm_90 and sm_100.

    python -m shoal.kernels.triton_ops.budgets [--json] [--jobs N]

prints the table of what it takes and exits with 1 when a budget is exceeded. No kernel may spill. The limits of decode
follow from four programs of 128 threads sharing an SM: 128 registers a thread, a quarter of the shared memory.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context

import torch

from shoal.kernels.draws import WORDS
from shoal.kernels.ops import AttentionMetadata, HeadNorms, LatentNorm
from shoal.kernels.page_format import PageFormat
from shoal.kernels.triton_ops.activation import gated_launch
from shoal.kernels.triton_ops.aot import Resources, compile_launch
from shoal.kernels.triton_ops.attention import attention_launches
from shoal.kernels.triton_ops.combine import combine_experts_launch
from shoal.kernels.triton_ops.grouped import StackedGroups, grouped_linear_launch
from shoal.kernels.triton_ops.launch import INTERPRETED, SM80, SM90, SM100, GpuTarget, Launch
from shoal.kernels.triton_ops.merge import merge_attention_launch
from shoal.kernels.triton_ops.mla import mla_attention_launches, rotary_store_latent_launch
from shoal.kernels.triton_ops.norm import head_rms_norm_launch, rms_norm_launch, rms_norm_rows_launch
from shoal.kernels.triton_ops.rotary import rotary_launch, rotary_store_kv_launch
from shoal.kernels.triton_ops.sampling import sample_launches
from shoal.kernels.triton_ops.store import store_kv_launch

TARGETS = (SM80, SM90, SM100)
KIB = 1024
MMA = ("mma.sync", "wgmma", "tcgen05")
"""What a product of 64 rows and more must use on each target; the 16 rows of decode take mma.sync everywhere."""
MMA_SYNC = ("mma.sync", "mma.sync", "mma.sync")
NONE = ("-", "-", "-")


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel in one shape of a real model. Tuples are by target, in the order of `TARGETS`."""

    name: str
    build: Callable[[GpuTarget], Launch]
    registers: int
    shared_kib: tuple[int, int, int]
    matrix_instruction: tuple[str, str, str] = NONE


@dataclass(frozen=True, slots=True)
class Row:
    """One case on one target: what it takes and what of it is over budget (nothing, if all is well)."""

    case: str
    target: str
    resources: Resources
    violations: tuple[str, ...]


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def attention_case(
    heads: tuple[int, int],
    head_dim: int,
    *,
    decode: bool = False,
    window: int | None = None,
    max_seq_len: int = 4096,
    dtype: torch.dtype = torch.bfloat16,
    index: int = 0,
) -> Callable[[GpuTarget], Launch]:
    """Launch `index` of an attention call over 64 sequences of one token (decode) or one of 64 tokens."""

    def build(target: GpuTarget) -> Launch:
        num_seqs = 64 if decode else 1
        q = _empty(64, heads[0], head_dim, dtype=dtype)
        pages = PageFormat("canonical", 16, heads[1], head_dim, dtype).allocate(1024, torch.device("meta"))
        meta = AttentionMetadata(
            query_start=_empty(num_seqs + 1, dtype=torch.int32),
            seq_lens=_empty(num_seqs, dtype=torch.int32),
            block_tables=_empty(num_seqs, max_seq_len // 16, dtype=torch.int32),
            slot_mapping=_empty(64, dtype=torch.int64),
            positions=_empty(64, dtype=torch.int64),
            max_query_len=64 // num_seqs,
            max_seq_len=max_seq_len,
            num_decodes=num_seqs if decode else 0,
        )
        lse = _empty(64, heads[0], dtype=torch.float32)
        return attention_launches(q, pages, meta, head_dim**-0.5, window, torch.empty_like(q), lse, target)[index]

    return build


def _store(_: GpuTarget) -> Launch:
    pages = PageFormat("canonical", 16, 8, 128, torch.bfloat16).allocate(1024, torch.device("meta"))
    return store_kv_launch(_empty(64, 8, 128), _empty(64, 8, 128), pages, _empty(64, dtype=torch.int64))


def _rms_norm(_: GpuTarget) -> Launch:
    x = _empty(64, 4096)
    return rms_norm_launch(x, _empty(4096, dtype=torch.float32), 1e-5, x, torch.empty_like(x), torch.empty_like(x))


def _rms_norm_rows(_: GpuTarget) -> Launch:
    rows, weight = _empty(32, dtype=torch.int64), _empty(4096, dtype=torch.float32)
    return rms_norm_rows_launch(_empty(64, 4096), rows, weight, 1e-5, _empty(32, 4096))


def _head_rms_norm(_: GpuTarget) -> Launch:
    x = _empty(64, 32, 128)
    return head_rms_norm_launch(x, _empty(128, dtype=torch.float32), 1e-6, torch.empty_like(x))


def _rotary(_: GpuTarget) -> Launch:
    cos_sin = _empty(8192, 128, dtype=torch.float32)
    return rotary_launch(_empty(64, 32, 128), _empty(64, 8, 128), _empty(64, dtype=torch.int64), cos_sin)


def rotary_store_kv_case(*, tokens: int = 64, normed: bool = False) -> Callable[[GpuTarget], Launch]:
    def build(_: GpuTarget) -> Launch:
        one = _empty(tokens, dtype=torch.int64)
        empty = _empty(0, dtype=torch.int32)
        meta = AttentionMetadata(empty, empty, empty, slot_mapping=one, positions=one, max_query_len=1, max_seq_len=1)
        pages = PageFormat("canonical", 16, 8, 128, torch.bfloat16).allocate(1024, torch.device("meta"))
        # Views of one projection, as models have them.
        qkv = torch.split_with_sizes(_empty(tokens, 48, 128), [32, 8, 8], dim=1)
        weight = _empty(128, dtype=torch.float32)
        norms = HeadNorms(weight, weight, 1e-6) if normed else None
        return rotary_store_kv_launch(
            (qkv[0], qkv[1], qkv[2]), _empty(8192, 128, dtype=torch.float32), pages, meta, norms
        )

    return build


def _latent_meta(num_seqs: int, max_seq_len: int) -> AttentionMetadata:
    """Of 64 tokens."""
    return AttentionMetadata(
        query_start=_empty(num_seqs + 1, dtype=torch.int32),
        seq_lens=_empty(num_seqs, dtype=torch.int32),
        block_tables=_empty(num_seqs, max_seq_len // 16, dtype=torch.int32),
        slot_mapping=_empty(64, dtype=torch.int64),
        positions=_empty(64, dtype=torch.int64),
        max_query_len=64 // num_seqs,
        max_seq_len=max_seq_len,
        num_decodes=num_seqs if num_seqs == 64 else 0,
    )


def latent_case(
    heads: int, *, decode: bool = False, max_seq_len: int = 4096, index: int = 0
) -> Callable[[GpuTarget], Launch]:
    """Launch `index` of a call of latent attention, 512 + 64 channels, over 64 sequences of one token (decode) or one
    of 64 tokens."""

    def build(target: GpuTarget) -> Launch:
        meta = _latent_meta(64 if decode else 1, max_seq_len)
        pages = PageFormat.latent("canonical", 16, 576, torch.bfloat16).allocate(1024, torch.device("meta"))
        # Rotary parts are views of the projection, as models have them.
        q, q_rope = _empty(64, heads, 512), _empty(64, heads * 192)[:, heads * 128 :].view(64, heads, 64)
        return mla_attention_launches(q, q_rope, pages, meta, 192**-0.5, torch.empty_like(q), target)[index]

    return build


def _rotary_store_latent(_: GpuTarget) -> Launch:
    pages = PageFormat.latent("canonical", 16, 576, torch.bfloat16).allocate(1024, torch.device("meta"))
    q_rope, kv = _empty(64, 16 * 192)[:, 16 * 128 :].view(64, 16, 64), _empty(64, 1536 + 576)[:, 1536:]
    norm, cos_sin = LatentNorm(_empty(512, dtype=torch.float32), 1e-6), _empty(8192, 64, dtype=torch.float32)
    return rotary_store_latent_launch(q_rope, kv, norm, cos_sin, pages, _latent_meta(64, 4096))


def sampling_case(index: int, *, rows: int = 64, vocab: int = 128256) -> Callable[[GpuTarget], Launch]:
    """Launch `index` of a draw over fp32 logits."""

    def build(_: GpuTarget) -> Launch:
        logits, draws = _empty(rows, vocab, dtype=torch.float32), _empty(rows, WORDS, dtype=torch.int64)
        return sample_launches(logits, draws, _empty(2, rows, dtype=torch.int64))[index]

    return build


def grouped_case(
    rows: int, experts: int, shape: tuple[int, int], dtype: torch.dtype = torch.bfloat16
) -> Callable[[GpuTarget], Launch]:
    """Rows that visit experts, whose matrices are of a `shape` (outputs, inputs)."""

    def build(_: GpuTarget) -> Launch:
        weight = StackedGroups(_empty(experts, *shape, dtype=dtype))
        x, out = _empty(rows, shape[1], dtype=dtype), _empty(rows, shape[0], dtype=dtype)
        return grouped_linear_launch(x, weight, _empty(experts + 1, dtype=torch.int32), out)

    return build


def combine_case(*, rows: int = 64) -> Callable[[GpuTarget], Launch]:
    def build(_: GpuTarget) -> Launch:
        places, weights = _empty(rows, 8, dtype=torch.int64), _empty(rows, 8, dtype=torch.float32)
        return combine_experts_launch(_empty(8 * rows, 2048), places, weights, _empty(rows, 2048))

    return build


def _merge(_: GpuTarget) -> Launch:
    out, lse = _empty(64, 32, 128, dtype=torch.float32), _empty(64, 32, dtype=torch.float32)
    return merge_attention_launch(out, lse, out, lse)


def _silu(_: GpuTarget) -> Launch:
    return gated_launch(_empty(64, 2 * 14336), "silu", _empty(64, 14336))


def _gelu(_: GpuTarget) -> Launch:
    return gated_launch(_empty(64, 2 * 14336), "gelu_tanh", _empty(64, 14336))


DECODE_REGISTERS = 128
DECODE_SHARED = (40, 56, 56)
CASES = (
    Case("prefill attention, 9/3 heads of 64", attention_case((9, 3), 64), 255, (33, 82, 82), MMA),
    Case("prefill attention, 32/8 heads of 128", attention_case((32, 8), 128), 255, (65, 162, 162), MMA),
    Case(
        "prefill attention, 32/8 heads of 128, window",
        attention_case((32, 8), 128, window=1024),
        255,
        (65, 97, 97),
        MMA,
    ),
    Case(
        "prefill attention, 4/1 heads of 256, window", attention_case((4, 1), 256, window=512), 255, (69, 129, 129), MMA
    ),
    Case(
        "prefill attention, 32/8 heads of 128, fp32",
        attention_case((32, 8), 128, dtype=torch.float32),
        255,
        (53, 53, 53),
        MMA_SYNC,
    ),
    Case(
        "decode attention, 9/3 heads of 64",
        attention_case((9, 3), 64, decode=True, max_seq_len=256),
        DECODE_REGISTERS,
        DECODE_SHARED,
        MMA_SYNC,
    ),
    Case(
        "decode attention, 32/8 heads of 128, split",
        attention_case((32, 8), 128, decode=True),
        DECODE_REGISTERS,
        DECODE_SHARED,
        MMA_SYNC,
    ),
    Case(
        "decode attention, 4/1 heads of 256, window, split",
        attention_case((4, 1), 256, decode=True, window=512),
        168,  # three programs
        (54, 75, 75),
        MMA_SYNC,
    ),
    Case("merge of a split decode, heads of 128", attention_case((32, 8), 128, decode=True, index=1), 64, (0, 0, 0)),
    Case("merge of two parts, 32 heads of 128", _merge, 64, (0, 0, 0)),
    Case("latent prefill attention, 16 heads of 512 + 64", latent_case(16), 255, (113, 109, 141), MMA),
    Case("latent prefill attention, 128 heads of 512 + 64", latent_case(128), 255, (113, 109, 141), MMA),
    Case(
        "latent decode attention, 16 heads of 512 + 64, split",
        latent_case(16, decode=True),
        200,  # two programs
        (56, 56, 56),
        MMA_SYNC,
    ),
    Case("merge of a split latent decode", latent_case(16, decode=True, index=1), 64, (0, 0, 0)),
    Case("rotary and store of latents, 16 heads", _rotary_store_latent, 64, (1, 1, 1)),
    Case("store_kv, 8 heads of 128", _store, 64, (0, 0, 0)),
    Case("rms_norm of 4096 with residual", _rms_norm, 64, (1, 1, 1)),
    Case("rms_norm of 32 rows of 4096", _rms_norm_rows, 64, (1, 1, 1)),
    Case("head_rms_norm, 32 heads of 128", _head_rms_norm, 64, (1, 1, 1)),
    Case("rotary, 32/8 heads of 128", _rotary, 64, (0, 0, 0)),
    Case("rotary and store_kv, 32/8 heads of 128", rotary_store_kv_case(), 64, (0, 0, 0)),
    Case("head norms, rotary and store_kv, 32/8 heads of 128", rotary_store_kv_case(normed=True), 64, (0, 0, 0)),
    # Three programs of 128 threads on an SM of sm_90, two of sm_80.
    Case(
        "grouped product, 64 rows of 128 experts of 1536 x 2048",
        grouped_case(64, 128, (1536, 2048)),
        DECODE_REGISTERS,
        (55, 55, 55),
        MMA_SYNC,
    ),
    # Two programs of 256 threads on an SM of sm_90 and sm_100, which leaves 128 registers a thread; one of sm_80.
    Case(
        "grouped product, 8192 rows of 128 experts of 1536 x 2048",
        grouped_case(8192, 128, (1536, 2048)),
        192,
        (65, 97, 97),
        MMA,
    ),
    Case(
        "grouped product, 4096 rows of 8 experts of 28672 x 4096, fp32",
        grouped_case(4096, 8, (28672, 4096), torch.float32),
        192,
        (33, 49, 49),
        MMA,
    ),
    Case("combine_experts, 8 results of 2048 a row", combine_case(), 64, (0, 0, 0)),
    Case("silu_and_mul of 14336", _silu, 64, (0, 0, 0)),
    Case("gelu_tanh_and_mul of 14336", _gelu, 64, (0, 0, 0)),
    Case("sampling, row maxima of 128256", sampling_case(0), 64, (1, 1, 1)),
    Case("sampling, row masses of 128256", sampling_case(1), 128, (17, 17, 17)),
    # One program of 512 threads a row: 128 registers are all that there are.
    Case("sampling, draw from 128256", sampling_case(2), 128, (49, 49, 49)),
)


def measure(case: Case, position: int) -> Row:
    """Compiles a case for the target at `position` of `TARGETS` and holds it against its budget."""
    target = TARGETS[position]
    taken = compile_launch(case.build(target), target)
    violations = []
    if taken.registers > case.registers:
        violations.append(f"{taken.registers} registers, allowed {case.registers}")
    if taken.stack_bytes:
        violations.append(f"{taken.stack_bytes} bytes spilled")
    allowed = min(case.shared_kib[position] * KIB, target.shared_bytes)
    if taken.shared_bytes > allowed:
        violations.append(f"{taken.shared_bytes} bytes of shared memory, allowed {allowed}")
    if taken.matrix_instruction != case.matrix_instruction[position]:
        violations.append(f"uses {taken.matrix_instruction}, not {case.matrix_instruction[position]}")
    if case.matrix_instruction != NONE and not taken.async_copies:
        violations.append("operands are not copied asynchronously")
    return Row(case.name, f"sm_{target.capability}", taken, tuple(violations))


def measure_all(jobs: int) -> list[Row]:
    """Every case on every target, `jobs` compilations at once, each in a process because the compiler holds the GIL.
    Forked, as nothing but this thread runs yet: the workers need not import torch again."""
    pairs = [(case, position) for case in range(len(CASES)) for position in range(len(TARGETS))]
    with ProcessPoolExecutor(jobs, mp_context=get_context("fork")) as pool:
        return list(pool.map(_measure_index, pairs))


def _measure_index(pair: tuple[int, int]) -> Row:
    # Cases hold closures, which cannot be sent to another process; their index can.
    return measure(CASES[pair[0]], pair[1])


def render(rows: list[Row]) -> str:
    """A Markdown table: registers of a thread, shared memory of a block and tensor-core instruction by target."""
    names = list(dict.fromkeys(row.case for row in rows))
    targets = list(dict.fromkeys(row.target for row in rows))
    cells = {(row.case, row.target): row for row in rows}
    lines = ["| kernel | " + " | ".join(targets) + " |", "|---" * (len(targets) + 1) + "|"]
    for name in names:
        lines.append(f"| {name} | " + " | ".join(_cell(cells[name, target]) for target in targets) + " |")
    return "\n".join(lines)


def _cell(row: Row) -> str:
    taken = row.resources
    parts = [f"{taken.registers} regs", f"{taken.stack_bytes} B spilled", f"{taken.shared_bytes / KIB:.1f} KiB"]
    if taken.matrix_instruction != "-":
        parts.append(taken.matrix_instruction)
    return ", ".join(parts) + (" **over budget**" if row.violations else "")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m shoal.kernels.triton_ops.budgets", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the rows as JSON instead of a table")
    parser.add_argument("--jobs", type=int, default=2, help="compilations at once (default 2)")
    options = parser.parse_args(arguments)
    if INTERPRETED:
        print("Nothing can be compiled in Triton's interpreter: unset TRITON_INTERPRET.", file=sys.stderr)
        return 2
    rows = measure_all(options.jobs)
    print(json.dumps([asdict(row) for row in rows], indent=1) if options.json else render(rows))
    for row in rows:
        for violation in row.violations:
            print(f"{row.case} on {row.target}: {violation}", file=sys.stderr)
    return 1 if any(row.violations for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
