"""Sampling as its definition reads: every row sorted whole, float64."""

from __future__ import annotations

import torch

from shoal.kernels.draws import FAILED_FLAG, MIN_P, POSITION, SAMPLE_INDEX, SEED, TEMPERATURE, TOP_K

_WORD = 0xFFFFFFFF
_COLUMN_LENGTH = 32


def sample(logits: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """See `Ops.sample`."""
    vocab = logits.shape[1]
    out = torch.zeros((2, len(logits)), dtype=torch.int64, device=logits.device)
    uniforms = philox_uniforms(draws).tolist()
    for row, (values, words) in enumerate(zip(logits.double(), draws, strict=True)):
        temperature, top_p, min_p = words[TEMPERATURE : MIN_P + 1].view(torch.float64).tolist()
        top_k = int(words[TOP_K]) if words[TOP_K] < vocab else 0
        # Stable: among equals the lower id comes first.
        ordered, ids = torch.sort(values, descending=True, stable=True)
        if not bool(torch.isfinite(ordered[0])):  # a NaN sorts before everything
            out[1, row] = FAILED_FLAG
        elif temperature == 0.0:
            out[0, row] = ids[0]
        elif top_k == 0 and top_p >= 1.0 and min_p <= 0.0:
            out[0, row] = _from_columns(torch.exp((values - ordered[0]) / temperature), uniforms[row], vocab)
        else:
            weights = _filtered(torch.exp((ordered - ordered[0]) / temperature), top_k, top_p, min_p)
            out[0, row] = ids[_invert_cdf(weights, uniforms[row][0])]
    return out


def _filtered(weights: torch.Tensor, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """The prefix of descending weights that the filters leave."""
    if top_k > 0:
        weights = weights[:top_k]
    if top_p < 1.0:
        running = weights.cumsum(0)
        weights = weights[: int((running < top_p * running[-1]).sum()) + 1]
    return weights[weights >= min_p]


def _from_columns(weights: torch.Tensor, uniforms: list[float], vocab: int) -> int:
    """Column j of the row holds the ids j, j + count, j + 2 * count, ...: first a column, then an id inside it."""
    count = -(-vocab // min(_COLUMN_LENGTH, vocab))
    length = -(-vocab // count)
    lines = torch.nn.functional.pad(weights, (0, length * count - vocab)).view(length, count)
    column = _invert_cdf(lines.sum(0), uniforms[0])
    return column + count * _invert_cdf(lines[:, column], uniforms[1])


def _invert_cdf(weights: torch.Tensor, uniform: float) -> int:
    """The first index whose running sum exceeds uniform * sum; never one of weight 0."""
    running = weights.cumsum(0)
    place = int((running <= uniform * running[-1]).sum())
    return min(place, int(torch.nonzero(weights)[-1]))


def philox_uniforms(draws: torch.Tensor) -> torch.Tensor:
    """float64 [n, 2] in [0, 1), 53 bits each: Philox4x32-10 of each row's counter under its seed. int64 holds the
    64-bit products; what a shift drags in from their sign is masked off."""
    position, seed = draws[:, POSITION], draws[:, SEED]
    c0, c1, c2 = position & _WORD, (position >> 32) & _WORD, draws[:, SAMPLE_INDEX]
    c3 = torch.zeros_like(c0)
    k0, k1 = seed & _WORD, (seed >> 32) & _WORD
    for _ in range(10):
        low0, high0 = _product(c0, 0xD2511F53)
        low1, high1 = _product(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return torch.stack([((c0 << 21) | (c1 >> 11)), ((c2 << 21) | (c3 >> 11))], dim=1).double() * 2.0**-53


def _product(word: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(low, high) 32 bits of the product of two 32-bit words, without the overflow of a signed 64-bit one."""
    low, high = (word & 0xFFFF) * factor, (word >> 16) * factor
    middle = (low >> 16) + high
    return ((middle << 16) | (low & 0xFFFF)) & _WORD, middle >> 16
