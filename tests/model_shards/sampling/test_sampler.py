"""The whole chain: what a row gets depends on that row alone; extremes and failures are exact."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from shoal.configs.errors import InvalidRequestError
from shoal.kernels.ops import Ops
from shoal.kernels.registry import select_ops
from shoal.model_shards.sampling.params import SamplingParams
from shoal.model_shards.sampling.sampler import ALL_MASKED, BAD_LOGITS, Sampler, SamplerState

VOCAB = 3000
KINDS = [
    SamplingParams(temperature=0.0),
    SamplingParams(),
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=0.7, top_k=40),
    SamplingParams(top_p=0.9),
    SamplingParams(temperature=1.7, top_p=0.999),
    SamplingParams(min_p=0.05),
    SamplingParams(temperature=1.5, top_k=700, top_p=0.97, min_p=0.001),
    SamplingParams(temperature=0.9, top_p=0.95, repetition_penalty=1.2, frequency_penalty=0.5),
    SamplingParams(temperature=0.0, logprobs=3, presence_penalty=1.0),
    SamplingParams(logit_bias={5: 3.0}, bad_words=((7,), (1, 2)), logprobs=0),
    SamplingParams(allowed_token_ids=tuple(range(0, VOCAB, 7)), top_k=20, logprobs=5),
    SamplingParams(min_tokens=4, stop_token_ids=(9,), top_p=0.5),
]
EOS = (0,)


class Drawing:
    """Which of the two ways to draw on the host a test's samplers take."""

    ops: Ops | None = None


@pytest.fixture(autouse=True, params=["numpy", "native"])
def drawing(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.param == "native":
        Drawing.ops = select_ops(torch.device("cpu"), torch.float32)
        if not Drawing.ops.host_sampling:
            pytest.skip("no native unit here")
    yield
    Drawing.ops = None


def sampler(eos: tuple[int, ...] = EOS) -> Sampler:
    return Sampler(eos, Drawing.ops)


def logits_of(rows: int, seed: int = 0) -> torch.Tensor:
    values = np.random.default_rng(seed).normal(0, 2.5, (rows, VOCAB)).astype(np.float32)
    return torch.from_numpy(values)


def state_of(params: SamplingParams, seed: int = 1, index: int = 0, tokens: tuple[int, ...] = (3, 1)) -> SamplerState:
    return SamplerState(params, seed, index, tokens, 1)


def one(params: SamplingParams, row: list[float], eos: tuple[int, ...] = ()) -> int:
    result = sampler(eos).sample(torch.tensor([row]), [SamplerState(params, 3, 0, [0], 1)])
    assert not result.errors, result.errors
    return result.token_ids[0]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("size", [2, 8, 64])
def test_a_row_gives_the_same_token_and_logprobs_alone_in_any_batch_and_at_any_place(size: int, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        logits = logits_of(size)
        states = [state_of(KINDS[row % len(KINDS)], seed=row) for row in range(size)]
        batched = sampler().sample(logits.clone(), states)
        order = np.random.default_rng(size).permutation(size)
        shuffled = sampler().sample(logits[order].clone(), [states[row] for row in order])
        for place, row in enumerate(order):
            alone = sampler().sample(logits[row : row + 1].clone(), [states[row]])
            for result, at in ((batched, row), (shuffled, place)):
                assert result.token_ids[at] == alone.token_ids[0], KINDS[row % len(KINDS)]
                assert result.logprobs[at] == alone.logprobs[0]
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("params", KINDS[1:9])
def test_weights_are_the_same_to_the_last_bit_in_any_batch(params: SamplingParams) -> None:
    """A thousand seeds on one row: a sum that differed in its last bit would move some token."""
    row = logits_of(1, seed=5)
    states = [state_of(params, seed=seed) for seed in range(1000)]
    together = sampler().sample(row.repeat(1000, 1), states).token_ids
    apart = [sampler().sample(row.clone(), [state]).token_ids[0] for state in states[::10]]
    assert together[::10] == apart


def generate(params: SamplingParams, seed: int, index: int, length: int = 12) -> list[int]:
    """A made-up model whose logits depend on the last token."""
    state = SamplerState(params, seed, index, [1], 1)
    for _ in range(length):
        state.append(sampler().sample(logits_of(1, seed=state.token_ids[-1]), [state]).token_ids[0])
    return state.token_ids[1:]


def test_n_samples_differ_and_equal_separate_runs() -> None:
    params = SamplingParams(temperature=0.8, top_p=0.95, n=4, seed=42)
    states = [SamplerState(params, 42, index, [1], 1) for index in range(4)]
    for _ in range(12):
        logits = torch.cat([logits_of(1, seed=state.token_ids[-1]) for state in states])
        for state, token in zip(states, sampler().sample(logits, states).token_ids, strict=True):
            state.append(token)
    outputs = [state.token_ids[1:] for state in states]
    assert outputs == [generate(params, 42, index) for index in range(4)]
    assert len({tuple(output) for output in outputs}) == 4


def test_a_sequence_rebuilt_in_the_middle_goes_on_as_before() -> None:
    params = SamplingParams(temperature=1.2, repetition_penalty=1.1, min_p=0.01)
    whole = generate(params, 9, 1)
    state = SamplerState(params, 9, 1, [1, *whole[:5]], 1)
    for _ in range(7):
        state.append(sampler().sample(logits_of(1, seed=state.token_ids[-1]), [state]).token_ids[0])
    assert state.token_ids[1:] == whole


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1e-6),
        SamplingParams(temperature=1e-3),
        SamplingParams(top_k=1),
        SamplingParams(top_p=1e-9),
        SamplingParams(min_p=1.0, top_k=1),
        SamplingParams(temperature=2.0, top_k=1, top_p=1e-9, min_p=1.0),
    ],
)
def test_narrow_settings_take_the_largest_and_of_equals_the_lowest_id(params: SamplingParams) -> None:
    row = [-3.0] * 500
    row[317] = 9.5
    assert one(params, row) == 317
    if params.greedy or params.top_k == 1 or params.top_p < 1:
        for twin in (400, 123, 450):
            row[twin] = 9.5
        assert one(params, row) == 123


def test_top_k_beyond_the_vocabulary_is_no_filter_and_does_not_fail() -> None:
    row = [0.0] * 10
    states = [state_of(SamplingParams(top_k=10**6), seed) for seed in range(200)]
    assert set(sampler().sample(torch.tensor([row] * 200), states).token_ids) == set(range(10))


def test_bias_of_100_decides_and_of_minus_100_forbids() -> None:
    row = [0.0] * 50
    row[7] = 20.0
    for params in (SamplingParams(), SamplingParams(temperature=0.0), SamplingParams(top_p=0.9)):
        assert one(replace(params, logit_bias={31: 100.0}), row) == 31
        assert one(replace(params, logit_bias={7: -100.0, 8: 50.0}), row) == 8


def test_huge_logits_neither_overflow_nor_fail() -> None:
    row = [-1e30, 3e4, 2.9e4, 1e30, 0.0]
    for params in (
        SamplingParams(temperature=0.01),
        SamplingParams(top_p=0.9),
        SamplingParams(top_k=2),
        SamplingParams(),
    ):
        assert one(params, row) == 3


def test_one_token_left_is_taken_whatever_its_logit() -> None:
    row = np.linspace(5, -30, 200).tolist()
    for params in (
        SamplingParams(),
        SamplingParams(top_p=0.3),
        SamplingParams(temperature=0.0),
        SamplingParams(min_p=0.9),
    ):
        assert one(replace(params, allowed_token_ids=(188,)), row) == 188


def test_the_padded_tail_of_a_vocabulary_is_never_drawn() -> None:
    row = [0.0] * 60 + [-np.inf] * 68
    for params in (SamplingParams(temperature=2.0), SamplingParams(top_k=100), SamplingParams(top_p=0.9999)):
        states = [state_of(params, seed) for seed in range(300)]
        assert max(sampler().sample(torch.tensor([row]).repeat(300, 1), states).token_ids) < 60


def test_min_tokens_holds_back_the_end_and_then_lets_it_come() -> None:
    params = SamplingParams(temperature=0.0, min_tokens=2)
    state = SamplerState(params, 0, 0, [5], 1)
    ends = (1, 2)
    for expected in (3, 3, 1):
        state.append(sampler(ends).sample(torch.tensor([[0.0, 9.0, 8.0, 7.0]]), [state]).token_ids[0])
        assert state.token_ids[-1] == expected


@pytest.mark.parametrize("params", [*KINDS, SamplingParams(temperature=0.0, bad_words=((11,),))])
@pytest.mark.parametrize("bad", [[np.nan], [np.inf], [np.nan, -np.inf, np.inf]])
def test_a_row_of_bad_logits_is_an_error_and_its_neighbours_are_not_touched(
    params: SamplingParams, bad: list[float]
) -> None:
    logits = logits_of(3)
    states = [state_of(params, seed=row) for row in range(3)]
    good = sampler().sample(logits.clone(), states)
    logits[1, 11 : 11 + len(bad)] = torch.tensor(bad)
    result = sampler().sample(logits, states)
    assert result.errors == {1: BAD_LOGITS}
    assert result.token_ids == [good.token_ids[0], -1, good.token_ids[2]]
    assert result.logprobs == [good.logprobs[0], None, good.logprobs[2]]


def test_a_batch_of_greedy_rows_finds_its_nan_too() -> None:
    logits = logits_of(2)
    logits[0, 5] = np.nan
    result = sampler().sample(logits, [state_of(KINDS[0])] * 2)
    assert result.errors == {0: BAD_LOGITS}
    assert result.token_ids[1] == int(logits[1].argmax())


@pytest.mark.parametrize("params", [SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(top_p=0.5)])
def test_masks_that_leave_no_token_are_an_error_of_that_row(params: SamplingParams) -> None:
    none_left = replace(params, allowed_token_ids=(4, 5), bad_words=((4,), (5,)))
    result = sampler().sample(logits_of(2), [state_of(none_left), state_of(params)])
    assert result.errors == {0: ALL_MASKED}
    assert result.token_ids[0] == -1
    assert result.token_ids[1] >= 0


def test_an_empty_batch_gives_empty_columns() -> None:
    result = sampler().sample(torch.empty(0, VOCAB), [])
    assert (result.token_ids, result.logprobs, result.errors) == ([], [], {})


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("logit_bias", SamplingParams(logit_bias={99999999: 5.0})),
        ("logit_bias", SamplingParams(logit_bias={-1: 5.0})),
        ("logit_bias", SamplingParams(logit_bias={1: 101.0})),
        ("stop_token_ids", SamplingParams(stop_token_ids=(VOCAB,))),
        ("bad_words", SamplingParams(bad_words=((1, VOCAB),))),
        ("bad_words", SamplingParams(bad_words=((1,), ()))),
        ("allowed_token_ids", SamplingParams(allowed_token_ids=())),
        ("allowed_token_ids", SamplingParams(allowed_token_ids=(-1,))),
        ("temperature", SamplingParams(temperature=float("nan"))),
        ("top_p", SamplingParams(top_p=0.0)),
        ("top_k", SamplingParams(top_k=-1)),
        ("min_p", SamplingParams(min_p=1.5)),
        ("repetition_penalty", SamplingParams(repetition_penalty=0.0)),
        ("repetition_penalty", SamplingParams(repetition_penalty=5e-324)),
        ("presence_penalty", SamplingParams(presence_penalty=float("inf"))),
        ("seed", SamplingParams(seed=2**64)),
        ("logprobs", SamplingParams(logprobs=21)),
        ("max_tokens", SamplingParams(max_tokens=0)),
        ("min_tokens", SamplingParams(min_tokens=17)),
    ],
)
def test_parameters_out_of_range_are_refused_by_name(name: str, params: SamplingParams) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        params.check(VOCAB)
    assert caught.value.param == name


@pytest.mark.parametrize("params", KINDS)
def test_parameters_survive_the_wire(params: SamplingParams) -> None:
    params.check(VOCAB)
    assert SamplingParams.from_wire(params.to_wire()) == params
