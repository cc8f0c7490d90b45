"""The two homes of rows, host and accelerator, answer alike. (Tensors of the CPU stand in for the accelerator's: the
operations are the same.)"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.model_shards.sampling import logprobs, sampler
from shoal.model_shards.sampling.device_rows import DeviceRows
from shoal.model_shards.sampling.host_rows import HostRows
from shoal.model_shards.sampling.params import SamplingParams
from shoal.model_shards.sampling.sampler import Sampler, SamplerState, prompt_logprobs
from shoal.model_shards.sampling.vocab_rows import vocab_rows

KINDS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8),
    SamplingParams(top_k=7, logprobs=3),
    SamplingParams(top_p=0.9, repetition_penalty=1.2, logprobs=2),
    SamplingParams(temperature=2.0, top_p=0.999),
    SamplingParams(min_p=0.03, logit_bias={4: 5.0}),
    SamplingParams(allowed_token_ids=(1, 5, 60), bad_words=((5,),)),
    SamplingParams(top_k=400, top_p=0.9),
]


@settings(max_examples=60, deadline=None)
@given(vocab=st.integers(1, 400), seed=st.integers(0, 99), ties=st.booleans(), data=st.data())
def test_every_operation_gives_the_same(vocab: int, seed: int, ties: bool, data: st.DataObject) -> None:
    generator = np.random.default_rng(seed)
    values = torch.from_numpy(generator.normal(0, 3, (5, vocab)).astype(np.float32))
    if ties:
        values = values.round()
    host, device = HostRows(values.clone()), DeviceRows(values.clone())
    rows = np.array(data.draw(st.sampled_from([[0, 1, 2, 3, 4], [3], [0, 2, 4]])))
    ids = generator.integers(0, vocab, len(rows))
    columns = generator.integers(0, host.columns.count, len(rows))
    k = int(generator.integers(1, vocab + 1))
    temperatures = generator.uniform(0.1, 2, len(rows)).astype(np.float32)
    for a, b in zip(host.argmax(rows), device.argmax(rows), strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(host.column_max(rows), device.column_max(rows))
    np.testing.assert_allclose(host.column_sum(rows), device.column_sum(rows), rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(host.column_values(rows, columns, -7), device.column_values(rows, columns, -7))
    for a, b in zip(host.above(1, 0.5), device.above(1, 0.5), strict=True):
        np.testing.assert_array_equal(a, b)
    assert host.kth_largest(2, k) == device.kth_largest(2, k)
    assert host.ranks(rows, ids) == device.ranks(rows, ids)
    everything = np.repeat(np.arange(len(rows)), vocab), np.tile(np.arange(vocab), len(rows))
    soft = [home.softmax(rows, temperatures).take(*everything) for home in (host, device)]
    np.testing.assert_allclose(*soft, rtol=1e-5)
    for home in (host, device):
        home.put(rows, ids, home.take(rows, ids) + np.float32(2))
        home.keep_only(int(rows[0]), np.unique(ids))
    grid = np.repeat(np.arange(5), vocab), np.tile(np.arange(vocab), 5)
    np.testing.assert_array_equal(host.take(*grid), device.take(*grid))
    np.testing.assert_array_equal(host.select(rows).take(*everything), device.select(rows).take(*everything))


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (sampler, logprobs):
        monkeypatch.setattr(module, "vocab_rows", DeviceRows)


def cases(size: int) -> tuple[torch.Tensor, list[SamplerState]]:
    values = np.random.default_rng(size).normal(0, 2.5, (size, 1500)).astype(np.float32)
    states = [SamplerState(KINDS[row % len(KINDS)], row, 0, [3, 1], 1) for row in range(size)]
    return torch.from_numpy(values), states


def test_sampling_on_the_accelerator_gives_the_tokens_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, states = cases(64)
    host = Sampler().sample(logits.clone(), states)
    scores = prompt_logprobs(logits, list(range(64)), 4)
    for module in (sampler, logprobs):
        monkeypatch.setattr(module, "vocab_rows", DeviceRows)
    device = Sampler().sample(logits.clone(), states)
    assert device.token_ids == host.token_ids
    found = [*prompt_logprobs(logits, list(range(64)), 4), *device.logprobs]
    for a, b in zip(found, [*scores, *host.logprobs], strict=True):
        assert (a is None) == (b is None)
        if a and b:
            assert (a.token_id, a.rank, [t for t, _ in a.top]) == (b.token_id, b.rank, [t for t, _ in b.top])
            assert a.logprob == pytest.approx(b.logprob, abs=2e-5)


@pytest.mark.usefixtures("on_device")
def test_sampling_on_the_accelerator_does_not_depend_on_the_batch() -> None:
    logits, states = cases(24)
    batched = Sampler().sample(logits.clone(), states)
    for row, state in enumerate(states):
        alone = Sampler().sample(logits[row : row + 1].clone(), [state])
        assert (alone.token_ids[0], alone.logprobs[0]) == (batched.token_ids[row], batched.logprobs[row])


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("params", KINDS[:7])
def test_bad_rows_are_found_on_the_accelerator_too(params: SamplingParams) -> None:
    logits, states = cases(3)
    states[1] = SamplerState(params, 0, 0, [0], 1)
    logits[1, 70] = torch.nan
    assert Sampler().sample(logits, states).errors == {1: logprobs.BAD_LOGITS}


def test_logits_of_another_type_are_refused() -> None:
    with pytest.raises(AssertionError, match="fp32"):
        vocab_rows(torch.zeros(1, 4, dtype=torch.bfloat16))
