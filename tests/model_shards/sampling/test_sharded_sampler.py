"""Tokens drawn from shards of the vocabulary are those drawn from whole rows, and little travels for them."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest
import torch

from shoal.kernels.ops import Ops
from shoal.kernels.reference.ops import ReferenceOps
from shoal.kernels.registry import select_ops
from shoal.model_shards.parallel.context import ParallelContext
from shoal.model_shards.parallel.embedding import VocabShard
from shoal.model_shards.sampling.nucleus import UNSETTLED, nucleus_sizes
from shoal.model_shards.sampling.order_keys import key_ids, key_values, order_keys, top_keys
from shoal.model_shards.sampling.params import SamplingParams
from shoal.model_shards.sampling.sampler import Sampler, SampleResult, SamplerState
from shoal.model_shards.sampling.sharded_sampler import ShardedSampler

VOCAB = 1003  # of 2 or 4 shards the last is padded
GREEDY = SamplingParams(temperature=0.0)
FEW_CANDIDATES = [
    GREEDY,
    SamplingParams(top_k=1),
    SamplingParams(temperature=0.7, top_k=40),
    SamplingParams(temperature=1.3, top_k=20, top_p=0.9, min_p=0.02),
    SamplingParams(top_k=100, top_p=0.6),
]
CUTS = [
    SamplingParams(top_p=0.9),
    SamplingParams(temperature=1.3, top_p=0.95),
    SamplingParams(temperature=0.6, min_p=0.05),
    SamplingParams(temperature=0.9, top_p=0.97, min_p=0.01),
    SamplingParams(top_k=VOCAB, top_p=0.3),
    SamplingParams(top_p=1e-6),
]
WHOLE = [
    SamplingParams(),
    SamplingParams(temperature=1.5, top_k=700),
    SamplingParams(temperature=0.0, logprobs=3),
    SamplingParams(top_p=0.9, repetition_penalty=1.3),
    SamplingParams(temperature=0.0, logit_bias={7: 5.0}),
    SamplingParams(min_tokens=40, top_k=5),
]


@dataclass
class Ranks:
    """Tensor-parallel ranks as threads of this process. Stands in for their ParallelContexts."""

    size: int
    traffic: Counter[str] = field(default_factory=Counter)
    """Bytes that all ranks sent, by operation, as the usual algorithms send them."""

    def __post_init__(self) -> None:
        self._barrier = threading.Barrier(self.size, timeout=60)
        self._parts: list[Any] = [None] * self.size

    def swap(self, rank: int, x: torch.Tensor) -> list[torch.Tensor]:
        self._parts[rank] = x
        self._barrier.wait()
        parts = list(self._parts)
        self._barrier.wait()
        return parts


@dataclass
class Context:
    ranks: Ranks
    rank: int

    def size(self, axis: str) -> int:
        return self.ranks.size

    def index(self, axis: str) -> int:
        return self.rank

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        self.ranks.traffic["all_gather"] += (self.ranks.size - 1) * x.nbytes
        return torch.cat(self.ranks.swap(self.rank, x), dim)

    def gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor | None:
        self.ranks.traffic["gather"] += x.nbytes if self.rank else 0
        parts = self.ranks.swap(self.rank, x)
        return None if self.rank else torch.cat(parts, dim)


def shards_of(logits: torch.Tensor, size: int) -> list[torch.Tensor]:
    """As `ParallelHead.shard_logits` gives them."""
    shards = [VocabShard.of_rank(logits.shape[1], size, rank) for rank in range(size)]
    return [
        torch.nn.functional.pad(logits[:, s.start : s.stop], (0, s.padded - (s.stop - s.start)), value=-torch.inf)
        for s in shards
    ]


def sample_sharded(
    logits: torch.Tensor, states: list[SamplerState], size: int, ops: Ops | None
) -> tuple[SampleResult, Counter[str]]:
    ranks, parts = Ranks(size), shards_of(logits, size)
    params = [state.params for state in states]

    def run(rank: int) -> SampleResult | None:
        context = cast(ParallelContext, Context(ranks, rank))
        sampler = ShardedSampler(Sampler((2,), ops), context, logits.shape[1])
        return sampler.sample(parts[rank], params, None if rank else states)

    with ThreadPoolExecutor(size) as pool:
        first, *others = pool.map(run, range(size))
    assert first is not None
    assert others == [None] * (size - 1)
    return first, ranks.traffic


def rows_like_text(count: int, seed: int) -> torch.Tensor:
    """A few tokens stand out, many are equal: values are rounded as bfloat16 rounds them."""
    random = np.random.default_rng(seed)
    ranks = np.argsort(random.random((count, VOCAB)), axis=1) + 1
    values = 8.0 - random.uniform(1.5, 4.0, (count, 1)) * np.log(ranks) + random.normal(0, 0.3, (count, VOCAB))
    return torch.from_numpy(values).bfloat16().float()


def states_of(kinds: list[SamplingParams], count: int, seed: int) -> list[SamplerState]:
    return [SamplerState(kinds[i % len(kinds)], seed * 1000 + i, 0, [3, *range(i % 7)], 1) for i in range(count)]


def native() -> Ops:
    ops = select_ops(torch.device("cpu"), torch.float32)
    if not ops.host_sampling:
        pytest.skip("no native unit here")
    return ops


@pytest.mark.parametrize("size", [2, 4])
def test_ten_thousand_draws_are_those_from_whole_rows(size: int) -> None:
    """Steps of one kind and of all kinds, each row of another sequence."""
    ops = native()
    steps = [FEW_CANDIDATES[:1], FEW_CANDIDATES, CUTS, WHOLE, FEW_CANDIDATES + CUTS, FEW_CANDIDATES + CUTS + WHOLE]
    drawn = 0
    for seed in range(18):
        logits, states = rows_like_text(600, seed), states_of(steps[seed % len(steps)], 600, seed)
        expected = Sampler((2,), ops).sample(logits.clone(), states)
        result, _ = sample_sharded(logits, states, size, ops)
        assert result == expected
        assert not result.errors
        drawn += len(states)
    assert drawn > 10_000


class DeviceOps(ReferenceOps):
    device_sampling = True

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), torch.float32)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("on_device", [False, True])
def test_other_ways_to_draw(size: int, on_device: bool) -> None:
    """In numpy, where there is no native unit, and by the operator where the logits lie."""
    ops = DeviceOps() if on_device else None
    for seed, kinds in ((5, FEW_CANDIDATES + CUTS), (6, FEW_CANDIDATES + CUTS + WHOLE)):
        logits, states = rows_like_text(200, seed), states_of(kinds, 200, seed)
        expected = Sampler((2,), ops).sample(logits.clone(), states)
        assert sample_sharded(logits, states, size, ops)[0] == expected


def test_candidates_of_greedy_rows_are_all_that_travels() -> None:
    for size in (2, 4):
        for count in (1, 50):
            _, traffic = sample_sharded(rows_like_text(count, 1), states_of([GREEDY], count, 1), size, native())
            assert traffic == {"gather": 8 * count * (size - 1)}


def test_top_k_rows_send_k_candidates_and_whole_rows_their_shard() -> None:
    _, traffic = sample_sharded(rows_like_text(10, 1), states_of([SamplingParams(top_k=40)], 10, 1), 4, native())
    assert traffic == {"gather": 8 * 40 * 10 * 3}
    _, traffic = sample_sharded(rows_like_text(10, 1), states_of([SamplingParams()], 10, 1), 4, native())
    assert traffic == {"gather": 4 * 251 * 10 * 3}
    both = states_of([GREEDY] * 9 + [SamplingParams()], 10, 1)
    _, traffic = sample_sharded(rows_like_text(10, 1), both, 4, native())
    assert traffic == {"gather": (8 * 9 + 4 * 251) * 3}


def test_rows_whose_cut_lies_beyond_the_candidates_travel_whole() -> None:
    """Flat rows: half of the vocabulary is in the nucleus."""
    flat = torch.zeros(4, VOCAB).uniform_(0, 0.01, generator=torch.Generator().manual_seed(0))
    peaked = flat.clone()
    peaked[:, [5, 400, 900]] = 20.0
    logits = torch.cat([flat, peaked])
    states = states_of([SamplingParams(top_p=0.5)], 8, 1)
    result, traffic = sample_sharded(logits, states, 2, native())
    assert result == Sampler((2,), native()).sample(logits.clone(), states)
    # 64 candidates and a mass a row to each other rank, and four shards of 502 logits to the first.
    assert traffic == {"all_gather": 2 * 8 * (64 + 1) * 8, "gather": 4 * 502 * 4}


def test_ties_go_to_the_lowest_id_across_shards() -> None:
    logits = torch.full((3, VOCAB), -1.0)
    logits[0, [900, 300, 301, 700]] = 2.0
    logits[1, 999] = 2.0
    logits[2, [0, 251]] = torch.tensor([-0.0, 0.0])
    result, _ = sample_sharded(logits, states_of([GREEDY], 3, 1), 4, native())
    assert result.token_ids == [300, 999, 0]
    # Of a thousand equals, top_k keeps the first ones.
    states = [SamplerState(SamplingParams(top_k=3), seed, 0, [1], 1) for seed in range(200)]
    result, _ = sample_sharded(torch.zeros(200, VOCAB), states, 4, native())
    assert set(result.token_ids) == {0, 1, 2}


@pytest.mark.parametrize("vocab", [5, 9, 321])
def test_padding_is_never_drawn(vocab: int) -> None:
    """The vocabulary leaves shards that are padded, or empty; what there is has logits far below the padding's 0."""
    kinds = [GREEDY, SamplingParams(top_k=2), SamplingParams(top_k=40), SamplingParams(top_p=0.9), SamplingParams()]
    logits = torch.full((100, vocab), -1000.0) - torch.arange(vocab)
    states = states_of(kinds, 100, 3)
    result, _ = sample_sharded(logits, states, 4, native())
    assert not result.errors
    assert all(0 <= token_id < vocab for token_id in result.token_ids)
    assert result == Sampler((2,), native()).sample(logits.clone(), states)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, "masked"])
@pytest.mark.parametrize("use_native", [True, False])
def test_a_row_without_a_distribution_fails_alone(bad: float | str, use_native: bool) -> None:
    ops = native() if use_native else None
    kinds = [GREEDY, SamplingParams(top_k=3), SamplingParams(top_p=0.9), SamplingParams(min_p=0.1), SamplingParams()]
    for kind in kinds:
        logits, states = rows_like_text(5, 2), states_of([kind, GREEDY], 5, 2)
        if isinstance(bad, str):
            logits[2] = -torch.inf
        else:
            logits[2, 800] = bad
        result, _ = sample_sharded(logits, states, 4, ops)
        assert result == Sampler((2,), ops).sample(logits.clone(), states)
        assert list(result.errors) == [2]


def test_keys_are_in_the_total_order_and_give_back_what_they_hold() -> None:
    values = torch.tensor([[3.0, -0.0, 0.0, torch.nan, -torch.inf, torch.inf, -2.5, 3.0]])
    keys = top_keys(values, 10, 8)
    assert key_ids(keys).tolist() == [[13, 15, 10, 17, 11, 12, 16, 14]]
    assert key_values(keys)[0, 1:].tolist() == [torch.inf, 3.0, 3.0, 0.0, 0.0, -2.5, -torch.inf]
    assert key_values(keys)[0, 0].isnan()
    assert top_keys(values[:, 4:], 10, 1).tolist() == order_keys(values[:, 5:6], torch.tensor([[11]])).tolist()


def test_a_cut_that_rounding_could_move_is_not_settled() -> None:
    """Four equal tokens, top_p 0.5: two or three are kept, as the mass is rounded."""
    keys = top_keys(torch.tensor([[0.0, 0.0, 0.0, 0.0, -50.0, -60.0]]), 0, 6).numpy()[:, None]
    masses = np.array([[4.0]])
    for top_p, size in ((0.5, UNSETTLED), (0.5 - 1e-8, UNSETTLED), (0.49, 2), (0.51, 3), (0.999, 4)):
        assert nucleus_sizes(keys, masses, [SamplingParams(top_p=top_p)], 1e-5).tolist() == [size]
    for min_p, size in ((1.0, UNSETTLED), (1.0 - 1e-6, 4), (1e-24, 5), (1e-30, UNSETTLED)):
        assert nucleus_sizes(keys, masses, [SamplingParams(min_p=min_p)], 1e-5).tolist() == [size]
    both = SamplingParams(top_p=0.51, min_p=0.9)
    assert nucleus_sizes(keys, masses, [both], 1e-5).tolist() == [3]
