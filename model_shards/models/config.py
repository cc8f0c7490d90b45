"""What a decoder is, as data. Parsers for HF `config.json` and GGUF metadata (in `weights/`) end in this type."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Family = Literal["llama", "mistral", "qwen2", "qwen3", "gemma3"]
Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Frequency scaling of rotary embeddings. `kind` "linear" divides by `factor`; "llama3" is the banded rule of
    Llama 3.1 (low/high frequency factors); "factors" divides each frequency by its entry (GGUF `rope_freqs`)."""

    kind: Literal["linear", "llama3", "factors"]
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A dense decoder. Everything that changes results is a field; parsers refuse by name what no field can say."""

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
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def softmax_scale(self) -> float:
        return self.head_dim**-0.5 if self.query_scale is None else self.query_scale

    def window(self, layer: int) -> int | None:
        return self.sliding_window if layer in self.sliding_layers else None
