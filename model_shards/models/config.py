"""What a decoder is, as data. Parsers for HF `config.json` and GGUF metadata (in `weights/`) end in this type."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Family = Literal["llama", "mistral", "qwen2", "qwen3", "gemma3", "mixtral", "qwen3_moe", "deepseek_v3"]
Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Frequency scaling of rotary embeddings. `kind` "linear" divides by `factor`; "llama3" is the banded rule of
    Llama 3.1 (low/high frequency factors); "factors" divides each frequency by its entry (GGUF `rope_freqs`); "yarn"
    (Peng et al. 2023, arXiv:2309.00071) divides waves that turn less than `beta_slow` times in the original context and
    keeps those that turn more than `beta_fast` times."""

    kind: Literal["linear", "llama3", "factors", "yarn"]
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    factors: tuple[float, ...] = ()
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    amplitude: float = 1.0
    """yarn: cosines and sines are multiplied by it."""


@dataclass(frozen=True, slots=True)
class MoEConfig:
    """Layers whose MLP is a choice of experts."""

    num_experts: int
    experts_per_token: int
    expert_size: int
    """Intermediate size of one expert."""
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool = True
    """Whether a token's chosen weights are divided by their sum."""
    scale: float = 1.0
    """The weights are multiplied by it at the end."""
    selection_bias: bool = False
    """A bias for each expert is added to the scores for the choice, not for the weights (DeepSeek-V3)."""
    num_groups: int = 1
    groups_per_token: int = 1
    """Experts are chosen from the best so many groups of equally many neighbours."""
    shared_size: int = 0
    """Intermediate size of the experts that every token visits, together; 0: there are none."""
    dense_layers: frozenset[int] = field(default_factory=frozenset)
    """Layers that have a plain MLP of `intermediate_size` instead."""


@dataclass(frozen=True, slots=True)
class MLAConfig:
    """Multi-head latent attention (DeepSeek-AI 2024, arXiv:2405.04434): keys and values are projections of one latent
    vector a token, which is what the cache holds, beside one rotated key that all heads share."""

    kv_lora_rank: int
    """Width of the latent."""
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None
    """Width of the queries' bottleneck; None: queries are projected in one."""
    rope_interleave: bool = True
    """Rotary channels of the checkpoint are pairs of neighbours."""

    @property
    def latent_dim(self) -> int:
        """Numbers that the cache holds of a token in a layer."""
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder. Everything that changes results is a field; parsers refuse by name what no field can say."""

    family: Family
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    """Rows of the embedding; the logits' width."""
    max_position: int
    """Longest context in tokens."""
    rms_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    rope_local_theta: float | None = None
    """Gemma 3: base of the sliding-window layers (unscaled); None: the same as the others."""
    activation: Activation = "silu"
    tie_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMSNorm over head_dim of q and k before rotary (Qwen3, Gemma 3)."""
    query_scale: float | None = None
    """Softmax scale; None: head_dim ** -0.5."""
    sliding_window: int | None = None
    """A token sees itself and the window - 1 tokens before it, in the layers listed in `sliding_layers`."""
    sliding_layers: frozenset[int] = field(default_factory=frozenset)
    embedding_scale: float | None = None
    """Gemma: hidden states are multiplied by sqrt(hidden_size)."""
    norm_offset: float = 0.0
    """Gemma: norms multiply by (offset + weight), offset 1; the weight is stored as HF stores it."""
    sandwich_norms: bool = False
    """Gemma: norms also after attention and after the MLP, before the residual is added."""
    moe: MoEConfig | None = None
    mla: MLAConfig | None = None
    """With it, `head_dim` is qk_nope_head_dim + qk_rope_head_dim and `num_kv_heads` is `num_heads`."""
    num_nextn_layers: int = 0
    """DeepSeek-V3: so many layers behind the others, for predicting further tokens, are in the file and not loaded."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def rotary_dim(self) -> int:
        """Channels of a head that are rotated."""
        return self.head_dim if self.mla is None else self.mla.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        return self.head_dim**-0.5 if self.query_scale is None else self.query_scale

    def window(self, layer: int) -> int | None:
        return self.sliding_window if layer in self.sliding_layers else None
