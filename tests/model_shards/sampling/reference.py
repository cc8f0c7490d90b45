"""Sampling as its definition reads: one row, float64, plain Python, full sorts. Slow and obvious."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from shoal.model_shards.sampling.params import SamplingParams

NEVER = -math.inf


def edited(
    logits: Sequence[float], params: SamplingParams, prompt: list[int], output: list[int], eos: Sequence[int] = ()
) -> list[float]:
    """The logits after penalties, bias and masks."""
    row = list(logits)
    counts = Counter(output)
    for token in range(len(row)):
        if token in counts or token in prompt:
            factor = params.repetition_penalty
            row[token] = row[token] / factor if row[token] > 0 else row[token] * factor
        row[token] -= params.frequency_penalty * counts[token]
        row[token] -= params.presence_penalty if counts[token] else 0.0
        row[token] += params.logit_bias.get(token, 0.0)
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            row[token] = NEVER
        if len(output) < params.min_tokens and token in (*eos, *params.stop_token_ids):
            row[token] = NEVER
        context = prompt + output
        for *prefix, last in params.bad_words:
            if token == last and context[len(context) - len(prefix) :] == prefix:
                row[token] = NEVER
    return row


def distribution(row: Sequence[float], params: SamplingParams) -> dict[int, float]:
    """token -> probability after temperature and filters, likeliest first, the lower id first among equals."""
    order = sorted((token for token, value in enumerate(row) if value > NEVER), key=lambda token: (-row[token], token))
    if params.greedy:
        return {order[0]: 1.0}
    weights = {token: math.exp((row[token] - row[order[0]]) / params.temperature) for token in order}
    if params.top_k:
        weights = dict(list(weights.items())[: params.top_k])
    if params.top_p < 1:
        goal = params.top_p * math.fsum(weights.values())
        kept: dict[int, float] = {}
        for token, weight in weights.items():
            if kept and math.fsum(kept.values()) >= goal:
                break
            kept[token] = weight
        weights = kept
    weights = {token: weight for token, weight in weights.items() if weight >= params.min_p}
    total = math.fsum(weights.values())
    return {token: weight / total for token, weight in weights.items()}


def margin(row: Sequence[float], params: SamplingParams) -> float:
    """How far the nearest cut of top_p or min_p is, relative: nearer than fp32 can tell, both answers are right."""
    loose = SamplingParams(temperature=params.temperature, top_k=params.top_k)
    shares = distribution(row, loose)
    distance, running = 1.0, 0.0
    largest = max(shares.values())
    for share in shares.values():
        running += share
        distance = min(distance, abs(running - params.top_p) if params.top_p < 1 else 1.0)
        distance = min(distance, abs(share / largest - params.min_p) if params.min_p > 0 else 1.0)
    return distance
