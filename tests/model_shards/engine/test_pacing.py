"""How much of a prompt fits in the time of a step."""

from __future__ import annotations

import random

import pytest

from shoal.model_shards.engine.pacing import SMALLEST_PIECE, StepPacer, TimeAllowance
from shoal.model_shards.engine.step_cost import StepShape


def cost(count: int, start: int, token_s: float, position_s: float) -> float:
    return sum(token_s + position_s * (start + i + 1) for i in range(count))


@pytest.mark.parametrize("seed", range(200))
def test_a_piece_is_the_largest_that_fits(seed: int) -> None:
    rng = random.Random(seed)
    token_s, position_s = rng.choice([0.0, rng.uniform(1e-4, 1e-2)]), rng.choice([1e-9, rng.uniform(1e-8, 1e-5)])
    start, time = rng.choice([0, rng.randrange(8000)]), rng.uniform(0.05, 1.0)
    granted = TimeAllowance(time, token_s, position_s).grant(1 << 30, start)
    assert granted % 8 == 0
    if granted > SMALLEST_PIECE:
        assert cost(granted, start, token_s, position_s) <= time * (1 + 1e-9)
    assert cost(granted + 8, start, token_s, position_s) > time


def test_a_cut_piece_fills_the_step_to_a_multiple_of_eight_rows() -> None:
    for rows in range(20):
        granted = TimeAllowance(0.4, 0.01, 0.0, rows).grant(100, 0)
        assert (rows + granted) % 8 == 0
        assert 32 < granted <= 40


def test_what_fits_whole_is_not_cut() -> None:
    allowance = TimeAllowance(0.1, 0.01, 0.0)
    assert [allowance.grant(wanted, 0) for wanted in (1, 7, 9)] == [1, 7, 9]
    assert allowance.grant(11, 0) == 8


def test_the_first_piece_is_never_refused_and_later_ones_take_what_is_left() -> None:
    allowance = TimeAllowance(-1.0, 0.01, 0.0)
    assert allowance.grant(100, 0) == SMALLEST_PIECE
    assert allowance.grant(3, 0) == 3
    allowance.spend(3, 0)
    assert allowance.grant(100, 0) == 0
    allowance = TimeAllowance(0.5, 0.01, 0.0)
    allowance.spend(20, 0)
    assert allowance.grant(100, 0) == 28
    allowance.spend(28, 0)
    assert allowance.grant(100, 0) == 0


def test_tokens_that_cost_nothing_are_not_bounded() -> None:
    assert TimeAllowance(0.1, 0.0, 0.0).grant(10**6, 0) == 10**6


def test_time_is_bounded_only_where_somebody_decodes() -> None:
    pacer = StepPacer(0.08)
    assert pacer.allowance(StepShape()) is None
    assert pacer.allowance(StepShape(decodes=1, decode_context=10)) is not None


def test_prompts_get_at_least_as_much_time_as_the_decodes() -> None:
    pacer = StepPacer(0.08)
    full = StepShape(decodes=32, decode_context=6400)
    for _ in range(200):
        pacer.observe(StepShape(decodes=8, decode_context=1600), 0.02)
        pacer.observe(full, 0.07)
        pacer.observe(StepShape(decodes=8, decode_context=1600, prompt_tokens=40, prompt_context=820), 0.08)
    few, many = pacer.allowance(StepShape(decodes=8, decode_context=1600)), pacer.allowance(full)
    assert few is not None
    assert many is not None
    assert few.grant(4096, 0) == pytest.approx(40, abs=8)  # 60 ms at 1.5 ms a token
    assert many.grant(4096, 0) == pytest.approx(47, abs=8)  # 70 ms, not 10


def test_before_anything_was_measured_pieces_are_small() -> None:
    allowance = StepPacer(0.08).allowance(StepShape(decodes=4, decode_context=400))
    assert allowance is not None
    assert 8 <= allowance.grant(4096, 0) <= 32
