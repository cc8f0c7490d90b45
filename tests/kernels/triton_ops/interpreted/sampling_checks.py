"""Sampling kernels in the interpreter: the tokens of the reference (full sorts, float64) and of the host's sampler."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shoal.kernels.draws import FAILED_FLAG, WORDS, pack_draws
from shoal.kernels.reference.sampling import sample
from shoal.kernels.triton_ops.sampling import sample_launches
from shoal.model_shards.sampling.params import SamplingParams
from shoal.model_shards.sampling.sampler import Sampler, SamplerState

KINDS = {
    "greedy": SamplingParams(temperature=0.0),
    "plain": SamplingParams(temperature=0.8),
    "top_k": SamplingParams(top_k=7),
    "top_k of one": SamplingParams(top_k=1),
    "top_k beyond the vocabulary": SamplingParams(top_k=10**6),
    "top_p": SamplingParams(top_p=0.9),
    "top_p of nearly all": SamplingParams(temperature=2.0, top_p=0.999),
    "top_p of one": SamplingParams(temperature=0.1, top_p=1e-3),
    "min_p": SamplingParams(min_p=0.03),
    "min_p of the largest only": SamplingParams(min_p=1.0),
    "top_k, top_p": SamplingParams(top_k=400, top_p=0.9),
    "all": SamplingParams(temperature=1.5, top_k=40, top_p=0.95, min_p=0.04),
    "coldest": SamplingParams(temperature=1.1e-5, top_p=0.5),
    "hottest": SamplingParams(temperature=2.0, min_p=1e-9),
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def states_of(kinds: list[SamplingParams], seed: int = 0) -> list[SamplerState]:
    """Each with its own seed (also negative ones and those of more than 32 bits), sample index and position."""
    return [
        SamplerState(params, (seed + row - 3) * 0x9E3779B97F4A7, row % 3, [0] * (1 + row % 5), 1)
        for row, params in enumerate(kinds)
    ]


def draws_of(states: list[SamplerState]) -> torch.Tensor:
    params = [state.params for state in states]
    return torch.from_numpy(
        pack_draws(
            [state.seed for state in states],
            [(state.sample_index, state.num_output_tokens) for state in states],
            [p.top_k for p in params],
            np.array([(0.0 if p.greedy else p.temperature, p.top_p, p.min_p) for p in params]),
        )
    )


def logits_of(rows: int, vocab: int, *, ties: bool = False, seed: int = 0) -> torch.Tensor:
    values = np.random.default_rng(seed).normal(0, 3, (rows, vocab)).astype(np.float32)
    return torch.from_numpy(values.round() if ties else values)


@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
@pytest.mark.parametrize("vocab", [1, 2, 31, 33, 96, 1500])
def test_tokens_of_the_reference_and_of_the_host(triton_ops, vocab: int, ties: bool) -> None:
    logits, states = logits_of(len(KINDS), vocab, ties=ties), states_of(list(KINDS.values()))
    tokens, flags = triton_ops(torch.float32).sample(logits, draws_of(states)).tolist()
    assert tokens == sample(logits, draws_of(states))[0].tolist()
    assert tokens == Sampler().sample(logits.clone(), states).token_ids
    assert not any(flags)


@pytest.mark.parametrize(("vocab", "ties"), [(32000, True), (128256, False), (2**18, False)])
def test_vocabularies_of_real_models(triton_ops, vocab: int, ties: bool) -> None:
    kinds = [KINDS[name] for name in ("greedy", "plain", "all")]
    logits, states = logits_of(len(kinds), vocab, ties=ties), states_of(kinds)
    logits[:, 1000:] -= 4  # a vocabulary has a head
    tokens, _ = triton_ops(torch.float32).sample(logits, draws_of(states)).tolist()
    assert tokens == Sampler().sample(logits.clone(), states).token_ids


@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_in_every_dtype_and_with_any_stride(triton_ops, dtype: torch.dtype) -> None:
    """Narrow logits are ties in the thousands: 16 bits have few values."""
    kinds = [KINDS[name] for name in ("greedy", "plain", "top_k", "top_p", "all")]
    logits, states = logits_of(len(kinds), 5000).to(dtype)[:, :4999], states_of(kinds)
    tokens, _ = triton_ops(dtype).sample(logits, draws_of(states)).tolist()
    assert tokens == Sampler().sample(logits.float().contiguous(), states).token_ids


def test_more_equals_than_a_lane_collects(triton_ops) -> None:
    """All tokens in one bin: the bisection walks over the row itself, and ids decide."""
    kinds = [SamplingParams(top_k=20000), SamplingParams(top_p=0.3), SamplingParams(top_k=3)]
    logits, states = torch.zeros(3, 40000), states_of(kinds)
    tokens, _ = triton_ops(torch.float32).sample(logits, draws_of(states)).tolist()
    assert tokens == sample(logits, draws_of(states))[0].tolist()
    assert tokens[0] < 20000
    assert tokens[1] < 12000
    assert tokens[2] < 3


def test_masked_tokens_are_never_drawn(triton_ops) -> None:
    logits = torch.full((len(KINDS), 500), -torch.inf)
    logits[:, [3, 77, 499]] = torch.tensor([1.0, 1.5, 0.5])
    states = states_of(list(KINDS.values()))
    tokens, flags = triton_ops(torch.float32).sample(logits, draws_of(states)).tolist()
    assert set(tokens) <= {3, 77, 499}
    assert tokens == sample(logits, draws_of(states))[0].tolist()
    assert not any(flags)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, "masked"])
def test_rows_without_a_distribution_are_flagged_and_no_others(triton_ops, bad) -> None:
    kinds = list(KINDS.values())
    logits, states = logits_of(2 * len(kinds), 300), states_of(kinds * 2)
    good = triton_ops(torch.float32).sample(logits, draws_of(states))
    if bad == "masked":
        logits[: len(kinds)] = -torch.inf
    else:
        logits[: len(kinds), 255] = bad
    tokens, flags = triton_ops(torch.float32).sample(logits, draws_of(states))
    assert flags.tolist() == [FAILED_FLAG] * len(kinds) + [0] * len(kinds)
    assert tokens[: len(kinds)].tolist() == [0] * len(kinds), "an id that can be embedded"
    assert torch.equal(tokens[len(kinds) :], good[0, len(kinds) :])


def test_signs_of_zero_are_equal(triton_ops) -> None:
    logits = torch.tensor([[-1.0, -0.0, 0.0, -2.0], [-1.0, 0.0, -0.0, -2.0]])
    for params in (KINDS["greedy"], KINDS["top_k of one"]):
        tokens, _ = triton_ops(torch.float32).sample(logits, draws_of(states_of([params, params]))).tolist()
        assert tokens == [1, 1]


def test_extreme_logits(triton_ops) -> None:
    """The largest floats, subnormal ones, and a spread that overflows when it is divided by the temperature."""
    logits = torch.tensor(
        [[3.4e38, -3.4e38, 0.0, 3.3e38], [1e-45, 0.0, -1e-45, 2e-45], [-3.4e38, -3.3e38, -3.4e38, -3.4e38]]
    )
    for params in KINDS.values():
        states = states_of([params] * 3)
        tokens, flags = triton_ops(torch.float32).sample(logits, draws_of(states)).tolist()
        assert not any(flags)
        if params.temperature < 1e-4 or params.top_k == 1 or params.min_p == 1.0:
            assert tokens[::2] == [0, 1]


def test_a_row_does_not_depend_on_the_batch(triton_ops) -> None:
    kinds = list(KINDS.values())
    logits, states = logits_of(len(kinds), 3000, ties=True), states_of(kinds)
    draws, ops = draws_of(states), triton_ops(torch.float32)
    together = ops.sample(logits, draws)
    order = torch.randperm(len(kinds))
    assert torch.equal(ops.sample(logits[order], draws[order]), together[:, order])
    for row in range(1, len(kinds), 4):
        assert torch.equal(ops.sample(logits[row : row + 1], draws[row : row + 1]), together[:, row : row + 1])


def test_what_is_in_the_workspace_does_not_matter(triton_ops, monkeypatch) -> None:
    """A captured step finds there what the last one left, and what other operators wrote."""
    logits, draws = logits_of(len(KINDS), 700), draws_of(states_of(list(KINDS.values())))
    expected = triton_ops(torch.float32).sample(logits, draws)
    out = torch.empty_like(expected)
    launches = sample_launches(logits, draws, out)
    for launch in launches:
        for name in ("work_ptr", "list_ptr"):
            if isinstance(memory := launch.args.get(name), torch.Tensor):
                memory.random_()
    for _ in range(2):
        out.fill_(-7)
        for launch in launches:
            launch.run()
        assert torch.equal(out, expected)


def test_no_rows_is_no_work(triton_ops) -> None:
    empty = triton_ops(torch.float32).sample(torch.empty(0, 50), torch.empty(0, WORDS, dtype=torch.int64))
    assert empty.shape == (2, 0)


DISTRIBUTIONS = {
    "plain": SamplingParams(temperature=0.9),
    "top_k": SamplingParams(top_k=6),
    "top_p": SamplingParams(top_p=0.8),
    "min_p": SamplingParams(min_p=0.1),
    "all": SamplingParams(temperature=1.4, top_k=12, top_p=0.9, min_p=0.05),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_many_draws_of_one_row(triton_ops, name: str) -> None:
    """The reference's, whose distribution is tested by itself with many more: its shares, its filters, its uniforms."""
    states = [SamplerState(DISTRIBUTIONS[name], seed, 0, [0], 1) for seed in range(24)]
    logits = logits_of(1, 24, seed=5).repeat(len(states), 1)
    result = triton_ops(torch.float32).sample(logits, draws_of(states))
    assert torch.equal(result, sample(logits, draws_of(states)))
    assert len(set(result[0].tolist())) > 1
