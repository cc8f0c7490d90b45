"""The Triton table: NVIDIA GPUs, canonical pages, hidden states in the model's dtype.

Matrix products go to the vendor's library through torch: there is nothing to fuse them with that would pay for giving
up its tuning. Imported only when this table is chosen: everything else of `kernels` works without triton.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F

from shoal.kernels.capture import Capturer
from shoal.kernels.ops import (
    AttentionMetadata,
    GroupedWeight,
    GroupMatrix,
    HeadNorms,
    HeadWeights,
    LatentNorm,
    LinearWeight,
    Ops,
    SeparateGroups,
)
from shoal.kernels.page_format import KVPages
from shoal.kernels.triton_ops.activation import gated_launch
from shoal.kernels.triton_ops.attention import attention_launches
from shoal.kernels.triton_ops.combine import combine_experts_launch
from shoal.kernels.triton_ops.graphs import CudaCapturer
from shoal.kernels.triton_ops.grouped import StackedGroups, grouped_linear_launch
from shoal.kernels.triton_ops.launch import INTERPRETED, GpuTarget
from shoal.kernels.triton_ops.merge import merge_attention_launch
from shoal.kernels.triton_ops.mla import mla_attention_launches, rotary_store_latent_launch
from shoal.kernels.triton_ops.norm import head_rms_norm_launch, rms_norm_launch, rms_norm_rows_launch
from shoal.kernels.triton_ops.rotary import rotary_launch, rotary_store_kv_launch
from shoal.kernels.triton_ops.sampling import sample_launches
from shoal.kernels.triton_ops.store import store_kv_launch

TRITON_OPERATORS = (
    "combine_experts",
    "gelu_tanh_and_mul",
    "grouped_linear",
    "head_rms_norm",
    "merge_attention",
    "paged_attention",
    "paged_attention_lse",
    "paged_mla_attention",
    "rms_norm",
    "rms_norm_rows",
    "rotary",
    "rotary_store_kv",
    "rotary_store_latent",
    "sample",
    "silu_and_mul",
    "store_kv",
)


class DenseWeight(LinearWeight):
    """A matrix in the activation dtype, as the checkpoint lays it out."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight = weight
        self.bias = bias
        self.out_features, self.in_features = weight.shape

    def tensors(self) -> list[torch.Tensor]:
        return [self.weight] if self.bias is None else [self.weight, self.bias]

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        return self.weight[index]


class TritonOps(Ops):
    """See the module. `device` is a CUDA device, or the CPU in Triton's interpreter."""

    name = "triton"
    device_sampling = True

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        if device.type != "cuda" and not INTERPRETED:
            raise ValueError(f"Triton kernels run on a GPU or in the interpreter (TRITON_INTERPRET=1), not on {device}")
        self.layout = "canonical"
        self.activation_dtype = dtype
        self._device = device
        self._target = GpuTarget.of(device)
        # `linear` promises fp32 accumulation: cuBLAS may otherwise add split-K partial sums in the operands' dtype.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False

    def prepare_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> LinearWeight:
        def place(x: torch.Tensor) -> torch.Tensor:
            return x.to(self._device, self.activation_dtype).contiguous()

        return DenseWeight(place(weight), None if bias is None else place(bias))

    def linear(self, x: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
        assert isinstance(weight, DenseWeight), type(weight)
        return F.linear(x, weight.weight, weight.bias)

    def prepare_grouped(self, matrices: Iterable[GroupMatrix]) -> GroupedWeight:
        separate = super().prepare_grouped(matrices)
        assert isinstance(separate, SeparateGroups)
        return StackedGroups(torch.stack([weight.tensors()[0] for weight in separate.weights]))

    def grouped_linear(self, x: torch.Tensor, weight: GroupedWeight, group_starts: torch.Tensor) -> torch.Tensor:
        assert isinstance(weight, StackedGroups), type(weight)
        out = torch.empty((len(x), weight.out_features), dtype=x.dtype, device=x.device)
        grouped_linear_launch(x, weight, group_starts, out).run()
        return out

    def combine_experts(self, results: torch.Tensor, places: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.empty((len(places), results.shape[1]), dtype=results.dtype, device=results.device)
        combine_experts_launch(results, places, weights, out).run()
        return out

    def prepare_router(self, weight: torch.Tensor) -> LinearWeight:
        return DenseWeight(weight.to(self._device, torch.float32).contiguous(), None)

    def router_logits(self, x: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
        assert isinstance(weight, DenseWeight), type(weight)
        return F.linear(x.float(), weight.weight)

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        total = x if residual is None else torch.empty_like(out)
        rms_norm_launch(x, weight, eps, residual, out, total).run()
        return out, total

    def rms_norm_rows(self, x: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out = torch.empty((len(rows), x.shape[1]), dtype=x.dtype, device=x.device)
        rms_norm_rows_launch(x, rows, weight, eps, out).run()
        return out

    def head_rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        head_rms_norm_launch(x, weight, eps, out).run()
        return out

    def rotary(self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
        rotary_launch(q, k, positions, cos_sin).run()

    def store_kv(self, k: torch.Tensor, v: torch.Tensor, pages: KVPages, slot_mapping: torch.Tensor) -> None:
        store_kv_launch(k, v, pages, slot_mapping).run()

    def rotary_store_kv(
        self,
        qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        cos_sin: torch.Tensor,
        pages: KVPages,
        meta: AttentionMetadata,
        norms: HeadNorms | None = None,
    ) -> torch.Tensor:
        rotary_store_kv_launch(qkv, cos_sin, pages, meta, norms).run()
        return qkv[0]

    def paged_attention(
        self, q: torch.Tensor, pages: KVPages, meta: AttentionMetadata, scale: float, window: int | None = None
    ) -> torch.Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for launch in attention_launches(q, pages, meta, scale, window, out, None, self._target):
            launch.run()
        return out

    def paged_attention_lse(
        self, q: torch.Tensor, pages: KVPages, meta: AttentionMetadata, scale: float, window: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        for launch in attention_launches(q, pages, meta, scale, window, out, lse, self._target):
            launch.run()
        return out, lse

    def prepare_heads(self, weight: torch.Tensor) -> HeadWeights:
        heads, outputs, inputs = weight.shape
        return HeadWeights(heads, outputs, inputs, weight.to(self._device, self.activation_dtype).contiguous())

    def head_linear(self, x: torch.Tensor, weight: HeadWeights) -> torch.Tensor:
        out = torch.empty((len(x), weight.num_heads, weight.out_features), dtype=x.dtype, device=x.device)
        # Heads are the batch; the vendor's product writes with the distances that it is given.
        torch.bmm(x.transpose(0, 1), weight.packed.transpose(1, 2), out=out.transpose(0, 1))
        return out

    def rotary_store_latent(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        norm: LatentNorm,
        cos_sin: torch.Tensor,
        pages: KVPages,
        meta: AttentionMetadata,
    ) -> None:
        rotary_store_latent_launch(q, kv, norm, cos_sin, pages, meta).run()

    def paged_mla_attention(
        self, q: torch.Tensor, q_rope: torch.Tensor, pages: KVPages, meta: AttentionMetadata, scale: float
    ) -> torch.Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for launch in mla_attention_launches(q, q_rope, pages, meta, scale, out, self._target):
            launch.run()
        return out

    def merge_attention(
        self, out: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor
    ) -> None:
        merge_attention_launch(out, lse, other, other_lse).run()

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(x.shape[0], x.shape[1] // 2, dtype=x.dtype, device=x.device)
        gated_launch(x, "silu", out).run()
        return out

    def gelu_tanh_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(x.shape[0], x.shape[1] // 2, dtype=x.dtype, device=x.device)
        gated_launch(x, "gelu_tanh", out).run()
        return out

    def sample(self, logits: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
        out = torch.empty((2, len(logits)), dtype=torch.int64, device=logits.device)
        for launch in sample_launches(logits, draws, out):
            launch.run()
        return out

    def capturer(self, pool_bytes: int) -> Capturer | None:
        """CUDA graphs, none in the interpreter. Their pool grows to what they need, whatever was foretold."""
        return CudaCapturer(self._device) if self._device.type == "cuda" else None

    def explain(self) -> dict[str, str]:
        where = "Triton's interpreter" if INTERPRETED else f"Triton, compiled for sm_{self._target.capability}"
        vendor = "cuBLAS through torch: a plain product has nothing to fuse"
        return (
            dict.fromkeys(TRITON_OPERATORS, where)
            | {"prepare_linear": vendor, "linear": vendor}
            | dict.fromkeys(("prepare_heads", "head_linear"), vendor)
        )

    @property
    def batch_invariant(self) -> bool:
        return False  # attention and norms are; cuBLAS picks its algorithm by the number of rows
