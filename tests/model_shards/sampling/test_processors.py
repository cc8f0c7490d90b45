"""Penalties, bias and masks against the slow reference, alone and together, on several rows at once."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.model_shards.sampling.params import SamplingParams
from shoal.model_shards.sampling.processors import apply_edits, edits_logits
from shoal.model_shards.sampling.state import SamplerState, TokenCounts
from shoal.model_shards.sampling.vocab_rows import vocab_rows

from .reference import edited

VOCAB = 24
EOS = (1, 2)
TOKENS = st.integers(0, VOCAB - 1)
LISTS = st.lists(TOKENS, max_size=12)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "repetition_penalty": st.floats(0.1, 3.0),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "logit_bias": st.dictionaries(TOKENS, st.floats(-100, 100), max_size=5),
    "allowed_token_ids": st.lists(TOKENS, min_size=1, max_size=8).map(tuple),
    "bad_words": st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple), max_size=4).map(tuple),
    "min_tokens": st.integers(0, 8),
    "stop_token_ids": LISTS.map(tuple),
}


def run(logits: np.ndarray, states: list[SamplerState]) -> np.ndarray:
    values = torch.from_numpy(logits.copy())
    index = [row for row, state in enumerate(states) if edits_logits(state, EOS)]
    if index:
        apply_edits(vocab_rows(values), index, states, EOS)
    return values.numpy()


def check(cases: list[tuple[SamplingParams, list[int], list[int]]], seed: int) -> None:
    logits = np.random.default_rng(seed).normal(0, 3, (len(cases), VOCAB)).astype(np.float32)
    states = [SamplerState(params, 0, 0, prompt + output, len(prompt)) for params, prompt, output in cases]
    result = run(logits, states)
    for row, (params, prompt, output) in enumerate(cases):
        expected = edited(logits[row].tolist(), params, prompt, output, EOS)
        np.testing.assert_allclose(result[row], expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", FIELDS)
@settings(deadline=None)
@given(data=st.data(), prompt=LISTS, output=LISTS, seed=st.integers(0, 1000))
def test_each_alone(name: str, data: st.DataObject, prompt: list[int], output: list[int], seed: int) -> None:
    params = SamplingParams(max_tokens=None, **{name: data.draw(FIELDS[name])})
    check([(params, prompt, output)], seed)


@settings(max_examples=200, deadline=None)
@given(
    cases=st.lists(
        st.tuples(st.fixed_dictionaries({}, optional=FIELDS).map(lambda f: SamplingParams(**f)), LISTS, LISTS),
        min_size=1,
        max_size=5,
    ),
    seed=st.integers(0, 1000),
)
def test_all_together_on_several_rows(cases: list[tuple[SamplingParams, list[int], list[int]]], seed: int) -> None:
    check(cases, seed)


def test_rows_that_ask_for_nothing_are_not_touched() -> None:
    state = SamplerState(
        SamplingParams(temperature=0.5, top_k=3, min_tokens=2, stop_token_ids=(3,)), 0, 0, [1, 4, 5], 1
    )
    assert not edits_logits(state, EOS)


def test_a_bad_word_is_masked_only_where_it_would_be_completed() -> None:
    params = SamplingParams(bad_words=((3,), (4, 5, 6), (7, 8)))
    masked = [
        (tokens, sorted(SamplerState(params, 0, 0, tokens, 1).masked_ids(())))
        for tokens in ([4, 5], [9, 4, 5], [5, 4], [4, 5, 7], [5])
    ]
    assert [ids for _, ids in masked] == [[3, 6], [3, 6], [3], [3, 8], [3]]


def test_ends_are_masked_until_min_tokens_even_when_the_engine_ignores_eos() -> None:
    params = SamplingParams(min_tokens=2, stop_token_ids=(7,), ignore_eos=True)
    state = SamplerState(params, 0, 0, [5, 5], 2)
    assert sorted(state.masked_ids(EOS)) == [1, 2, 7]
    state.append(9)
    assert sorted(state.masked_ids(EOS)) == [1, 2, 7]
    state.append(9)
    assert state.masked_ids(EOS) == []


@settings(deadline=None)
@given(prompt=st.lists(st.integers(0, 400)), output=st.lists(st.integers(0, 400), max_size=300))
def test_counts_kept_token_by_token_equal_counts_made_at_once(prompt: list[int], output: list[int]) -> None:
    counts = TokenCounts(prompt, [])
    for token in output:
        counts.add(token)
    found = dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True))
    assert found == {token: float(output.count(token)) for token in {*prompt, *output}}


def test_a_resumed_sequence_is_edited_as_if_it_had_never_stopped() -> None:
    params = SamplingParams(repetition_penalty=1.3, frequency_penalty=0.4, bad_words=((5, 6),), min_tokens=4)
    logits = np.random.default_rng(0).normal(0, 3, (1, VOCAB)).astype(np.float32)
    lived = SamplerState(params, 9, 2, [3, 4], 2)
    for token in (8, 8, 5):
        run(logits, [lived])
        lived.append(token)
    resumed = SamplerState(params, 9, 2, [3, 4, 8, 8, 5], 2)
    np.testing.assert_array_equal(run(logits, [lived]), run(logits, [resumed]))
    assert lived.uniforms() == resumed.uniforms()
