"""The CPU's table of operators, on the native unit (`*.cpp`).

Activations are fp32; weights and pages are fp32 or bfloat16, widened in registers, and weights may be quantized: those
meet activations of 8 bits (`quantized.cpp`). Every operator is batch-invariant:
a row's result has the same bits whatever else is in the batch (the .cpp files say how).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Sequence

import torch

from shoal.kernels.capture import Capturer
from shoal.kernels.cpu import checks, grouped, mla
from shoal.kernels.cpu.grouped import PackedGroups, PackedQuantizedGroups
from shoal.kernels.cpu.native import Native
from shoal.kernels.cpu.program import CpuCapturer
from shoal.kernels.cpu.quantized import PackedQuantizedWeight
from shoal.kernels.draws import WORDS
from shoal.kernels.huge_pages import Arena
from shoal.kernels.ops import (
    AttentionMetadata,
    GroupedWeight,
    GroupMatrix,
    HeadWeights,
    LatentNorm,
    LinearWeight,
    Ops,
    Routing,
    SeparateGroups,
)
from shoal.kernels.page_format import KVPages
from shoal.kernels.quantized import QuantizedMatrix

_Shape = ctypes.c_int64 * 9
_STORED = (torch.float32, torch.bfloat16)


class PackedWeight(LinearWeight):
    """A weight in panels of `panel_outputs` rows, [panels, in_features, panel_outputs]; its last panel is padded."""

    def __init__(
        self, native: Native, arena: Arena, weight: torch.Tensor, bias: torch.Tensor | None, threads: int
    ) -> None:
        if weight.dim() != 2 or weight.dtype not in _STORED:
            raise ValueError(
                f"a linear weight is a float32 or bfloat16 matrix, not {weight.dtype} {tuple(weight.shape)}"
            )
        self.out_features, self.in_features = weight.shape
        self._native = native
        width = native.panel_outputs
        padded = -(-self.out_features // width) * width
        self.packed = arena.empty((padded // width, self.in_features, width), weight.dtype)
        weight = weight.contiguous()
        self.address, self.itemsize = self.packed.data_ptr(), weight.itemsize
        native.pack_weight(weight.data_ptr(), self.itemsize, *weight.shape, self.address, threads)
        self.bias: torch.Tensor | None = None
        if bias is not None:
            if bias.shape != (self.out_features,):
                raise ValueError(f"bias {tuple(bias.shape)} does not fit weight {tuple(weight.shape)}")
            self.bias = torch.zeros(padded)
            self.bias[: self.out_features] = bias
        self.bias_address = None if self.bias is None else self.bias.data_ptr()

    def tensors(self) -> list[torch.Tensor]:
        return [self.packed] if self.bias is None else [self.packed, self.bias]

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        index = index.to(torch.int64).contiguous()
        checks.check_rows(index, self.out_features)
        out = torch.empty((len(index), self.in_features))
        self._native.weight_rows(
            self.address, self.itemsize, self.in_features, index.data_ptr(), len(index), out.data_ptr(),
            torch.get_num_threads(),
        )  # fmt: skip
        return out


class CpuOps(Ops):
    """See the module. With SHOAL_KERNEL_CHECKS=1 every index is checked before native code follows it."""

    name = "cpu"
    layout = "cpu_packed"
    activation_dtype = torch.float32
    host_sampling = True

    def __init__(self, native: Native) -> None:
        self._native = native
        self._arena = Arena()
        self._packing_threads = torch.get_num_threads()  # as they are now: loading takes torch's own down to one
        self._checked = os.environ.get("SHOAL_KERNEL_CHECKS") == "1"

    def prepare_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> LinearWeight:
        return PackedWeight(self._native, self._arena, weight, bias, self._packing_threads)

    def prepare_quantized(self, parts: Sequence[QuantizedMatrix], bias: torch.Tensor | None = None) -> LinearWeight:
        return PackedQuantizedWeight(self._native, self._arena, parts, bias)

    def prepare_grouped(self, matrices: Iterable[GroupMatrix]) -> GroupedWeight:
        separate = super().prepare_grouped(matrices)
        assert isinstance(separate, SeparateGroups)
        shape = separate.out_features, separate.in_features
        dense = [weight.packed for weight in separate.weights if isinstance(weight, PackedWeight)]
        if len(dense) == separate.num_groups and len({packed.dtype for packed in dense}) == 1:
            return PackedGroups(self._native, dense, *shape)
        segments = [
            weight.segments[0]
            for weight in separate.weights
            if isinstance(weight, PackedQuantizedWeight) and len(weight.segments) == 1
        ]
        formats = {segment.format for segment in segments}
        if len(segments) == separate.num_groups and len(formats) == 1:
            packed = [segment.packed for segment in segments]
            return PackedQuantizedGroups(self._native, packed, *shape, int(formats.pop()))
        return separate  # of several formats: one product after the other

    def grouped_linear(self, x: torch.Tensor, weight: GroupedWeight, group_starts: torch.Tensor) -> torch.Tensor:
        if not isinstance(weight, PackedGroups):
            return super().grouped_linear(x, weight, group_starts)
        rows = _as_rows(x)
        assert rows.shape[1] == weight.in_features, (x.shape, weight.in_features)
        assert (group_starts.shape, group_starts.dtype) == ((weight.num_groups + 1,), torch.int32), group_starts
        assert group_starts.is_contiguous()
        if self._checked:
            checks.check_groups(group_starts, len(rows))
        out = torch.empty((len(rows), weight.out_features))
        weight.multiply(rows, group_starts, out)
        return out

    def choose_experts(
        self, logits: torch.Tensor, bias: torch.Tensor | None, routing: Routing
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return grouped.choose_experts(self._native, logits.contiguous(), bias, routing)

    def group_rows(
        self, x: torch.Tensor, groups: torch.Tensor, num_groups: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if self._checked:
            checks.check_experts(groups, num_groups)
        return grouped.group_rows(self._native, _as_rows(x), groups.contiguous(), num_groups)

    def combine_experts(self, results: torch.Tensor, places: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if self._checked:
            checks.check_experts(places, len(results))
        return grouped.combine_experts(self._native, results.contiguous(), places.contiguous(), weights.contiguous())

    def linear(self, x: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
        assert x.shape[-1] == weight.in_features, (x.shape, weight.in_features)
        rows = _as_rows(x)
        out = torch.empty((*x.shape[:-1], weight.out_features))
        if isinstance(weight, PackedQuantizedWeight):
            weight.multiply(rows, out)
            return out
        assert isinstance(weight, PackedWeight), type(weight)
        self._native.linear(
            rows.data_ptr(), rows.stride(0), weight.address, weight.itemsize, weight.bias_address, out.data_ptr(),
            rows.shape[0], weight.out_features, weight.in_features, torch.get_num_threads(),
        )  # fmt: skip
        return out

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = _as_rows(x)
        count, hidden = rows.shape
        assert (weight.shape, weight.dtype) == ((hidden,), torch.float32), (weight.shape, weight.dtype)
        out = torch.empty((count, hidden))
        if residual is None:
            added, added_stride, total, total_address = None, 0, x, None
        else:
            assert residual.shape == x.shape, (residual.shape, x.shape)
            residual = _as_rows(residual)
            total = torch.empty((count, hidden))
            added, added_stride, total_address = residual.data_ptr(), residual.stride(0), total.data_ptr()
        self._native.rms_norm(
            rows.data_ptr(), rows.stride(0), added, added_stride, weight.data_ptr(), eps, out.data_ptr(),
            total_address, count, hidden, torch.get_num_threads(),
        )  # fmt: skip
        return out, total

    def head_rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        x = _as_heads(x)
        tokens, heads, dim = x.shape
        assert (weight.shape, weight.dtype) == ((dim,), torch.float32), (weight.shape, weight.dtype)
        out = torch.empty((tokens, heads, dim))
        self._native.head_rms_norm(
            x.data_ptr(), x.stride(0), weight.data_ptr(), eps, out.data_ptr(), tokens, heads, dim,
            torch.get_num_threads(),
        )  # fmt: skip
        return out

    def rotary(self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
        tokens, heads, dim = q.shape
        # In place, so a view that cannot be followed is the caller's bug, not a reason to copy.
        assert all(map(_follows_heads, (q, k))), (q.stride(), k.stride())
        assert k.shape[::2] == (tokens, dim), (k.shape, q.shape)
        assert (positions.shape, positions.dtype) == ((tokens,), torch.int64), (positions.shape, positions.dtype)
        assert (cos_sin.shape[1], cos_sin.dtype) == (dim, torch.float32), (cos_sin.shape, cos_sin.dtype)
        assert all(x.is_contiguous() for x in (positions, cos_sin))
        if self._checked:
            checks.check_positions(positions, cos_sin)
        self._native.rotary(
            q.data_ptr(), q.stride(0), heads, k.data_ptr(), k.stride(0), k.shape[1], positions.data_ptr(),
            cos_sin.data_ptr(), tokens, dim, torch.get_num_threads(),
        )  # fmt: skip

    def store_kv(self, k: torch.Tensor, v: torch.Tensor, pages: KVPages, slot_mapping: torch.Tensor) -> None:
        k, v, page = _as_heads(k), _as_heads(v), pages.format
        assert k.shape == v.shape == (len(k), page.num_kv_heads, page.head_dim), (k.shape, v.shape, page)
        assert (slot_mapping.shape, slot_mapping.dtype) == ((len(k),), torch.int64), slot_mapping
        assert slot_mapping.is_contiguous()
        assert _is_packed(pages), page
        if self._checked:
            checks.check_slots(slot_mapping, pages)
        self._native.store_kv(
            k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0), pages.k.data_ptr(), pages.v.data_ptr(),
            page.dtype.itemsize, slot_mapping.data_ptr(), k.shape[0], page.num_kv_heads, page.head_dim,
            page.block_size, torch.get_num_threads(),
        )  # fmt: skip

    def paged_attention(
        self, q: torch.Tensor, pages: KVPages, meta: AttentionMetadata, scale: float, window: int | None = None
    ) -> torch.Tensor:
        return self._attention(q, pages, meta, scale, window, None)

    def paged_attention_lse(
        self, q: torch.Tensor, pages: KVPages, meta: AttentionMetadata, scale: float, window: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        lse = torch.full(q.shape[:2], -torch.inf)
        return self._attention(q, pages, meta, scale, window, lse), lse

    def merge_attention(
        self, out: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor
    ) -> None:
        rows, dim = _even_rows(out), out.shape[2]
        others, lses, other_lses = _even_rows(other), _even_rows(lse[..., None]), _even_rows(other_lse[..., None])
        assert rows.shape == others.shape == (len(lses), dim), (out.shape, other.shape, lse.shape)
        assert len(lses) == len(other_lses), (lse.shape, other_lse.shape)
        self._native.merge_attention(
            rows.data_ptr(), rows.stride(0), lses.data_ptr(), lses.stride(0), others.data_ptr(), others.stride(0),
            other_lses.data_ptr(), other_lses.stride(0), len(rows), dim, torch.get_num_threads(),
        )  # fmt: skip

    def _attention(
        self,
        q: torch.Tensor,
        pages: KVPages,
        meta: AttentionMetadata,
        scale: float,
        window: int | None,
        lse: torch.Tensor | None,
    ) -> torch.Tensor:
        q, page = _as_heads(q), pages.format
        tokens, heads, dim = q.shape
        assert (dim, heads % page.num_kv_heads) == (page.head_dim, 0), (q.shape, page)
        assert window is None or window > 0, window
        assert _is_packed(pages), page
        assert meta.block_tables.is_contiguous()
        assert meta.query_start.dtype == meta.seq_lens.dtype == meta.block_tables.dtype == torch.int32
        if self._checked:
            checks.check_attention(meta, pages, tokens, keyless=lse is not None)
        num_seqs, table_width = meta.block_tables.shape
        shape = _Shape(
            num_seqs, heads, page.num_kv_heads, dim, dim, page.block_size, table_width, q.stride(0), window or 0
        )
        out = torch.empty((tokens, heads, dim))
        self._native.paged_attention(
            q.data_ptr(), pages.k.data_ptr(), pages.v.data_ptr(), page.dtype.itemsize, meta.query_start.data_ptr(),
            meta.seq_lens.data_ptr(), meta.block_tables.data_ptr(), shape, scale, out.data_ptr(),
            None if lse is None else lse.data_ptr(), tokens, torch.get_num_threads(),
        )  # fmt: skip
        return out

    def prepare_heads(self, weight: torch.Tensor) -> HeadWeights:
        return mla.pack_heads(self._native, self._arena, weight, self._packing_threads)

    def head_linear(self, x: torch.Tensor, weight: HeadWeights) -> torch.Tensor:
        return mla.head_linear(self._native, _as_heads(x), weight)

    def rotary_store_latent(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        norm: LatentNorm,
        cos_sin: torch.Tensor,
        pages: KVPages,
        meta: AttentionMetadata,
    ) -> None:
        assert _follows_heads(q), q.stride()  # in place: a view that cannot be followed is the caller's bug
        if self._checked:
            checks.check_positions(meta.positions, cos_sin)
            checks.check_slots(meta.slot_mapping, pages)
        mla.rotary_store_latent(self._native, (q, _as_rows(kv)), norm, cos_sin, pages, meta)

    def paged_mla_attention(
        self, q: torch.Tensor, q_rope: torch.Tensor, pages: KVPages, meta: AttentionMetadata, scale: float
    ) -> torch.Tensor:
        if self._checked:
            checks.check_attention(meta, pages, len(q))
        return mla.attention(self._native, (_as_heads(q), _as_heads(q_rope)), pages, meta, scale)

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        return self._gated(x, gelu=False)

    def gelu_tanh_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        return self._gated(x, gelu=True)

    def _gated(self, x: torch.Tensor, gelu: bool) -> torch.Tensor:
        rows = _as_rows(x)
        width = rows.shape[1] // 2
        out = torch.empty((*x.shape[:-1], width))
        self._native.gated(
            rows.data_ptr(), rows.stride(0), gelu, out.data_ptr(), rows.shape[0], width, torch.get_num_threads()
        )
        return out

    def sample(self, logits: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
        if logits.dtype != torch.float32 or logits.stride(1) != 1:
            logits = logits.to(torch.float32).contiguous()
        count, vocab = logits.shape
        assert (draws.shape, draws.dtype) == ((count, WORDS), torch.int64), (draws.shape, draws.dtype)
        assert draws.is_contiguous()
        out = torch.empty((2, count), dtype=torch.int64)
        self._native.sample(
            logits.data_ptr(), logits.stride(0), draws.data_ptr(), count, vocab, out.data_ptr(),
            out.data_ptr() + count * out.itemsize, torch.get_num_threads(),
        )  # fmt: skip
        return out

    def capturer(self, pool_bytes: int) -> Capturer | None:
        if self._checked:  # a replay asks Python nothing, so it could check nothing
            return None
        return CpuCapturer(self._native, pool_bytes)

    def explain(self) -> dict[str, str]:
        lanes = self._native.panel_outputs // 2
        native = f"cpu: native unit, {lanes} floats a vector ({self._native.library})"
        return dict.fromkeys(sorted(Ops.__abstractmethods__ - {"explain", "batch_invariant"}), native)

    @property
    def batch_invariant(self) -> bool:
        return True


def _as_rows(x: torch.Tensor) -> torch.Tensor:
    """x as [rows, columns] with contiguous columns; a copy only where its strides allow no view."""
    assert x.dtype == torch.float32, x.dtype
    if x.dim() != 2:
        x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()


def _even_rows(x: torch.Tensor) -> torch.Tensor:
    """x [tokens, heads, dim] as [tokens * heads, dim]: always a view, so that it can be written."""
    assert x.dtype == torch.float32, x.dtype
    rows = x.view(-1, x.shape[2])
    assert rows.stride(1) == 1 or rows.shape[1] == 1, x.stride()
    return rows


def _as_heads(x: torch.Tensor) -> torch.Tensor:
    """x [tokens, heads, dim] with contiguous last two axes; a copy only where it has others."""
    assert x.dtype == torch.float32, x.dtype
    return x if _follows_heads(x) else x.contiguous()


def _follows_heads(x: torch.Tensor) -> bool:
    """Whether the heads of a token lie side by side; the stride of an axis with one entry means nothing."""
    return x.stride(2) == 1 and (x.stride(1) == x.shape[2] or x.shape[1] == 1) and x.dtype == torch.float32


def _is_packed(pages: KVPages) -> bool:
    return pages.format.layout == "cpu_packed" and pages.k.is_contiguous() and pages.v.is_contiguous()
