"""Heads of the vocabulary and draws against full sorts, ties included."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shoal.model_shards.sampling.candidates import heads
from shoal.model_shards.sampling.draw import FAILED, Draws, draw, invert_cdf
from shoal.model_shards.sampling.params import SamplingParams
from shoal.model_shards.sampling.vocab_rows import vocab_rows

from .reference import distribution, margin

VALUES = {
    "distinct": lambda rng, shape: rng.normal(0, 3, shape),
    "few values": lambda rng, shape: rng.integers(-3, 4, shape),
    "all equal": lambda rng, shape: np.zeros(shape),
    "mostly masked": lambda rng, shape: np.where(rng.random(shape) < 0.9, -np.inf, rng.normal(0, 3, shape)),
}
VOCABULARIES = st.sampled_from([1, 2, 3, 63, 64, 65, 127, 128, 129, 300, 1000])


def rows_of(kind: str, seed: int, shape: tuple[int, int]) -> np.ndarray:
    values = np.asarray(VALUES[kind](np.random.default_rng(seed), shape), dtype=np.float32)
    values[:, 0] = np.maximum(values[:, 0], -9)  # never a row of nothing
    return values


def draws_of(params: list[SamplingParams], uniforms: np.ndarray) -> Draws:
    return Draws(
        np.arange(len(params)),
        np.array([p.temperature for p in params]),
        np.array([p.top_k for p in params]),
        np.array([p.top_p for p in params]),
        np.array([p.min_p for p in params]),
        uniforms,
    )


@settings(deadline=None)
@given(kind=st.sampled_from(list(VALUES)), seed=st.integers(0, 99), vocab=VOCABULARIES, at_least=st.integers(1, 1200))
def test_a_head_is_the_beginning_of_the_total_order(kind: str, seed: int, vocab: int, at_least: int) -> None:
    values = rows_of(kind, seed, (3, vocab))
    rows = vocab_rows(torch.from_numpy(values))
    index = np.array([0, 2])
    head = heads(rows, index, rows.column_max(index), at_least)
    for place, row in enumerate(index):
        order = np.lexsort((np.arange(vocab), -values[row]))
        order = order[values[row][order] > -np.inf]
        size = head.sizes[place]
        np.testing.assert_array_equal(head.ids[place, :size], order[:size])
        np.testing.assert_array_equal(head.values[place, :size], values[row][order[:size]])
        assert size >= min(at_least, len(order))
        assert not head.whole[place] or size == len(order)
        assert size == len(order) or values[row][order[size]] < head.values[place, size - 1], "a tie is cut"


@settings(deadline=None)
@given(vocab=st.integers(1, 2000), seed=st.integers(0, 9))
def test_columns_cover_every_id_once(vocab: int, seed: int) -> None:
    values = np.random.default_rng(seed).normal(0, 1, (2, vocab)).astype(np.float32)
    rows = vocab_rows(torch.from_numpy(values))
    ids = rows.columns.ids(np.arange(rows.columns.count))
    assert sorted(ids[ids < vocab]) == list(range(vocab))
    padded = np.full((2, *ids.shape), np.nan, dtype=np.float32)
    padded[:, ids < vocab] = values[:, ids[ids < vocab]]
    np.testing.assert_array_equal(rows.column_max(np.arange(2)), np.nanmax(padded, axis=2))
    np.testing.assert_allclose(rows.column_sum(np.arange(2)), np.nansum(padded, axis=2), rtol=1e-4, atol=1e-4)
    for row in range(2):
        columns = rows.column_values(np.full(len(ids), row), np.arange(len(ids)), np.nan)
        np.testing.assert_array_equal(columns, padded[row])


@settings(max_examples=300, deadline=None)
@given(
    kind=st.sampled_from(list(VALUES)),
    seed=st.integers(0, 99),
    vocab=VOCABULARIES,
    temperature=st.sampled_from([0.1, 0.7, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 2, 5, 50, 64, 65, 500, 10**6]),
    top_p=st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.99, 0.9999, 1.0]),
    min_p=st.sampled_from([0.0, 1e-6, 0.02, 0.3, 1.0]),
    uniform=st.floats(0, 1, exclude_max=True),
)
def test_a_filtered_draw_is_the_inverse_cdf_of_the_reference(
    kind: str, seed: int, vocab: int, temperature: float, top_k: int, top_p: float, min_p: float, uniform: float
) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    values = rows_of(kind, seed, (1, vocab))
    assume(0 < top_k < vocab or top_p < 1 or min_p > 0)  # else it is a plain draw, in another order
    assume(margin(values[0].tolist(), params) > 1e-5)
    shares = distribution(values[0].tolist(), params)
    running = np.cumsum(list(shares.values()))
    assume(np.abs(running - uniform).min() > 1e-9)
    expected = list(shares)[int(np.searchsorted(running, uniform, side="right"))]
    rows = vocab_rows(torch.from_numpy(values))
    assert draw(rows, draws_of([params], np.array([[uniform, 0.5]]))).tolist() == [expected]


@settings(deadline=None)
@given(kind=st.sampled_from(list(VALUES)), seed=st.integers(0, 99), vocab=VOCABULARIES)
def test_a_plain_draw_splits_the_unit_square_by_the_probabilities(kind: str, seed: int, vocab: int) -> None:
    """Every token owns a rectangle: a column of the first uniform, an interval of the second."""
    values = rows_of(kind, seed, (1, vocab))
    grid = 40
    uniforms = (np.stack(np.meshgrid(np.arange(grid), np.arange(grid)), axis=-1).reshape(-1, 2) + 0.5) / grid
    rows = vocab_rows(torch.from_numpy(np.repeat(values, grid * grid, axis=0)))
    drawn = draw(rows, draws_of([SamplingParams()] * grid * grid, uniforms))
    shares = distribution(values[0].tolist(), SamplingParams())
    frequency = np.bincount(drawn, minlength=vocab) / grid**2
    assert set(drawn.tolist()) <= set(shares)
    assert all(abs(frequency[token] - share) <= 3 / grid for token, share in shares.items())


@settings(deadline=None)
@given(
    weights=st.lists(st.sampled_from([0.0, 1e-300, 1e-30, 0.1, 1.0, 3.0]), min_size=1, max_size=9).filter(any),
    uniform=st.sampled_from([0.0, 0.3, 0.999, 1 - 2**-53]),
)
def test_inverting_never_gives_an_index_without_weight(weights: list[float], uniform: float) -> None:
    (place,) = invert_cdf(np.array([weights]), np.array([uniform]))
    assert weights[place] > 0


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(top_k=3), SamplingParams(top_p=0.5)])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_row_without_a_distribution_fails_and_its_neighbours_do_not(params: SamplingParams, bad: float) -> None:
    values = rows_of("distinct", 0, (3, 200))
    uniforms = np.full((3, 2), 0.4)
    good = draw(vocab_rows(torch.from_numpy(values.copy())), draws_of([params] * 3, uniforms))
    values[1, 77] = bad
    drawn = draw(vocab_rows(torch.from_numpy(values)), draws_of([params] * 3, uniforms))
    assert drawn.tolist() == [good[0], FAILED, good[2]]
