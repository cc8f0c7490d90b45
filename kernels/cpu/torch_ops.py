"""The CPU without a compiler: the reference with torch's fused operators where it has them."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from shoal.kernels.ops import AttentionMetadata
from shoal.kernels.page_format import KVPages
from shoal.kernels.reference.attention import gather_sequence, visible_keys
from shoal.kernels.reference.ops import ReferenceOps


class TorchCpuOps(ReferenceOps):
    """Weights are held in fp32 (the widening of bfloat16 is exact): torch's bfloat16 product is ten times slower than
    its fp32 one on CPUs without bfloat16 units. Pages are canonical."""

    name = "torch_cpu"

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(torch.device("cpu"), dtype)

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = x if residual is None else x + residual
        return F.rms_norm(total, total.shape[-1:], weight, eps), total

    def head_rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], weight, eps)

    def paged_attention(
        self, q: torch.Tensor, pages: KVPages, meta: AttentionMetadata, scale: float, window: int | None = None
    ) -> torch.Tensor:
        out = torch.zeros_like(q)
        decodes = meta.num_decodes
        if decodes:
            out[:decodes] = _decode(q[:decodes], pages, meta, scale, window)
        starts, lengths = meta.query_start.tolist(), meta.seq_lens.tolist()
        for i in range(decodes, len(lengths)):
            rows = slice(starts[i], starts[i + 1])
            if rows.start == rows.stop:
                continue
            keys, values = gather_sequence(pages, meta.block_tables[i], lengths[i])
            mask = visible_keys(rows.stop - rows.start, lengths[i], window, q.device)
            out[rows] = _attend(q[rows].unsqueeze(0), keys.unsqueeze(0), values.unsqueeze(0), mask, scale)[0]
        return out

    def explain(self) -> dict[str, str]:
        torch_native = dict.fromkeys(("rms_norm", "head_rms_norm", "linear", "paged_attention"), "torch_cpu: torch")
        return super().explain() | torch_native


def _decode(q: torch.Tensor, pages: KVPages, meta: AttentionMetadata, scale: float, window: int | None) -> torch.Tensor:
    """One query a sequence: all of them as one batch, padded to the longest."""
    count = len(q)
    lengths = meta.seq_lens[:count].unsqueeze(1)
    num_blocks = -(-int(lengths.max()) // pages.format.block_size)
    k, v = pages.canonical(meta.block_tables[:count, :num_blocks].flatten().long())
    keys, values = (x.view(count, num_blocks * x.shape[1], *x.shape[2:]) for x in (k, v))
    position = torch.arange(keys.shape[1])
    visible = position < lengths
    if window is not None:
        visible &= position >= lengths - window
    # A padded slot may hold anything, also NaN, which neither a mask nor a zero probability takes away.
    padded = ~(position < lengths)[..., None, None]
    keys, values = keys.masked_fill(padded, 0), values.masked_fill(padded, 0)
    return _attend(q.unsqueeze(1), keys, values, visible[:, None, None], scale)[:, 0]


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """q [batch, queries, heads, head_dim], k and v [batch, keys, kv_heads, head_dim] -> like q."""
    queries, keys, values = (x.transpose(1, 2).to(q.dtype) for x in (q, k, v))
    out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale, enable_gqa=True)
    return out.transpose(1, 2)
