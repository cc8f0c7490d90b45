"""The definition of right: every operator in plain torch, fp32 inside, on any device, for canonical pages."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from shoal.kernels.ops import AttentionMetadata, HeadWeights, LatentNorm, LinearWeight, Ops
from shoal.kernels.page_format import KVPages
from shoal.kernels.reference.attention import paged_attention
from shoal.kernels.reference.mla import paged_mla_attention


class ReferenceLinearWeight(LinearWeight):
    """The weight in fp32, so that every product is exact in the storage type and summed in fp32."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, activation_dtype: torch.dtype) -> None:
        if weight.dim() != 2 or not weight.is_floating_point():
            raise ValueError(f"a linear weight is a floating-point matrix, not {weight.dtype} {tuple(weight.shape)}")
        if bias is not None and bias.shape != weight.shape[:1]:
            raise ValueError(f"bias {tuple(bias.shape)} does not fit weight {tuple(weight.shape)}")
        self.out_features, self.in_features = weight.shape
        self.weight = weight.float()
        self.bias = None if bias is None else bias.float()
        self.activation_dtype = activation_dtype

    def tensors(self) -> list[torch.Tensor]:
        return [self.weight] if self.bias is None else [self.weight, self.bias]

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        return self.weight[index].to(self.activation_dtype)


class ReferenceOps(Ops):
    """Hidden states are fp32 on a CPU and of the model's dtype elsewhere; each operator computes in fp32 inside."""

    name = "reference"

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.layout = "canonical"
        self.activation_dtype = torch.float32 if device.type == "cpu" else dtype

    def prepare_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> LinearWeight:
        return ReferenceLinearWeight(weight, bias, self.activation_dtype)

    def linear(self, x: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
        assert isinstance(weight, ReferenceLinearWeight), type(weight)
        return F.linear(x.float(), weight.weight, weight.bias).to(self.activation_dtype)

    def router_logits(self, x: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
        assert isinstance(weight, ReferenceLinearWeight), type(weight)
        return F.linear(x.float(), weight.weight)

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # The sum is rounded to the activation dtype first: it is what the next layer adds to.
        total = x if residual is None else (x.float() + residual.float()).to(x.dtype)
        return _rms_norm(total, weight, eps), total

    def head_rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return _rms_norm(x, weight, eps)

    def rotary(self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
        cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
        for x in (q, k):
            first, second = x.float().chunk(2, dim=-1)
            x.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))

    def store_kv(self, k: torch.Tensor, v: torch.Tensor, pages: KVPages, slot_mapping: torch.Tensor) -> None:
        kept = slot_mapping >= 0
        slots = slot_mapping[kept]
        for source, target in ((k, pages.k), (v, pages.v)):
            target.flatten(0, 1)[slots] = source[kept].to(target.dtype)

    def paged_attention(
        self, q: torch.Tensor, pages: KVPages, meta: AttentionMetadata, scale: float, window: int | None = None
    ) -> torch.Tensor:
        return self.paged_attention_lse(q, pages, meta, scale, window)[0].to(q.dtype)

    def paged_attention_lse(
        self, q: torch.Tensor, pages: KVPages, meta: AttentionMetadata, scale: float, window: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return paged_attention(q, pages, meta, scale, window)

    def prepare_heads(self, weight: torch.Tensor) -> HeadWeights:
        heads, outputs, inputs = weight.shape
        return HeadWeights(heads, outputs, inputs, weight.float())

    def head_linear(self, x: torch.Tensor, weight: HeadWeights) -> torch.Tensor:
        return torch.einsum("nhi,hoi->nho", x.float(), weight.packed).to(self.activation_dtype)

    def rotary_store_latent(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        norm: LatentNorm,
        cos_sin: torch.Tensor,
        pages: KVPages,
        meta: AttentionMetadata,
    ) -> None:
        latent, key = kv[:, : len(norm.weight)], kv[:, len(norm.weight) :]
        self.rotary(q, key.unsqueeze(1), meta.positions, cos_sin)
        row = torch.cat((_rms_norm(latent, norm.weight, norm.eps), key), dim=1)
        kept = meta.slot_mapping >= 0
        pages.k.view(-1, row.shape[1])[meta.slot_mapping[kept]] = row[kept].to(pages.k.dtype)

    def paged_mla_attention(
        self, q: torch.Tensor, q_rope: torch.Tensor, pages: KVPages, meta: AttentionMetadata, scale: float
    ) -> torch.Tensor:
        return paged_mla_attention(q, q_rope, pages, meta, scale)

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.float().chunk(2, dim=-1)
        return (F.silu(gate) * up).to(x.dtype)

    def gelu_tanh_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.float().chunk(2, dim=-1)
        return (F.gelu(gate, approximate="tanh") * up).to(x.dtype)

    def explain(self) -> dict[str, str]:
        return dict.fromkeys(sorted(Ops.__abstractmethods__ - {"explain", "batch_invariant"}), "reference: torch, fp32")

    @property
    def batch_invariant(self) -> bool:
        return False  # the matrix library picks its summation order by the number of rows


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    values = x.float()
    values = values * torch.rsqrt(values.square().mean(dim=-1, keepdim=True) + eps)
    return (values * weight.float()).to(x.dtype)
