"""Logprobs against log-softmax, ranks against a sort; the chain does not change them."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.model_shards.engine.plan import TokenLogprobs
from shoal.model_shards.sampling.params import SamplingParams
from shoal.model_shards.sampling.sampler import Sampler, SamplerState, prompt_logprobs


def expected(row: np.ndarray, target: int, k: int) -> TokenLogprobs:
    scores = torch.log_softmax(torch.from_numpy(row).double(), dim=0).clamp_min(-9999.0).tolist()
    order = sorted(range(len(row)), key=lambda token: (-row[token], token))
    top = [(token, scores[token]) for token in order[:k] if row[token] > -np.inf]
    return TokenLogprobs(target, scores[target], order.index(target) + 1, top)


def check(found: TokenLogprobs, wanted: TokenLogprobs) -> None:
    assert (found.token_id, found.rank) == (wanted.token_id, wanted.rank)
    assert found.logprob == pytest.approx(wanted.logprob, abs=2e-5)
    assert [token for token, _ in found.top] == [token for token, _ in wanted.top]
    assert [score for _, score in found.top] == pytest.approx([score for _, score in wanted.top], abs=2e-5)


@settings(deadline=None)
@given(
    seed=st.integers(0, 99),
    vocab=st.sampled_from([1, 2, 20, 64, 300, 1500]),
    k=st.sampled_from([0, 1, 5, 20]),
    kind=st.sampled_from(["distinct", "ties", "masked"]),
)
def test_prompt_logprobs_equal_log_softmax_with_exact_ranks(seed: int, vocab: int, k: int, kind: str) -> None:
    generator = np.random.default_rng(seed)
    logits = generator.normal(0, 3, (4, vocab)).astype(np.float32)
    if kind == "ties":
        logits = np.round(logits)
    if kind == "masked":
        logits[:, 1:][generator.random((4, vocab - 1)) < 0.7] = -np.inf
    targets = generator.integers(0, vocab, 4).tolist()
    for row, entry in enumerate(prompt_logprobs(torch.from_numpy(logits), targets, k)):
        check(entry, expected(logits[row], targets[row], k))


def test_prompt_logprobs_do_not_depend_on_how_the_prompt_is_cut() -> None:
    logits = torch.from_numpy(np.random.default_rng(0).normal(0, 3, (70, 40_000)).astype(np.float32))
    targets = list(range(70))
    whole = prompt_logprobs(logits, targets, 5)
    for size in (1, 16, 69):
        parts = [prompt_logprobs(logits[i : i + size], targets[i : i + size], 5) for i in range(0, 70, size)]
        assert [entry for part in parts for entry in part] == whole


def test_scoring_leaves_the_logits_as_they_were() -> None:
    logits = torch.randn(3, 100)
    before = logits.clone()
    prompt_logprobs(logits, [1, 2, 3], 4)
    assert torch.equal(logits, before)


def test_a_masked_target_has_the_lowest_logprob_and_no_infinity_reaches_json() -> None:
    logits = torch.tensor([[0.0, -torch.inf, 1.0]])
    (entry,) = prompt_logprobs(logits, [1], 3)
    assert entry.logprob == -9999.0
    assert entry.rank == 3
    assert [token for token, _ in entry.top] == [2, 0]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_prompt_row_without_a_distribution_is_refused(bad: float) -> None:
    logits = torch.zeros(2, 10)
    logits[1, 3] = bad
    with pytest.raises(ValueError, match="NaN"):
        prompt_logprobs(logits, [0, 0], 2)


def test_reported_logprobs_are_those_of_the_raw_logits_whatever_the_chain_did() -> None:
    logits = np.random.default_rng(4).normal(0, 3, (2, 200)).astype(np.float32)
    params = SamplingParams(
        temperature=0.3, top_k=3, logit_bias={17: 100.0}, repetition_penalty=1.5, bad_words=((0,),), logprobs=4
    )
    states = [SamplerState(params, 0, 0, [1, 2], 1), SamplerState(SamplingParams(logprobs=1), 0, 0, [1], 1)]
    result = Sampler().sample(torch.from_numpy(logits.copy()), states)
    assert result.token_ids[0] == 17
    for row, k in ((0, 4), (1, 1)):
        entry = result.logprobs[row]
        assert entry is not None
        check(entry, expected(logits[row], result.token_ids[row], k))
