"""Tables of cosines and sines for rotary embeddings (Su et al. 2021, arXiv:2104.09864) and their frequency scalings.

Angles are computed in fp32, as the models were trained: at position 8,000 an fp64 table would differ by 2e-4 radians.
"""

from __future__ import annotations

import math

import torch

from shoal.configs.errors import ModelLoadError
from shoal.model_shards.models.config import ModelConfig, RopeScaling


def rotary_table(config: ModelConfig, num_positions: int, *, local: bool = False) -> torch.Tensor:
    """fp32 [num_positions, rotary_dim]: cosines in the first half, sines in the second.

    `local`: the table of Gemma 3's sliding-window layers, which have a base of their own and no scaling.
    """
    amplitude = 1.0
    if local and config.rope_local_theta is not None:
        frequencies = _frequencies(config.rope_local_theta, config.rotary_dim)
    else:
        frequencies = _frequencies(config.rope_theta, config.rotary_dim)
        if config.rope_scaling is not None:
            frequencies = _scale(frequencies, config.rope_theta, config.rope_scaling)
            amplitude = config.rope_scaling.amplitude
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * amplitude


def _frequencies(theta: float, head_dim: int) -> torch.Tensor:
    """fp32 [head_dim / 2], radians a token."""
    return 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)


def _scale(frequencies: torch.Tensor, theta: float, scaling: RopeScaling) -> torch.Tensor:
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "yarn":
        return _scale_by_ramp(frequencies, theta, scaling)
    if scaling.kind == "factors":
        if len(scaling.factors) != len(frequencies):
            raise ModelLoadError(
                f"The checkpoint gives {len(scaling.factors)} rotary factors for {len(frequencies)} frequencies "
                f"(head_dim / 2); it does not fit its own configuration."
            )
        return frequencies / torch.tensor(scaling.factors, dtype=torch.float32)
    return _scale_by_band(frequencies, scaling)


def _scale_by_band(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Llama 3.1: long waves are stretched by `factor`, short ones kept, those between blended linearly."""
    wavelengths = 2 * math.pi / frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((scaling.original_max_position / wavelengths - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies


def _scale_by_ramp(frequencies: torch.Tensor, theta: float, scaling: RopeScaling) -> torch.Tensor:
    """YaRN: between the channels (rounded outwards) whose waves turn `beta_fast` and `beta_slow` times in the original
    context, kept and stretched frequencies are blended linearly by the channel's number."""
    pairs = len(frequencies)

    def channel(turns: float) -> float:
        """Of the frequency whose wave turns so many times; theta ** (-channel / pairs) is a channel's frequency."""
        return pairs * math.log(scaling.original_max_position / (turns * 2 * math.pi)) / math.log(theta)

    first = max(math.floor(channel(scaling.beta_fast)), 0)
    last = min(math.ceil(channel(scaling.beta_slow)), 2 * pairs - 1)
    width = last - first if last != first else 0.001
    stretched = ((torch.arange(pairs, dtype=torch.float32) - first) / width).clamp(0.0, 1.0)
    return frequencies / scaling.factor * stretched + frequencies * (1 - stretched)
