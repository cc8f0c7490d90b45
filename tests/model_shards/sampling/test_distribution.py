"""The drawn tokens have the distribution that the definition says: total variation, for each filter and combined.

For n draws over k outcomes, E[TV] <= sqrt(k / n) / 2 (Jensen), and one draw moves TV by at most 1 / n, so that by
McDiarmid's inequality TV exceeds its mean by sqrt(ln(1 / delta) / (2 n)) with probability delta at most: 1e-6 here.
"""

import math
from collections import Counter

import numpy as np
import pytest
import torch

from shoal.model_shards.sampling.params import SamplingParams
from shoal.model_shards.sampling.sampler import Sampler, SamplerState

from .reference import distribution, edited, margin

VOCAB = 96
STREAMS, POSITIONS = 400, 50
CASES = {
    "plain": SamplingParams(),
    "cold": SamplingParams(temperature=0.4),
    "hot": SamplingParams(temperature=2.0),
    "top_k": SamplingParams(top_k=12),
    "top_p": SamplingParams(top_p=0.8),
    "top_p that needs most of the vocabulary": SamplingParams(temperature=2.0, top_p=0.995),
    "min_p": SamplingParams(min_p=0.07),
    "top_k, top_p": SamplingParams(temperature=1.3, top_k=30, top_p=0.85),
    "top_k, top_p, min_p": SamplingParams(temperature=1.5, top_k=40, top_p=0.95, min_p=0.04),
    "bias": SamplingParams(logit_bias={3: 4.0, 5: -100.0, 90: 5.5}),
    "allowed": SamplingParams(allowed_token_ids=(1, 2, 3, 50, 95)),
}


def logits() -> np.ndarray:
    return np.random.default_rng(11).normal(0, 2.0, VOCAB).astype(np.float32)


def check(counts: Counter[int], row: list[float], params: SamplingParams) -> None:
    assert margin(row, params) > 1e-4, "the case stands too near a cut to have one right answer"
    shares = distribution(row, params)
    assert set(counts) <= set(shares), "a filtered token was drawn"
    assert total_variation(counts, shares) <= bound(counts.total(), len(shares))


def bound(draws: int, outcomes: int) -> float:
    return math.sqrt(outcomes / draws) / 2 + math.sqrt(math.log(1e6) / (2 * draws))


def total_variation(counts: Counter[int], shares: dict[int, float]) -> float:
    return sum(abs(counts[t] / counts.total() - shares.get(t, 0.0)) for t in {*counts, *shares}) / 2


def sampled(params: SamplingParams) -> Counter[int]:
    """Successive positions of sequences that differ by their seeds."""
    states = [SamplerState(params, seed, 0, [0], 1) for seed in range(STREAMS)]
    counts: Counter[int] = Counter()
    row = torch.from_numpy(logits())
    for _ in range(POSITIONS):
        result = Sampler().sample(row.repeat(STREAMS, 1), states)
        assert not result.errors
        counts.update(result.token_ids)
        for state, token in zip(states, result.token_ids, strict=True):
            state.append(token)
    return counts


@pytest.mark.parametrize("name", CASES)
def test_total_variation(name: str) -> None:
    check(sampled(CASES[name]), edited(logits().tolist(), CASES[name], [0], []), CASES[name])


def test_total_variation_after_penalties() -> None:
    params = SamplingParams(repetition_penalty=1.6, presence_penalty=0.8, frequency_penalty=0.3, top_p=0.9)
    prompt, output = [0, 1, 2, 3, 4, 5, 6, 7], [10, 11, 10, 10]
    states = [SamplerState(params, seed, 0, prompt + output, len(prompt)) for seed in range(4000)]
    result = Sampler().sample(torch.from_numpy(logits()).repeat(len(states), 1), states)
    check(Counter(result.token_ids), edited(logits().tolist(), params, prompt, output), params)


def test_sample_indexes_of_one_seed_are_independent_draws() -> None:
    params = SamplingParams(top_p=0.8)
    states = [SamplerState(params, 7, index, [0], 1) for index in range(4000)]
    result = Sampler().sample(torch.from_numpy(logits()).repeat(len(states), 1), states)
    check(Counter(result.token_ids), logits().tolist(), params)


def test_the_bound_would_see_a_filter_that_is_off_by_one_token() -> None:
    counts = sampled(SamplingParams(top_k=12))
    for wrong in (11, 13):
        shares = distribution(logits().tolist(), SamplingParams(top_k=wrong))
        assert total_variation(counts, shares) > bound(counts.total(), len(shares))
