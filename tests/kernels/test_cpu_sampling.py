"""Native sampling draws the token that the reference draws, whatever the filters, and fails the same rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shoal.kernels.draws import FAILED_FLAG, pack_draws

VOCABULARIES = [1, 2, 7, 33, 100, 1000, 5003]
SHAPES = [
    (temperature, top_p, min_p)
    for temperature in (0.0, 0.3, 1.0, 1.7)
    for top_p in (1.0, 0.999, 0.9, 0.5, 1e-9)
    for min_p in (0.0, 0.05, 1.0)
]
TOP_K = [0, 1, 5, 64, 65, 700, 10**6]


def draws_of(rows: int, shapes: np.ndarray, top_k: list[int], seed: int = 0) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    counters = [(index, position) for index, position in rng.integers(0, 1 << 30, (rows, 2)).tolist()]
    return torch.from_numpy(pack_draws(rng.integers(0, 1 << 62, rows).tolist(), counters, top_k, shapes))


def logits_of(kind: str, rows: int, vocab: int) -> torch.Tensor:
    rng = np.random.default_rng(vocab)
    values = rng.normal(0, 2.5, (rows, vocab)).astype(np.float32)
    if kind == "tied":
        values = np.round(values)
    elif kind == "masked":
        values[:, rng.integers(0, vocab, vocab // 2)] = -np.inf
        values[:, 0] = 1.0
    elif kind == "flat":
        values[:] = -3.0
    return torch.from_numpy(values)


@pytest.mark.parametrize("vocab", VOCABULARIES)
@pytest.mark.parametrize("kind", ["distinct", "tied", "masked", "flat"])
def test_it_draws_what_the_reference_draws(native_ops, reference, kind, vocab) -> None:
    """420 rows a case. The two round weights differently, which moves a token once in about a million draws."""
    cases = [(shape, k) for shape in SHAPES for k in TOP_K]
    logits = logits_of(kind, len(cases), vocab)
    draws = draws_of(len(cases), np.array([shape for shape, _ in cases]), [k for _, k in cases])
    assert torch.equal(native_ops.sample(logits, draws), reference.sample(logits, draws))


@pytest.mark.parametrize("shape", [(0.0, 1.0, 0.0), (1.0, 1.0, 0.0), (1.0, 0.9, 0.0), (1.0, 1.0, 0.1)])
@pytest.mark.parametrize("bad", [[np.nan], [np.inf], [np.nan, -np.inf, np.inf], [-np.nan]])
@pytest.mark.parametrize("place", [0, 511, 998, 1000])
def test_a_row_without_a_distribution_fails_alone(native_ops, reference, shape, bad, place) -> None:
    logits = logits_of("distinct", 3, 1003)
    draws = draws_of(3, np.array([shape] * 3), [0] * 3)
    healthy = native_ops.sample(logits, draws)
    logits[1, place : place + len(bad)] = torch.tensor(bad)
    got = native_ops.sample(logits, draws)
    assert got[1].tolist() == [0, FAILED_FLAG, 0]
    assert got[0].tolist() == [int(healthy[0, 0]), 0, int(healthy[0, 2])]
    logits[1] = -torch.inf
    assert torch.equal(native_ops.sample(logits, draws), reference.sample(logits, draws))
    assert native_ops.sample(logits, draws)[1, 1] == FAILED_FLAG


@pytest.mark.parametrize("num_threads", [1, 3])
def test_rows_do_not_depend_on_batch_or_threads(native_ops, threads, num_threads) -> None:
    shapes = np.array([SHAPES[i % len(SHAPES)] for i in range(200)])
    logits, draws = logits_of("distinct", 200, 3001), draws_of(200, shapes, [TOP_K[i % 7] for i in range(200)])
    threads(num_threads)
    together = native_ops.sample(logits, draws)
    threads(1)
    for i in range(0, 200, 7):
        alone = native_ops.sample(logits[i : i + 1], draws[i : i + 1])
        assert torch.equal(alone[:, 0], together[:, i])


def test_rows_may_be_a_view(native_ops) -> None:
    wide = logits_of("distinct", 5, 1500)
    draws = draws_of(5, np.array([(1.0, 0.9, 0.0)] * 5), [0] * 5)
    narrow = wide[:, :1200]
    assert torch.equal(native_ops.sample(narrow, draws), native_ops.sample(narrow.contiguous(), draws))


def test_an_empty_batch(native_ops) -> None:
    assert native_ops.sample(torch.empty(0, 10), torch.empty(0, 8, dtype=torch.int64)).shape == (2, 0)
