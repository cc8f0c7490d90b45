"""The only door to the operators. A table of them is chosen once, at start, by device and capability.

Every operator has a torch reference (`kernels/reference/`, fp32 inside: the definition of right), a Triton version
(`kernels/triton_ops/`) and a native CPU version (`kernels/cpu/`) where the reference is slow. Models reach the
operators through the `Ops` that the runner was given, never by import, so that a batch depends on no global.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, Protocol

import torch

from shoal.kernels.capture import Capturer
from shoal.kernels.page_format import KVPages, Layout
from shoal.kernels.quantized import QuantizedMatrix


@dataclass(slots=True)
class AttentionMetadata:
    """Where the tokens of one step lie. Sequences are in batch order; their query tokens are concatenated.

    All tensors are on the operators' device, int32 unless said, contiguous.
    """

    query_start: torch.Tensor
    """[num_seqs + 1]: sequence i owns rows query_start[i] : query_start[i + 1]."""
    seq_lens: torch.Tensor
    """[num_seqs]: tokens in the cache after this step's are stored (context + query)."""
    block_tables: torch.Tensor
    """[num_seqs, max_blocks]: padded with the null block 0."""
    slot_mapping: torch.Tensor
    """[num_tokens] int64: block_id * block_size + offset of each query token; -1 stores nothing."""
    positions: torch.Tensor
    """[num_tokens] int64: position of each query token in its sequence."""
    max_query_len: int
    max_seq_len: int
    num_decodes: int = 0
    """The first so many sequences have one query token each."""


@dataclass(slots=True)
class HeadNorms:
    """RMSNorms over head_dim that a model applies to q and k before it rotates them (Qwen3, Gemma 3)."""

    q_weight: torch.Tensor
    """fp32 [head_dim], already with any offset; `k_weight` likewise."""
    k_weight: torch.Tensor
    eps: float


@dataclass(slots=True)
class LatentNorm:
    """RMSNorm of the latent before it is stored."""

    weight: torch.Tensor
    """fp32 [latent_dim]."""
    eps: float


class LinearWeight(ABC):
    """A weight in the form that its table's `linear` reads fastest. `out_features`, `in_features` are of this rank."""

    out_features: int
    in_features: int

    @abstractmethod
    def tensors(self) -> list[torch.Tensor]:
        """What holds it, its bias included."""

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())

    @abstractmethod
    def rows(self, index: torch.Tensor) -> torch.Tensor:
        """[len(index), in_features] in the activation dtype: lets a tied embedding share the weight of the head."""


class Routing(Protocol):
    """How a row of logits becomes a choice of experts. The attributes are those of the models' `MoEConfig`."""

    @property
    def num_experts(self) -> int: ...
    @property
    def experts_per_token(self) -> int: ...
    @property
    def scoring(self) -> Literal["softmax", "sigmoid"]: ...
    @property
    def normalize(self) -> bool: ...
    @property
    def scale(self) -> float: ...
    @property
    def num_groups(self) -> int: ...
    @property
    def groups_per_token(self) -> int: ...


GroupMatrix = torch.Tensor | Sequence[QuantizedMatrix]
"""One group's matrix [out_features, in_features]: dense, or quantized parts stacked along the output features."""


class GroupedWeight(ABC):
    """Matrices of one shape, one a group (an expert), in the form that the table's `grouped_linear` reads fastest."""

    num_groups: int
    out_features: int
    in_features: int

    @abstractmethod
    def slot_tensors(self, slot: int) -> list[torch.Tensor]:
        """What makes up the matrix of group `slot`: views of the weight's own memory, of the same shapes and dtypes for
        every group of weights prepared alike. Overwriting all of them with another group's puts that one's matrix in
        this place (whoever does it sees to it that no operator runs meanwhile)."""

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for slot in range(self.num_groups) for tensor in self.slot_tensors(slot))


class SeparateGroups(GroupedWeight):
    """A linear weight for each group: what a backend without a grouped product multiplies one after the other."""

    def __init__(self, weights: list[LinearWeight]) -> None:
        if not weights:
            raise ValueError("a grouped weight has at least one group")
        self.weights = weights
        self.num_groups = len(weights)
        self.out_features, self.in_features = weights[0].out_features, weights[0].in_features
        for weight in weights:
            if (weight.out_features, weight.in_features) != (self.out_features, self.in_features):
                raise ValueError(
                    f"groups of [{self.out_features}, {self.in_features}] and "
                    f"[{weight.out_features}, {weight.in_features}] have no common shape"
                )

    def slot_tensors(self, slot: int) -> list[torch.Tensor]:
        return self.weights[slot].tensors()


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """A matrix a head, [out_features, in_features], in the form that its table's `head_linear` reads fastest."""

    num_heads: int
    """On this rank."""
    out_features: int
    in_features: int
    packed: torch.Tensor


class Ops(ABC):
    """One backend's operators. `activation_dtype` is what hidden states are kept in between them."""

    name: str
    layout: Layout
    activation_dtype: torch.dtype
    device_sampling: bool = False
    """Whether tokens are drawn by `sample`, where the logits lie; else the caller draws them on the host."""
    host_sampling: bool = False
    """Whether the caller draws them by `sample` too, from logits in the host's memory."""

    @abstractmethod
    def prepare_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> LinearWeight:
        """`weight` [out_features, in_features] in its storage dtype; takes it over (may repack; do not keep it)."""

    def prepare_quantized(self, parts: Sequence[QuantizedMatrix], bias: torch.Tensor | None = None) -> LinearWeight:
        """Quantized matrices that share their input, stacked along the output features. A backend that has no product
        of its own for them holds the numbers they stand for, in fp32."""
        weight = torch.cat([part.dequantize() for part in parts])
        return self.prepare_linear(weight, None if bias is None else bias.float())

    @abstractmethod
    def linear(self, x: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
        """x [..., in_features] -> [..., out_features] in the activation dtype, fp32 accumulation. The result of a row
        does not depend on what other rows are in the batch, where the backend says `batch_invariant`."""

    def prepare_router(self, weight: torch.Tensor) -> LinearWeight:
        """fp32 [num_experts, hidden], for `router_logits`."""
        return self.prepare_linear(weight)

    def router_logits(self, x: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
        """x [n, hidden] -> fp32 [n, num_experts], computed in fp32 whatever the activation dtype. (As it stands here:
        for a table whose activations are fp32.)"""
        assert self.activation_dtype == torch.float32
        return self.linear(x, weight)

    def prepare_grouped(self, matrices: Iterable[GroupMatrix]) -> GroupedWeight:
        """One matrix [out_features, in_features] a group, in order; takes each over as it comes, so that the caller may
        make them one at a time. Raises ValueError for shapes that differ and for none at all."""
        return SeparateGroups(
            [
                self.prepare_linear(matrix) if isinstance(matrix, torch.Tensor) else self.prepare_quantized(matrix)
                for matrix in matrices
            ]
        )

    def grouped_linear(self, x: torch.Tensor, weight: GroupedWeight, group_starts: torch.Tensor) -> torch.Tensor:
        """x [n, in_features] -> [n, out_features] in the activation dtype, fp32 accumulation: rows group_starts[g] :
        group_starts[g + 1] meet the matrix of group g.

        `group_starts` int32 [num_groups + 1], on the operators' device, ascending from 0 to at most n; groups may be
        empty. Rows from group_starts[num_groups] on meet none: what they give is undefined. A row's result is that of
        `linear` with its group's matrix where the backend is `batch_invariant`."""
        assert isinstance(weight, SeparateGroups), type(weight)
        starts = group_starts.tolist()
        out = torch.empty((len(x), weight.out_features), dtype=self.activation_dtype, device=x.device)
        for group, (start, stop) in enumerate(pairwise(starts)):
            if start < stop:
                out[start:stop] = self.linear(x[start:stop], weight.weights[group])
        return out

    def choose_experts(
        self, logits: torch.Tensor, bias: torch.Tensor | None, routing: Routing
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """logits fp32 [n, num_experts], bias fp32 [num_experts] or None -> the experts that each row chooses (int64
        [n, k]), the best first, of equals the lowest, and how much each counts (fp32 [n, k]). None: the backend has
        nothing better than torch, and leaves it to the caller."""
        return None

    def group_rows(
        self, x: torch.Tensor, groups: torch.Tensor, num_groups: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows on their way to the groups (experts) that they chose: x [n, width], groups int64 [n, k] of `num_groups`
        -> (rows [n * k, width], group by group and in the order of x within one; int32 [num_groups + 1]: where each
        group's begin and end, as `grouped_linear` wants it; int64 [n, k]: where each choice's row went)."""
        ordered, order = torch.sort(groups.flatten(), stable=True)
        starts = torch.searchsorted(ordered, torch.arange(num_groups + 1, device=x.device), out_int32=True)
        places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
        return x[order // groups.shape[1]], starts, places.view(groups.shape)

    def combine_experts(self, results: torch.Tensor, places: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """What its experts made of each row, weighted and summed: results [m, hidden], places int64 [n, k] (rows of
        `results`), weights fp32 [n, k] -> [n, hidden] in the dtype of `results`, summed in fp32. One choice after the
        other, since a reduction may take them in an order that depends on n."""
        total = torch.zeros((len(places), results.shape[1]), dtype=torch.float32, device=results.device)
        for choice in range(places.shape[1]):
            total += results[places[:, choice]].float() * weights[:, choice, None]
        return total.to(results.dtype)

    @abstractmethod
    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x [num_tokens, hidden] -> (normalised, residual). With a residual, x + residual is normalised and is also
        the second result; without, the second result is x. (Zhang & Sennrich 2019, arXiv:1910.07467.) `weight` is
        fp32 [hidden] and already holds any offset."""

    def rms_norm_rows(self, x: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """The norm of some rows only: x [num_tokens, hidden], rows int64 [n] on the same device -> [n, hidden]."""
        return self.rms_norm(x.index_select(0, rows), weight, eps)[0]

    @abstractmethod
    def head_rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """RMSNorm over the last axis of x [num_tokens, num_heads, head_dim] (q and k norms)."""

    @abstractmethod
    def rotary(self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
        """Rotates q [num_tokens, num_heads, head_dim] and k [num_tokens, num_kv_heads, head_dim] in place, in the
        half-split convention of HF (channel i pairs with i + head_dim / 2). `cos_sin` is fp32 [max_position,
        head_dim]: cosines in the first half, sines in the second. (Su et al. 2021, arXiv:2104.09864.) q and k may be
        views with any stride in the token axis; their last two axes are contiguous."""

    @abstractmethod
    def store_kv(self, k: torch.Tensor, v: torch.Tensor, pages: KVPages, slot_mapping: torch.Tensor) -> None:
        """Writes k, v [num_tokens, num_kv_heads, head_dim] to their slots."""

    def rotary_store_kv(
        self,
        qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        cos_sin: torch.Tensor,
        pages: KVPages,
        meta: AttentionMetadata,
        norms: HeadNorms | None = None,
    ) -> torch.Tensor:
        """What lies between the projection and attention: q and k [num_tokens, heads, head_dim] are normed (given
        `norms`) and rotated, k and v stored. Returns q; what q and k hold afterwards is the backend's business."""
        q, k, v = qkv
        if norms is not None:
            q = self.head_rms_norm(q, norms.q_weight, norms.eps)
            k = self.head_rms_norm(k, norms.k_weight, norms.eps)
        self.rotary(q, k, meta.positions, cos_sin)
        self.store_kv(k, v, pages, meta.slot_mapping)
        return q

    @abstractmethod
    def paged_attention(
        self, q: torch.Tensor, pages: KVPages, meta: AttentionMetadata, scale: float, window: int | None = None
    ) -> torch.Tensor:
        """Causal attention of q [num_tokens, num_heads, head_dim] over the pages, whose slots already hold this
        step's keys; one operator for prefill, chunked prefill and decode. `window`: a token sees itself and the
        window - 1 before it. Returns [num_tokens, num_heads, head_dim]."""

    @abstractmethod
    def paged_attention_lse(
        self, q: torch.Tensor, pages: KVPages, meta: AttentionMetadata, scale: float, window: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same in fp32, with the fp32 log-sum-exp [num_tokens, num_heads], for exact merges of partial attention.
        A sequence may have fewer keys than queries: those before the first key give zeros and -inf."""

    def merge_attention(
        self, out: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor
    ) -> None:
        """Attention over two disjoint sets of keys becomes that over both, in `out` and `lse`: fp32 [n, num_heads,
        head_dim] and [n, num_heads], as `paged_attention_lse` gives them. A row's result depends on that row alone; one
        without any key in either keeps zeros and -inf. (Milakov & Gimelshein 2018, arXiv:1805.02867.) All four may be
        views whose rows and heads lie evenly apart."""
        top = torch.maximum(lse, other_lse)
        top = top.masked_fill(top == -torch.inf, 0)
        mine, theirs = torch.exp(lse - top), torch.exp(other_lse - top)
        total = mine + theirs
        divisor = total.masked_fill(total == 0, 1).unsqueeze(-1)
        out.mul_(mine.unsqueeze(-1) / divisor).add_(other * (theirs.unsqueeze(-1) / divisor))
        lse.copy_(top + total.log())

    # --- latent attention (DeepSeek-AI 2024, arXiv:2405.04434) ----------------------------------------------------

    @abstractmethod
    def prepare_heads(self, weight: torch.Tensor) -> HeadWeights:
        """`weight` [num_heads, out_features, in_features] in its storage dtype; takes it over (may repack)."""

    @abstractmethod
    def head_linear(self, x: torch.Tensor, weight: HeadWeights) -> torch.Tensor:
        """Every head by a matrix of its own: x [num_tokens, num_heads, in_features] -> [num_tokens, num_heads,
        out_features] in the activation dtype, fp32 accumulation. x may have any stride in the token axis; its last two
        axes are contiguous."""

    @abstractmethod
    def rotary_store_latent(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        norm: LatentNorm,
        cos_sin: torch.Tensor,
        pages: KVPages,
        meta: AttentionMetadata,
    ) -> None:
        """What lies between the projections and latent attention. q [num_tokens, num_heads, rope_dim], the rotary part
        of the queries, is rotated in place as by `rotary`; of kv [num_tokens, latent_dim + rope_dim] the latent is
        normed and the rest, the key that all heads share, is rotated, and both are stored. q and kv may have any stride
        in the token axis; what kv holds afterwards is the backend's business."""

    @abstractmethod
    def paged_mla_attention(
        self, q: torch.Tensor, q_rope: torch.Tensor, pages: KVPages, meta: AttentionMetadata, scale: float
    ) -> torch.Tensor:
        """Causal attention over latent pages with the keys' and values' projections absorbed: all heads read the same
        key of latent_dim + rope_dim channels, of which the first latent_dim are the value. q [num_tokens, num_heads,
        latent_dim] and q_rope [num_tokens, num_heads, rope_dim], together the queries -> [num_tokens, num_heads,
        latent_dim]. Both may have any stride in the token axis."""

    @abstractmethod
    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        """x [num_tokens, 2 * n] (gate, up) -> silu(gate) * up [num_tokens, n]."""

    @abstractmethod
    def gelu_tanh_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        """x [num_tokens, 2 * n] (gate, up) -> gelu_tanh(gate) * up [num_tokens, n]."""

    def sample(self, logits: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
        """One token a row, on the device and without sync: logits [n, vocab] (fp32, bfloat16 or float16), draws int64
        [n, draws.WORDS] as `draws.pack_draws` makes them -> int64 [2, n]: token ids, then flags.

        temperature -> top_k -> top_p -> min_p -> inverse CDF, as `SamplingParams` defines them; greedy rows take the
        first of the largest. A row whose logits hold NaN or +inf or nothing finite has flag FAILED_FLAG and id 0, an id
        that can be embedded. A row's token depends on its own logits and draw only."""
        from shoal.kernels.reference.sampling import sample

        return sample(logits, draws)

    def capturer(self, pool_bytes: int) -> Capturer | None:
        """Records sequences of operators whose results fit `pool_bytes`; None where the backend cannot."""
        return None

    @abstractmethod
    def explain(self) -> dict[str, str]:
        """Operator -> which implementation runs and why it was chosen."""

    @property
    @abstractmethod
    def batch_invariant(self) -> bool:
        """True when a row's result never depends on the other rows."""
