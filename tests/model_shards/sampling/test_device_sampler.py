"""Sampling on a device: what the host queues, and that it waits for nothing. The reference's `sample` stands in for a
kernel; the kernels give its tokens (tests/kernels/triton_ops)."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch

from shoal.kernels.draws import WORDS
from shoal.kernels.reference.ops import ReferenceOps
from shoal.model_shards.sampling import device_edits, device_rows, device_sampler
from shoal.model_shards.sampling.device_sampler import DeviceSampler
from shoal.model_shards.sampling.host_rows import HostRows
from shoal.model_shards.sampling.logprobs import BAD_LOGITS
from shoal.model_shards.sampling.params import SamplingParams
from shoal.model_shards.sampling.processors import apply_edits
from shoal.model_shards.sampling.sampler import ALL_MASKED, Sampler, SamplerState

from .reference import distribution, margin
from .test_distribution import bound, total_variation

EOS = (2, 3)
EDITS = [
    SamplingParams(repetition_penalty=1.3, temperature=0.0),
    SamplingParams(repetition_penalty=0.7, presence_penalty=0.5, frequency_penalty=-0.25, logit_bias={7: 1.5}),
    SamplingParams(frequency_penalty=0.4, bad_words=((5,), (1, 9), (5,))),
    SamplingParams(logit_bias={4: 5.0, 11: -100.0}, min_tokens=50, stop_token_ids=(8,)),
    SamplingParams(allowed_token_ids=(1, 5, 60, 61), bad_words=((5,),), top_k=3),
    SamplingParams(top_p=0.9, logprobs=2, logit_bias={1: 3.0}),
    SamplingParams(min_p=0.05, logprobs=0),
    SamplingParams(temperature=0.0, logprobs=4),
    SamplingParams(),
]


class DeviceOps(ReferenceOps):
    device_sampling = True

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), torch.float32)


def cases(rows: int, vocab: int = 150) -> tuple[torch.Tensor, list[SamplerState]]:
    generator = np.random.default_rng(rows)
    logits = torch.from_numpy(generator.normal(0, 3, (rows, vocab)).astype(np.float32))
    prompt_and_output = [1, 5, 5, 9, 7, 1]
    return logits, [SamplerState(EDITS[i % len(EDITS)], 7 - i, i % 2, prompt_and_output, 3) for i in range(rows)]


def test_tokens_errors_and_logprobs_of_the_host() -> None:
    logits, states = cases(90)
    logits[4, 30] = torch.nan  # only some ids are allowed there, and they are sound
    logits[8, 30] = torch.nan
    logits[22, [1, 60, 61]] = -torch.inf  # the allowed ones; 5 is a bad word
    host = Sampler(EOS).sample(logits.clone(), states)
    device = Sampler(EOS, DeviceOps()).sample(logits.clone(), states)
    assert device.token_ids == host.token_ids
    assert device.errors == host.errors == {4: BAD_LOGITS, 8: BAD_LOGITS, 22: ALL_MASKED}
    for ours, theirs in zip(device.logprobs, host.logprobs, strict=True):
        assert (ours is None) == (theirs is None)
        if ours and theirs:
            assert (ours.token_id, ours.rank) == (theirs.token_id, theirs.rank)
            assert ours.logprob == pytest.approx(theirs.logprob, abs=2e-5)


def test_edits_are_the_host_s_to_the_last_bit() -> None:
    logits, states = cases(40)
    host, device = logits.clone(), logits.clone()
    rows = list(range(len(states)))
    apply_edits(HostRows(host), rows, states, EOS)
    device_edits.apply_edits_on_device(device, rows, states, EOS)
    assert torch.equal(host, device)
    assert not torch.equal(host, logits)


def test_a_table_that_draws_on_the_host_is_not_asked() -> None:
    logits, states = cases(9)
    plain = ReferenceOps(torch.device("cpu"), torch.float32)
    assert Sampler(EOS, plain).sample(logits.clone(), states) == Sampler(EOS).sample(logits.clone(), states)


def test_launching_reads_nothing_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of the meta device have no values: whoever reads one, or makes a shape depend on one, fails."""

    class MetaOps(DeviceOps):
        def sample(self, logits: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
            assert draws.shape == (len(logits), WORDS)
            return torch.empty((2, len(logits)), dtype=torch.int64, device="meta")

    def onto_meta(array: np.ndarray, device: torch.device) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    for module in (device_rows, device_edits, device_sampler):
        monkeypatch.setattr(module, "to_device", onto_meta)
    logits, states = cases(27)
    launched = DeviceSampler(MetaOps(), EOS).launch(logits.to("meta"), states)
    assert launched.answer.device.type == "meta"
    assert launched.edited
    assert launched.raw is not None
    with pytest.raises(NotImplementedError):
        launched.collect()


def test_the_host_copies_once(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, states = cases(27)
    states = [state for state in states if state.params.logprobs is None]
    copies = []
    to_cpu = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda self: copies.append(self.shape) or to_cpu(self))
    Sampler(EOS, DeviceOps()).sample(logits[: len(states)], states)
    assert copies == [(2, len(states))]


FILTERS = {
    "plain": SamplingParams(),
    "cold": SamplingParams(temperature=0.4),
    "hot": SamplingParams(temperature=2.0),
    "top_k": SamplingParams(top_k=12),
    "top_p": SamplingParams(top_p=0.8),
    "min_p": SamplingParams(min_p=0.07),
    "top_k, top_p, min_p": SamplingParams(temperature=1.5, top_k=40, top_p=0.95, min_p=0.04),
}


@pytest.mark.parametrize("name", FILTERS)
def test_distribution(name: str) -> None:
    """Total variation and chi-square, each with a chance of 1e-6 to fail."""
    params, count = FILTERS[name], 4000
    row = np.random.default_rng(11).normal(0, 2.0, 96).astype(np.float32)
    assert margin(row.tolist(), params) > 1e-4, "the case stands too near a cut to have one right answer"
    states = [SamplerState(params, seed, 0, [0], 1) for seed in range(count)]
    result = Sampler((), DeviceOps()).sample(torch.from_numpy(row).repeat(count, 1), states)
    observed, shares = Counter(result.token_ids), distribution(row.tolist(), params)
    assert set(observed) <= set(shares), "a filtered token was drawn"
    assert total_variation(observed, shares) <= bound(count, len(shares))
    assert chi_square(observed, shares, count) <= 1


def chi_square(observed: Counter[int], shares: dict[int, float], count: int) -> float:
    """The statistic over its bound (Wilson & Hilferty 1931); tokens of fewer than five expected draws are one cell."""
    rare = [token for token, share in shares.items() if share * count < 5]
    cells = [(observed[token], share * count) for token, share in shares.items() if token not in rare]
    if rare:
        cells.append((sum(observed[token] for token in rare), sum(shares[token] for token in rare) * count))
    freedom = len(cells) - 1
    limit = freedom * (1 - 2 / (9 * freedom) + 4.75 * math.sqrt(2 / (9 * freedom))) ** 3
    return sum((seen - expected) ** 2 / expected for seen, expected in cells) / limit
